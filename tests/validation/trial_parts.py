"""Parts for tests of the validation: sound ones, and those that end in every way in which a process can end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from kumi.validation.part import Rows, Setting, Skipped


def sound(setting: Setting) -> Rows:
    yield {"what": "a figure", "tokens/s": 12.5}
    yield {"what": "a device", "value": setting.device}


def killed(setting: Setting) -> Rows:
    yield {"what": "before the crash"}
    os.kill(os.getpid(), signal.SIGSEGV)
    yield {"what": "never"}


def leaves(setting: Setting) -> Rows:
    yield {"what": "before the end"}
    os._exit(7)


def hangs(setting: Setting) -> Rows:
    yield {"what": "before the wait"}
    time.sleep(600)


def skipped(setting: Setting) -> Rows:
    yield from ()
    raise Skipped("there is no such device")


def tells_everything(setting: Setting) -> Rows:
    """Yield and raise every private string of the test, which the file in the variable TOLD has."""
    told = Path(os.environ["TOLD"]).read_text()
    yield {"what": told, told: 1}
    raise ValueError(told)


def launched(setting: Setting) -> Rows:
    """Yield whether this process takes itself for a rank."""
    from kumi.launch.standing import launched_rank

    yield {"rank": launched_rank(os.environ) is not None}
