"""An operation of the forward pass: its dims, its parameters, its FLOPs, and the activations that it saves.

The ledger (`kumi.spec.ledger`) describes a model as a list of these operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kumi.spec.model import ModelSpec

# Values of `Op.kind`.
OP_KINDS = (
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
    "score",
    "lora",
    "convolution",
    "scan",
    "gated_norm",
)


# Operations that are one matmul with a weight.
_MATMULS = ("linear", "router", "log_prob", "score")


@dataclass(frozen=True)
class Dim:
    """A named tensor dimension; `kumi.spec.sharding.DIM_TO_AXIS` has the mesh axis that may shard it.

    `unit` is the smallest part for a rank: one head of `heads` and `kv_heads`, or the columns of one index in a pair
    of fused matrices.
    """

    name: str
    size: int
    unit: int = 1

    @property
    def count(self) -> int:
        """The number of units."""
        return self.size // self.unit


@dataclass(frozen=True)
class Param:
    """A parameter.

    - `name`: its native name, which is kumi's own (see `kumi.spec.weight_rules`).
    - `dims`: a parameter of routed experts has a leading dim named "experts".
    - `init`: "normal", "zeros" or "ones"; `kumi.nn.initialize` has further values for adapters and Mamba mixers.
    - `frozen`: it is not trained, and is stored in the compute dtype or the format `quantized`.
    - `quantized`: name of the quantization format; empty without quantization.
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
        """True if weight decay applies: to matrices, tables and kernels, but not to biases, norms and other vectors.

        A vector for each expert is a vector, although its tensor has two dims.
        """
        return sum(dim.name != "experts" for dim in self.dims) > 1


@dataclass(frozen=True)
class Activation:
    """A tensor that the forward pass saves for the backward pass: its dims without the token dimension, and its dtype.

    `dtype` is "compute" (the precision's compute dtype), "float32" or "int64". A tensor with a row for each expert of
    a token has a leading dim named "routed".
    """

    dims: tuple[Dim, ...]
    dtype: str = "compute"


@dataclass(frozen=True)
class Op:
    """One operation of the forward pass.

    - `kind`: one of `OP_KINDS`. `gate` is a gated activation, act(a) * b; `activation` has one input. `router` is the
      linear layer that scores experts; `dispatch` and `combine` move tokens to their experts and back. `lora` is the
      adapter of a linear layer or of routed experts. `convolution`, `scan` and `gated_norm`, norm(x * silu(gate)),
      belong to a Mamba mixer. `log_prob` and `score` are heads.
    - `source`, `target`: input and output dims without the token dimension; for attention the dims of queries and of
      values, both over all query heads.
    - `saved`: activations of one token, over all its passes, with a balanced load of experts.
    - `passes`: how often a token goes through the operation: once per routed expert, else once.
    - `experts`: the number of routed experts with weights in the operation; 0 for others.
    - `heads`: query heads of attention, or heads of a scan.
    - `kv_size`: width of a token's keys and values together; for a rotation, twice that of its keys; for a scan,
      that of B and C, which write and read its state.
    - `window`: positions that a query attends to, itself included; None for all earlier ones.
    - `buffers`: tensors that are not trained.
    - `frozen`: no parameter that the operation reads is trained, also none of another operation (a tied head).
    - `chunk`: positions that a scan computes together.
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

    def forward_flops(self, tokens: int, seq_len: int, attention_len: float | None = None) -> int:
        """Return the FLOPs of matmuls in the forward pass over `tokens` in sequences of `seq_len`.

        Attention counts in full, S x S, without regard to windows and causality, as in PaLM (Chowdhery et al., 2022,
        appendix B) and PyTorch's counter. S is `attention_len` where attention stays within documents
        (`BatchSpec.attention_len`), else `seq_len`. Element-wise operations do not count. The chunks of a scan, of Q
        positions, also count in full, Q x Q: C times B for each group of heads, the result times the channels, and two
        matmuls of channels and states (Dao and Gu, 2024, section 6). Convolutions count.
        """
        if self.kind in _MATMULS:
            return int(2 * tokens * self.passes * self.source.size * self.target.size)
        if self.kind == "lora":
            return int(2 * tokens * self.passes * self.rank * (self.source.size + self.target.size))
        if self.kind == "attention":
            return round(2 * tokens * (attention_len or seq_len) * (self.source.size + self.target.size))
        if self.kind == "convolution":
            return 2 * tokens * self.source.size * self.params[0].dims[-1].size
        if self.kind == "scan":
            pairs = seq_len // self.chunk * self.chunk**2 + (seq_len % self.chunk) ** 2
            width = self.kv_size // 2
            within = 2 * tokens * pairs // seq_len * (self.source.size + width)
            return within + 4 * tokens * self.source.size * width // self.source.count
        return 0

    def train_flops(self, tokens: int, seq_len: int, attention_len: float | None = None) -> int:
        """Return the FLOPs of forward and backward: three times those of the forward, or twice for a frozen matrix."""
        weights = self.kind in _MATMULS
        return (2 if weights and self.frozen else 3) * self.forward_flops(tokens, seq_len, attention_len)

    @property
    def rank(self) -> int:
        """The rank of an adapter, for operations of kind "lora"."""
        return self.params[1].dims[-1].size

    def reach(self, seq_len: float) -> float:
        """Return the mean number of positions that a query attends to, over a sequence of `seq_len`.

        For packed documents this is `BatchSpec.attention_len`, as if they were of equal length.
        """
        window = seq_len if self.window is None else min(self.window, seq_len)
        return window - window * (window - 1) / (2 * seq_len)


def linear(
    name: str, source: Dim, target: Dim, *, bias: bool = False, saved: tuple[Activation, ...] = (), kind: str = "linear"
) -> Op:
    """Return the linear layer `name`, with a weight of shape (target, source)."""
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
    """Return the norm `name` of `dim`, with a `style` of "rmsnorm" or "layernorm" and parameters of `weight` (or
    `dim`).

    A layer norm has a bias unless `bias` is off. `init` is the initialization of the weight. The norm saves the
    statistics of each vector of the size of `weight` in float32. It also saves its input, unless `keeps_input` is off
    because another operation saves it.
    """
    weight = weight or dim
    params: tuple[Param, ...] = (Param(f"{name}.weight", (weight,), init),)
    vectors: tuple[Dim, ...] = () if weight.size == dim.size else (Dim(dim.name, dim.size // weight.size),)
    if style == "layernorm":
        params = (*params, Param(f"{name}.bias", (weight,), "zeros")) if bias else params
        vectors = (*vectors, Dim("mean_and_scale", 2))
    saved = (Activation((dim,)), Activation(vectors, "float32")) if keeps_input else (Activation(vectors, "float32"),)
    return Op(name, "norm", dim, dim, params, saved)


def block_norm(spec: ModelSpec, name: str, dim: Dim, *, keeps_input: bool = True) -> Op:
    """Return the norm `name` of hidden states, with the style and initialization of `spec`."""
    init = "zeros" if spec.zero_centered_norm else "ones"
    return norm(name, spec.norm, dim, keeps_input=keeps_input, bias=spec.norm_bias, init=init)
