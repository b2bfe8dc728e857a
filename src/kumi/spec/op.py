"""One operation of the forward pass: its dims, its parameters, its FLOPs and what it keeps for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kumi.spec.model import ModelSpec

KINDS = (
    "embedding",
    "positions",
    "norm",
    "linear",
    "rope",
    "attention",
    "gate",
    "activation",
    "add",
    "router",
    "dispatch",
    "combine",
    "log_prob",
    "lora",
    "convolution",
    "scan",
    "gated_norm",
)


@dataclass(frozen=True)
class Dim:
    """A named tensor dimension; `kumi.spec.sharding.AXIS` says which mesh axis may cut it.

    `unit` is the smallest piece that may be cut off: one head of `heads` and `kv_heads`, one column of each half where
    two matrices lie side by side.
    """

    name: str
    size: int
    unit: int = 1

    @property
    def count(self) -> int:
        """How many pieces there are to hand out."""
        return self.size // self.unit


@dataclass(frozen=True)
class Param:
    """A parameter: its native name (see `kumi.spec.weight_rules`), its dims, and how it starts: "normal", "zeros" or
    "ones" (or, in adapters and Mamba mixers, as `kumi.nn.initialize` says).

    Parameters of routed experts have a leading dim named "experts". A `frozen` one is not trained, and
    lies in the compute dtype, or where it says so in the `quantized` one.
    """

    name: str
    dims: tuple[Dim, ...]
    init: str = "normal"
    frozen: bool = False
    quantized: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies: to matrices, tables and kernels, but not to biases, norms and other vectors.

        A vector for each expert is still a vector, although its tensor has two dims.
        """
        return sum(dim.name != "experts" for dim in self.dims) > 1


@dataclass(frozen=True)
class Activation:
    """A tensor kept from the forward to the backward: its dims besides the token dimension, and its dtype.

    `dtype` is "compute" (the precision's compute dtype), "float32" or "int64". A tensor that has a row for every expert
    a token is sent to has a leading dim named "routed", of as many.
    """

    dims: tuple[Dim, ...]
    dtype: str = "compute"


@dataclass(frozen=True)
class Op:
    """One operation of the forward pass, of a kind in `KINDS`.

    A linear maps `source` to `target` (dims without the token dimension); an attention op's `source` is the dim of its
    queries and its `target` that of its values, both over all query heads. `gate` is a gated activation, act(a) * b,
    and `activation` one of a single input. `router` is the linear that scores experts; `dispatch` and `combine` bring
    tokens to their experts and back. `lora` is the adapter beside a linear. The parameters of a `frozen` operation, or
    those of others that it reads, are not trained.

    `passes` says how often each token goes through the operation: as many times as it has routed experts, else once.
    `saved` is of one token with all its passes, balanced over experts. `experts` is how many routed experts' weights
    the operation holds, 0 outside of them. `buffers` are tensors that belong to the model and are not trained. Of
    attention only: `heads` (of queries), `kv_size` (width of a token's keys and values together) and `window` (how many
    positions a query sees, itself included; None: all before it).

    Of a Mamba mixer: `convolution` of each channel over time, `scan` the recurrence, whose pieces are groups of its
    `heads`, with the width of what writes into and reads from the states as its `kv_size`, worked out `chunk` positions
    at a time, and `gated_norm` norm(x * silu(gate)).
    """

    name: str
    kind: str
    source: Dim
    target: Dim
    params: tuple[Param, ...] = ()
    saved: tuple[Activation, ...] = ()
    passes: float = 1
    experts: int = 0
    heads: int = 0
    kv_size: int = 0
    window: int | None = None
    buffers: tuple[Param, ...] = ()
    frozen: bool = False
    chunk: int = 0

    def forward_flops(self, tokens: int, seq_len: int) -> int:
        """Floating-point operations of the matrix products in the forward pass over `tokens` in rows of `seq_len`.

        Attention is counted in full, S x S, windows and causality aside, as PaLM (Chowdhery et al., 2022, appendix B)
        and PyTorch's counter do; element-wise work is not counted. A scan's chunks of Q positions are counted in full,
        Q x Q, too: products of what reads with what writes for each group of heads, of these with the channels, and
        twice of the channels with states (Dao and Gu, 2024, section 6). A convolution is counted as such.
        """
        if self.kind in ("linear", "router", "log_prob"):
            return int(2 * tokens * self.passes * self.source.size * self.target.size)
        if self.kind == "lora":
            return 2 * tokens * self.rank * (self.source.size + self.target.size)
        if self.kind == "attention":
            return 2 * tokens * seq_len * (self.source.size + self.target.size)
        if self.kind == "convolution":
            return 2 * tokens * self.source.size * self.params[0].dims[-1].size
        if self.kind == "scan":
            pairs = seq_len // self.chunk * self.chunk**2 + (seq_len % self.chunk) ** 2
            width = self.kv_size // 2
            within = 2 * tokens * pairs // seq_len * (self.source.size + width)
            return within + 4 * tokens * self.source.size * width // self.source.count
        return 0

    def train_flops(self, tokens: int, seq_len: int) -> int:
        """Those of a forward pass, and of a backward pass of twice its size, or once where no weights are trained."""
        weights = self.kind in ("linear", "router", "log_prob")
        return (2 if weights and self.frozen else 3) * self.forward_flops(tokens, seq_len)

    @property
    def rank(self) -> int:
        """Of an adapter only: the size between its two matrices."""
        return self.params[0].dims[0].size

    def reach(self, seq_len: int) -> float:
        """How many positions a query of an attention op sees, on average over a row of `seq_len`."""
        window = seq_len if self.window is None else min(self.window, seq_len)
        return window - window * (window - 1) / (2 * seq_len)


def linear(
    name: str, source: Dim, target: Dim, *, bias: bool = False, saved: tuple[Activation, ...] = (), kind: str = "linear"
) -> Op:
    """The matrix product `name`, its weight stored as (target, source)."""
    weight = Param(f"{name}.weight", (target, source))
    params = (weight, Param(f"{name}.bias", (target,), "zeros")) if bias else (weight,)
    return Op(name, kind, source, target, params, saved)


def norm(
    name: str,
    style: str,
    dim: Dim,
    *,
    weight: Dim | None = None,
    keeps_input: bool = True,
    bias: bool = True,
    init: str = "ones",
) -> Op:
    """The normalisation `name` of `dim`, "rmsnorm" or "layernorm", with parameters of `weight` (else of `dim`).

    A layer norm has a bias unless `bias` is off; `init` is how the weight starts.

    Kept are the statistics of each vector of `weight`'s size in float32, and the input, unless another operation keeps
    that already.
    """
    weight = weight or dim
    params: tuple[Param, ...] = (Param(f"{name}.weight", (weight,), init),)
    vectors: tuple[Dim, ...] = () if weight.size == dim.size else (Dim(dim.name, dim.size // weight.size),)
    if style == "layernorm":
        params = (*params, Param(f"{name}.bias", (weight,), "zeros")) if bias else params
        vectors = (*vectors, Dim("mean_and_scale", 2))
    kept = (Activation((dim,)), Activation(vectors, "float32")) if keeps_input else (Activation(vectors, "float32"),)
    return Op(name, "norm", dim, dim, params, kept)


def block_norm(spec: ModelSpec, name: str, dim: Dim, *, keeps_input: bool = True) -> Op:
    """The normalisation `name` of hidden states, as `spec` normalises them."""
    init = "zeros" if spec.zero_centered_norm else "ones"
    return norm(name, spec.norm, dim, keeps_input=keeps_input, bias=spec.norm_bias, init=init)
