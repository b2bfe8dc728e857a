"""The choice among the kernels of a CPU or a GPU, as a text for run files, run folders and caches.

Where kumi has several kernels for an operation, it measures them once per machine. A text is one of:

    reference                                            the choice of earlier versions, which did not measure
    kind=fp32 products=default flash=fp32-short,bf16-long     a CPU
    kernels=loss:triton,scan:mamba-ssm                        a GPU

- `kind`: the precision that `precision.kind = "auto"` resolves to.
- `products`: the library of float32 matmuls: PyTorch's default, oneDNN, or mixed (the default for experts, else
  oneDNN).
- `flash`: the cases of dtype and document length in which attention uses PyTorch's flash kernel. Other cases use the
  block-wise kernel.
- `kernels`: the operations that a GPU computes by something else than PyTorch's operations, each with the
  implementation, and settings that a run file asks for and that are off on this GPU (see `ASKED` and `CHOICES`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

AUTO_KINDS = ("fp32", "bf16")
MATMUL_LIBRARIES = ("onednn", "default", "mixed")
# Cases of attention: documents shorter than LONG_TOKENS tokens, on average over a microbatch, and longer documents.
FLASH_CASES = ("fp32-short", "fp32-long", "bf16-short", "bf16-long")
LONG_TOKENS = 1024
# Implementations of operations on a GPU beside PyTorch's, in order of preference: a maintained library before kumi's
# own Triton kernels (`kumi.nn.kernels`). "loss": between the matmuls of the loss head; "experts": tokens to the rows of
# experts and back; "rotation": rotary position embeddings; "scan": Mamba's recurrence.
KERNELS = {"loss": ("triton",), "experts": ("triton",), "rotation": ("triton",), "scan": ("mamba-ssm", "triton")}
# Attention on a GPU, if not by PyTorch's flash kernel: newer versions of it, and masks of all pairs of tokens where
# PyTorch's fails or is wrong.
ATTENTION = ("fa3", "fa4", "masked")
# Settings of a run file that are compared with what they replace when a run first asks for them, and their keys. "off"
# means that they fail, differ or are slower on this GPU, so that they are not used.
ASKED = {"compile": "train.compile", "float8": "precision.kind", "async_tp": "comm.async_tp"}
# All that is chosen by measurement: operation or setting -> what may be chosen beside the default.
CHOICES = {**KERNELS, "attention": ATTENTION, **dict.fromkeys(ASKED, ("off",))}

# Implementation -> the package that it needs, and a relative clause ("which ...") that says where to get the package.
KERNEL_PACKAGES = {
    "triton": ("triton", "PyTorch for CUDA brings along"),
    "mamba-ssm": ("mamba-ssm", "its authors build for each version of PyTorch"),
}
# All packages whose versions a measurement depends on, beside PyTorch.
MEASURED_PACKAGES = (*(package for package, _ in KERNEL_PACKAGES.values()), "flash-attn-3", "flash-attn-4", "torchao")


@dataclass(frozen=True)
class Numerics:
    """A choice of kernels. If `kind` is empty, the description of the CPU decides the precision.

    `kernels` has pairs of an operation and its implementation, in the order of `CHOICES`, without those of PyTorch.
    """

    kind: str = ""
    products: str = "onednn"
    flash: tuple[str, ...] = ()
    kernels: tuple[tuple[str, str], ...] = ()

    def chosen(self, operation: str) -> str | None:
        """Return the choice for `operation`, a key of `CHOICES`; None for the default."""
        return dict(self.kernels).get(operation)

    def __str__(self) -> str:
        if self == REFERENCE:
            return "reference"
        if self.kernels:
            return f"kernels={kernels_text(self.kernels)}"
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
    if "kernels" in given:
        if len(given) > 1:
            raise ValueError(f"kernels= is for GPUs, and {text!r} has words for CPUs, too; {_EXAMPLE}")
        try:
            return Numerics(kernels=parse_kernels(given["kernels"]))
        except ValueError as error:
            raise ValueError(f"kernels: {error}") from None
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


def kernels_text(kernels: Sequence[tuple[str, str]]) -> str:
    """Return `kernels` as a text: the inverse of `parse_kernels`."""
    return ",".join(map(":".join, kernels)) or "torch"


def parse_kernels(text: str) -> tuple[tuple[str, str], ...]:
    """Return the operations and implementations in `text`, such as "loss:triton,scan:mamba-ssm"; () for "torch".

    Raise ValueError if it names an operation twice, or something that is not in `CHOICES`.
    """
    chosen: dict[str, str] = {}
    for word in [] if text == "torch" else text.split(","):
        operation, _, implementation = word.strip().partition(":")
        if operation in chosen or implementation not in CHOICES.get(operation, ()):
            allowed = ", ".join(f"{name}:{each}" for name, all_of in CHOICES.items() for each in all_of)
            reason = "occurs twice" if operation in chosen else "is unknown"
            raise ValueError(f"{word.strip()!r} {reason}; write 'torch', or some of {allowed}")
        chosen[operation] = implementation
    return tuple((operation, chosen[operation]) for operation in CHOICES if operation in chosen)


_EXAMPLE = f"write 'reference', or as in {str(Numerics('fp32', 'default', FLASH_CASES[:2]))!r}"


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield each key and value of `text`, words such as "kind=fp32". Raise ValueError for unknown or repeated keys."""
    seen = set[str]()
    for word in text.split():
        key, equals, value = word.partition("=")
        if key not in ("kind", "products", "flash", "kernels") or not equals or key in seen:
            raise ValueError(
                f"{word!r} must be one of kind=, products=, flash= and kernels=, each at most once; {_EXAMPLE}"
            )
        seen.add(key)
        yield key, value
