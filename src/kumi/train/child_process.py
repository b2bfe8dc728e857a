"""Training in a process of its own, for programs and notebooks: the program that runs there, and what starts it.

    train_in_child --stdin: the configuration as JSON--> child: start() -> ranks
                   <--stdout: what the run prints, and what its listener is told, as lines that begin with RECORD--

The calling process is never forked and keeps its signal handlers, threads and CUDA as they are.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import kumi.errors
from kumi.config import RunConfig, from_dict
from kumi.errors import OK, TERMINATED, KumiError
from kumi.launch import signals
from kumi.launch.rank_process import die_with
from kumi.train.callbacks import Callbacks, TrainerControl

# RFC 7464 marks the beginning of a JSON text in a stream with this character.
RECORD = "\x1e"


def train_in_child(
    config: RunConfig, callbacks: Callbacks, allow_change: Sequence[str], show: Callable[[str], None]
) -> int:
    """Train `config` in a new process and return its exit code: OK, too, where a callback ended the run.

    `show` gets every line that the run prints; the callbacks are called here, while the training goes on. An exception
    of theirs, or Ctrl-C, stops the run after a save, and is raised once that is done.

    Raise the KumiError that the run ended with, and KumiError where the process died without a word.
    """
    request = {"config": config.model_dump(mode="json", exclude_none=True), "allow_change": list(allow_change)}
    command = [sys.executable, "-m", "kumi.train.child_process", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, errors="replace") as child:
        end, failure = _follow(child, json.dumps(request), callbacks, show)
    if failure is not None:
        raise failure
    if "message" in end:
        raise getattr(kumi.errors, end["kind"])(end["message"])
    if "code" not in end:
        raise KumiError(f"the training process {_ending(child.returncode)} without a reason; its output says more")
    return OK if callbacks.control.should_training_stop and end["code"] == TERMINATED else int(end["code"])


def _follow(
    child: subprocess.Popen[str], request: str, callbacks: Callbacks, show: Callable[[str], None]
) -> tuple[dict[str, Any], BaseException | None]:
    """Show what `child` prints and tell `callbacks` what it reports, to its end. Return the record of how it ended, and
    the exception that stopped it."""
    assert child.stdin is not None and child.stdout is not None, "both are pipes"  # noqa: PT018
    failure: BaseException | None = None
    stopping, ended, end, told = False, False, dict[str, Any](), dict[str, Any]()
    child.stdin.write(request)
    child.stdin.close()
    while True:
        try:
            if not (line := child.stdout.readline()):
                return end, failure
            text, _, record = line.rstrip("\n").partition(RECORD)
            if failure is None and (text or not record):
                show(text)
            told = json.loads(record) if record else {}
            if "call" in told and failure is None:
                getattr(callbacks, told["call"])(*told["arguments"])
            end = told if "call" not in told and told else end
        except BaseException as error:
            if failure is not None:  # a second Ctrl-C: the user does not want to wait for the save
                child.kill()
                raise
            failure = error
        ended = ended or told.get("call") == "end"
        if not stopping and (failure is not None or (callbacks.control.should_training_stop and not ended)):
            stopping = True
            child.send_signal(signal.SIGINT if isinstance(failure, KeyboardInterrupt) else signal.SIGTERM)


def _ending(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


class Relay:
    """A listener that writes what it is told to standard output, for `train_in_child`."""

    def __init__(self) -> None:
        self.control = TrainerControl()

    def begin(self, step: int, tokens: int) -> None:
        _send({"call": "begin", "arguments": [step, tokens]})

    def step(self, entry: dict[str, Any]) -> None:
        _send({"call": "step", "arguments": [entry]})

    def evaluation(self, entry: dict[str, Any]) -> None:
        _send({"call": "evaluation", "arguments": [entry]})

    def saved(self) -> None:
        _send({"call": "saved", "arguments": []})

    def end(self) -> None:
        _send({"call": "end", "arguments": []})


def _send(record: dict[str, Any]) -> None:
    sys.stdout.flush()
    data = f"{RECORD}{json.dumps(record)}\n".encode()
    while data:
        data = data[os.write(1, data) :]


def main() -> int:
    """Train what standard input describes; the exit code. The last record says how it ended."""
    from kumi.train.start import start

    die_with(int(sys.argv[1]), signal.SIGTERM)
    request = json.load(sys.stdin)
    try:
        # A signal that comes before or after the training has nothing to save, and ends the process with its code.
        with signals.leaving():
            code = start(from_dict(request["config"]), allow_change=request["allow_change"], listener=Relay())
    except KumiError as error:
        _send({"kind": type(error).__name__, "message": str(error)})
        return error.exit_code
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    _send({"code": code})
    return code


if __name__ == "__main__":
    sys.exit(main())
