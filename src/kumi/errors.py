"""The errors that a user may see, with their exit codes.

KumiError (1)
├── ConfigError (2)         a run file, a flag or a path that cannot be used; nothing was started
│   ├── ModelError          a config.json that kumi does not support
│   ├── LayoutError         a layout that is illegal for this model, cluster or batch
│   └── RefusedError        an existing folder, a damaged checkpoint, too little disk space: nothing was changed
├── DataError (3)           a record that cannot be read, in a run that stops at the first one
│   └── NothingTrainedError no token of a step is trained
├── FitError (4)            the plan does not fit the device
├── DeviceMemoryError (5)   the device ran out of memory during a step
├── DivergedError (6)       the loss is not finite, or float16 gradients keep overflowing
├── CommunicationError (7)  a rank died, a collective timed out, or an upload to the hub failed
└── SaveError (8)           a checkpoint could not be written during the run

Codes 75 (saved, please run again), 130 (Ctrl-C, saved) and 143 (SIGTERM, saved) are not errors.
"""

from __future__ import annotations

# Exit codes that are not errors.
OK = 0
REQUEUE = 75
INTERRUPTED = 130
TERMINATED = 143

# Maximum number of characters of a message; the rest is not shown.
_LONGEST = 4_000


class KumiError(Exception):
    """A failure with a message of one sentence: what failed, where, the values, the reason and the remedy."""

    exit_code = 1

    def __str__(self) -> str:
        """Return the message, truncated and with control characters escaped: it may quote an untrusted file."""
        text = super().__str__()
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
        if text.isprintable():
            return text
        return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


class ConfigError(KumiError):
    """A run file, a flag or a path that cannot be used."""

    exit_code = 2


class ModelError(ConfigError):
    """A config.json or a weight file of a model that kumi does not support."""


class LayoutError(ConfigError):
    """A layout that is illegal for the model, the cluster or the batch."""


class RefusedError(ConfigError):
    """A file or folder that kumi refuses to use or overwrite."""


class DataError(KumiError):
    """A record that cannot be read."""

    exit_code = 3


class NothingTrainedError(DataError):
    """A step without any token to train, raised on all ranks."""


class FitError(KumiError):
    """A plan that does not fit the device."""

    exit_code = 4


class DeviceMemoryError(KumiError):
    """A device that ran out of memory during a step."""

    exit_code = 5


class DivergedError(KumiError):
    """A loss that is not finite, or float16 gradients that keep overflowing."""

    exit_code = 6


class CommunicationError(KumiError):
    """A rank that died, a collective that timed out, or an upload that failed."""

    exit_code = 7


class SaveError(KumiError):
    """A checkpoint that could not be written during the run."""

    exit_code = 8
