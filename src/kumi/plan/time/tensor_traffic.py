"""Tensor-parallel communication of a layer, derived from the ledger, the list of its operations.

The trainer (`kumi.parallel.tensor_parallel`) places its collectives by the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from kumi.spec.op import Op
from kumi.spec.sharding import DIM_TO_AXIS, tp_style


class TensorTraffic(NamedTuple):
    """Sizes of a layer's tensor-parallel collectives in the forward pass, in elements per token.

    `column_inputs`: inputs of column-parallel matrices, one entry for all matrices with the same input.
    `shared_inputs`: tensors that all ranks read as they are, not through a sharded matrix (see `_shared_inputs`).
    `row_outputs`: outputs of row-parallel matrices.
    `norms`: the number of norms whose mean is taken over tp ranks.
    `ends_with_row`: True if the layer's last matrix is row-parallel and no norm reads its output.

    With sequence parallelism inputs are all-gathered and their gradients reduce-scattered, and the inputs of matrices
    are all-gathered a second time for the weight gradients; outputs are reduce-scattered and their gradients
    all-gathered. Without, outputs are all-reduced in the forward pass and gradients of inputs in the backward pass.
    """

    column_inputs: tuple[int, ...]
    shared_inputs: tuple[int, ...]
    row_outputs: tuple[int, ...]
    norms: int
    ends_with_row: bool


def tensor_traffic(ops: Sequence[Op]) -> TensorTraffic:
    """Return the communication of a layer with operations `ops`, without routed experts, which use expert_tp."""
    dense = [op for op in ops if not op.experts]
    inputs: list[int] = []
    before = None
    for op in dense:
        if tp_style(op) == "column" and (before is None or tp_style(before) != "column" or before.source != op.source):
            inputs.append(op.source.size)
        before = op
    norms = [op for op in dense if op.kind == "norm" and DIM_TO_AXIS.get(op.params[0].dims[0].name) == "tp"]
    outputs = tuple(op.target.size for op in dense if tp_style(op) == "row")
    # The backward pass of a norm behind the last matrix reads the matrix's output.
    last = [op for op in ops if op.kind in ("linear", "combine", "norm")][-1]
    return TensorTraffic(tuple(inputs), tuple(_shared_inputs(dense)), outputs, len(norms), tp_style(last) == "row")


def _shared_inputs(ops: Sequence[Op]) -> list[int]:
    """Return the parts of latent projections that bypass the norm after them and go to all heads (MLA's RoPE keys)."""
    return [
        op.target.size - after.source.size
        for op, after in pairwise(ops)
        if op.kind == "linear" and tp_style(op) == "replicated" and after.kind == "norm"
        if op.target.name == after.source.name and op.target.size > after.source.size
    ]
