"""`kumi`, but each step takes at least so many seconds: slow_steps.py SECONDS train RUN.toml ...

The results are those of `kumi`. A test thus reaches a run between two of its steps, however fast the machine is.
"""

import sys
import time

from kumi.cli import main
from kumi.train import loop

SECONDS = float(sys.argv.pop(1))
train_step = loop.train_step


def slow_train_step(*given):
    time.sleep(SECONDS)
    return train_step(*given)


loop.train_step = slow_train_step
if __name__ == "__main__":
    sys.exit(main())
