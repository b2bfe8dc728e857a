"""The operations of a Mamba mixer, which tensor parallelism shards by groups of heads, and the tensors that they save.

For each token, the input projections give z (the gate of the output), x (the input of the recurrence), b and c (how x
enters the state, and how the output is read from the state) and dt (the time step).

The third argument of a `Dim` is the size of its part for one group of heads. The recurrence saves only its inputs: its
backward pass recomputes the states at the start of each chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

from kumi.spec.model import Mamba, ModelSpec
from kumi.spec.op import Activation, Dim, Op, Param, linear


def mamba_ops(spec: ModelSpec, mamba: Mamba, name: str) -> Iterator[Op]:
    """Yield projections, convolutions, recurrence, gated norm and output projection on the normalized input."""
    embed, groups = Dim("embed", spec.hidden_size), mamba.n_groups
    channels = Dim("groups", mamba.width, mamba.width // groups)
    shared = Dim("groups", groups * mamba.state_size, mamba.state_size)
    heads = Dim("groups", mamba.num_heads, mamba.num_heads // groups)
    saved: tuple[Activation, ...] = (Activation((embed,)),)
    for which, dim in (("z", channels), ("x", channels), ("b", shared), ("c", shared), ("dt", heads)):
        yield linear(f"{name}.{which}_proj", embed, dim, bias=mamba.bias, saved=saved)
        saved = ()
    for which, dim in (("x", channels), ("b", shared), ("c", shared)):
        yield _convolution(f"{name}.{which}_conv1d", mamba, dim)
    yield _scan(name, mamba, channels, shared, heads)
    inputs = (Activation((channels,)), Activation((channels,)), Activation((Dim("groups", groups),), "float32"))
    weight = Param(f"{name}.norm.weight", (channels,), "ones")
    yield Op(f"{name}.norm", "gated_norm", channels, channels, (weight,), inputs)
    yield linear(f"{name}.out_proj", channels, embed, bias=mamba.bias, saved=(Activation((channels,)),))


def _convolution(name: str, mamba: Mamba, dim: Dim) -> Op:
    """Return the convolution over time of each channel of `dim`."""
    params: tuple[Param, ...] = (Param(f"{name}.weight", (dim, Dim("one", 1), Dim("kernel", mamba.conv_kernel))),)
    if mamba.conv_bias:
        params = (*params, Param(f"{name}.bias", (dim,), "zeros"))
    return Op(name, "convolution", dim, dim, params, (Activation((dim,)),))


def _scan(name: str, mamba: Mamba, channels: Dim, shared: Dim, heads: Dim) -> Op:
    """Return the recurrence over x, b, c and dt.

    The decay A starts at -1, -2, ... and dt between 0.001 and 0.1, as in the code of Dao and Gu (2024,
    arXiv:2405.21060).
    """
    inits = {"A_log": "log_index", "D": "ones", "dt_bias": "step"}
    params = tuple(Param(f"{name}.{leaf}", (heads,), init) for leaf, init in inits.items())
    saved = tuple(Activation((dim,)) for dim in (channels, shared, shared, heads))
    return Op(
        f"{name}.scan",
        "scan",
        channels,
        channels,
        params,
        saved,
        heads=mamba.num_heads,
        kv_size=2 * shared.size,
        chunk=mamba.chunk_size,
    )
