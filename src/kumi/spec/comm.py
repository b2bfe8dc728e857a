"""How gradients and parameters travel between data-parallel ranks, and tokens between tensor-parallel ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kumi.spec.cluster import ClusterSpec
from kumi.spec.engine import KUMI, Engine
from kumi.spec.field_docs import described
from kumi.spec.layout import Layout
from kumi.spec.precision import Precision

COMPRESS = ("none", "bf16", "fp16", "powersgd")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Comm:
    """How gradients and parameters travel between data-parallel ranks, and tokens between tensor-parallel ones.

    Only `compress` changes values: "bf16" and "fp16" round what is sent, and gradients are kept as wide as before.
    "powersgd" sends a product of two matrices for each matrix's gradient, and adds what that leaves out to the next
    step's (Vogels et al., 2019, arXiv:1905.13727).
    """

    compress: str = described(
        "What gradients are rounded to on their way: two bytes ('bf16', 'fp16'), or matrices of low rank "
        "('powersgd', for whole replicas only).",
        "none",
    )
    powersgd_rank: int = described("Rank of these matrices.", 4)
    powersgd_start: int = described("Steps of a start that come before, with gradients as they are.", 1000)
    bucket_mb: float | None = described(
        "Size of the messages, in MiB, in which gradients of whole replicas are summed while the "
        "backward pass goes on; by default PyTorch's 25.",
        None,
    )
    prefetch: int | None = described(
        "How many layers ahead divided parameters are gathered; by default the next one.", None
    )
    async_tp: bool = described(
        "Tensor-parallel GPUs of one node gather and sum tokens while they multiply others; needs "
        "`layout.sequence_parallel`.",
        False,
    )


PLAIN = Comm()


def sent_in(precision: Precision, comm: Comm) -> Precision:
    """`precision`, with gradients in the dtype that `comm` compresses them to."""
    return replace(precision, reduce=_DTYPES[comm.compress]) if comm.compress in _DTYPES else precision


def engine_with(comm: Comm) -> Engine:
    """kumi's own traits, where gradients travel as `comm` says."""
    return replace(KUMI, grad_reduce_itemsize=2) if comm.compress in _DTYPES else KUMI


def refusals(comm: Comm, layout: Layout, microbatches: int, cluster: ClusterSpec | None = None) -> Iterator[str]:
    """What in `comm` has no place in `layout`, or on `cluster` where that is known, in sentences."""
    divided, whole = layout.zero > 0, layout.zero == 0 and layout.pp * layout.stages == 1
    where, compress = f"zero={layout.zero} and pp={layout.pp}", comm.compress
    if compress in _DTYPES and layout.zero == 1 and microbatches > 1:
        yield (
            f"comm.compress='{compress}' with zero=1 would add the {microbatches} microbatches of a step up in "
            f"{_DTYPES[compress]}, too; set layout.zero = 2 or 3, or comm.compress = 'none'"
        )
    if compress == "powersgd" and not whole:
        yield (
            f"comm.compress='powersgd' with {where}: it is for gradients of whole replicas; set layout.zero = 0 and "
            f"layout.pp = 1, or comm.compress = 'bf16' or 'none'"
        )
    if comm.bucket_mb is not None and not whole:
        yield (
            f"comm.bucket_mb={comm.bucket_mb:g} with {where}: it is for gradients of whole replicas; set "
            f"layout.zero = 0 and layout.pp = 1, or leave it out"
        )
    if comm.prefetch is not None and not divided and layout.world_size > 1:
        yield (
            f"comm.prefetch={comm.prefetch} with zero=0: nothing is gathered; set layout.zero = 1, 2 or 3, or "
            f"leave it out"
        )
    if comm.async_tp:
        yield from _untrained_overlap(layout, cluster)


def _untrained_overlap(layout: Layout, cluster: ClusterSpec | None) -> Iterator[str]:
    if layout.tp == 1 or not layout.sequence_parallel:
        yield (
            f"comm.async_tp=true with tp={layout.tp} and sequence_parallel={str(layout.sequence_parallel).lower()}: "
            f"no tokens are gathered; set layout.tp > 1 and layout.sequence_parallel = true, or comm.async_tp = "
            f"false"
        )
    if cluster is not None and cluster.device.kind != "cuda":
        yield (
            f"comm.async_tp=true on {cluster.device.name}: products and messages overlap on CUDA devices only; set "
            f"comm.async_tp = false"
        )
    elif cluster is not None and layout.tp > cluster.devices_per_node:
        yield (
            f"comm.async_tp=true with tp={layout.tp} on nodes of {cluster.devices_per_node} devices, which read "
            f"each other's memory within a node only; set layout.tp <= {cluster.devices_per_node}, or "
            f"comm.async_tp = false"
        )
