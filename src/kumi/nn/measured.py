"""Measure which of the ways to compute is the fastest on this CPU, with the threads that this process has.

Everything is timed in `ROUNDS` rounds, in each of which all ways have their turn, so that what else happens on the
machine meets all of them. Products stay with oneDNN, attention in blocks and the precision with what the CPU's flags
say unless another way has a lead of `LEAD`, by the medians and by the fastest rounds. What is not timed within
`SECONDS` is as in the reference: a second is enough unless the machine is busy, and then nothing can be told.
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
from kumi.nn.cpu_attention import packed_attention
from kumi.nn.cpu_flash import flash_attention
from kumi.nn.matmul import enable_fast_float32
from kumi.nn.numerics import use
from kumi.spec import families
from kumi.spec.numerics import FLASH, KINDS, LONG, Numerics

ROUNDS = 3
LEAD = 1.05
# oneDNN multiplies experts' rows, too, only with this lead: they have to be padded for it (see `kumi.nn.grouped`).
PADDING = 1.15
SECONDS = 2.0

# Tokens, and the sizes of the model whose matrices, attention and layer are timed.
TOKENS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD = 256, 384, 1024, 6, 2, 64

Seconds = dict[str, float]
# The seconds of each way, by round.
_Rounds = dict[str, list[float]]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(kind: str) -> tuple[Numerics, dict[str, Seconds]]:
    """Return the choices, and the median seconds of every way, by what was chosen: "products", "formats", "attention
    fp32-long" and so on; empty where there was no time. `kind` is the precision that the CPU's flags suggest."""
    torch.manual_seed(0)
    clock = _Clock()
    products = _library(clock.timed("products", _products()))
    use(Numerics(products=products))  # as what follows will be computed
    formats = clock.timed("formats", _formats())
    bf16_is_near = bool(formats) and median(formats["bf16"]) < 2 * median(formats["fp32"])
    # Without instructions for it a product in bfloat16 takes ten times as long, and in blocks runs in one thread.
    flash = [case for case in FLASH if case.startswith("bf16") and formats and not bf16_is_near]
    for case in (case for case in FLASH if case not in flash):
        ways = clock.timed(f"attention {case}", _attention(case))
        flash += [case] if _ahead(ways, "blocks", ("flash",)) == "flash" else []
    numerics = Numerics(kind, products, tuple(case for case in FLASH if case in flash))
    if bf16_is_near:
        use(numerics)
        numerics = replace(numerics, kind=_ahead(clock.timed("layer", _steps()), kind, KINDS))
    elif formats:
        numerics = replace(numerics, kind="fp32")
    return numerics, clock.medians()


class _Clock:
    """Times ways until `SECONDS` are over."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + SECONDS
        self._rounds: dict[str, _Rounds] = {}

    def timed(self, what: str, ways: Mapping[str, Callable[[], object]]) -> _Rounds:
        """Return the seconds of each of `ways` in every round, after a first one that is not counted; nothing where
        that takes too long."""
        seconds: _Rounds = {name: [] for name in ways}
        for number in range(ROUNDS + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                if began > self._until:
                    return self._rounds.setdefault(what, {})
                way()
                if number:
                    seconds[name].append(time.perf_counter() - began)
        return self._rounds.setdefault(what, seconds)

    def medians(self) -> dict[str, Seconds]:
        """Return the median seconds of all ways."""
        return {what: {way: median(each) for way, each in ways.items()} for what, ways in self._rounds.items()}


def _library(rounds: _Rounds) -> str:
    """Return by which library float32 matrices are multiplied, given the times of both, oneDNN's only if exact."""
    if not rounds:
        return "onednn"
    if "onednn" not in rounds or _leads(rounds, "default", "onednn"):
        return "default"
    return "onednn" if _leads(rounds, "onednn", "default", PADDING) else "mixed"


def _ahead(rounds: _Rounds, reference: str, others: Sequence[str]) -> str:
    """Return the one of `others` that leads `reference`, or `reference` where none does."""
    ahead = [way for way in others if way in rounds and _leads(rounds, way, reference)]
    return ahead[0] if ahead else reference


def _leads(rounds: _Rounds, way: str, other: str, by: float = LEAD) -> bool:
    """Return whether `way` took less than `other` by so much, by the medians and by the fastest rounds."""
    return all(of(rounds[way]) * by <= of(rounds[other]) for of in (median, min))


def _products() -> dict[str, Callable[[], object]]:
    """The products of a layer, forward and backward, by both libraries if oneDNN's are exact."""
    shapes = ((HIDDEN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN))
    sizes = [((TOKENS, width), (height, width), (TOKENS, height)) for height, width in shapes]
    given = [[torch.randn(size) for size in each] for each in sizes]

    def multiply(precision: str) -> None:
        torch.set_float32_matmul_precision(precision)
        for x, weight, grad in given:
            _ = x @ weight.T, grad @ weight, grad.T @ x

    exact = enable_fast_float32().precision != "highest"
    return {"default": partial(multiply, "highest"), **({"onednn": partial(multiply, "medium")} if exact else {})}


def _formats() -> dict[str, Callable[[], object]]:
    """One product in each number format."""
    square = torch.randn(TOKENS // 2, TOKENS), torch.randn(TOKENS, TOKENS)
    return {kind: partial(torch.mm, *(x.to(dtype) for x in square)) for kind, dtype in _DTYPES.items()}


def _attention(case: str) -> dict[str, Callable[[], object]]:
    """Attention of one of the cases of `FLASH`, forward and backward, in blocks and by PyTorch's kernel."""
    kind, length = case.split("-")
    # Two short documents, which two threads divide, or a long one.
    documents, heads, kv_heads = ((LONG // 2,) * 2, HEADS, KV_HEADS) if length == "short" else ((LONG,), 2, 1)
    sizes = [(1, sum(documents), count, HEAD) for count in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(size).to(_DTYPES[kind]).requires_grad_() for size in sizes]
    bounds = torch.tensor((0, *documents)).cumsum(0).tolist()

    def attend(way: Callable[..., Tensor]) -> None:
        # Of a scalar: a given gradient would make PyTorch import its compiler's symbols, half a second.
        torch.autograd.grad(way(*inputs, bounds=bounds).square().sum(), inputs)

    return {
        "blocks": partial(attend, partial(packed_attention, window=None)),
        "flash": partial(attend, flash_attention),
    }


def _steps() -> dict[str, Callable[[], object]]:
    """A decoder of one layer, forward and backward, in each number format."""
    return {kind: partial(_step, *_layer(kind)) for kind in KINDS}


def _layer(kind: str) -> tuple[Decoder, Tensor]:
    """A decoder of one layer in the number format `kind`, and tokens for it."""
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
    """The forward and the backward pass of `decoder` over the tokens `ids` (1, T)."""
    total, _ = decoder(ids, labels=ids, token_weights=torch.full(ids.shape, 1 / ids.numel()))
    total.backward()
    decoder.zero_grad()
