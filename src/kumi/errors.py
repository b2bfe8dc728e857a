"""The errors a user can cause, and the exit code of each.

KumiError (1)
├── ConfigError (2)         a run file, a flag or a path that cannot be used; nothing was started
│   ├── ModelError          a config.json that is not understood
│   ├── LayoutError         a layout that is illegal for this model, cluster or batch
│   └── RefusedError        an existing folder, a damaged checkpoint, too little disk: nothing was touched
├── DataError (3)           a record that cannot be read, where the run asked to stop at one
├── FitError (4)            the plan does not fit the device
├── DeviceMemoryError (5)   the device ran out of memory during a step
├── DivergedError (6)       the loss is not finite, or float16 gradients keep overflowing
├── CommunicationError (7)  a rank died, a collective timed out, or the hub did not take a folder
└── SaveError (8)           a checkpoint could not be written during the run

Codes 75 (saved, please run again), 130 (Ctrl-C, saved) and 143 (SIGTERM, saved) are not errors.
"""

from __future__ import annotations

OK = 0
REQUEUE = 75
INTERRUPTED = 130
TERMINATED = 143

# The longest sentence that is shown.
_LONGEST = 4_000


class KumiError(Exception):
    """A failure that is explained in one sentence: what, where, the values, why, and what to do."""

    exit_code = 1

    def __str__(self) -> str:
        """Return the sentence without what a hostile file could do to a terminal: control characters, or megabytes."""
        text = super().__str__()
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
        if text.isprintable():
            return text
        return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


class ConfigError(KumiError):
    exit_code = 2


class ModelError(ConfigError):
    """A config.json or a weight file that does not describe a model kumi understands."""


class LayoutError(ConfigError):
    """A layout that is illegal for the model, the cluster or the batch."""


class RefusedError(ConfigError):
    """Something on disk that kumi will not use or overwrite."""


class DataError(KumiError):
    exit_code = 3


class FitError(KumiError):
    exit_code = 4


class DeviceMemoryError(KumiError):
    exit_code = 5


class DivergedError(KumiError):
    exit_code = 6


class CommunicationError(KumiError):
    exit_code = 7


class SaveError(KumiError):
    exit_code = 8
