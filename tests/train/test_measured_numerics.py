"""A run measures once how its CPU computes, stores it, and goes on with it."""

import json
import os
import signal
import time
import tomllib
from pathlib import Path

import pytest
from tests.train.conftest import back_to, losses, run_file

from kumi.cli import main
from kumi.config import load, resolve
from kumi.config.numerics import chosen_of, read_cached_numerics, this_gpu, this_processor
from kumi.spec.numerics import REFERENCE, Numerics
from kumi.train import measure_numerics, start

FOUND = Numerics("fp32", "default", ("fp32-short",))


@pytest.fixture
def folder(small, tmp_path, monkeypatch):
    """A folder with data and a run file without a precision, before any measurement."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KUMI_NUMERICS")
    small.copy(tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    back_to("run", 0)
    monkeypatch.setattr(measure_numerics, "_may_fork", lambda: True)  # so that the measurement can be replaced
    run_file(
        tmp_path / "work",
        precision={},
        train__out="new",
        train__steps=2,
        optim__warmup_steps=0,
        export={"enabled": False},
    )
    return tmp_path / "work"


def measures(monkeypatch, numerics=FOUND):
    """Have `kumi.nn.fastest_numerics` find this without measuring. It runs in another process, so files count the
    calls."""
    calls = Path("calls").absolute()
    calls.touch()

    def measure(kind):
        with calls.open("a") as file:
            file.write(f"{kind}\n")
        return numerics, {"products": {"default": 1.0, "onednn": 2.0}}

    monkeypatch.setattr("kumi.nn.fastest_numerics.measure", measure)
    return lambda: len(calls.read_text().splitlines())


def stored(out):
    with open(f"{out}/config.toml", "rb") as file:
        return tomllib.load(file)["precision"]["numerics"]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_it_is_measured_once_and_stored(folder, monkeypatch, capfd, ranks):
    count = measures(monkeypatch)
    assert main(["describe", "run.toml", f"cluster.devices_per_node={ranks}"]) == 0
    assert "numerics   measured at the first start on this machine" in capfd.readouterr().out
    assert count() == 0, "only a run measures"
    for out in ("new", "another"):
        assert main(["train", "run.toml", f"cluster.devices_per_node={ranks}", f"train.out={out}"]) == 0
        assert stored(out) == str(FOUND)
        assert f"numerics   {FOUND} (measured: products: default 2x onednn)" in capfd.readouterr().out
    assert count() == 1
    assert read_cached_numerics(this_processor(ranks)).numerics == FOUND


def test_a_resume_goes_on_as_the_run_began_and_says_where_it_does_not(folder, monkeypatch, capsys):
    # The dtype of the reference, whatever the CPU.
    monkeypatch.setattr("kumi.config.local_machine.cpu_dtypes", lambda: ("float32",))
    measures(monkeypatch)
    assert main(["train", "run.toml"]) == 0
    measures(monkeypatch, REFERENCE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "another machine's"))
    longer = ["train", "run.toml", "--allow-change", "train.steps"]
    capsys.readouterr()
    assert main([*longer, "train.steps=3"]) == 0
    assert stored("new") == str(FOUND)
    assert "rounding" not in capsys.readouterr().out
    assert main([*longer, "train.steps=4", "precision.numerics=reference"]) == 0
    out = capsys.readouterr().out
    assert f"in float32 with '{FOUND}', and continues on" in out
    assert "in float32 with 'reference'; losses are equal up to rounding only" in out
    assert stored("new") == "reference"
    monkeypatch.setattr("kumi.train.train_state.cpu_name", lambda: "another CPU")
    assert main([*longer, "train.steps=5"]) == 0
    assert "and continues on another CPU in float32 with 'reference'; losses" in capsys.readouterr().out
    assert len(losses("new")) == 5


def die(kind):
    os.kill(os.getpid(), signal.SIGKILL)


def hang(kind):
    time.sleep(60)


@pytest.mark.parametrize("how", [die, hang])
def test_a_measurement_that_dies_or_hangs_leaves_the_reference(folder, monkeypatch, capsys, how):
    monkeypatch.setattr("kumi.nn.fastest_numerics.measure", how)
    monkeypatch.setattr(measure_numerics, "_TIMEOUT_SECONDS", 1.0)
    assert measure_numerics.with_measured_numerics(resolve(load("run.toml"))).numerics == REFERENCE
    assert "could not be measured; using the reference" in capsys.readouterr().out
    assert read_cached_numerics(this_processor(1)) is None


def test_where_torch_is_loaded_a_new_process_measures(folder, monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(measure_numerics, "_TIMEOUT_SECONDS", 600.0)
    assert not measure_numerics._may_fork()
    measured = measure_numerics.measure_here(1)
    # On a machine as busy as one that runs tests it may not have come to its end.
    assert read_cached_numerics(this_processor(1)) == (measured if measured.complete else None)
    assert {"products", "formats", "attention fp32-short"} <= measured.seconds.keys()
    monkeypatch.setattr(measure_numerics.sys, "executable", "/bin/false")
    assert measure_numerics.measure_here(1).numerics == REFERENCE
    assert "could not be measured" in capsys.readouterr().out


def test_what_was_measured_in_part_is_not_kept_for_other_runs(folder, monkeypatch, capsys):
    measured = (FOUND, {"products": {"default": 1.0}, "formats": {}})
    monkeypatch.setattr("kumi.nn.fastest_numerics.measure", lambda kind: measured)
    assert measure_numerics.with_measured_numerics(resolve(load("run.toml"))).numerics == FOUND
    assert "the machine is busy or slow: numerics not measured in time stay at the reference" in capsys.readouterr().out
    assert read_cached_numerics(this_processor(1)) is None


class Meeting:
    """A rendezvous where rank 0 has sent `word`."""

    def __init__(self, word):
        self.receive = lambda: word


def test_the_other_ranks_of_a_launcher_compute_as_rank_0_says(folder, monkeypatch):
    """Whatever the cache on their machine has."""
    launched = []
    monkeypatch.setattr(start, "_launch", lambda run, *_: launched.append(run) or 0)
    monkeypatch.setattr(start, "open_data", lambda run: None)
    for own in (None, FOUND):
        run = measure_numerics.with_numerics(resolve(load("run.toml")), own) if own else resolve(load("run.toml"))
        numerics = Numerics("bf16", "onednn", ("bf16-long",))
        rank_0 = measure_numerics.with_numerics(run, numerics)
        word = {"finished": False, "folder_mark": "", "numerics": str(numerics), "plan": rank_0.plan.plain()}
        assert start._join(run, Meeting(json.dumps(word))) == 0
        assert (launched[-1].numerics, launched[-1].precision.compute) == (numerics, "bfloat16")
    assert start._join(run, Meeting(json.dumps(word | {"finished": True}))) == 0
    assert len(launched) == 2


RECORD = {
    "numerics": "kernels=loss:triton",
    "seconds": {"loss": {"torch": 2.0, "triton": 1.0}, "scan": {"torch": 1.0, "triton": 1.5}},
    "notes": ["scan:triton takes 1.50 times as long as PyTorch's operations, and is not used"],
    "took": 9.0,
}


def test_the_kernels_of_a_gpu_are_measured_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    commands = []
    monkeypatch.setattr(measure_numerics, "_run_measurement", lambda command, _: commands.append(command) or RECORD)
    measured = measure_numerics.measure_gpu("a GPU")
    assert measured.numerics == Numerics(kernels=(("loss", "triton"),))
    assert commands[0][1:] == ["-m", "kumi.nn.fastest_kernels", "cuda"]
    assert capsys.readouterr().out == f"kernels    {RECORD['notes'][0]}\n"
    assert read_cached_numerics(this_gpu("a GPU")) == measured


def test_settings_are_compared_when_a_run_first_asks_for_them(monkeypatch, tmp_path, capsys):
    """A setting that does not pay is off; one whose process crashes is, too; one that the run refuses stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    records = {
        "cuda": RECORD,
        "compile": RECORD | {"numerics": "reference", "seconds": {"compile": {"off": 2.0, "on": 1.0}}, "notes": []},
        "float8": {"numerics": "reference", "seconds": {}, "notes": [], "took": 0.0},
        "async_tp": None,
    }
    asked = []
    monkeypatch.setattr(
        measure_numerics, "_run_measurement", lambda command, _: asked.append(command[-1]) or records[command[-1]]
    )
    measured = measure_numerics.measure_gpu("a GPU", ("compile", "float8", "async_tp"))
    assert asked == ["cuda", "compile", "float8", "async_tp"]
    assert measured.numerics.kernels == (("loss", "triton"), ("async_tp", "off"))
    assert "async_tp crashed or hung when it was compared; comm.async_tp is not used" in capsys.readouterr().out
    assert measure_numerics.measure_gpu("a GPU", ("compile", "async_tp")) == measured
    assert asked[4:] == []
    assert chosen_of(measured, ()).kernels == (("loss", "triton"),)
    assert chosen_of(measured, ("async_tp",)) == measured.numerics
    assert chosen_of(measured, ("float8",)) is None


def test_nothing_is_compared_in_exclusive_compute_mode(monkeypatch, tmp_path, capsys):
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho Exclusive_Process\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(smi.parent), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure_numerics, "_run_measurement", lambda *_: pytest.fail("a process was started"))
    assert measure_numerics.measure_gpu("a GPU", ("compile",)).numerics == REFERENCE
    assert "not compared, because the GPU is in exclusive compute mode" in capsys.readouterr().out
    assert read_cached_numerics(this_gpu("a GPU")) is None


def test_a_gpu_whose_measurement_dies_computes_by_pytorch(monkeypatch, tmp_path, capsys):
    """The process may crash: the run starts all the same, and the next start measures again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure_numerics.sys, "executable", "false")
    assert measure_numerics.measure_gpu("a GPU").numerics == REFERENCE
    assert "could not be compared; using PyTorch's operations" in capsys.readouterr().out
    assert read_cached_numerics(this_gpu("a GPU")) is None
