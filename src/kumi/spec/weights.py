"""The mapping between native tensors and the tensors in the files of a Hugging Face folder, by the rules of the family.

A native tensor has kumi's name and shape (see `kumi.spec.weight_rules`); a stored tensor has those of the file.

stored_parts(spec, param)   native tensor -> its parts in stored tensors
stored_tensors(spec)        stored tensor -> the parts of native tensors in it
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
    """A rectangle of a native tensor, and its place in the stored tensor with `name` and `shape`.

    - `start`, `extent`: first index and shape of the rectangle of the native tensor.
    - `view`: shape as which the stored tensor is viewed.
    - `at`, `size`: first index and shape of the rectangle of the view.
    - `order`: permutation of the dims of the rectangle of the view, after which its elements are in native order:

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
        """True if the part is a rectangle of the stored tensor without view and permutation."""
        return self.view == self.shape and self.order == tuple(range(len(self.order)))

    @property
    def is_whole(self) -> bool:
        """True if the part is the complete stored tensor, without view and permutation."""
        return self.in_order and self.size == self.shape


@dataclass(frozen=True)
class ParamPart:
    """A native tensor, and a part of it in a stored tensor."""

    param: Param
    part: Part


def stored_parts(spec: ModelSpec, param: Param, *, stacked: bool = False) -> tuple[Part, ...]:
    """Return the parts of `param`, a tensor of `spec`, in files. Together they cover it, in the order of its elements.

    `stacked`: the file has one tensor for all experts of a layer, as transformers 5 keeps it in memory and can save it.
    """
    prefix, inner = _split(param.name)
    for rule in spec.weights.rules:
        parts = _parts_by_rule(spec, rule, param, prefix, inner, stacked)
        if parts:
            return parts
    return (_whole_part(param, stored_name(spec, param.name)),)


@lru_cache(maxsize=64)
def stored_tensors(spec: ModelSpec) -> Mapping[str, tuple[ParamPart, ...]]:
    """Return for each stored tensor, by name, the parts of native tensors in it, in the order of `tensors(spec)`."""
    stored: dict[str, list[ParamPart]] = {}
    for param in tensors(spec):
        for part in stored_parts(spec, param):
            stored.setdefault(part.name, []).append(ParamPart(param, part))
    return {name: tuple(pieces) for name, pieces in stored.items()}


def stored_name(spec: ModelSpec, name: str) -> str:
    """Return `name` with the prefix that it has in files."""
    for native, stored in spec.weights.prefixes:
        if name.startswith(native):
            return stored + name.removeprefix(native)
    return name


def _split(name: str) -> tuple[str, str]:
    """Return the prefix of the layer of a tensor, with its dot (or ""), and the name within the layer."""
    if not name.startswith(LAYERS):
        return "", name
    index, _, inner = name.removeprefix(LAYERS).partition(".")
    return f"{LAYERS}{index}.", inner


def _whole_part(param: Param, name: str, *, transposed: bool = False) -> Part:
    """Return `param` as a stored tensor of its own."""
    shape, dims = param.shape, len(param.shape)
    order = (*range(dims - 2), dims - 1, dims - 2) if transposed and dims > 1 else tuple(range(dims))
    stored = tuple(shape[dim] for dim in order)
    return Part(name, stored, (0,) * dims, shape, stored, (0,) * dims, stored, order)


def _parts_by_rule(
    spec: ModelSpec, rule: Rule, param: Param, prefix: str, inner: str, stacked: bool
) -> tuple[Part, ...]:
    """Return the parts of `param` according to `rule`; empty if the rule does not match."""
    natives = (rule.native,) if isinstance(rule, Rename | Stack | Pairs) else rule.natives
    index = next((i for i, native in enumerate(natives) if inner == native or inner.startswith(f"{native}.")), None)
    if index is None:
        return ()
    leaf = inner.removeprefix(natives[index])
    if isinstance(rule, Stack):
        return () if stacked else _stack_parts(spec, rule, param, prefix)
    name = stored_name(spec, prefix + rule.stored + leaf)
    if isinstance(rule, Rename):
        return (_whole_part(param, name, transposed=rule.transposed),)
    if isinstance(rule, Pairs):
        return _pair_parts(param, name)
    siblings = [_tensors_by_name(spec)[f"{prefix}{native}{leaf}"] for native in natives]
    return (
        _rows_part(siblings, index, name, rule.transposed)
        if isinstance(rule, Rows)
        else _groups_part(siblings, index, name),
    )


@lru_cache(maxsize=64)
def _tensors_by_name(spec: ModelSpec) -> dict[str, Param]:
    return {param.name: param for param in tensors(spec)}


def _rows_part(siblings: list[Param], index: int, name: str, transposed: bool) -> Part:
    """Return `siblings[index]` as a part of the stored tensor `name`, by the rule `Rows`."""
    param, dims = siblings[index], len(siblings[index].shape)
    heights = [sibling.shape[0] for sibling in siblings]
    shape, at = (sum(heights), *param.shape[1:]), (sum(heights[:index]), *(0,) * (dims - 1))
    order = (1, 0) if transposed and dims == 2 else tuple(range(dims))
    shape, at, size = (tuple(sizes[dim] for dim in order) for sizes in (shape, at, param.shape))
    return Part(name, shape, (0,) * dims, param.shape, shape, at, size, order)


def _groups_part(siblings: list[Param], index: int, name: str) -> Part:
    """Return `siblings[index]`, of queries, keys and values, as a part of the stored tensor `name`, by `Groups`."""
    query, key, _ = siblings
    param, rest = siblings[index], query.shape[1:]
    head_dim, groups, queries = key.dims[0].unit, key.dims[0].count, query.dims[0].count // key.dims[0].count
    view = (groups, queries + 2, head_dim, *rest)
    at = (0, (0, queries, queries + 1)[index], 0, *(0,) * len(rest))
    size = (groups, queries if index == 0 else 1, head_dim, *rest)
    shape = (groups * (queries + 2) * head_dim, *rest)
    return Part(name, shape, (0,) * len(param.shape), param.shape, view, at, size, tuple(range(len(view))))


def _pair_parts(param: Param, name: str) -> tuple[Part, ...]:
    """Return the two halves of `param` as parts of the stored tensor `name`, by the rule `Pairs`."""
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


def _stack_parts(spec: ModelSpec, rule: Stack, param: Param, prefix: str) -> tuple[Part, ...]:
    """Return the matrices of each expert in `param` as parts that are stored tensors of their own, by `rule`."""
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
