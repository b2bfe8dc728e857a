"""Calibration recovers constants from steps estimated with them; constants without influence keep their values."""

from dataclasses import replace

import numpy as np
import pytest

from kumi.errors import ConfigError
from kumi.plan.calibration.calibrate import MeasuredRun, calibrate, cluster_constants
from kumi.plan.calibration.fit_constants import identifiable_columns, least_squares, log_jacobian
from kumi.plan.estimate import estimate
from kumi.plan.estimates import MemoryEstimate, bytes_as_measured
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
    """Return a run whose job has CLUSTER, and whose step time is the estimate for the cluster `truth`."""
    job = Job(MODEL, CLUSTER, BatchSpec(seq_len, seq_len * sequences), PRECISIONS["fp32"], Optim())
    true = estimate(replace(job, cluster=truth), layout)
    memory = max(bytes_as_measured(stage, CLUSTER.device) for stage in true.memory) + extra_memory
    return MeasuredRun(f"run-{layout.zero}-{sequences}", job, layout, true.step_seconds, 40, memory, DEVICE.name)


ALONE = Layout(microbatch=4)
RUNS = [
    run(ALONE),
    run(Layout(), sequences=1),
    run(Layout(dp_replicate=4), sequences=4),
    run(Layout(dp_shard=4, zero=3)),
]


def test_enough_runs_recover_the_constants():
    result = calibrate(RUNS)
    assert result.moved["device.matmul.float32"] == (0.8, pytest.approx(0.6, rel=1e-3))
    assert result.moved["device.stream"] == (0.5, pytest.approx(0.25, rel=1e-3))
    assert result.moved["gloo: bandwidth"] == (2e8, pytest.approx(5e7, rel=1e-3))
    for compared in result.runs:
        assert compared.after == pytest.approx(compared.measured, rel=1e-3)
        assert abs(compared.before / compared.measured - 1) > 0.1


def test_one_run_moves_one_constant_and_lists_the_others():
    result = calibrate([RUNS[0]])
    ((name, (before, after)),) = result.moved.items()
    assert name == "device.matmul.float32"  # most of this step is matmuls
    assert after < before
    assert result.runs[0].after == pytest.approx(result.runs[0].measured, rel=1e-3)
    assert set(result.kept) >= {"device.stream", "gloo: bandwidth", "gloo: latency"}
    assert "too little" in result.kept["device.stream"]
    assert result.source == "calibrated on run-0-16: 40 steps"


def test_runs_on_one_rank_do_not_move_links():
    result = calibrate(RUNS[:2])
    assert not [name for name in result.moved if name.startswith("gloo")]
    assert result.moved["device.stream"][1] == pytest.approx(0.25, rel=0.02)


def test_a_constant_stays_within_its_bounds():
    impossible = replace(RUNS[0], seconds=RUNS[0].seconds / 100)
    result = calibrate([impossible])
    assert result.moved["device.matmul.float32"][1] == pytest.approx(1.0)
    assert result.runs[0].after > impossible.seconds
    assert result.bounded == ("device.matmul.float32",)
    assert result.time_ratio == pytest.approx(impossible.seconds / result.runs[0].after)
    assert calibrate([RUNS[0]]).bounded == ()


def test_steps_that_agree_with_the_estimate_move_nothing():
    result = calibrate([run(ALONE, truth=CLUSTER)])
    assert all(after == pytest.approx(before, rel=1e-6) for before, after in result.moved.values())


def test_memory_beyond_the_estimate_is_reserved():
    assert "device.reserved" in calibrate(RUNS).kept
    result = calibrate([RUNS[0], run(Layout(), sequences=1, extra_memory=2**27)])
    assert result.moved["device.reserved"] == (2**28, 2**28 + 2**27)


def test_no_run_is_refused():
    with pytest.raises(ConfigError, match="at least one finished run"):
        calibrate([])


def test_unknown_constants_are_not_calibrated():
    bare = replace(CLUSTER, device=replace(DEVICE, launch=0.0), links=())
    names = [
        constant.name for constant in cluster_constants([replace(RUNS[0], job=replace(RUNS[0].job, cluster=bare))])
    ]
    assert names == ["device.matmul.float32", "device.stream"]


def test_least_squares_finds_a_minimum_and_keeps_to_bounds():
    sizes = np.linspace(0.1, 2, 20)

    def residuals(parameters):
        return np.log((parameters[0] * sizes + parameters[1]) / (3e-4 * sizes + 5e-4))

    assert least_squares(residuals, [1e-2, 1.0], [1e-8, 1e-8], [1.0, 1e9]) == pytest.approx([3e-4, 5e-4], rel=1e-3)

    def plane(parameters):
        return np.log(np.array([parameters[0] * parameters[1] ** 2 / 12, parameters[1] / 2]))

    assert least_squares(plane, [1.0, 1.0], [1e-3] * 2, [1e3] * 2) == pytest.approx([3.0, 2.0])
    assert least_squares(plane, [1.0, 1.0], [1e-3] * 2, [2.0, 1e3])[0] == pytest.approx(2.0)


def test_the_jacobian_is_with_respect_to_logarithms():
    result = log_jacobian(lambda values: np.array([np.log(values[0] ** 3 * values[1])]), [2.0, 5.0])
    assert result == pytest.approx(np.array([[3.0, 1.0]]), rel=1e-3)


def test_proportional_columns_are_not_identifiable():
    proportional = np.array([[1.0, 2.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 0.3]])
    assert list(identifiable_columns(proportional, 0.05)) == [1, 2]
    assert list(identifiable_columns(proportional, 0.5)) == [1]
    assert list(identifiable_columns(np.zeros((2, 2)), 0.05)) == []


def test_the_peak_of_a_run_counts_a_cpu_s_process_and_not_a_gpu_s_reserve():
    memory = MemoryEstimate(1, 0, 0, 0, 0, 0, 0, reserved=100)
    cpu = replace(CLUSTER.device, kind="cpu", reserved=60)
    assert bytes_as_measured(memory, cpu) == 41
    assert bytes_as_measured(memory, replace(cpu, kind="cuda")) == 1
