"""How gradients and parameters travel between data-parallel ranks, and tokens between tensor-parallel ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kumi.spec.cluster import ClusterSpec
from kumi.spec.engine import KUMI, Engine
from kumi.spec.layout import Layout
from kumi.spec.precision import Precision

COMPRESS = ("none", "bf16", "fp16", "powersgd")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Comm:
    """Settings of communication, which change when and how much is sent; with `compress`, what arrives, too.

    `compress` is "none", "bf16" or "fp16" (gradients travel in two bytes, and are kept as wide as before), or
    "powersgd" (of every matrix's gradient a product of two of `powersgd_rank`, and what that leaves out is added to the
    next step's; Vogels et al., 2019, arXiv:1905.13727), which begins after `powersgd_start` steps. `bucket_mb` is the
    size of the messages in which whole replicas are summed, `prefetch` how many units ahead divided parameters are
    gathered; None leaves either to PyTorch. With `async_tp` tensor-parallel ranks, GPUs of one node, gather and sum
    tokens while they multiply others.
    """

    compress: str = "none"
    powersgd_rank: int = 4
    powersgd_start: int = 1000
    bucket_mb: float | None = None
    prefetch: int | None = None
    async_tp: bool = False


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
