"""Worker process: render whole conversations with their chat template, as other trainers see them.

kumi.data.pool runs it as `python -m kumi.data.stock_worker` with jobs of the preparation, each with "digests": those of
the rows to render. A template may exceed the limits and end the process, so the process of the command does not render
itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any

from kumi.data import tokenizer
from kumi.data.chat.masked import RowRefused
from kumi.data.encode_rows import content_of, digest_of
from kumi.data.formats import Conversation
from kumi.data.record_files import Fault
from kumi.data.row_path import open_row_path
from kumi.errors import KumiError


def render_rows(job: dict[str, Any]) -> dict[str, list[str]]:
    """Return, by digest, the texts of the rows of `job` with the digests in "digests": one text for each side."""
    path, asked, texts = open_row_path(job, tokenizer.load(job["tokenizer"])), set(job["digests"]), {}
    for number, segment in enumerate(job["segments"]):
        for item in path.read(segment):
            if isinstance(item, Fault):
                continue
            try:
                example = path.convert(item[1], segment["file"]["path"], item[0])
                digest = f"{digest_of(content_of(example)):016x}"
                if digest in asked and digest not in texts:
                    with path.guarded(number, example.line):
                        texts[digest] = [
                            path.render(side) if isinstance(side, Conversation) else side.prompt + side.completion
                            for side in example.sides
                        ]
            except RowRefused:
                continue  # the preparation has counted it
    return texts


def _main() -> None:
    """Run the job in each line of stdin. Answer on stdout with a line {"result": ...} or {"error": ...} each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout = sys.stderr
    for line in sys.stdin:
        answer: dict[str, Any]
        try:
            answer = {"result": render_rows(json.loads(line))}
        except KumiError as error:
            answer = {"error": str(error)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _main()
