"""`kumi`, but rank 0 takes SLOW_SECONDS longer to prepare the data."""

import os
import sys
import time

from kumi.cli import main
from kumi.train import start

prepare_data = start.prepare_data


def slow_prepare_data(run):
    time.sleep(float(os.environ["SLOW_SECONDS"]))
    return prepare_data(run)


start.prepare_data = slow_prepare_data
if __name__ == "__main__":
    sys.exit(main())
