"""The states that each optimizer has for a parameter: names, dims and dtypes.

The planner's bytes, the tensors of a checkpoint and the trainer's memory follow from this table. A state's dim has the
name of the parameter's dim if tp and ep shard both alike, and another name if it is unsharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from kumi.errors import ConfigError
from kumi.spec.ledger import LAYERS, is_layer_param
from kumi.spec.op import Dim, Param
from kumi.spec.optim import Optim
from kumi.spec.precision import ITEMSIZE

# AdamW's moments, and the step counter: a float32 scalar on each rank.
MOMENTS, COUNTER = ("exp_avg", "exp_avg_sq"), "step"
# The momentum of Muon and of SGD.
MOMENTUM = "momentum_buffer"
# Adafactor's mean squares of the rows and of the columns of a matrix, and of the elements of other tensors.
ROW_MEANS, COLUMN_MEANS, MEAN_SQUARES = "row_var", "col_var", "variance"
# 8-bit AdamW's scales of the blocks of each moment.
SCALES = tuple(f"{moment}_scale" for moment in MOMENTS)

# Number of consecutive elements of a row with one float32 scale, and minimum number of elements of a tensor with
# quantized moments, both as in bitsandbytes.
QUANTIZED_BLOCK, _MIN_QUANTIZED = 256, 4096


@dataclass(frozen=True)
class OptimizerState:
    """A state of an optimizer for a parameter.

    - `tensor`: the parameter's name and the state's dims.
    - `dtype`: empty for the dtype of the parameter.
    - `sharded`: ZeRO shards the state by the same dim as the parameter; else all ranks of the ZeRO group have the
      complete state.
    """

    name: str
    tensor: Param
    dtype: str = ""
    sharded: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape of the state."""
        return self.tensor.shape


def _counter(param: Param) -> OptimizerState:
    return OptimizerState(COUNTER, Param(param.name, (), "zeros"), "float32", sharded=False)


def _same_shape(param: Param, *names: str, dtype: str = "") -> tuple[OptimizerState, ...]:
    """Return a state with the shape of `param` for each of `names`."""
    return tuple(OptimizerState(name, Param(param.name, param.dims, "zeros"), dtype) for name in names)


def _adamw(optim: Optim, param: Param) -> tuple[OptimizerState, ...]:
    return (_counter(param), *_same_shape(param, *MOMENTS))


def has_quantized_moments(param: Param) -> bool:
    """True if 8-bit AdamW quantizes the moments of `param`: a matrix with a large enough global size."""
    return param.decayed and param.numel >= _MIN_QUANTIZED


def _adamw_8bit(optim: Optim, param: Param) -> tuple[OptimizerState, ...]:
    """Return the step, both moments in bytes, and their scales; for vectors and small tensors, the states of AdamW."""
    if not has_quantized_moments(param):
        return _adamw(optim, param)
    blocks = Dim("blocks", -(-param.dims[-1].size // QUANTIZED_BLOCK))
    scales = (
        OptimizerState(name, Param(param.name, (*param.dims[:-1], blocks), "zeros"), "float32") for name in SCALES
    )
    return (_counter(param), *_same_shape(param, *MOMENTS, dtype="uint8"), *scales)


def is_muon_matrix(param: Param) -> bool:
    """True if Muon updates `param`: a matrix of a layer or of its experts. AdamW updates all other parameters."""
    return is_layer_param(param) and sum(dim.name != "experts" for dim in param.dims) == 2


def _muon(optim: Optim, param: Param) -> tuple[OptimizerState, ...]:
    if not is_muon_matrix(param):
        return _adamw(optim, param)
    return _same_shape(param, MOMENTUM)


def _adafactor(optim: Optim, param: Param) -> tuple[OptimizerState, ...]:
    """Return the step and the mean squares: of rows and of columns for a matrix, else of elements."""
    if not param.decayed:
        return (_counter(param), *_same_shape(param, MEAN_SQUARES, dtype="float32"))
    *outer, rows, columns = param.dims
    mean = Dim("mean", 1)
    # ZeRO shards the first dim after "experts", which is the rows unless the tensor has other dims before them.
    rows_sharded = len(outer) == (param.dims[0].name == "experts")
    return (
        _counter(param),
        OptimizerState(ROW_MEANS, Param(param.name, (*outer, rows, mean), "zeros"), "float32"),
        OptimizerState(
            COLUMN_MEANS, Param(param.name, (*outer, mean, columns), "zeros"), "float32", sharded=not rows_sharded
        ),
    )


def _sgd(optim: Optim, param: Param) -> tuple[OptimizerState, ...]:
    return _same_shape(param, MOMENTUM) if optim.betas[0] else ()


# Optimizer -> a function of its options and a parameter, which returns the states for the parameter.
STATES: Mapping[str, Callable[[Optim, Param], tuple[OptimizerState, ...]]] = {
    "adamw": _adamw,
    "adamw-8bit": _adamw_8bit,
    "muon": _muon,
    "adafactor": _adafactor,
    "sgd": _sgd,
}
OPTIM_KINDS = tuple(STATES)


@lru_cache(maxsize=65536)
def states_of(optim: Optim, param: Param) -> tuple[OptimizerState, ...]:
    """Return the states that `optim` keeps for `param`. Raise ConfigError when the optimizer is unknown."""
    if optim.kind not in STATES:
        raise ConfigError(f"optim.kind='{optim.kind}' is unknown; use one of {', '.join(OPTIM_KINDS)}")
    return STATES[optim.kind](optim, param)


def optimizer_state_bytes(optim: Optim, param: Param, itemsize: int) -> int:
    """Return the bytes of all states of the unsharded `param`, which has elements of `itemsize` bytes."""
    states = states_of(optim, param)
    return sum((ITEMSIZE[state.dtype] if state.dtype else itemsize) * prod(state.shape) for state in states)


def bytes_per_element(optim: Optim, itemsize: int) -> float:
    """Return the bytes of states per element of a large matrix of a layer, 4096 x 4096 elements of `itemsize` bytes."""
    matrix = Param(f"{LAYERS}0.matrix", (Dim("rows", 4096), Dim("columns", 4096)))
    return optimizer_state_bytes(optim, matrix, itemsize) / matrix.numel
