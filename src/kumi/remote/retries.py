"""Repeat a request to a store that failed for a reason that may pass: a server's error, a timeout, a cut connection."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from kumi.errors import CommunicationError, ConfigError, KumiError

T = TypeVar("T")

# Six attempts, with 4 to 8 s of pauses in all. Longer failures are for the caller: a run goes on and tries again later.
ATTEMPTS = 6
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0  # seconds

# Failures that another attempt cannot repair, by the names of their classes: botocore, which has them, is not imported.
_LASTING = {
    "NoCredentialsError": "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or log in",
    "PartialCredentialsError": "the credentials are incomplete; set both the key and the secret",
    "ProfileNotFound": "the profile of AWS_PROFILE does not exist",
    "ParamValidationError": "the address is not valid for this store",
    "UnauthorizedSSOTokenError": "the login has expired; log in again",
    "TokenRetrievalError": "the login has expired; log in again",
}


def with_retries(url: str, action: Callable[[], T], pause: Callable[[float], None] = time.sleep) -> T:
    """Return the result of `action`, a request about `url`, which is repeated while it fails for a passing reason.

    FileNotFoundError is raised as it is. Raise ConfigError for a lasting failure, such as missing credentials, and
    CommunicationError after `ATTEMPTS` failures.
    """
    for attempt in range(ATTEMPTS):
        try:
            return action()
        except (KumiError, FileNotFoundError):
            raise
        except Exception as error:  # every file system raises classes of its own
            lasting = lasting_reason(error)
            if lasting is not None:
                raise ConfigError(f"{url}: the store refuses access: {lasting}") from None
            if attempt == ATTEMPTS - 1:
                raise CommunicationError(
                    f"{url}: the store failed {ATTEMPTS} times in a row ({explain_failure(error)}); try again later"
                ) from None
        longest = min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE)
        pause(longest * random.uniform(0.5, 1.0))  # clients that failed together must not retry together
    raise AssertionError("the last attempt returns or raises")


def lasting_reason(error: Exception) -> str | None:
    """Return why another attempt would fail as well; None for a failure that may pass."""
    if isinstance(error, PermissionError):
        return f"{explain_failure(error)}; check the credentials and what they allow"
    names = [base.__name__ for base in type(error).__mro__]
    reason = next((_LASTING[name] for name in names if name in _LASTING), None)
    if reason is None and isinstance(error, ImportError | NotImplementedError | NotADirectoryError | IsADirectoryError):
        reason = explain_failure(error)
    return reason


def explain_failure(error: BaseException) -> str:
    """Return the message of `error` on one line; the name of its class if it has none."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split()).rstrip(".")
    return text[:300] or type(error).__name__
