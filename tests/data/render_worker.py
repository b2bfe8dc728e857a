"""A worker of `kumi.data.pool` that renders the rows of its jobs and answers with their texts or refusals."""

import json
import sys

from kumi.data.chat import RowRefused
from kumi.data.chat.sandbox import Renderer
from kumi.data.chat.template import ChatTemplate
from kumi.data.row_guard import RowGuard
from kumi.errors import KumiError


def answer(job):
    guard = RowGuard(job.get("refused_rows", ()))
    results = []
    try:
        with guard.compiling("t.jinja"):
            renderer = Renderer(ChatTemplate(job["template"], "t.jinja", ""), {}, timeout_s=0.3, memory_gib=0.5)
        for line, text in enumerate(job["rows"]):
            try:
                with guard.rendering(0, line, renderer.limits):
                    results.append(renderer.render([{"role": "user", "content": text}]))
            except RowRefused as refused:
                results.append([refused.kind, refused.reason])
    except KumiError as error:
        return {"error": str(error), "kind": type(error).__name__}
    return {"result": results}


if __name__ == "__main__":
    for request in sys.stdin:
        print(json.dumps(answer(json.loads(request))), flush=True)
