"""What families with routed experts have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families.keys import Key
from kumi.spec.model import MoE

# transformers 4 and 5 write one or the other.
COUNT = {"num_experts": Key("integer?", None), "num_local_experts": Key("integer?", None)}


def count(family: str, values: Mapping[str, Any]) -> int:
    """How many routed experts a layer has, under either of the two names of `COUNT`."""
    said = {values[name] for name in COUNT if values[name] is not None}
    if len(said) != 1:
        raise ModelError(f"config.json: num_experts={values['num_experts']} and num_local_experts="
                         f"{values['num_local_experts']} of a {family} model; give one of them")  # fmt: skip
    return int(said.pop())


def check_experts(moe: MoE) -> MoE:
    """`moe`, when its router can choose as many experts as it should."""
    if moe.num_experts_per_tok > moe.num_experts:
        raise ModelError(f"config.json: num_experts_per_tok={moe.num_experts_per_tok} is more than the "
                         f"{moe.num_experts} experts of a layer; correct one of them")  # fmt: skip
    if moe.num_experts % moe.n_group or moe.topk_group > moe.n_group:
        raise ModelError(f"config.json: n_group={moe.n_group} must divide the {moe.num_experts} experts of a layer, "
                         f"and topk_group={moe.topk_group} be at most n_group; correct them")  # fmt: skip
    return moe
