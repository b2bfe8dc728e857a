"""Programs on a sandbox service of the user's own, by HTTP.

A program is a POST with the JSON object
    {"program": Python source, "stdin": text, "timeout_s": number, "memory_mb": integer, "processes": integer,
     "files_mb": integer, "output_kb": integer}
and the answer is {"exit_code": integer, "stdout": text, "timed_out": true or false}.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from kumi.errors import ConfigError
from kumi.files.untrusted import brief
from kumi.rewards.http_request import RequestError, bearer, post_json
from kumi.rewards.sandbox.program_run import Outcome, ProgramLimits, RunProgram

# Seconds for the connection and the service's own work, beyond those of the program.
_SERVICE_S = 30.0
_ATTEMPTS = 3


def open_service(url: str, limits: ProgramLimits, key_variable: str) -> RunProgram:
    """Return the function that runs programs on the service at `url`.

    The function raises RequestError if the service does not answer as described above. Raise ConfigError if the key is
    not in the environment.
    """
    headers = bearer(key_variable, f"service {url}")
    sizes = {
        "memory_mb": limits.memory >> 20,
        "processes": limits.processes,
        "files_mb": limits.files >> 20,
        "output_kb": limits.output >> 10,
    }

    def run(program: str, stdin: bytes, timeout_s: float) -> Outcome:
        content = {"program": program, "stdin": stdin.decode(), "timeout_s": timeout_s, **sizes}
        return _outcome(url, post_json(url, content, headers, timeout_s + _SERVICE_S, _ATTEMPTS), limits.output)

    return run


def _outcome(url: str, answer: object, limit: int) -> Outcome:
    """Return the outcome that the service answered, its output cut at `limit` bytes."""
    fields: Mapping[str, object] = answer if isinstance(answer, dict) else {}
    code, output, timed_out = (fields.get(name) for name in ("exit_code", "stdout", "timed_out"))
    if not (isinstance(code, int) and isinstance(output, str) and isinstance(timed_out, bool)):
        raise RequestError(f"{url} answered {brief(answer)}, without exit_code, stdout and timed_out")
    return Outcome(code, output.encode()[:limit], b"", "time" if timed_out else "")


def check_service(url: str, run: RunProgram) -> None:
    """Raise ConfigError unless the service at `url` runs a program. Whether it isolates programs is not tested."""
    token = secrets.token_hex(16)
    try:
        outcome = run("print(input())", token.encode() + b"\n", 10.0)
    except RequestError as error:
        raise ConfigError(f"the sandbox service cannot be used: {error}; correct `service`") from None
    if outcome.output.strip() != token.encode():
        raise ConfigError(
            f"the sandbox service {url} printed {brief(outcome.output)} for a program that prints its input "
            f"(exit code {outcome.code}); correct the service"
        )
