"""How many parameters of some operations a rank holds under tensor and expert parallelism, before ZeRO divides them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kumi.plan.columns import Columns, Floats
from kumi.spec.ledger import Op
from kumi.spec.sharding import AXIS


def local_elements(ops: Iterable[Op], x: Columns) -> tuple[Floats, Floats]:
    """Elements of the dense parameters of `ops` and of those of routed experts, (rows,) each.

    A dim is cut into whole units, the largest share is counted, and a key-value head that ranks outnumber is held by
    several of them.
    """
    dense, expert = np.zeros(len(x)), np.zeros(len(x))
    for op in ops:
        for param in op.params:
            numel = np.ones(len(x))
            routed = any(dim.name == "experts" for dim in param.dims)
            for dim in param.dims:
                axis = AXIS.get(dim.name)
                cut = x.ep if axis == "ep" else (x.expert_tp if routed else x.tp) if axis == "tp" else 1
                numel = numel * np.ceil(dim.count / cut) * dim.unit
            if routed:
                expert += numel
            else:
                dense += numel
    return dense, expert
