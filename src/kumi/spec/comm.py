"""Options of the communication between data-parallel and between tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kumi.spec.cluster import ClusterSpec, Device
from kumi.spec.engine import KUMI, Engine
from kumi.spec.field_docs import described
from kumi.spec.layout import Layout
from kumi.spec.numerics import REFERENCE, Numerics
from kumi.spec.precision import Precision

COMPRESS = ("none", "bf16", "fp16", "powersgd")
# Value of `Comm.compress` -> the dtype in which gradients are sent.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Comm:
    """How data-parallel ranks send gradients and parameters, and tensor-parallel ranks send activations.

    Only `compress` changes values. "bf16" and "fp16" round gradients for sending, and store them as wide as before.
    "powersgd" sends a low-rank approximation of each matrix's gradient, and adds the error to the next step's gradient
    (Vogels et al., 2019, arXiv:1905.13727).
    """

    compress: str = described(
        "Compression of gradients for sending: two bytes per element ('bf16', 'fp16'), or matrices of low rank "
        "('powersgd', for unsharded replicas only).",
        "none",
    )
    powersgd_rank: int = described("Rank of the matrices of 'powersgd'.", 4)
    powersgd_start: int = described("Steps without compression before 'powersgd' starts.", 1000)
    bucket_mb: float | None = described(
        "Size, in MiB, of the buckets in which the gradients of unsharded replicas are reduced during the "
        "backward pass; by default PyTorch's 25.",
        None,
    )
    prefetch: int | None = described(
        "How many layers ahead sharded parameters are all-gathered; by default the next one.", None
    )
    async_tp: bool = described(
        "Overlap the all-gathers and reduce-scatters of tensor parallelism with matmuls, on GPUs of one node; needs "
        "`layout.sequence_parallel`.",
        False,
    )


DEFAULT_COMM = Comm()


def reduce_precision(precision: Precision, comm: Comm) -> Precision:
    """Return `precision` with `reduce` set to the dtype to which `comm` compresses gradients."""
    return replace(precision, reduce=_DTYPES[comm.compress]) if comm.compress in _DTYPES else precision


def engine_for(comm: Comm, device: Device, numerics: Numerics | None = None, *, compiled: bool = False) -> Engine:
    """Return the traits of kumi's trainer on `device` with the options of `comm`.

    `numerics`: the kernels of a GPU; None for PyTorch's operations.
    `compiled`: True if layers are compiled.
    """
    engine = replace(KUMI, grad_reduce_itemsize=2) if comm.compress in _DTYPES else KUMI
    if not device.is_gpu:
        return engine
    chosen = (numerics or REFERENCE).chosen
    return replace(
        engine,
        kernels="compiled" if compiled else "fused-norms",
        loss_kernels=chosen("loss") or "eager",
        scan_kernels="fused" if chosen("scan") else "eager",
        expert_kernels=chosen("experts") or "eager",
        fused_rotation=chosen("rotation") is not None,
        attention="flash-3" if chosen("attention") in ("fa3", "fa4") else "pytorch",
    )


def illegal_comm(comm: Comm, layout: Layout, microbatches: int, cluster: ClusterSpec | None = None) -> Iterator[str]:
    """Yield the reasons why the options of `comm` do not fit `layout`, or `cluster` if given."""
    sharded, ddp = layout.zero > 0, layout.zero == 0 and layout.pp * layout.stages == 1
    where, compress = f"zero={layout.zero} and pp={layout.pp}", comm.compress
    if compress in _DTYPES and layout.zero == 1 and microbatches > 1:
        yield (
            f"comm.compress='{compress}' with zero=1 would also accumulate the gradients of the {microbatches} "
            f"microbatches of a step in {_DTYPES[compress]}; set layout.zero = 2 or 3, or comm.compress = 'none'"
        )
    if compress == "powersgd" and not ddp:
        yield (
            f"comm.compress='powersgd' works on the gradients of unsharded replicas, but the layout has {where}; set "
            f"layout.zero = 0 and layout.pp = 1, or comm.compress = 'bf16' or 'none'"
        )
    if comm.bucket_mb is not None and not ddp:
        yield (
            f"comm.bucket_mb={comm.bucket_mb:g} works on the gradients of unsharded replicas, but the layout has "
            f"{where}; set layout.zero = 0 and layout.pp = 1, or leave comm.bucket_mb out"
        )
    if comm.prefetch is not None and not sharded and layout.world_size > 1:
        yield (
            f"comm.prefetch={comm.prefetch} has no effect with zero=0, because no parameters are all-gathered; set "
            f"layout.zero = 1, 2 or 3, or leave comm.prefetch out"
        )
    if comm.async_tp:
        yield from _illegal_async_tp(layout, cluster)


def _illegal_async_tp(layout: Layout, cluster: ClusterSpec | None) -> Iterator[str]:
    """Yield the reasons why `async_tp` does not fit `layout`, or `cluster` if given."""
    if layout.tp == 1 or not layout.sequence_parallel:
        yield (
            f"comm.async_tp=true has no effect with tp={layout.tp} and "
            f"sequence_parallel={str(layout.sequence_parallel).lower()}, because no activations are all-gathered; set "
            f"layout.tp > 1 and layout.sequence_parallel = true, or comm.async_tp = false"
        )
    if cluster is not None and not cluster.device.is_gpu:
        yield (
            f"comm.async_tp=true needs CUDA devices, but the device is {cluster.device.name}; set comm.async_tp = false"
        )
    elif cluster is not None and layout.tp > cluster.devices_per_node:
        yield (
            f"comm.async_tp=true with tp={layout.tp} needs tensor-parallel ranks within one node, but nodes have "
            f"{cluster.devices_per_node} devices; set layout.tp <= {cluster.devices_per_node}, or "
            f"comm.async_tp = false"
        )
