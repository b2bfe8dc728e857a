"""A finished run's folder and a cluster file become a cluster file that explains the run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from measured import CPU, measurements, transfers

from kumi.bench.cluster_toml import node_toml
from kumi.bench.describe_machine import node_of
from kumi.bench.refit import MIN_STEPS, WARM_UP, read_run, recalibrate, render_calibration
from kumi.cli import main
from kumi.config import dump, load, open_run, resolve
from kumi.config.cluster_source import cluster_spec
from kumi.config.job_sections import ClusterSection
from kumi.config.presets import read_node
from kumi.errors import ConfigError, RefusedError
from kumi.plan.estimate import estimate
from kumi.plan.uncertainty.of_estimate import estimate_uncertainty
from kumi.report.run_description import make_console
from kumi.spec.job import Job

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"


def cluster_file(folder, ranks=2):
    """A cluster file of `ranks` CPU devices."""
    file = folder / f"cpu-{ranks}.toml"
    file.write_text(node_toml(node_of(measurements(transfers=transfers() if ranks > 1 else ()), CPU, ranks)))
    return str(file)


def run_folder(folder, *, seconds=0.5, steps=WARM_UP + MIN_STEPS, ranks=2, peak=2**20):
    """A quickstart run after `steps` steps; the first ones and every fourth took ten times as long."""
    folder.mkdir()
    # "auto" would be another precision on CPUs that multiply bfloat16 slowly.
    overrides = [f"cluster.devices_per_node={ranks}", "precision.kind=bf16", f"train.out={folder}"]
    config = load(QUICKSTART, overrides)
    (folder / "config.toml").write_text(dump(config))
    lines = [{"step": 0, "eval/loss": 3.0}]
    for step in range(1, steps + 1):
        slow = step <= WARM_UP or step % 4 == 0
        lines.append({"step": step, "perf/step_s": seconds * (10 if slow else 1), "mem/peak_bytes": peak + step})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_new_file_explains_the_run(tmp_path):
    before, out = cluster_file(tmp_path), tmp_path / "calibrated.toml"
    folder = run_folder(tmp_path / "run", seconds=0.6)
    calibration = recalibrate([folder], before, out)
    ((name, _),) = calibration.moved.items()
    run = resolve(load(folder / "config.toml"))
    assert name == f"device.matmul.{run.precision.compute}"
    cluster = cluster_spec(ClusterSection(source=str(out), devices_per_node=2))
    made = estimate(Job(run.model, cluster, run.batch, run.precision, run.optim), run.layout)
    assert made.step_seconds == pytest.approx(0.6, rel=2e-3)  # the file has four digits
    text = out.read_text()
    assert "calibrated on quickstart: 10 steps" in text
    assert text.startswith(f"# {before}, calibrated on")
    make_console().print(render_calibration(calibration))


def test_the_rest_of_the_file_stays(tmp_path):
    before, out = cluster_file(tmp_path), tmp_path / "calibrated.toml"
    calibration = recalibrate([run_folder(tmp_path / "run", seconds=0.6, peak=2**40)], before, out)
    old, new = (cluster_spec(ClusterSection(source=str(file))) for file in (before, out))
    assert new.links == old.links
    assert (new.device.peak, new.device.attention, new.device.stream) == (
        old.device.peak,
        old.device.attention,
        old.device.stream,
    )
    assert new.device.reserved == round(calibration.moved["device.reserved"][1]) > old.device.reserved


def test_from_the_command_line(tmp_path, capsys):
    folders = [str(run_folder(tmp_path / name, seconds=seconds)) for name, seconds in (("a", 0.5), ("b", 0.6))]
    plan = ["plan", str(QUICKSTART), f"cluster.source={cluster_file(tmp_path)}"]
    words = [*plan, *(word for folder in folders for word in ("--calibrate", folder))]
    assert main([*words, "--out", str(tmp_path / "new.toml"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [run["measured"] for run in printed["runs"]] == [0.5, 0.6]
    assert read_node(str(tmp_path / "new.toml")).devices_per_node == 2
    assert main([*words, "--out", str(tmp_path / "new.toml")]) == 2
    assert "the file exists" in capsys.readouterr().err
    assert main(words) == 0
    assert f"wrote {folders[0]}/calibrated.toml" in capsys.readouterr().out


def test_without_a_run_file_the_cluster_of_the_run_is_refitted(tmp_path, capsys):
    """The quickstart's is this machine."""
    folder = run_folder(tmp_path / "run", seconds=0.6, peak=2**31)
    assert main(["plan", "--calibrate", str(folder)]) == 0
    capsys.readouterr()
    again = resolve(load(folder / "config.toml", [f"cluster.source={folder / 'calibrated.toml'}"]))
    assert again.cluster.measured.runs == 1
    assert again.estimate.peak_memory > 2**30, "the excess is reserved"
    assert estimate(again.job, resolve(load(folder / "config.toml")).layout).step_seconds == pytest.approx(0.6, rel=0.2)


def test_a_plan_on_calibrated_machines_is_surer(tmp_path):
    """Its margin and its intervals are those of machines whose figures were refitted to as many runs."""
    folders = [run_folder(tmp_path / name, seconds=seconds, peak=2**29) for name, seconds in (("a", 0.5), ("b", 0.5))]
    recalibrate(folders, cluster_file(tmp_path), tmp_path / "new.toml")
    before, after = (
        resolve(load(QUICKSTART, [f"cluster.source={file}", "cluster.devices_per_node=2", f"train.out={tmp_path}/n"]))
        for file in (cluster_file(tmp_path), tmp_path / "new.toml")
    )
    wide, narrow = (estimate_uncertainty(run.job, run.estimate) for run in (before, after))
    assert (wide.machine_runs, narrow.machine_runs) == (0, 2)
    assert "no published run is on" in wide.extrapolated
    assert "no published run is on" not in narrow.extrapolated
    for name in ("time80", "time90", "memory80", "memory90"):
        old, new = getattr(wide, name), getattr(narrow, name)
        assert new.high / new.low < old.high / old.low, name
    assert narrow.margin <= wide.margin


def test_a_run_is_refitted_with_its_own_layout(tmp_path):
    """The search would choose dp_replicate=2, and the CPU of the run is not the one that refits."""
    folder = run_folder(tmp_path / "run", seconds=0.8)
    chosen = open_run(load(folder / "config.toml"))
    assert chosen.layout.words.startswith("dp_replicate=2 microbatch=")
    own = open_run(load(folder / "config.toml", ["layout.zero=3", "layout.recompute=full"]))
    assert own.layout.dp_shard == 2
    made_for = own.plan.made_for.model_copy(update={"device": "another CPU"})
    (folder / "plan.json").write_text(replace(own.plan, pinned={}, made_for=made_for).text())
    with open(folder / "metrics.jsonl", "a") as file:
        for layout, seconds in ((chosen.layout, 1e-3), (own.layout, 0.8)):
            line = {"step": 99, "layout": layout.words, "perf/step_s": seconds, "mem/peak_bytes": 1}
            file.write(json.dumps(line) + "\n")
    run = read_run(folder, cluster_file(tmp_path))
    assert (run.layout, run.seconds, run.steps) == (own.layout, 0.8, MIN_STEPS + 1)
    assert run.job.precision == own.precision
    calibrated = recalibrate([folder], cluster_file(tmp_path), tmp_path / "calibrated.toml")
    cluster = cluster_spec(ClusterSection(source=str(tmp_path / "calibrated.toml"), devices_per_node=2))
    assert estimate(replace(run.job, cluster=cluster), own.layout).step_seconds == pytest.approx(0.8, rel=0.01)
    assert calibrated.runs[0].steps == MIN_STEPS + 1


def test_a_run_is_its_median_step_after_the_warm_up(tmp_path):
    run = read_run(run_folder(tmp_path / "run", seconds=0.25), cluster_file(tmp_path))
    assert (run.name, run.seconds, run.steps) == ("quickstart", 0.25, MIN_STEPS)
    assert run.peak_memory == 2**20 + WARM_UP + MIN_STEPS
    assert run.layout.dp == 2


@pytest.mark.parametrize(
    ("change", "ranks", "words"),
    [
        ({"steps": WARM_UP + MIN_STEPS - 1}, 2, "9 measured steps after the first 5"),
        (
            {"ranks": 4},
            2,
            "ran with 4 ranks, but .*describes 2 ranks that share the CPU; measure with kumi bench --ranks 4",
        ),
        ({}, 1, "ran with 2 ranks, but .*describes 1 rank"),
    ],
)
def test_runs_that_say_nothing_of_the_cluster(change, ranks, words, tmp_path):
    folder = run_folder(tmp_path / "run", **change)
    with pytest.raises(ConfigError, match=words):
        recalibrate([folder], cluster_file(tmp_path, ranks), tmp_path / "new.toml")
    assert not (tmp_path / "new.toml").exists()


def test_runs_on_different_devices_are_refused_by_name(tmp_path):
    folders = [run_folder(tmp_path / name) for name in "abc"]
    for folder, device in zip(folders, ("Old", "New", "Old"), strict=True):
        own = open_run(load(folder / "config.toml"))
        made_for = own.plan.made_for.model_copy(update={"device": device})
        (folder / "plan.json").write_text(replace(own.plan, pinned={}, made_for=made_for).text())
    with pytest.raises(ConfigError) as refused:
        recalibrate(folders, cluster_file(tmp_path), tmp_path / "new.toml")
    assert f"2 kinds of devices (Old: {folders[0]}, {folders[2]}; New: {folders[1]})" in str(refused.value)
    recalibrate(folders[::2], cluster_file(tmp_path), tmp_path / "new.toml")


def test_a_run_beyond_the_bounds_is_told_and_widens_the_intervals(tmp_path, capsys):
    """No constant moves more than fivefold, and this step took far longer: intervals cover both."""
    folder, new = run_folder(tmp_path / "run", seconds=60.0), tmp_path / "new.toml"
    calibration = recalibrate([folder], cluster_file(tmp_path), new)
    assert calibration.bounded == tuple(name for name in calibration.moved if name != "device.reserved")
    assert calibration.time_ratio > 2
    make_console().print(render_calibration(calibration))
    assert "stopped at a bound: device.matmul.bfloat16, and the runs still take" in capsys.readouterr().out
    settings = [f"cluster.source={new}", "cluster.devices_per_node=2", f"train.out={tmp_path}/n"]
    run = resolve(load(QUICKSTART, settings))
    errors = estimate_uncertainty(run.job, run.estimate)
    assert errors.machine_error == pytest.approx(calibration.time_ratio - 1, rel=1e-3)
    low, high = (bound / run.estimate.step_seconds for bound in (errors.time80.low, errors.time80.high))
    assert low < 1 < calibration.time_ratio < high
    assert main(["plan", str(QUICKSTART), *settings]) == 0
    assert "longer than their refitted figures explain" in " ".join(capsys.readouterr().out.split())


def test_other_refusals(tmp_path):
    folder, cluster = run_folder(tmp_path / "run"), cluster_file(tmp_path)
    with pytest.raises(ConfigError, match="not a run folder"):
        recalibrate([tmp_path], cluster, tmp_path / "new.toml")
    with pytest.raises(ConfigError, match="ran on a cpu device"):
        recalibrate([folder], "h100-sxm", tmp_path / "new.toml")
    with pytest.raises(RefusedError, match="is not overwritten"):
        recalibrate([folder], cluster, Path(cluster))
    written = (folder / "config.toml").read_text()
    for old, new in (('kind = "lm"', 'kind = "grpo"'), ("rewards = []", ""), ("every = 50", "every = 0")):
        assert old in written
        written = written.replace(old, new)
    rewards = '[[rewards]]\nkind = "function"\nfile = "reward.py:correct"\n'
    (folder / "config.toml").write_text(f"{written}\n[rollout]\nmax_new_tokens = 8\n{rewards}")
    with pytest.raises(ConfigError, match=r"is a run with \[rollout\]"):
        recalibrate([folder], cluster, tmp_path / "new.toml")
