"""The tensors that every optimizer keeps for a parameter: their names, dims and dtypes.

The planner's bytes, a checkpoint's tensors and the trainer's memory are read from here. A state's dims have the
parameter's names where tp and ep shard them as the parameter's, and other names where every rank has them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from kumi.errors import ConfigError
from kumi.spec.ledger import LAYERS, is_hidden
from kumi.spec.op import Dim, Param
from kumi.spec.optim import Optim
from kumi.spec.precision import ITEMSIZE

# AdamW's moments, and the step counter: a float32 scalar that every rank keeps.
MOMENTS, COUNTER = ("exp_avg", "exp_avg_sq"), "step"
MOMENTUM = "momentum_buffer"
# Adafactor's mean squares of the rows and of the columns of a matrix, and of the elements of other tensors.
ROW_MEANS, COLUMN_MEANS, SQUARES = "row_var", "col_var", "variance"
# 8-bit AdamW's scales of the blocks of each moment.
SCALES = tuple(f"{moment}_scale" for moment in MOMENTS)

# Elements of a row that share a float32 scale, and the size below which a tensor's moments are not quantised, as in
# bitsandbytes.
BLOCK, SMALL = 256, 4096


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps for a parameter.

    `tensor` has the parameter's name and the state's dims. `dtype` is empty where it is the parameter's. ZeRO shards a
    `sharded` state by the dim by which it shards the parameter; others are the same on all ranks of the group.
    """

    name: str
    tensor: Param
    dtype: str = ""
    sharded: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.tensor.shape


def _counter(param: Param) -> State:
    return State(COUNTER, Param(param.name, (), "zeros"), "float32", sharded=False)


def _like(param: Param, *names: str, dtype: str = "") -> tuple[State, ...]:
    """States with an element for every element of `param`."""
    return tuple(State(name, Param(param.name, param.dims, "zeros"), dtype) for name in names)


def _adamw(optim: Optim, param: Param) -> tuple[State, ...]:
    return (_counter(param), *_like(param, *MOMENTS))


def is_quantised(param: Param) -> bool:
    """True for a tensor whose moments 8-bit AdamW quantises: a matrix, decided by its global size."""
    return param.decayed and param.numel >= SMALL


def _adamw_8bit(optim: Optim, param: Param) -> tuple[State, ...]:
    if not is_quantised(param):
        return _adamw(optim, param)
    blocks = Dim("blocks", -(-param.dims[-1].size // BLOCK))
    scales = (State(name, Param(param.name, (*param.dims[:-1], blocks), "zeros"), "float32") for name in SCALES)
    return (_counter(param), *_like(param, *MOMENTS, dtype="uint8"), *scales)


def is_orthogonalised(param: Param) -> bool:
    """True for what Muon updates: matrices of layers, those of experts included; AdamW updates all other parameters."""
    return is_hidden(param) and sum(dim.name != "experts" for dim in param.dims) == 2


def _muon(optim: Optim, param: Param) -> tuple[State, ...]:
    if not is_orthogonalised(param):
        return _adamw(optim, param)
    return _like(param, MOMENTUM)


def _adafactor(optim: Optim, param: Param) -> tuple[State, ...]:
    if not param.decayed:
        return (_counter(param), *_like(param, SQUARES, dtype="float32"))
    *outer, rows, columns = param.dims
    mean = Dim("mean", 1)
    # ZeRO shards the first dim, experts aside: of a matrix its rows.
    rows_sharded = len(outer) == (param.dims[0].name == "experts")
    return (
        _counter(param),
        State(ROW_MEANS, Param(param.name, (*outer, rows, mean), "zeros"), "float32"),
        State(COLUMN_MEANS, Param(param.name, (*outer, mean, columns), "zeros"), "float32", sharded=not rows_sharded),
    )


def _sgd(optim: Optim, param: Param) -> tuple[State, ...]:
    return _like(param, MOMENTUM) if optim.betas[0] else ()


STATES: Mapping[str, Callable[[Optim, Param], tuple[State, ...]]] = {
    "adamw": _adamw,
    "adamw-8bit": _adamw_8bit,
    "muon": _muon,
    "adafactor": _adafactor,
    "sgd": _sgd,
}
KINDS = tuple(STATES)


@lru_cache(maxsize=65536)
def states_of(optim: Optim, param: Param) -> tuple[State, ...]:
    """Return the states that `optim` keeps for `param`. Raise ConfigError when the optimizer is unknown."""
    if optim.kind not in STATES:
        raise ConfigError(f"optim.kind='{optim.kind}' is unknown; use {', '.join(KINDS)}")
    return STATES[optim.kind](optim, param)


def state_bytes(optim: Optim, param: Param, itemsize: int) -> int:
    """Return the bytes of all states of `param`, unsharded, whose own elements have `itemsize` bytes."""
    return sum((ITEMSIZE[one.dtype] if one.dtype else itemsize) * prod(one.shape) for one in states_of(optim, param))


def bytes_per_element(optim: Optim, itemsize: int) -> float:
    """Return the bytes of states for an element of a large matrix of a layer (4096 x 4096), its own of `itemsize`."""
    matrix = Param(f"{LAYERS}0.matrix", (Dim("rows", 4096), Dim("columns", 4096)))
    return state_bytes(optim, matrix, itemsize) / matrix.numel
