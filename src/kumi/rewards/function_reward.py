"""A user's reward function, `file.py:function`."""

from __future__ import annotations

import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kumi.errors import ConfigError
from kumi.files.untrusted import brief
from kumi.paths import shown_path
from kumi.rewards.reward_spec import FunctionReward
from kumi.rewards.text_rewards import RewardFunction


def function_reward(spec: FunctionReward, folder: Path) -> RewardFunction:
    """Return the function that `spec` names; its file is relative to `folder`, and may import files beside it.

    An `async def` is run to its end. Raise ConfigError if there is no such function with three parameters, or if its
    file raises an exception.
    """
    name, _, function_name = spec.file.rpartition(":")
    path = folder / Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"reward {spec.name!r}: {shown_path(path)} is not a file; correct file={spec.file!r}")
    try:
        module = _module(path.resolve())
    except Exception as error:
        raise ConfigError(
            f"reward {spec.name!r}: {path} cannot be imported ({type(error).__name__}: {error}); correct the file"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"reward {spec.name!r}: {path} has no function {function_name!r}; correct file={spec.file!r}")
    try:
        inspect.signature(function).bind("prompt", "reply", {})
    except TypeError as error:
        raise ConfigError(
            f"reward {spec.name!r}: {function_name} of {path} cannot be called as {function_name}(prompt, reply, row) "
            f"({error}); give it these parameters"
        ) from None
    except ValueError:  # a function of compiled code, without a signature
        pass

    def reward(prompt: str, reply: str, row: Mapping[str, Any]) -> float | None:
        value = function(prompt, reply, row)
        if inspect.iscoroutine(value):
            import asyncio  # not at the top: the import takes a third of the time in which a worker starts

            value = asyncio.run(value)
        return checked_reward(value)

    return reward


@cache
def _module(path: Path) -> ModuleType:
    """Import the file `path` once, with its folder first in sys.path, as if Python ran the file."""
    sys.path.insert(0, str(path.parent))
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses and pickle look their module up by its name.
    sys.modules.setdefault(path.stem, module)
    module_spec.loader.exec_module(module)
    return module


def checked_reward(value: Any) -> float | None:
    """Return `value` as a reward. Raise TypeError or ValueError unless it is None, True, False or a finite number."""
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise TypeError(f"a reward is a number or None, not {brief(value)} of type {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a reward is a finite number or None, not {number}")
    return number
