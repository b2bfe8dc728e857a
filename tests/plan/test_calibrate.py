"""Constants are found again in steps that the estimator itself made with other constants; what no step tells stays."""

from dataclasses import replace

import numpy as np
import pytest

from kumi.errors import ConfigError
from kumi.plan.calibration.calibrate import MeasuredRun, calibrate, knobs
from kumi.plan.calibration.fit_constants import identifiable, least_squares, slopes
from kumi.plan.estimate import estimate
from kumi.spec import families
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec, Device, Link
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS

MODEL = families.from_hf(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    }
)
DEVICE = Device(
    "Testor",
    "cpu",
    2**34,
    peak=(("float32", 1e11),),
    memory_bandwidth=2e10,
    stream=0.5,
    matmul=(("float32", 0.8),),
    attention=(0.3, 0.3),
    launch=3e-6,
    reserved=2**28,
)
CLUSTER = ClusterSpec("test", DEVICE, 4, links=(Link("gloo", 4, 2e8, 1e-4, 1.0),))
TRUE = replace(
    CLUSTER,
    device=replace(DEVICE, stream=0.25, matmul=(("float32", 0.6),)),
    links=(replace(CLUSTER.links[0], bandwidth=5e7),),
)


def run(layout, seq_len=256, sequences=16, truth=TRUE, extra_memory=0):
    """A run on machines that are `truth`, described as CLUSTER, whose steps take what the planner says of `truth`."""
    job = Job(MODEL, CLUSTER, BatchSpec(seq_len, seq_len * sequences), PRECISIONS["fp32"], Optim())
    made = estimate(replace(job, cluster=truth), layout)
    memory = max(stage.total - stage.reserved for stage in made.memory) + extra_memory
    return MeasuredRun(f"run-{layout.zero}-{sequences}", job, layout, made.step_seconds, 40, memory)


ALONE = Layout(microbatch=4)
RUNS = [
    run(ALONE),
    run(Layout(), sequences=1),
    run(Layout(dp_replicate=4), sequences=4),
    run(Layout(dp_shard=4, zero=3)),
]


def test_constants_are_found_again_in_enough_runs():
    found = calibrate(RUNS)
    assert found.moved["device.matmul.float32"] == (0.8, pytest.approx(0.6, rel=1e-3))
    assert found.moved["device.stream"] == (0.5, pytest.approx(0.25, rel=1e-3))
    assert found.moved["gloo: bandwidth"] == (2e8, pytest.approx(5e7, rel=1e-3))
    for compared in found.runs:
        assert compared.after == pytest.approx(compared.measured, rel=1e-3)
        assert abs(compared.before / compared.measured - 1) > 0.1


def test_one_run_moves_one_constant_and_says_what_it_left():
    found = calibrate([RUNS[0]])
    ((name, (before, after)),) = found.moved.items()
    assert name == "device.matmul.float32"  # most of this step is matrix products
    assert after < before
    assert found.runs[0].after == pytest.approx(found.runs[0].measured, rel=1e-3)
    assert set(found.kept) >= {"device.stream", "gloo: bandwidth", "gloo: latency"}
    assert "too little" in found.kept["device.stream"]
    assert found.source == "calibrated on run-0-16: 40 steps"


def test_runs_on_one_rank_say_nothing_of_links():
    found = calibrate(RUNS[:2])
    assert not [name for name in found.moved if name.startswith("gloo")]
    assert found.moved["device.stream"][1] == pytest.approx(0.25, rel=0.02)


def test_a_constant_stays_within_its_bounds():
    impossible = replace(RUNS[0], seconds=RUNS[0].seconds / 100)
    found = calibrate([impossible])
    assert found.moved["device.matmul.float32"][1] == pytest.approx(1.0)
    assert found.runs[0].after > impossible.seconds


def test_measured_steps_that_agree_move_nothing():
    found = calibrate([run(ALONE, truth=CLUSTER)])
    assert all(after == pytest.approx(before, rel=1e-6) for before, after in found.moved.values())


def test_memory_beyond_the_estimate_is_reserved():
    assert "device.reserved" in calibrate(RUNS).kept
    found = calibrate([RUNS[0], run(Layout(), sequences=1, extra_memory=2**27)])
    assert found.moved["device.reserved"] == (2**28, 2**28 + 2**27)


def test_no_run_is_refused():
    with pytest.raises(ConfigError, match="at least one finished run"):
        calibrate([])


def test_figures_that_are_not_known_are_no_knobs():
    bare = replace(CLUSTER, device=replace(DEVICE, launch=0.0), links=())
    names = [knob.name for knob in knobs([replace(RUNS[0], job=replace(RUNS[0].job, cluster=bare))])]
    assert names == ["device.matmul.float32", "device.stream"]


def test_least_squares_finds_a_minimum_and_keeps_to_bounds():
    x = np.linspace(0.1, 2, 20)

    def residuals(parameters):
        return np.log((parameters[0] * x + parameters[1]) / (3e-4 * x + 5e-4))

    assert least_squares(residuals, [1e-2, 1.0], [1e-8, 1e-8], [1.0, 1e9]) == pytest.approx([3e-4, 5e-4], rel=1e-3)

    def plane(parameters):
        return np.log(np.array([parameters[0] * parameters[1] ** 2 / 12, parameters[1] / 2]))

    assert least_squares(plane, [1.0, 1.0], [1e-3] * 2, [1e3] * 2) == pytest.approx([3.0, 2.0])
    assert least_squares(plane, [1.0, 1.0], [1e-3] * 2, [2.0, 1e3])[0] == pytest.approx(2.0)


def test_slopes_are_those_of_logarithms():
    found = slopes(lambda p: np.array([np.log(p[0] ** 3 * p[1])]), [2.0, 5.0])
    assert found == pytest.approx(np.array([[3.0, 1.0]]), rel=1e-3)


def test_what_moves_alike_is_not_told_apart():
    alike = np.array([[1.0, 2.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 0.3]])
    assert list(identifiable(alike, 0.05)) == [1, 2]
    assert list(identifiable(alike, 0.5)) == [1]
    assert list(identifiable(np.zeros((2, 2)), 0.05)) == []
