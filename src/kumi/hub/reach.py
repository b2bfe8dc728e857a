"""Whether the hub answers, and what its client's errors mean."""

from __future__ import annotations

# Seconds that the hub has to answer at all.
REACHED = 5.0


def out_of_reach() -> str:
    """Why the hub cannot be reached, empty where it can: found out in one try, where fetching would make six."""
    try:
        from huggingface_hub import constants, get_session

        get_session().head(constants.ENDPOINT, timeout=REACHED)
    except Exception as error:  # the hub client raises many kinds, all of which mean the same here
        return in_a_line(error)
    return ""


def in_a_line(error: BaseException) -> str:
    """What `error` says, without line ends and a full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def meaning(error: BaseException, name: str, revision: str | None) -> str:
    """What the hub client's `error` means to who asked for the repository `name`."""
    # By name: where these classes live differs between versions of the client.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return f"its owner asks you to accept terms first, on the page of {name}; then log in with `hf auth login`"
    if "RepositoryNotFoundError" in kinds:
        return "there is no such repository, or it is private and your token may not read it; see `hf auth login`"
    if "RevisionNotFoundError" in kinds:
        return f"it has no revision {revision!r}"
    if "LocalEntryNotFoundError" in kinds:
        return "not all of it is in the local cache"
    if "EntryNotFoundError" in kinds:
        return "the repository has no such file"
    # The client wraps what went wrong with one of many files in an error that names the file alone.
    cause = error.__cause__ if type(error) is RuntimeError else None
    return in_a_line(error) if cause is None else f"{in_a_line(error)}: {in_a_line(cause)}"
