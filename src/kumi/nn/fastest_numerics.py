"""Measure which numerics are the fastest on this CPU, with the threads of this process.

Numerics are the number format, the matmul library and the attention kernels (see `kumi.spec.numerics`).

Each candidate is timed once per round, in `ROUNDS` rounds, so that other load on the machine affects all candidates.
The defaults are oneDNN for products, attention in blocks (`kumi.nn.attention.cpu_attention`), and the precision that
the CPU's flags suggest. Another candidate replaces the default if it is faster by a factor of `LEAD`, both in the
median and in the fastest round; oneDNN must be faster by `PADDED_LEAD` to multiply the experts' rows, too. A
measurement that is not finished within `SECONDS` keeps the default: a second suffices unless the machine is busy, and
then the times would mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from kumi.nn import Decoder
from kumi.nn.attention.cpu_attention import packed_attention
from kumi.nn.attention.cpu_flash import flash_attention
from kumi.nn.cpu_matmul import enable_fast_float32
from kumi.nn.numerics import use_numerics
from kumi.spec import families
from kumi.spec.numerics import AUTO_KINDS, FLASH_CASES, LONG_TOKENS, Numerics

ROUNDS = 3
LEAD = 1.05
# oneDNN needs this lead to multiply the experts' rows, because they have to be padded (see `kumi.nn.grouped_gemm`).
PADDED_LEAD = 1.15
SECONDS = 2.0

# Tokens, and the dimensions of the model whose products, attention and layer are timed.
TOKENS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD = 256, 384, 1024, 6, 2, 64

Seconds = dict[str, float]
# Candidate -> its seconds in each round.
_Rounds = dict[str, list[float]]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(kind: str) -> tuple[Numerics, dict[str, Seconds]]:
    """Return the fastest numerics, and the median seconds of each candidate by measurement.

    Measurements are "products", "formats", "attention fp32-long" and so on; a measurement that ran out of time
    has no candidates. `kind` is the precision that the CPU's flags suggest.
    """
    torch.manual_seed(0)
    clock = _Clock()
    products = _library(clock.timed("products", _products()))
    use_numerics(Numerics(products=products))  # for the following measurements
    formats = clock.timed("formats", _formats())
    bf16_is_near = bool(formats) and median(formats["bf16"]) < 2 * median(formats["fp32"])
    # Without bfloat16 instructions a bfloat16 product takes ten times as long, and attention in blocks computes each of
    # its products in one thread: it need not be timed.
    flash = [case for case in FLASH_CASES if case.startswith("bf16") and formats and not bf16_is_near]
    for case in (case for case in FLASH_CASES if case not in flash):
        times = clock.timed(f"attention {case}", _attention(case))
        flash += [case] if _ahead(times, "blocks", ("flash",)) == "flash" else []
    numerics = Numerics(kind, products, tuple(case for case in FLASH_CASES if case in flash))
    if bf16_is_near:
        use_numerics(numerics)
        numerics = replace(numerics, kind=_ahead(clock.timed("layer", _steps()), kind, AUTO_KINDS))
    elif formats:
        numerics = replace(numerics, kind="fp32")
    return numerics, clock.medians()


class _Clock:
    """Times candidates until `SECONDS` have passed."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + SECONDS
        self._rounds: dict[str, _Rounds] = {}

    def timed(self, measurement: str, candidates: Mapping[str, Callable[[], object]]) -> _Rounds:
        """Return the seconds of each candidate by round, after one warm-up round; empty if time runs out."""
        seconds: _Rounds = {name: [] for name in candidates}
        for round_index in range(ROUNDS + 1):
            for name, candidate in candidates.items():
                began = time.perf_counter()
                if began > self._until:
                    return self._rounds.setdefault(measurement, {})
                candidate()
                if round_index:
                    seconds[name].append(time.perf_counter() - began)
        return self._rounds.setdefault(measurement, seconds)

    def medians(self) -> dict[str, Seconds]:
        """Return the median seconds of each candidate, by measurement."""
        return {
            measurement: {candidate: median(each) for candidate, each in candidates.items()}
            for measurement, candidates in self._rounds.items()
        }


def _library(rounds: _Rounds) -> str:
    """Return "default", "onednn", or "mixed": oneDNN, but the default library for the experts' rows.

    `rounds` has times of oneDNN only if it passed the check of `enable_fast_float32`.
    """
    if not rounds:
        return "onednn"
    if "onednn" not in rounds or _leads(rounds, "default", "onednn"):
        return "default"
    return "onednn" if _leads(rounds, "onednn", "default", PADDED_LEAD) else "mixed"


def _ahead(rounds: _Rounds, reference: str, others: Sequence[str]) -> str:
    """Return the first of `others` that is faster than `reference` by `LEAD`; `reference` if none is."""
    ahead = [candidate for candidate in others if candidate in rounds and _leads(rounds, candidate, reference)]
    return ahead[0] if ahead else reference


def _leads(rounds: _Rounds, candidate: str, other: str, by: float = LEAD) -> bool:
    """Return True if `candidate` is faster than `other` by a factor of `by`, in the median and in the fastest round."""
    return all(statistic(rounds[candidate]) * by <= statistic(rounds[other]) for statistic in (median, min))


def _products() -> dict[str, Callable[[], object]]:
    """Return functions that compute the products of a layer and its gradients, by the default library and by oneDNN.

    oneDNN is left out if it fails the check of `enable_fast_float32`.
    """
    shapes = ((HIDDEN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN))
    sizes = [((TOKENS, width), (height, width), (TOKENS, height)) for height, width in shapes]
    tensors = [[torch.randn(size) for size in each] for each in sizes]

    def multiply(precision: str) -> None:
        torch.set_float32_matmul_precision(precision)
        for x, weight, grad in tensors:
            _ = x @ weight.T, grad @ weight, grad.T @ x

    is_exact = enable_fast_float32().precision != "highest"
    return {"default": partial(multiply, "highest"), **({"onednn": partial(multiply, "medium")} if is_exact else {})}


def _formats() -> dict[str, Callable[[], object]]:
    """Return functions that compute one product, one for each number format."""
    square = torch.randn(TOKENS // 2, TOKENS), torch.randn(TOKENS, TOKENS)
    return {kind: partial(torch.mm, *(x.to(dtype) for x in square)) for kind, dtype in _DTYPES.items()}


def _attention(case: str) -> dict[str, Callable[[], object]]:
    """Return functions that compute attention and its gradients for a case of `FLASH_CASES`: in blocks, and by
    PyTorch's kernel."""
    kind, length = case.split("-")
    # Two short documents, one for each of two threads, or one long document.
    documents, heads, kv_heads = (
        ((LONG_TOKENS // 2,) * 2, HEADS, KV_HEADS) if length == "short" else ((LONG_TOKENS,), 2, 1)
    )
    sizes = [(1, sum(documents), count, HEAD) for count in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(size).to(_DTYPES[kind]).requires_grad_() for size in sizes]
    cu_seqlens = torch.tensor((0, *documents)).cumsum(0).tolist()

    def attend(function: Callable[..., Tensor]) -> None:
        # Differentiate a scalar: with a given gradient, PyTorch would import its compiler's symbols, which takes half a
        # second.
        torch.autograd.grad(function(*inputs, cu_seqlens=cu_seqlens).square().sum(), inputs)

    return {
        "blocks": partial(attend, partial(packed_attention, window=None)),
        "flash": partial(attend, flash_attention),
    }


def _steps() -> dict[str, Callable[[], object]]:
    """Return functions that run forward and backward of a decoder with one layer, one for each number format."""
    return {kind: partial(_step, *_layer(kind)) for kind in AUTO_KINDS}


def _layer(kind: str) -> tuple[Decoder, Tensor]:
    """Return a decoder with one layer in the number format `kind`, and tokens for it."""
    config = {
        "model_type": "llama",
        "vocab_size": HIDDEN,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": TOKENS,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    decoder = Decoder(families.from_hf(config), dtype=_DTYPES[kind])
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return decoder, torch.randint(0, HIDDEN, (1, TOKENS))


def _step(decoder: Decoder, ids: Tensor) -> None:
    """Run the forward and the backward pass of `decoder` on tokens `ids` (1, T)."""
    total, _ = decoder(ids, labels=ids, token_weights=torch.full(ids.shape, 1 / ids.numel()))
    total.backward()
    decoder.zero_grad()
