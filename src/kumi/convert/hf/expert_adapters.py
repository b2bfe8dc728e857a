"""LoRA adapters of routed experts in PEFT's format, where they belong to parameters with a matrix for each expert.

transformers 5 has all experts of a layer in one module with one parameter per matrix, (X, out, in) or (X, in, out)
for X experts.
PEFT (0.17 and later) wraps the module once for each parameter that `target_parameters` names, in the order in which the
module registers them: the last one outermost.

    <experts>.lora_A.weight               (X * r, in)     row e * r + j is row j of the A of expert e
    <experts>.lora_B.weight               (out, r * X)    column j * X + e is column j of the B of expert e
    <experts>.base_layer.lora_A.weight                    the parameter before the last
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from kumi.spec.ledger import ops
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.peft import module_name
from kumi.spec.weights import stored_parts


@dataclass(frozen=True)
class ExpertMatrix:
    """The matrices (out, in) of all experts of a layer, which are one parameter in transformers.

    native      its name in kumi
    parameter   its name in transformers
    order       (out,) row of transformers' matrices for each row of the native ones
    experts     the number of experts
    columns     the size of `in`
    """

    native: str
    parameter: str
    order: Tensor
    experts: int
    columns: int

    @property
    def module(self) -> str:
        """The module of transformers that has the parameter."""
        return self.parameter.rpartition(".")[0]

    def shapes(self, r: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of an adapter with rank `r`, by PEFT's endings."""
        return {"lora_A.weight": (self.experts * r, self.columns), "lora_B.weight": (len(self.order), r * self.experts)}

    def peft_tensors(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        """Return PEFT's tensors, by their endings, of the native factors `a` (X, in, r) and `b` (X, out, r)."""
        rows = torch.empty_like(b)
        rows[:, self.order] = b
        return {"lora_A.weight": a.transpose(1, 2).flatten(0, 1), "lora_B.weight": rows.permute(1, 2, 0).flatten(1)}

    def factors(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the native factors, A (X, in, r) and B (X, out, r), of PEFT's `tensors`."""
        a, b = tensors["lora_A.weight"], tensors["lora_B.weight"]
        rows = b.reshape(len(self.order), -1, self.experts).permute(2, 0, 1)
        columns = a.reshape(self.experts, -1, self.columns).transpose(1, 2)
        return columns.contiguous(), rows[:, self.order].contiguous()


@lru_cache(maxsize=8)
def expert_matrices(spec: ModelSpec) -> Mapping[str, ExpertMatrix]:
    """Return the matrices of routed experts of a model of `spec`, by native name, in the order of their modules."""
    base = replace(spec, lora=None)
    matrices = (op.params[0] for op in ops(base) if op.kind == "linear" and op.experts)
    return {param.name: _expert_matrix(base, param) for param in matrices}


def _expert_matrix(spec: ModelSpec, param: Param) -> ExpertMatrix:
    """Return the matrices `param` (X, out, in) of `spec`, with their name and the order of rows in transformers."""
    experts, rows, columns = param.dims
    # The parts of one expert's matrix with one column show where transformers has each row.
    single = replace(param, dims=(replace(experts, size=1), rows, replace(columns, size=1)))
    row_indices, order = torch.arange(rows.size), torch.empty(rows.size, dtype=torch.int64)
    for part in stored_parts(spec, single, stacked=True):
        box = tuple(slice(first, first + size) for first, size in zip(part.at, part.size, strict=True))
        values = row_indices.view(part.shape).view(part.view)[box].permute(part.order).reshape(-1)
        order[part.start[1] : part.start[1] + part.extent[1]] = values
    parameter = module_name(spec, stored_parts(spec, param, stacked=True)[0].name)
    return ExpertMatrix(param.name, parameter, order, experts.size, columns.size)


def matrices_by_path(matrices: Iterable[ExpertMatrix]) -> dict[str, ExpertMatrix]:
    """Return the adapted `matrices` by the path under which PEFT stores the tensors of each adapter."""
    by_module: dict[str, list[ExpertMatrix]] = {}
    for matrix in matrices:
        by_module.setdefault(matrix.module, []).append(matrix)
    return {
        module + ".base_layer" * depth: matrix
        for module, wrapped in by_module.items()
        for depth, matrix in enumerate(reversed(wrapped))
    }


def target_parameters(spec: ModelSpec, adapted: Iterable[str]) -> list[str]:
    """Return PEFT's target_parameters for the `adapted` parameters, named by their last two parts where these suffice.

    `adapted`: names in transformers.
    """
    names = set(adapted)
    by_ending: dict[str, set[str]] = {}
    for matrix in expert_matrices(spec).values():
        by_ending.setdefault(_ending(matrix.parameter), set()).add(matrix.parameter)
    return sorted({_ending(name) if by_ending[_ending(name)] <= names else name for name in names})


def _ending(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def is_target(parameter: str, targets: Iterable[str]) -> bool:
    """True if PEFT's target_parameters `targets` select `parameter`."""
    return any(parameter == target or parameter.endswith(f".{target}") for target in targets)
