"""kumi trains large language models on many GPUs from one description of model and layout."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kumi.api import describe_run, generate, plan_run, tokenizer, train_run
    from kumi.convert import load_decoder
    from kumi.train.callbacks import TrainerCallback, TrainerControl, TrainerState
    from kumi.train.run_summary import TrainOutput

__all__ = [
    "TrainOutput",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "__version__",
    "describe_run",
    "generate",
    "load_decoder",
    "plan_run",
    "tokenizer",
    "train_run",
]

# The module of each name: imported when it is first used, since load_decoder needs torch and the rest may not.
_MODULES = {
    "TrainOutput": "kumi.train.run_summary",
    "TrainerCallback": "kumi.train.callbacks",
    "TrainerControl": "kumi.train.callbacks",
    "TrainerState": "kumi.train.callbacks",
    "describe_run": "kumi.api",
    "generate": "kumi.api",
    "load_decoder": "kumi.convert",
    "plan_run": "kumi.api",
    "tokenizer": "kumi.api",
    "train_run": "kumi.api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'kumi' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
