"""The process of one part: it runs the function that standard input names, and writes a line of JSON for each row.

    python -m kumi.validation.part_process < '["module:function", {setting}, "file of rows"]'

The last line says how the part ended. Without it, the process crashed.
"""

from __future__ import annotations

import json
import sys
import traceback
from importlib import import_module
from typing import Any, TextIO

from kumi.errors import KumiError
from kumi.validation.part import Setting, Skipped


def run_part(function: str, setting: Setting, out: TextIO) -> None:
    """Write the rows that `function` ("module:name") yields to `out`, each as it comes, and how it ended."""
    try:
        module, _, name = function.partition(":")
        for row in getattr(import_module(module), name)(setting):
            _write(out, {"row": row})
    except Skipped as skipped:
        _write(out, _end("skipped", str(skipped)))
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        kind = "" if isinstance(error, KumiError) else f"{type(error).__name__}: "
        _write(out, _end("failed", f"{kind}{first}", traceback.format_exc()))
    else:
        _write(out, _end("ok", ""))


def _end(status: str, reason: str, where: str = "") -> dict[str, Any]:
    return {"status": status, "reason": reason, "traceback": where}


def _write(out: TextIO, entry: dict[str, Any]) -> None:
    out.write(json.dumps(entry) + "\n")
    out.flush()


def _main() -> None:
    function, setting, path = json.loads(sys.stdin.read())
    with open(path, "a", encoding="utf-8") as out:
        run_part(function, Setting(**setting), out)


if __name__ == "__main__":
    _main()
