"""How a CPU computes what it can compute in several ways, in words that a run file, a run folder and a cache hold.

    reference                                            what kumi did before it measured, whatever the CPU
    kind=fp32 products=default flash=fp32-short,bf16-long

`kind` is the precision that `precision.kind = "auto"` stands for. `products` is how float32 matrices are multiplied: by
PyTorch's default library, by oneDNN, or, mixed, those of experts by the default one and all others by oneDNN. `flash`
is where attention is left to PyTorch's flash kernel, by number format and length of documents; the rest is computed in
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("fp32", "bf16")
PRODUCTS = ("onednn", "default", "mixed")
# Attention over documents shorter than LONG tokens, on average over a microbatch, and over longer ones.
FLASH = ("fp32-short", "fp32-long", "bf16-short", "bf16-long")
LONG = 1024


@dataclass(frozen=True)
class Numerics:
    """One choice of each. A `kind` of "" leaves the precision to what is known of the CPU."""

    kind: str = ""
    products: str = "onednn"
    flash: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self == REFERENCE:
            return "reference"
        kind = f"kind={self.kind} " if self.kind else ""
        return f"{kind}products={self.products} flash={','.join(self.flash) or 'none'}"


REFERENCE = Numerics()


def attention_case(itemsize: int, length: float) -> str:
    """Return which of `FLASH` attention is in elements of `itemsize` bytes, over documents of `length` tokens."""
    return f"{'fp32' if itemsize >= 4 else 'bf16'}-{'short' if length < LONG else 'long'}"


def parse(text: str) -> Numerics:
    """Return what `text` says. Raise ValueError, with the word that is wrong, unless it is as `str` writes it."""
    if text == "reference":
        return REFERENCE
    given = dict(_pairs(text))
    if missing := {"products", "flash"} - given.keys():
        raise ValueError(f"{text!r} does not say {' and '.join(sorted(missing))}; {_EXAMPLE}")
    flash = () if given["flash"] == "none" else tuple(given["flash"].split(","))
    for key, words, known in (
        ("kind", [given["kind"]] if "kind" in given else [], KINDS),
        ("products", [given["products"]], PRODUCTS),
        ("flash", list(flash), FLASH),
    ):
        if wrong := [word for word in words if word not in known]:
            raise ValueError(f"{key}={wrong[0]} is unknown, it is one of {', '.join(known)}; {_EXAMPLE}")
    return Numerics(given.get("kind", ""), given["products"], tuple(one for one in FLASH if one in flash))


_EXAMPLE = f"write 'reference', or as in {str(Numerics('fp32', 'default', FLASH[:2]))!r}"


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    seen = set[str]()
    for word in text.split():
        key, equals, value = word.partition("=")
        if key not in ("kind", "products", "flash") or not equals or key in seen:
            raise ValueError(f"{word!r} is none of kind=, products= and flash=, each once; {_EXAMPLE}")
        seen.add(key)
        yield key, value
