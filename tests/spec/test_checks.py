import pytest

from kumi.spec.batch import BatchSpec
from kumi.spec.checks import problems
from kumi.spec.cluster import ClusterSpec, Device
from kumi.spec.layout import Layout
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, Rope

LAYER = LayerSpec(Attention(4, 2, 16, Rope(10000.0)), MLP(128))
MODEL = ModelSpec("llama", 256, 64, (LAYER, LAYER), 1e-5, 128)
BATCH = BatchSpec(64, 64 * 24)


def found(layout, batch=BATCH, devices=None):
    cluster = ClusterSpec("test", Device("cpu", "cpu", 2**34), devices or layout.world_size)
    return problems(MODEL, layout, cluster, batch)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp_replicate=4, microbatch=2),
        Layout(dp_shard=4, zero=3),
        Layout(dp_replicate=2, dp_shard=2, zero=1),
    ],
)
def test_legal_layouts_have_no_problems(layout):
    assert found(layout) == []


@pytest.mark.parametrize(
    ("layout", "batch", "devices", "sentence"),
    [
        (
            Layout(dp_replicate=5),
            BATCH,
            None,
            "dp=5 does not divide the 24 sequences of a step; use 1, 2, 3, 4, 6, 8, 12 or 24",
        ),
        (
            Layout(microbatch=5),
            BATCH,
            None,
            "microbatch=5 does not divide the 24 sequences that each rank has in a step",
        ),
        (Layout(), BatchSpec(64, 100), None, "seq_len=64 does not divide tokens_per_step=100; use 128"),
        (Layout(), BatchSpec(256, 512), None, "seq_len=256 is longer than max_position_embeddings=128"),
        (Layout(dp_replicate=2), BATCH, 4, "the layout needs 2 devices"),
        (Layout(zero=4), BATCH, None, "zero=4 is not a ZeRO stage"),
        (Layout(dp_replicate=2, zero=2), BATCH, None, "set dp_shard = 2 and dp_replicate = 1"),
        (Layout(dp_shard=2), BATCH, None, "zero=0 divides nothing, but dp_shard=2"),
        (Layout(recompute="some"), BATCH, None, "recompute='some' is unknown; use none, selective, full"),
        (Layout(microbatch=0), BATCH, None, "microbatch=0 is not a degree"),
    ],
)
def test_each_problem_has_its_sentence(layout, batch, devices, sentence):
    assert any(sentence in problem for problem in found(layout, batch, devices)), found(layout, batch, devices)
