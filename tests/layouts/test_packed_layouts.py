"""Frozen matrices in four bits are the same in every layout, to the bit: training equals one process, a rank holds the
planned bytes, and reads only the rows that its blocks need."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from test_lora_layouts import LORAS, Trace, _read, equal, train

from kumi.nn.nf4 import packed_matrices
from kumi.parallel import build, init_adamw, unwrap
from kumi.parallel.lora import draw_reader
from kumi.parallel.stage_modules import local_shard
from kumi.plan.memory.device_memory import rank_memory
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec, Device
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import decayed_names
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, Rope
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from kumi.spec.sharding import state_bytes
from steps import SPECS, forward_backward, mesh_of

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")

# In "wide" two tp ranks shard every matrix between blocks of 64 elements. In the others the last block of a matrix is
# incomplete, and rows begin within blocks.
_LAYER = LayerSpec(Attention(4, 2, 32, Rope(10000.0), qkv_bias=True), MLP(128))
SPECS["wide"] = ModelSpec("qwen2", 250, 64, (_LAYER,) * 2, 1e-5, 128)


def train_packed(layout: Layout, family: str, microbatches: int, kind: str) -> Trace:
    return train(layout, family, "packed", microbatches, kind)


@cache
def alone(run, family: str, kind: str) -> Trace:
    return run(1, train_packed, Layout(), family, 1, kind)[0]


ZERO3 = Layout(dp_shard=2, zero=3)
CASES = [(replace(ZERO3, pp=2, recompute="full"), "qwen"), (Layout(tp=2, recompute="selective"), "wide")]
LATER = [
    (ZERO3, "qwen"),
    (replace(ZERO3, zero=1), "qwen"),
    (replace(ZERO3, zero=2), "llama"),
    (Layout(cp=2, zero=3), "llama"),
    (Layout(cp=2, zero=1), "qwen"),
    (Layout(pp=2, cp=2, zero=3), "llama"),
    (Layout(pp=2, cp=2, zero=1), "qwen"),
    (replace(ZERO3, dp_replicate=2), "llama"),
    (replace(ZERO3, offload="states"), "llama"),
    (replace(ZERO3, pp=2, schedule="zb-h1"), "llama"),
    (replace(ZERO3, ep=2), "moe"),
    (replace(ZERO3, tp=2), "wide"),
    (Layout(tp=2, sequence_parallel=False), "wide"),
    (Layout(tp=2, recompute="full"), "wide"),
    (Layout(tp=2, pp=2, schedule="zb-h1"), "wide"),
    (Layout(dp_replicate=2), "qwen"),
    (Layout(pp=2, recompute="full"), "llama"),
]


def _name(case) -> str:
    layout, family = case
    changed = [f"{key}{value}" for key, value in vars(layout).items() if value != getattr(Layout(), key)]
    return "-".join([*changed, family])


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in LATER)], ids=_name
)
def test_training_equals_one_process(ranks, case):
    layout, family = case
    expected = alone(ranks, family, "fp64")
    for trace in ranks(layout.world_size, train_packed, layout, family, 3, "fp64"):
        equal(trace, expected)
        # A packed matrix has no elements to save.
        assert not [part.name for part in trace.params if part.name.endswith("q_proj.weight")]


def test_float32_loses_a_millionth(ranks):
    expected = alone(ranks, "llama", "fp32")
    assert expected.losses != pytest.approx(ranks(1, train, Layout(), "llama", "lora", 1, "fp32")[0].losses, rel=1e-4)
    for trace in ranks(2, train_packed, ZERO3, "llama", 1, "fp32"):
        assert trace.losses == pytest.approx(expected.losses, rel=1e-6)


def _spec(family: str) -> ModelSpec:
    return replace(SPECS[family], lora=LORAS["packed"])


@dataclass(frozen=True)
class Filled:
    """A rank's blocks of a packed matrix, codes and scale in a row, and the rows that it read for them."""

    blocks: list[list[int]]
    columns: int
    rows_read: int


def _filled(layout: Layout, family: str) -> dict[str, Filled]:
    spec, mesh, rows_read = _spec(family), mesh_of(layout), Counter()
    drawn = draw_reader(spec, 7)

    def base(name, start, shape):
        rows_read[name] += shape[0]
        return drawn(name, start, shape)

    # Initial magnitudes would be read from the matrices, too.
    adapters = lambda name, start, shape: _read(spec, name, start, shape)  # noqa: E731
    model = build(spec, mesh, PRECISIONS["bf16"], weights=base, adapters=adapters)
    filled = {}
    for name, packed in packed_matrices(unwrap(model)).items():
        codes, scales = (local_shard(tensor.detach()) for tensor in (packed.codes, packed.scales))
        blocks = torch.cat([codes, scales], dim=1).tolist()
        filled[name] = Filled(blocks, packed.shape[1], rows_read[f"model/{name}.weight"])
    return filled


@pytest.mark.parametrize("family", ["qwen", "wide"])
def test_ranks_read_and_pack_their_blocks_of_the_complete_matrix(ranks, family):
    (whole,) = ranks(1, _filled, Layout(), family)
    shards = ranks(2, _filled, ZERO3, family)
    assert whole
    for name, matrix in whole.items():
        parts = [shard[name] for shard in shards]
        assert [block for part in parts for block in part.blocks] == matrix.blocks, name
        # Its rows, and the parts of rows at which its blocks begin and end.
        assert all(part.rows_read < len(part.blocks) * 64 / part.columns + 2 for part in parts), name


def _state_bytes(layout: Layout) -> tuple[int, int, int]:
    spec, mesh = _spec("wide"), mesh_of(layout)
    model = build(spec, mesh, PRECISIONS["bf16"], weights=0)
    optimizer = init_adamw(unwrap(model).named_parameters(), decayed_names(spec), Optim())
    forward_backward(model, mesh, 0, 3)
    sizes = (
        sum(local_shard(tensor).nbytes for tensor in tensors)
        for tensors in (
            model.parameters(),
            [value.grad for value in model.parameters() if value.grad is not None],
            [value for state in optimizer.state.values() for value in state.values()],
        )
    )
    params, grads, states = sizes
    return params, grads, states


@pytest.mark.parametrize(
    "layout",
    [
        ZERO3,
        pytest.param(replace(ZERO3, zero=1), marks=pytest.mark.exhaustive),
        pytest.param(Layout(tp=2), marks=pytest.mark.exhaustive),
        pytest.param(Layout(pp=2, cp=2, zero=3), marks=pytest.mark.exhaustive),
    ],
    ids=["zero3", "zero1", "tp", "pp-cp-zero3"],
)
def test_a_rank_holds_the_planned_bytes(ranks, layout):
    spec = _spec("wide")
    cpu = Device("CPU", "cpu", 1 << 34, ("float32", "bfloat16"), (("bfloat16", 1e12),))
    job = Job(spec, ClusterSpec("test", cpu, layout.world_size), BatchSpec(16, 16 * 4), PRECISIONS["bf16"], Optim())
    measured = ranks(layout.world_size, _state_bytes, layout)
    for rank, sizes in enumerate(measured):
        exact = state_bytes(spec, layout, rank, PRECISIONS["bf16"], Optim())
        assert sizes == (exact.params, exact.grads, exact.optimizer)
    for pp_rank in range(layout.pp):
        here = [sizes for rank, sizes in enumerate(measured) if layout.coords(rank)["pp"] == pp_rank]
        planned = rank_memory(job, layout, pp_rank)
        assert planned.params == pytest.approx(max(sizes[0] for sizes in here), rel=0.02)
        assert planned.optimizer == pytest.approx(max(sizes[2] for sizes in here), rel=0.02)
