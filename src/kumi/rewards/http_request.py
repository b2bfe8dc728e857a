"""Requests by HTTP with JSON in and out: bounded in time, in size and in attempts, with a key from the environment."""

from __future__ import annotations

import http.client
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from kumi.errors import ConfigError
from kumi.files import untrusted
from kumi.remote.retries import explain_failure

# Bytes of the largest answer, and of one read from the connection.
_LARGEST_ANSWER = 16 * 2**20
_BLOCK = 1 << 16
# Seconds between attempts: the first pause, which doubles with each attempt, and the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 20.0
# Status codes of failures that may pass until another attempt: a timeout, too many requests, an error of the server.
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class RequestError(Exception):
    """A request without a usable answer. `passing`: True if another attempt may succeed."""

    def __init__(self, reason: str, passing: bool = False) -> None:
        super().__init__(reason)
        self.passing = passing


class RequestTimeoutError(RequestError):
    """A request without an answer in its time."""


def bearer(variable: str, where: str) -> Mapping[str, str]:
    """Return the header with the key in the environment variable `variable`; {} if `variable` is "".

    Raise ConfigError if the environment variable is not set, or has no valid key. Its value is never shown.
    """
    if not variable:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"{where}: the environment variable {variable} is not set; set it to the key of the service")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"{where}: the value of {variable} is not a key: it has white space or is not in ASCII")
    return {"Authorization": f"Bearer {key}"}


def post_json(
    url: str,
    content: Mapping[str, Any],
    headers: Mapping[str, str],
    timeout_s: float,
    attempts: int,
    pause: Callable[[float], None] = time.sleep,
) -> Any:
    """Return the JSON that `url` answers to the JSON `content`, after at most `attempts` requests in `timeout_s`.

    Raise RequestTimeoutError when the time is over, and RequestError when the last attempt failed, or an attempt failed
    for a reason that lasts. `pause` waits for a number of seconds between attempts.
    """
    deadline = time.monotonic() + timeout_s
    for attempt in range(attempts):
        try:
            return _post(url, json.dumps(content).encode(), headers, deadline)
        except RequestError as error:
            if not error.passing or attempt == attempts - 1:
                raise
            reason = error
        longest = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
        wait = longest * random.uniform(0.5, 1.0)  # clients that failed together must not return together
        if time.monotonic() + wait >= deadline:
            raise RequestTimeoutError(f"{reason}, and {timeout_s:g} s are over")
        pause(wait)
    raise AssertionError("the last attempt returns or raises")


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener of URLs that follows no redirect, which would take the key to another server."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
    ):
        opener.add_handler(handler())
    return opener


_OPENER = _opener()


def _post(url: str, body: bytes, headers: Mapping[str, str], deadline: float) -> Any:
    """Return the JSON that `url` answers to one request. Raise RequestError without a usable answer."""
    sent = {"Content-Type": "application/json", "User-Agent": "kumi", **headers}
    request = urllib.request.Request(url, data=body, headers=sent, method="POST")
    try:
        with _OPENER.open(request, timeout=_time_left(url, deadline)) as answer:
            raw = _read(url, answer, deadline)
    except urllib.error.HTTPError as error:
        with error:
            text = " ".join(error.read(2000).decode(errors="replace").split())[:200]
        raise RequestError(f"{url} answered {error.code} {error.reason}: {text}", error.code in _PASSING) from None
    except (OSError, http.client.HTTPException) as error:
        _fail(url, error)
    try:
        return untrusted.strict_json(raw)
    except ValueError as error:
        raise RequestError(f"{url} answered no valid JSON: {error}") from None


def _read(url: str, answer: http.client.HTTPResponse, deadline: float) -> bytes:
    """Return the body of `answer`; the deadline also holds for a server that sends it byte by byte."""
    raw = b""
    while block := answer.read1(_BLOCK):
        raw += block
        if len(raw) > _LARGEST_ANSWER:
            raise RequestError(f"{url} answered more than {_LARGEST_ANSWER} bytes")
        _time_left(url, deadline)
    return raw


def _time_left(url: str, deadline: float) -> float:
    """Return the seconds until `deadline`, a time of `time.monotonic`. Raise RequestTimeoutError if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise RequestTimeoutError(f"{url} did not answer in time")
    return left


def _fail(url: str, error: Exception) -> NoReturn:
    """Raise the RequestError that says why the connection to `url` failed with `error`."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        raise RequestTimeoutError(f"{url} did not answer in time")
    text = explain_failure(cause) if isinstance(cause, BaseException) else str(cause)
    raise RequestError(f"{url} cannot be reached: {text}", passing=True)
