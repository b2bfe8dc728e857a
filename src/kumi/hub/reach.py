"""Send requests to the hub: test whether it is reachable, and explain the errors of its client."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kumi.errors import KumiError

T = TypeVar("T")

# Timeout in seconds of the request that tests whether the hub answers.
_TIMEOUT = 5.0


def from_hub(get: Callable[[bool], T], name: str, revision: str | None, failure: Callable[[str], KumiError]) -> T:
    """Return `get(cached)` for the repository `name`; `cached` is true when the hub is unreachable.

    A KumiError of `get` is raised as it is; for any other error, `failure(reason)` is raised.
    """
    unreachable = unreachable_reason()
    try:
        return get(bool(unreachable))
    except KumiError:
        raise
    except Exception as error:  # the hub client raises many unrelated classes
        reason = unreachable or explain_hub_error(error, name, revision)
    raise failure(reason)


def unreachable_reason() -> str:
    """Return why the hub is unreachable, or "" if it answers.

    The test makes one request; a download from an unreachable hub would retry six times.
    """
    try:
        from huggingface_hub import constants, get_session

        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except Exception as error:  # the hub client raises many unrelated classes
        return _one_line(error)
    return ""


def _one_line(error: BaseException) -> str:
    """Return the message of `error` on one line, without the full stop; the name of its class if it has none."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def explain_hub_error(error: BaseException, name: str, revision: str | None) -> str:
    """Return an explanation, for the user, of an error of the hub client about the repository `name`."""
    # Compare names: the module of these classes differs between versions of the client.
    classes = {base.__name__ for base in type(error).__mro__}
    if "GatedRepoError" in classes:
        return f"its owner asks you to accept terms first, on the page of {name}; then log in with `hf auth login`"
    if "RepositoryNotFoundError" in classes:
        return "there is no such repository, or it is private and your token may not read it; see `hf auth login`"
    if "RevisionNotFoundError" in classes:
        return f"it has no revision {revision!r}"
    if "LocalEntryNotFoundError" in classes:
        return "the local cache does not have all of its files"
    if "EntryNotFoundError" in classes:
        return "the repository has no such file"
    # For a download of several files the client raises a RuntimeError with the file's name; the reason is its cause.
    cause = error.__cause__ if type(error) is RuntimeError else None
    return _one_line(error) if cause is None else f"{_one_line(error)}: {_one_line(cause)}"
