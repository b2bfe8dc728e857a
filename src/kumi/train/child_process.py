"""Train in a child process, for programs and notebooks: the child's program, and the function that starts it.

    train_in_child --stdin: the configuration as JSON--> child: start() -> ranks
                   <--stdout: the run's output, and events for the callbacks as JSON after _RECORD_MARK--

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
from kumi.launch.rank_process import die_with_parent
from kumi.train.callbacks import Callbacks, TrainerControl

# RFC 7464: this character marks the beginning of a JSON text in a stream.
_RECORD_MARK = "\x1e"


def train_in_child(
    config: RunConfig, callbacks: Callbacks, allow_change: Sequence[str], show: Callable[[str], None]
) -> int:
    """Train `config` in a new process and return its exit code, which is OK if a callback ended the run.

    `show` receives every line that the run prints. The callbacks are called in this process, while the training
    continues. An exception of a callback, or Ctrl-C, stops the run after a save, and is raised after that.

    Raise the KumiError that ended the run; KumiError if the process died without reporting one.
    """
    request = {"config": config.model_dump(mode="json", exclude_none=True), "allow_change": list(allow_change)}
    command = [sys.executable, "-m", "kumi.train.child_process", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, errors="replace") as child:
        last, failure = _follow(child, json.dumps(request), callbacks, show)
    if failure is not None:
        raise failure
    if "message" in last:
        raise getattr(kumi.errors, last["kind"])(last["message"])
    if "code" not in last:
        raise KumiError(
            f"the training process {_ending(child.returncode)} without reporting a cause; look for the cause in its "
            f"output"
        )
    return OK if callbacks.control.should_training_stop and last["code"] == TERMINATED else int(last["code"])


def _follow(
    child: subprocess.Popen[str], request: str, callbacks: Callbacks, show: Callable[[str], None]
) -> tuple[dict[str, Any], BaseException | None]:
    """Show the output of `child` and pass its events to `callbacks`, until it ends.

    Return the last record of `child` (its exit code or error), and the exception of a callback or Ctrl-C, if any.
    """
    assert child.stdin is not None and child.stdout is not None, "both are pipes"  # noqa: PT018
    failure: BaseException | None = None
    stopping, trained, last, event = False, False, dict[str, Any](), dict[str, Any]()
    child.stdin.write(request)
    child.stdin.close()
    while True:
        try:
            if not (line := child.stdout.readline()):
                return last, failure
            text, _, record = line.rstrip("\n").partition(_RECORD_MARK)
            if failure is None and (text or not record):
                show(text)
            event = json.loads(record) if record else {}
            if "call" in event and failure is None:
                getattr(callbacks, event["call"])(*event["arguments"])
            last = event if "call" not in event and event else last
        except BaseException as error:
            if failure is not None:  # a second Ctrl-C: do not wait for the save
                child.kill()
                raise
            failure = error
        trained = trained or event.get("call") == "end"
        if not stopping and (failure is not None or (callbacks.control.should_training_stop and not trained)):
            stopping = True
            child.send_signal(signal.SIGINT if isinstance(failure, KeyboardInterrupt) else signal.SIGTERM)


def _ending(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


class ListenerRelay:
    """A listener that writes its events to standard output, for `train_in_child`."""

    def __init__(self) -> None:
        self.control = TrainerControl()

    def begin(self, step: int, tokens: int) -> None:
        _send({"call": "begin", "arguments": [step, tokens]})

    def step(self, entry: dict[str, Any]) -> None:
        _send({"call": "step", "arguments": [entry]})

    def evaluation(self, entry: dict[str, Any]) -> None:
        _send({"call": "evaluation", "arguments": [entry]})

    def saving(self) -> None:
        _send({"call": "saving", "arguments": []})

    def end(self) -> None:
        _send({"call": "end", "arguments": []})


def _send(record: dict[str, Any]) -> None:
    """Write `record` to standard output, after its mark and what was printed before."""
    sys.stdout.flush()
    data = f"{_RECORD_MARK}{json.dumps(record)}\n".encode()
    while data:
        data = data[os.write(1, data) :]


def main() -> int:
    """Train the configuration on standard input. Return the exit code.

    The last record that is sent to the parent contains the exit code or the error.
    """
    from kumi.train.start import start

    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    request = json.load(sys.stdin)
    try:
        # Before and after training there is nothing to save: a signal then ends the process with its exit code.
        with signals.exit_on_signal():
            code = start(from_dict(request["config"]), allow_change=request["allow_change"], listener=ListenerRelay())
    except KumiError as error:
        _send({"kind": type(error).__name__, "message": str(error)})
        return error.exit_code
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    _send({"code": code})
    return code


if __name__ == "__main__":
    sys.exit(main())
