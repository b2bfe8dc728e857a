"""Which family an unknown config.json is most like: by the names it gives itself, and by its keys."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from types import ModuleType
from typing import Any

from kumi.spec.families.keys import IGNORED, NEUTRAL

# What every config.json may say.
_COMMON = frozenset(NEUTRAL).union(*(group.split() for group in IGNORED.values()))
# At most so many unknown keys are named.
SHOWN = 4


def nearest(config: Mapping[str, Any], families: Mapping[str, ModuleType]) -> str:
    """A sentence about the one of `families` (by model_type) that `config` is most like, and what it lacks."""
    own = {key for key in config if key not in _COMMON}
    known = {name: _keys(module) for name, module in families.items()}
    best = max(families, key=lambda name: _alike(config, name, families[name]) + _overlap(own, known[name]))
    foreign = sorted(own - known[best])
    names = ", ".join(key[:60] for key in foreign[:SHOWN]) + (
        f" and {len(foreign) - SHOWN} more" if len(foreign) > SHOWN else ""
    )
    lacks = f"which does not know its {names}" if foreign else "which knows all of its keys"
    return f"the nearest is {best} ({families[best].ARCHITECTURE}), {lacks}"


def _keys(module: ModuleType) -> set[str]:
    """What a family's config.json may say besides; of models that see, what it says beside the text."""
    own = (
        module.KEYS
        if hasattr(module, "KEYS")
        else (*module.FAMILY.kept, *next(iter(module.FAMILY.texts.values())).KEYS, "text_config")
    )
    return set(own) - _COMMON


def _alike(config: Mapping[str, Any], name: str, module: ModuleType) -> float:
    """How alike the names are, 0 to 1."""
    architectures = config.get("architectures")
    said = [str(one) for one in architectures] if isinstance(architectures, list) else []
    pairs = [(str(config.get("model_type") or ""), name), *((one, module.ARCHITECTURE) for one in said)]
    return max(SequenceMatcher(None, _bare(one), _bare(other)).ratio() for one, other in pairs)


def _bare(name: str) -> str:
    return name.lower().replace("forcausallm", "").replace("forconditionalgeneration", "").replace("_", "")


def _overlap(own: set[str], known: set[str]) -> float:
    """How many of the keys are the same, of those that either has."""
    return len(own & known) / max(1, len(own | known))
