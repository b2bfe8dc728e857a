"""What a layer asks of a GPU: kernels, bytes of element-wise operations, waits of the host. No GPU is needed.

    python benchmarks/launches.py [--cases dense packed ...] [--verbose] [--host] [--json PATH]

The trainer's step runs on fake CPU tensors, with the operators that it calls on a GPU: attention, norms and the chunks
of the head are those of a GPU, and nothing is computed. Every operator that starts a kernel counts as one launch, also
those of kumi's own, which start one each. Bytes are those of an operator's inputs and outputs, without matrix products
and attention; a gather or a scatter counts the rows that it moves. What a layer needs is half of the difference between
models of one and of three layers, and the rest is outside of layers. An operator whose result the host would wait for
ends the count with its name: no microbatch may wait.

`--host` measures the CPU time of a small layer on this machine, with and without recomputation.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import shapes
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kumi.nn.attention import flash_partial, grouped_query
from kumi.nn.attention.attention_context import AttentionFn, Segments
from kumi.nn.decoder import Decoder
from kumi.nn.norm import RMSNorm, rms_norm
from kumi.nn.numerics import use_kernels
from kumi.objectives import OBJECTIVES
from kumi.parallel import build, build_optimizer, clip_gradients, grad_norm, pipeline
from kumi.parallel.build import assemble
from kumi.parallel.mesh import Mesh, RankInfo, build_mesh
from kumi.parallel.recompute import Recompute
from kumi.parallel.run_microbatches import shard_batch, training_inputs
from kumi.parallel.weight_copies import WeightCopies, add_weight_copies
from kumi.spec import families
from kumi.spec.layout import Layout
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS

TOKENS, DOCUMENTS = 8192, 8
CPU = torch.device("cpu")
# Operators that start no kernel, beside views.
_FREE = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "empty_permuted",
    "detach",
    "lift_fresh",
    "alias",
    "device",
    "_unsafe_view",
    "unbind",
    "is_same_size",
    "_reshape_alias",
    "resize_",
    "set_",
    "promote_types",
}
# Operators whose result the host waits for.
WAITING = {"_local_scalar_dense", "nonzero", "is_nonzero", "_unique2", "masked_select", "equal", "item"}
_PRODUCTS = {"mm", "addmm", "bmm", "grouped_times", "grouped_outer"}
# Operators that move rows of a tensor: (moved, others of their size).
_GATHERS = {"index", "index_select", "gather", "embedding"}
_SCATTERS = {"index_put_", "index_put", "_index_put_impl_", "scatter", "scatter_", "scatter_add_", "index_add_"}


@dataclass(frozen=True)
class Case:
    """A model with one path of the trainer.

    `weights`: "bf16", as FSDP2 gathers them, or "float32", as one GPU and DDP hold them.
    `documents`: in each row.
    `kernels`: with the Triton kernels of kumi, which then have to be importable; else PyTorch's operations.
    """

    config: dict[str, Any]
    weights: str = "bf16"
    documents: int = 1
    recompute: str = "none"
    kernels: bool = False


CASES = {
    "dense": Case(shapes.LLAMA_8B),
    "packed": Case(shapes.LLAMA_8B, documents=DOCUMENTS),
    "float32 weights": Case(shapes.LLAMA_8B, weights="float32"),
    "selective": Case(shapes.LLAMA_8B, recompute="selective"),
    "full": Case(shapes.LLAMA_8B, recompute="full"),
    "experts": Case(shapes.QWEN_30B_A3B),
    "dense, kernels": Case(shapes.LLAMA_8B, kernels=True),
    "experts, kernels": Case(shapes.QWEN_30B_A3B, kernels=True),
}
KERNELS = tuple((operation, "triton") for operation in ("loss", "experts", "rotation"))
PHASES = ("forward", "backward", "update")


class HostWaits(Exception):
    """An operator would make the host wait for the GPU."""


@dataclass
class Load:
    """Launches and bytes of element-wise operations, by operator."""

    launches: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def minus(self, other: Load, share: float = 1.0) -> Load:
        """Return `share` of the difference to `other`."""
        names = {*self.launches, *other.launches}
        return Load(
            Counter({name: share * (self.launches[name] - other.launches[name]) for name in names}),
            Counter({name: share * (self.bytes[name] - other.bytes[name]) for name in names}),
        )

    @property
    def kernels(self) -> int:
        return round(sum(self.launches.values()))

    @property
    def gigabytes(self) -> float:
        return sum(self.bytes.values()) / 1e9


class CountLaunches(TorchDispatchMode):
    """Counts the operators of each phase. Raise `HostWaits` for one of `WAITING`."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = {phase: Load() for phase in PHASES}
        self.updating = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if name in WAITING or (name == "repeat_interleave" and (kwargs or {}).get("output_size") is None):
            raise HostWaits(f"{namespace}::{name} makes the host wait for the GPU")
        out = func(*args, **(kwargs or {}))
        if not (func.is_view or name in _FREE or namespace == "prim"):
            in_backward = torch._C._current_graph_task_id() >= 0
            load = self.loads["update" if self.updating else "backward" if in_backward else "forward"]
            load.launches[name] += 1
            load.bytes[name] += _moved_bytes(name, args, kwargs, out)
        return out


def _moved_bytes(name: str, args: Any, kwargs: Any, out: Any) -> int:
    if name in _PRODUCTS or "attention" in name or "attn" in name:
        return 0
    if name in _GATHERS:
        return 2 * out.nbytes
    if name in _SCATTERS:
        values = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, Tensor)]
        return sum(x.nbytes for x in values) + (values[-1].nbytes if values else 0)
    return sum(x.nbytes for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor))


@torch.library.custom_op("launches::fused_rms_norm", mutates_args=())
def _fused_rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The fused kernel of a GPU, which PyTorch takes apart on CPU tensors."""
    raise NotImplementedError("only on fake tensors")


@_fused_rms_norm.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out, scale = _fused_rms_norm(x, weight)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        operator = torch.ops.aten._fused_rms_norm_backward
        grad_x, grad_weight = operator(grad, x, [x.shape[-1]], scale, weight, [True, True])
        return grad_x, grad_weight


def _norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    out: Tensor = _Norm.apply(x, weight.to(x.dtype))
    return out


@contextmanager
def as_on_gpu(decoder: nn.Module) -> Iterator[None]:
    """A context in which `decoder`, of CPU tensors, calls the operators that it calls on a GPU."""
    assert isinstance(decoder, Decoder)
    for module in decoder.modules():
        if isinstance(module, RMSNorm) and module.function is rms_norm:
            module.function = _norm
    decoder.weighted_sum = partial(decoder.weighted_sum, device_kind="cuda")
    decoder.make_attention = _attention
    with (
        patch.object(grouped_query, "has_varlen", _is_half),
        patch.object(flash_partial, "has_varlen", _is_half),
        patch.object(grad_norm, "_scales_nothing", lambda factor: False),
    ):
        yield


def _is_half(q: Tensor) -> bool:
    return q.dtype.itemsize == 2


def _attention(tokens: Tensor, document_ids: Tensor | None, cu_seqlens: Any = None) -> AttentionFn:
    """`kumi.nn.decoder.unsharded_attention` with the boundaries on the device, as on a GPU."""
    rows, length = tokens.shape
    on_host = list(cu_seqlens or range(0, rows * length + 1, length))
    on_device = torch.tensor(on_host, dtype=torch.int32)
    return partial(grouped_query.attend, Segments(document_ids, on_device, on_host))


def count(case: Case, layers: int) -> dict[str, Load]:
    """Return the load of a step of one microbatch of `TOKENS` tokens, by phase."""
    spec = families.from_hf(shapes.with_layers(case.config, layers))
    mesh = build_mesh(Layout(recompute=case.recompute), RankInfo(0, 1, 0, CPU))
    model = assemble(spec, mesh, PRECISIONS["bf16-pure" if case.weights == "bf16" else "bf16"])
    objective, columns = OBJECTIVES["lm"](), _columns(case, mesh)
    use_kernels(KERNELS if case.kernels else ())
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_gpu(model):
        model.to_empty(device=CPU)
        if case.weights == "float32":
            add_weight_copies(model, PRECISIONS["bf16"])
        optimizer = build_optimizer(model, mesh, Optim())
        on_device = {name: x if x.is_cpu else torch.empty_like(x, device=CPU) for name, x in columns.items()}
        with CountLaunches() as counter:
            inputs = training_inputs(objective, on_device, mesh, TOKENS)
            pipeline.train_microbatches(model, mesh, [inputs])
            counter.updating = True
            clip_gradients(model, 1.0, mesh)
            optimizer.step()
            for hook in model._forward_pre_hooks.values():
                if isinstance(hook, WeightCopies):
                    hook.fill()  # in place of the next step's first forward pass
    use_kernels(())
    return counter.loads


def _columns(case: Case, mesh: Mesh) -> dict[str, Tensor]:
    """Return the columns of a row as the trainer sends them to a device; those of the device are on "meta"."""
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    documents = (torch.arange(TOKENS) * case.documents // TOKENS)[None]
    batch = {"input_ids": ids, "labels": ids, "document_ids": documents}
    device = RankInfo(0, 1, 0, torch.device("meta"))
    return shard_batch(OBJECTIVES["lm"](), batch, Mesh(mesh.layout, device, {}))


def measure(case: Case) -> dict[str, Any]:
    """Return launches and gigabytes of a layer and of everything outside of layers, by phase."""
    shallow, deep = count(case, 1), count(case, 3)
    result: dict[str, Any] = {}
    for phase in PHASES:
        layer = deep[phase].minus(shallow[phase], 0.5)
        outside = shallow[phase].minus(layer)
        result[phase] = {
            "launches": layer.kernels,
            "gigabytes": round(layer.gigabytes, 2),
            "outside": {"launches": outside.kernels, "gigabytes": round(outside.gigabytes, 2)},
            "by_operator": {
                name: [round(number, 1), round(layer.bytes[name] / 1e9, 2)]
                for name, number in layer.launches.most_common()
                if round(number, 1)
            },
        }
    return result


# Selective recomputation by the dispatch modes that PyTorch has for it.
_PYTORCHS = "selective by PyTorch's modes"


def host_seconds(repeats: int = 7, layers: int = 8) -> dict[str, float]:
    """Return the CPU milliseconds of a small layer, forward and backward, by recomputation: medians of `repeats`."""
    spec = families.from_hf(shapes.with_layers(shapes.TINY, layers))
    steps: dict[str, Callable[[], Any]] = {}
    for how in ("none", "full", "selective", _PYTORCHS):
        mesh = build_mesh(Layout(recompute=how.partition(" ")[0]), RankInfo(0, 1, 0, CPU))
        model = build(spec, mesh, PRECISIONS["fp32"], weights=0)
        for layer in model.model.layers.values() if how == _PYTORCHS else ():
            layer.wrappers[:] = [Recompute("selective", compiled=True)]
        ids = torch.zeros(1, 16, dtype=torch.int64)
        inputs = {"input_ids": ids, "labels": ids, "token_weights": torch.ones(ids.shape)}
        steps[how] = partial(pipeline.train_microbatches, model, mesh, [inputs])
    seconds: dict[str, list[float]] = {how: [] for how in steps}
    for turn in range(repeats + 1):
        for how, step in steps.items():
            began = time.process_time()
            for _ in range(5):
                step()
            if turn:
                seconds[how].append((time.process_time() - began) / 5 / layers)
    return {how: round(1e3 * median(each), 3) for how, each in seconds.items()}


def table(results: dict[str, Any]) -> str:
    """Return the results as a table of Markdown."""
    lines = ["| | forward | backward | element-wise GB | outside of layers | update |", "|---|---|---|---|---|---|"]
    for name, result in results.items():
        forward, backward, update = (result[phase] for phase in PHASES)
        outside = " + ".join(str(part["outside"]["launches"]) for part in (forward, backward))
        lines.append(
            f"| {name} | {forward['launches']} | {backward['launches']} | {forward['gigabytes']} + "
            f"{backward['gigabytes']} | {outside} | {update['outside']['launches']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    available = [name for name, case in CASES.items() if not case.kernels or find_spec("triton")]
    parser.add_argument("--cases", nargs="+", choices=CASES, default=available)
    parser.add_argument("--verbose", action="store_true", help="list the operators of a layer")
    parser.add_argument("--host", action="store_true", help="measure CPU time of recomputation instead")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    if args.host:
        print(json.dumps({"cpu_ms_per_layer": host_seconds()}))
        return
    results = {name: measure(CASES[name]) for name in args.cases}
    print(table(results))
    if args.verbose:
        for name, result in results.items():
            for phase in PHASES:
                parts = (
                    f"{operator} {n:g} ({size} GB)" for operator, (n, size) in result[phase]["by_operator"].items()
                )
                print(f"{name}, {phase}: {', '.join(parts)}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
