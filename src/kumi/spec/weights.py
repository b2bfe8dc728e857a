"""Where the files of a Hugging Face folder hold a model's tensors, by the rules of its family, read both ways.

parts(spec, param)   what files hold of a tensor
files(spec)          what a file's tensors are made of
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kumi.spec.ledger import LAYERS, tensors
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.weight_rules import Pairs, Rename, Rows, Rule, Stack


@dataclass(frozen=True)
class Part:
    """A piece of a tensor in a file, where the tensor is called `name` and has `shape`.

    Seen as `view`, the file's tensor has a rectangle that begins at `at` and has `size`; with its dims in `order`, its
    elements are those of the native tensor's rectangle that begins at `start` and has `extent`:

        native[start : start + extent] == file.view(view)[at : at + size].permute(order).reshape(extent)
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    view: tuple[int, ...]
    at: tuple[int, ...]
    size: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        """Whether the elements are a rectangle of the file's tensor as it is, in the order that the native one has."""
        return self.view == self.shape and self.order == tuple(range(len(self.order)))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the file's tensor, in the order that the native one has."""
        return self.in_order and self.size == self.shape


@dataclass(frozen=True)
class Piece:
    """A native tensor, and the part of it that a file's tensor holds."""

    param: Param
    part: Part


def parts(spec: ModelSpec, param: Param, *, stacked: bool = False) -> tuple[Part, ...]:
    """What files hold of `param`, a tensor of `spec`: all of it, in the order of its elements.

    `stacked`: experts are one tensor in the file, too, as transformers 5 has them in memory and can save them.
    """
    prefix, inner = _split(param.name)
    for rule in spec.weights.rules:
        found = _apply(spec, rule, param, prefix, inner, stacked)
        if found:
            return found
    return (_whole(param, stored_name(spec, param.name)),)


@lru_cache(maxsize=64)
def files(spec: ModelSpec) -> Mapping[str, tuple[Piece, ...]]:
    """For the name of every tensor in files, the pieces of native tensors that it is made of; in the order of these."""
    found: dict[str, list[Piece]] = {}
    for param in tensors(spec):
        for part in parts(spec, param):
            found.setdefault(part.name, []).append(Piece(param, part))
    return {name: tuple(pieces) for name, pieces in found.items()}


def stored_name(spec: ModelSpec, name: str) -> str:
    """`name` with its beginning as files have it."""
    for native, stored in spec.weights.prefixes:
        if name.startswith(native):
            return stored + name.removeprefix(native)
    return name


def _split(name: str) -> tuple[str, str]:
    """The layer that a tensor belongs to, with the dot after it (or nothing), and its name in there."""
    if not name.startswith(LAYERS):
        return "", name
    number, _, inner = name.removeprefix(LAYERS).partition(".")
    return f"{LAYERS}{number}.", inner


def _whole(param: Param, name: str, *, transposed: bool = False) -> Part:
    """All of `param` as a tensor of its own."""
    shape, dims = param.shape, len(param.shape)
    order = (*range(dims - 2), dims - 1, dims - 2) if transposed and dims > 1 else tuple(range(dims))
    stored = tuple(shape[dim] for dim in order)
    return Part(name, stored, (0,) * dims, shape, stored, (0,) * dims, stored, order)


def _apply(spec: ModelSpec, rule: Rule, param: Param, prefix: str, inner: str, stacked: bool) -> tuple[Part, ...]:
    """What `rule` says about `param`; nothing where it does not fit."""
    natives = (rule.native,) if isinstance(rule, Rename | Stack | Pairs) else rule.natives
    index = next((i for i, native in enumerate(natives) if inner == native or inner.startswith(f"{native}.")), None)
    if index is None:
        return ()
    leaf = inner.removeprefix(natives[index])
    if isinstance(rule, Stack):
        return () if stacked else _stack(spec, rule, param, prefix)
    name = stored_name(spec, prefix + rule.stored + leaf)
    if isinstance(rule, Rename):
        return (_whole(param, name, transposed=rule.transposed),)
    if isinstance(rule, Pairs):
        return _pairs(param, name)
    siblings = [_tensors(spec)[f"{prefix}{native}{leaf}"] for native in natives]
    return (
        _rows(siblings, index, name, rule.transposed) if isinstance(rule, Rows) else _groups(siblings, index, name),
    )


@lru_cache(maxsize=64)
def _tensors(spec: ModelSpec) -> dict[str, Param]:
    return {param.name: param for param in tensors(spec)}


def _rows(siblings: list[Param], index: int, name: str, transposed: bool) -> Part:
    param, dims = siblings[index], len(siblings[index].shape)
    heights = [one.shape[0] for one in siblings]
    shape, at = (sum(heights), *param.shape[1:]), (sum(heights[:index]), *(0,) * (dims - 1))
    order = (1, 0) if transposed and dims == 2 else tuple(range(dims))
    shape, at, size = (tuple(one[dim] for dim in order) for one in (shape, at, param.shape))
    return Part(name, shape, (0,) * dims, param.shape, shape, at, size, order)


def _groups(siblings: list[Param], index: int, name: str) -> Part:
    query, key, _ = siblings
    param, rest = siblings[index], query.shape[1:]
    head_dim, groups, queries = key.dims[0].unit, key.dims[0].count, query.dims[0].count // key.dims[0].count
    view = (groups, queries + 2, head_dim, *rest)
    at = (0, (0, queries, queries + 1)[index], 0, *(0,) * len(rest))
    size = (groups, queries if index == 0 else 1, head_dim, *rest)
    shape = (groups * (queries + 2) * head_dim, *rest)
    return Part(name, shape, (0,) * len(param.shape), param.shape, view, at, size, tuple(range(len(view))))


def _pairs(param: Param, name: str) -> tuple[Part, ...]:
    count, rows, *rest = param.shape
    half, dims = rows // 2, len(rest)
    shape, view = (count, *rest, rows), (count, *rest, half, 2)
    order = (0, dims + 1, *range(1, dims + 1), dims + 2)
    return tuple(
        Part(
            name,
            shape,
            (0, which * half, *(0,) * dims),
            (count, half, *rest),
            view,
            (*(0,) * (dims + 2), which),
            (*view[:-1], 1),
            order,
        )
        for which in (0, 1)
    )


def _stack(spec: ModelSpec, rule: Stack, param: Param, prefix: str) -> tuple[Part, ...]:
    count, rows, columns = param.shape
    height = rows // len(rule.pieces)
    shape = (height, columns)
    return tuple(
        Part(
            stored_name(spec, prefix + piece.format(expert)),
            shape,
            (expert, index * height, 0),
            (1, *shape),
            shape,
            (0, 0),
            shape,
            (0, 1),
        )
        for expert in range(count)
        for index, piece in enumerate(rule.pieces)
    )
