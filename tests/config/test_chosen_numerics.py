"""The choice of a CPU's numerics: by the run file, the run folder, the variable and the cache, in this order."""

import json
import os
from dataclasses import replace

import pytest

from kumi.config import dump, load, load_plan, open_run, resolve
from kumi.config.cluster_source import cluster_spec
from kumi.config.job_sections import ClusterSection
from kumi.config.numerics import (
    MeasuredNumerics,
    Processor,
    cache_numerics,
    choose_numerics,
    numerics_from_environment,
    read_cached_numerics,
    this_gpu,
    this_processor,
)
from kumi.config.stored_config import EARLIER_VALUES
from kumi.errors import ConfigError
from kumi.spec.numerics import REFERENCE, Numerics
from small_llama import SMALL_LLAMA

MEASURED = MeasuredNumerics(Numerics("fp32", "default", ("fp32-long",)), {"products": {"default": 1.0, "onednn": 2.0}})
RUN = {
    "name": "small",
    "model": {"init": "random", "config": SMALL_LLAMA | {"num_hidden_layers": 1}},
    "batch": {"seq_len": 32, "tokens_per_step": 256},
    "data": {"tokenizer": {"vocab_size": 300}, "sources": [{"path": "documents.jsonl"}]},
    "train": {"steps": 6, "out": "run"},
}


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KUMI_NUMERICS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("kumi.config.local_machine._gpus", list)
    monkeypatch.chdir(tmp_path)


def test_a_measurement_holds_for_its_cpu_torch_and_threads(tmp_path):
    processor = Processor("a CPU", "flags", "2.13.0", 2)
    assert read_cached_numerics(processor) is None
    cache_numerics(processor, MEASURED)
    assert read_cached_numerics(processor) == MEASURED
    others = (
        Processor("another", "flags", "2.13.0", 2),
        Processor("a CPU", "fewer", "2.13.0", 2),
        Processor("a CPU", "flags", "2.12.0", 2),
        Processor("a CPU", "flags", "2.13.0", 1),
    )
    assert [read_cached_numerics(other) for other in others] == [None] * 4
    assert [file.name for file in (tmp_path / "kumi/numerics").iterdir()] == [processor.file]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"numerics": "reference"}',
        '{"numerics": "no", "seconds": {}}',
        '{"numerics": "reference", "seconds": {"a": 1}}',
        "\0" * 99,
        '{"numerics": "reference", "seconds": {}}',
        '{"numerics": "reference", "seconds": {"a": {}}}',
        '{"numerics": "reference", "seconds": {"a": {"b": 0}}}',
    ],
)
def test_a_damaged_cache_is_none(tmp_path, text):
    processor = this_processor(1)
    cache_numerics(processor, MEASURED)
    (tmp_path / "kumi/numerics" / processor.file).write_text(text)
    assert read_cached_numerics(processor) is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "kumi").write_text("a file")
    cache_numerics(this_processor(1), MEASURED)
    assert read_cached_numerics(this_processor(1)) is None


def test_ranks_share_the_threads(monkeypatch):
    assert [this_processor(ranks).threads for ranks in (1, 10**6)] == [len(os.sched_getaffinity(0)), 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert this_processor(2).threads == 5


def test_what_is_said_first_counts(monkeypatch):
    """The run file before the run folder, the variable and the cache."""
    assert open_run(load(RUN)).numerics is None
    cache_numerics(this_processor(1), MEASURED)
    assert open_run(load(RUN)).numerics == MEASURED.numerics
    monkeypatch.setenv("KUMI_NUMERICS", "products=default flash=none")
    assert open_run(load(RUN)).numerics == numerics_from_environment() == Numerics(products="default")
    os.mkdir("run")
    with open("run/config.toml", "w") as file:
        file.write(dump(load(RUN, {"precision.numerics": "products=onednn flash=fp32-short"})))
    assert open_run(load(RUN)).numerics == Numerics(flash=("fp32-short",))
    assert open_run(load(RUN, {"precision.numerics": "reference"})).numerics == REFERENCE


def test_it_is_spelled_out_in_the_configuration_that_a_run_stores():
    assert resolve(load(RUN)).config.precision.numerics == "auto"
    cache_numerics(this_processor(1), MEASURED)
    assert resolve(load(RUN)).config.precision.numerics == str(MEASURED.numerics)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_the_precision_is_the_faster_one_unless_the_run_file_says(kind):
    cache_numerics(this_processor(1), MeasuredNumerics(Numerics(kind), MEASURED.seconds))
    assert resolve(load(RUN)).precision.compute == {"fp32": "float32", "bf16": "bfloat16"}[kind]
    for asked in ("fp32", "bf16"):
        compute = resolve(load(RUN, {"precision.kind": asked})).precision.compute
        assert compute == {"fp32": "float32", "bf16": "bfloat16"}[asked]


def test_what_was_measured_here_says_nothing_of_the_precision_of_other_machines(tmp_path):
    file = tmp_path / "cpu.toml"
    file.write_text(
        'devices_per_node = 1\n[device]\nname = "another"\nkind = "cpu"\nmemory = "8 GiB"\n'
        'dtypes = ["float32", "bfloat16"]\n'
    )
    cache_numerics(this_processor(1), MEASURED)
    run = resolve(load(RUN, {"cluster.source": str(file)}))
    assert (run.precision.compute, run.numerics) == ("bfloat16", Numerics("", "default", ("fp32-long",)))


def test_gpus_of_a_described_cluster_are_measured_where_they_are_here(monkeypatch):
    """Most runs name a preset. Elsewhere, such as on a login node, only a measurement in the cache counts."""
    config = load_plan(RUN, {"cluster.source": "h100-sxm"})
    cluster = cluster_spec(config.cluster)
    assert choose_numerics(config, cluster) == REFERENCE
    monkeypatch.setattr("kumi.config.numerics.has_gpu", lambda name: name == "NVIDIA H100 80GB HBM3")
    assert choose_numerics(config, cluster) is None
    assert (
        choose_numerics(load_plan(RUN, {"cluster.source": "h200-sxm"}), cluster_spec(ClusterSection(source="h200-sxm")))
        == REFERENCE
    )
    kernels = Numerics(kernels=(("loss", "triton"),))
    cache_numerics(this_gpu(cluster.device.name), MeasuredNumerics(kernels, {"loss": {"triton": 1.0, "torch": 2.0}}))
    assert choose_numerics(config, cluster) == kernels
    monkeypatch.setattr("kumi.config.numerics.has_gpu", lambda name: False)
    assert choose_numerics(config, cluster) == kernels
    assert choose_numerics(load_plan(RUN, {"cluster.source": "h100-sxm", "precision.kernels": "torch"}), cluster) == (
        REFERENCE
    )


def test_a_variable_that_says_something_else_is_refused(monkeypatch):
    monkeypatch.setenv("KUMI_NUMERICS", "fast")
    with pytest.raises(
        ConfigError, match=r"^KUMI_NUMERICS: 'fast' must be one of kind=, products=, flash= and kernels="
    ):
        choose_numerics(load(RUN), cluster_spec(ClusterSection(source="auto")))
    with pytest.raises(ConfigError, match=r"^precision.numerics: 'fast' must be one of"):
        load(RUN, {"precision.numerics": "fast"})
    for unset in ("auto", ""):
        monkeypatch.setenv("KUMI_NUMERICS", unset)
        assert numerics_from_environment() is None


def test_the_cache_can_be_read_by_people(tmp_path):
    cache_numerics(this_processor(1), MEASURED)
    written = json.loads((tmp_path / "kumi/numerics" / this_processor(1).file).read_text())
    assert written["numerics"] == "kind=fp32 products=default flash=fp32-long"
    assert set(written) == {"cpu", "torch", "threads", "numerics", "seconds"}


LOSS = (("loss", "triton"),)
ON_GPU = MeasuredNumerics(Numerics(kernels=LOSS), {"loss": {"torch": 2.0, "triton": 1.0}})


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU; return its name."""
    cluster = cluster_spec(ClusterSection(source="h100-sxm"))
    here = replace(cluster, nodes=1, devices_per_node=1, device=replace(cluster.device, name="a GPU"))
    monkeypatch.setattr("kumi.config.jobs.cluster_spec", lambda section: here)
    return "a GPU"


def test_kernels_of_a_gpu_are_measured_unless_something_chooses_them(gpu, monkeypatch):
    """The run file before the run folder, the variable and the cache."""
    assert open_run(load(RUN)).numerics is None
    assert open_run(load(RUN)).config.precision.kernels == "auto"
    cache_numerics(this_gpu(gpu), ON_GPU)
    assert open_run(load(RUN)).numerics == ON_GPU.numerics
    assert open_run(load(RUN)).config.precision.kernels == "loss:triton"
    monkeypatch.setenv("KUMI_NUMERICS", "kernels=scan:triton")
    assert open_run(load(RUN)).numerics.kernels == (("scan", "triton"),)
    os.mkdir("run")
    with open("run/config.toml", "w") as file:
        file.write(dump(load(RUN, {"precision.kernels": "experts:triton"})))
    assert open_run(load(RUN)).numerics.kernels == (("experts", "triton"),)
    assert open_run(load(RUN, {"precision.kernels": "torch"})).numerics == REFERENCE
    assert open_run(load(RUN)).config.precision.numerics == "auto"  # a key of CPUs


def test_settings_that_do_not_pay_are_left_out(gpu):
    """Of what a run asks for, and nothing of the rest."""
    asking = {"train.compile": True, "precision.kind": "fp8"}
    cache_numerics(this_gpu(gpu), ON_GPU)
    assert open_run(load(RUN, asking)).numerics is None, "they are still to be compared"
    kernels = (*LOSS, ("compile", "off"), ("float8", "off"), ("async_tp", "off"))
    seconds = ON_GPU.seconds | {key: {"off": 1.0, "on": 2.0} for key in ("compile", "float8", "async_tp")}
    cache_numerics(this_gpu(gpu), MeasuredNumerics(Numerics(kernels=kernels), seconds))
    run = open_run(load(RUN, asking))
    assert run.config.precision.kernels == "loss:triton,compile:off,float8:off"
    assert (run.compiles, run.precision.products, run.precision.compute) == (False, "", "bfloat16")
    assert run.config.train.compile, "the run file's key stays"
    assert open_run(load(RUN)).config.precision.kernels == "loss:triton"
    pinned = open_run(load(RUN, asking | {"precision.kernels": "torch"}))
    assert (pinned.compiles, pinned.precision.products) == (True, "float8")


def test_an_earlier_run_goes_on_with_pytorch(gpu):
    cache_numerics(this_gpu(gpu), ON_GPU)
    os.mkdir("run")
    stored = dump(load(RUN)).replace('kernels = "auto"\n', "")
    assert "kernels" not in stored
    with open("run/config.toml", "w") as file:
        file.write(stored)
    assert EARLIER_VALUES["precision.kernels"] == {"precision.kernels": "torch"}
    assert open_run(load(RUN)).numerics == REFERENCE


def test_kernels_are_not_measured_for_other_clusters():
    """A measurement here says nothing of the GPUs that a file describes."""
    run = resolve(load(RUN, {"cluster.source": "h100-sxm"}))
    assert run.numerics == REFERENCE
    assert run.config.precision.kernels == "torch"


def test_a_measurement_holds_for_a_gpu_and_its_packages(gpu, monkeypatch):
    cache_numerics(this_gpu(gpu), ON_GPU)
    assert read_cached_numerics(this_gpu("another")) is None
    monkeypatch.setattr("kumi.config.numerics.version", lambda package: "1.0")
    assert read_cached_numerics(this_gpu(gpu)) is None


def test_wrong_kernels_are_refused():
    with pytest.raises(ConfigError, match=r"precision.kernels: 'loss:magic' is unknown; write 'torch', or some of"):
        load(RUN, {"precision.kernels": "loss:magic"})
