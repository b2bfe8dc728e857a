"""The process that uploads a run folder beside the training: its program, and the class that starts and ends it.

    start of the run --task as JSON--> mirror: look for a new checkpoint twice a second, upload it
    end of the run   --"finish"------> mirror: upload what is left  --result as JSON--> the run's exit code

The mirror is a process of its own, so that it does not hold the interpreter's lock while the training needs it, and is
not copied when the training forks. It imports no torch. If the training dies, its end of the pipe closes, and the
mirror ends at once; the next start of the run uploads the rest.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from kumi.errors import ConfigError, KumiError, SaveError
from kumi.progress import show_progress
from kumi.remote.remote_store import open_store
from kumi.storage.run_mirror import DisplacedError, MirrorTask, RunMirror, finish_with_retries
from kumi.units import format_seconds

_POLL_SECONDS = 0.5
# Seconds from a failed upload, whose requests were retried already, to the next one; doubled with each failure.
_FIRST_WAIT, _LONGEST_WAIT = 5.0, 120.0
_FINISH = "finish\n"


class MirrorProcess:
    """A running mirror of `task`. Call `finish` or `stop` once."""

    def __init__(self, task: MirrorTask) -> None:
        self._url = task.url
        # A session of its own: Ctrl-C in the terminal is for the training, which saves, and then finishes the mirror.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kumi.storage.mirror_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None, "it is a pipe"
        with suppress(BrokenPipeError):  # the mirror has died, which `finish` reports
            self._process.stdin.write(f"{task.text()}\n")
            self._process.stdin.flush()

    def finish(self) -> None:
        """Wait until everything is uploaded. Raise SaveError if that fails; the run folder still has everything."""
        try:
            text, _ = self._process.communicate(_FINISH)
        except BaseException:  # a signal: the user does not want to wait for the uploads
            self.stop()
            raise
        died = f"{self._url}: the process that uploads has died; run the same command again to upload the rest"
        result = json.loads(text) if text else {"error": died}
        if result["error"]:
            raise SaveError(result["error"])

    def stop(self) -> None:
        """End the mirror at once."""
        self._process.kill()
        self._process.communicate()


def main() -> int:
    """Mirror the run of the task on standard input until "finish"; write the result to standard output."""
    parent, task = os.getppid(), MirrorTask(**json.loads(_read_line()))

    def end_with_parent() -> None:
        if os.getppid() != parent:
            os._exit(ConfigError.exit_code)

    try:
        with open_store(task.url, "train.out") as store:
            mirror = RunMirror(task, store)
            mirror.on_progress = end_with_parent
            _follow(mirror, task)
            _finish(mirror, task)
        error = ""
    except KumiError as failure:
        error = str(failure)
    print(json.dumps({"error": error}), flush=True)
    return 0


def _follow(mirror: RunMirror, task: MirrorTask) -> None:
    """Upload checkpoints as they appear, until the training sends "finish". Report the first of successive failures."""
    wait, due, failed = _FIRST_WAIT, 0.0, False
    while not _finish_asked(_POLL_SECONDS):
        if time.monotonic() < due:
            continue
        try:
            uploaded = mirror.update()
            if failed and uploaded:
                _say(f"{task.url} is reached again, and the newest checkpoint is there")
                wait, failed = _FIRST_WAIT, False
        except DisplacedError:
            raise
        except (KumiError, OSError) as error:
            if not failed:
                _say(f"{error}; training goes on, and the upload is tried again every {format_seconds(_LONGEST_WAIT)}")
            failed, due = True, time.monotonic() + wait
            wait = min(2 * wait, _LONGEST_WAIT)


def _finish(mirror: RunMirror, task: MirrorTask) -> None:
    """Upload what is left, with a bar. Raise SaveError after a failure without progress for `task.patience` seconds."""
    before, end_with_parent = mirror.bytes_done, mirror.on_progress
    with show_progress(f"uploading to {task.url}", max(mirror.left(), 1)) as update:

        def progress() -> None:
            end_with_parent()
            update(mirror.bytes_done - before)

        mirror.on_progress = progress
        try:
            finish_with_retries(mirror, task.patience)
        except (KumiError, OSError) as error:
            remedy = f"everything is in {task.out}; run the same command again to upload the rest"
            raise error if isinstance(error, DisplacedError) else SaveError(f"{error}; {remedy}") from None


def _finish_asked(seconds: float) -> bool:
    """Wait for `seconds` and return True if the training sends "finish". End this process if the training has died."""
    if not select.select([0], [], [], seconds)[0]:
        return False
    if _read_line() != _FINISH:
        os._exit(ConfigError.exit_code)
    return True


def _read_line() -> str:
    """Return the next line of standard input, without reading ahead of it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return line.decode()


def _say(text: Any) -> None:
    print(f"upload     {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
