"""The choice among the kernels of a CPU, as a text for run files, run folders and caches.

Where kumi has several kernels for an operation, it measures them once per machine. A text is one of:

    reference                                            the choice of earlier versions, which did not measure
    kind=fp32 products=default flash=fp32-short,bf16-long

- `kind`: the precision that `precision.kind = "auto"` resolves to.
- `products`: the library of float32 matmuls: PyTorch's default, oneDNN, or mixed (the default for experts, else
  oneDNN).
- `flash`: the cases of dtype and document length in which attention uses PyTorch's flash kernel. Other cases use the
  block-wise kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

AUTO_KINDS = ("fp32", "bf16")
MATMUL_LIBRARIES = ("onednn", "default", "mixed")
# Cases of attention: documents shorter than LONG_TOKENS tokens, on average over a microbatch, and longer documents.
FLASH_CASES = ("fp32-short", "fp32-long", "bf16-short", "bf16-long")
LONG_TOKENS = 1024


@dataclass(frozen=True)
class Numerics:
    """A choice of kernels. If `kind` is empty, the description of the CPU decides the precision."""

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
    """Return the member of `FLASH_CASES` for elements of `itemsize` bytes and documents of `length` tokens."""
    return f"{'fp32' if itemsize >= 4 else 'bf16'}-{'short' if length < LONG_TOKENS else 'long'}"


def parse_numerics(text: str) -> Numerics:
    """Return the choice that `text` describes: the inverse of `str`. Raise ValueError for any other text."""
    if text == "reference":
        return REFERENCE
    given = dict(_pairs(text))
    if missing := {"products", "flash"} - given.keys():
        raise ValueError(f"{text!r} lacks {' and '.join(sorted(missing))}; {_EXAMPLE}")
    flash = () if given["flash"] == "none" else tuple(given["flash"].split(","))
    for key, words, allowed in (
        ("kind", [given["kind"]] if "kind" in given else [], AUTO_KINDS),
        ("products", [given["products"]], MATMUL_LIBRARIES),
        ("flash", list(flash), FLASH_CASES),
    ):
        if wrong := [word for word in words if word not in allowed]:
            raise ValueError(f"{key}={wrong[0]} is unknown, use one of {', '.join(allowed)}; {_EXAMPLE}")
    return Numerics(given.get("kind", ""), given["products"], tuple(case for case in FLASH_CASES if case in flash))


_EXAMPLE = f"write 'reference', or as in {str(Numerics('fp32', 'default', FLASH_CASES[:2]))!r}"


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    seen = set[str]()
    for word in text.split():
        key, equals, value = word.partition("=")
        if key not in ("kind", "products", "flash") or not equals or key in seen:
            raise ValueError(f"{word!r} must be one of kind=, products= and flash=, each at most once; {_EXAMPLE}")
        seen.add(key)
        yield key, value
