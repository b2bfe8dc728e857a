"""The layout of a run that has begun: kept while it can run and the run file pins no other, and else chosen anew."""

import json
import re
from dataclasses import replace

import pytest
from tests.config.test_chosen_numerics import RUN

from kumi import hub
from kumi.config import dump, load, open_run, resolve
from kumi.config.run_plan import parse_plan, read_plan
from kumi.config.stored_config import StoredRun
from kumi.errors import FitError, LayoutError, RefusedError
from kumi.plan.memory.process import MODULE_BYTES
from kumi.plan.search import select

DEVICE = """devices_per_node = {ranks}
[device]
name = "a CPU"
kind = "cpu"
memory = "{memory}"
reserved = "{reserved}"
dtypes = ["float32"]
memory_bandwidth = "8 GB/s"
peak_flops = {{ float32 = "100 GFLOP/s" }}
"""
LINK = '[[links]]\nname = "loopback"\nspan = 2\nbandwidth = "1 GB/s"\nlatency = "50 us"\nefficiency = 0.8\n'


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KUMI_NUMERICS", "reference")
    monkeypatch.chdir(tmp_path)


def machines(ranks=1, memory="1 GiB", reserved="0 B"):
    with open("cpu.toml", "w") as file:
        file.write(DEVICE.format(ranks=ranks, memory=memory, reserved=reserved) + (LINK if ranks > 1 else ""))


def config(**overrides):
    machines = {"cluster.source": "cpu.toml", "cluster.network": "25gbe", "plan.margin": 0.02}
    return load(RUN, machines | {key.replace("__", "."): value for key, value in overrides.items()})


def began(**overrides):
    """Return what the folder of a run stores after a start on these machines."""
    run = resolve(config(**overrides))
    return StoredRun(run.config.model_dump(mode="json", exclude_none=True), run.plan)


# With so much reserved, 1 GiB is too little for all eight sequences at once.
FULL = f"{1001.9 - MODULE_BYTES / 2**20} MiB"


def test_a_layout_stays_where_a_search_would_choose_another():
    """A calibration says that more memory is free, or less than the run takes, which trains all the same."""
    machines(reserved=FULL)
    small = began()
    machines()
    large = began()
    assert (small.plan.layout.microbatch, large.plan.layout.microbatch) == (4, 8)
    for begun in (small, large):
        for reserved in ("0 B", FULL):
            machines(reserved=reserved)
            run = resolve(config(), stored=begun)
            assert (run.layout, run.change, run.pinned) == (begun.plan.layout, "", {})
            assert run.estimate == select.estimate_for_training(run.job, run.layout)


def test_nothing_is_searched_for_a_layout_that_stays(monkeypatch):
    machines()
    begun = began()
    monkeypatch.setattr("kumi.config.decide_layout.select_layout", None)
    assert resolve(config(), stored=begun).layout == begun.plan.layout


def test_a_pin_changes_it_and_the_change_is_said():
    machines()
    begun = began()
    run = resolve(config(layout__microbatch=4), stored=begun)
    assert run.layout == replace(begun.plan.layout, microbatch=4)
    assert run.change == (
        "microbatch: 8 -> 4, because layout.microbatch=4 is pinned now; losses are equal up to rounding only"
    )
    assert run.pinned == {"microbatch": 4}
    # A pin to the stored value changes nothing, and neither does removing a pin.
    assert resolve(config(layout__microbatch=8), stored=begun).change == ""
    run = resolve(config(), stored=StoredRun(None, run.plan))
    assert (run.layout.microbatch, run.change) == (4, "")


def test_on_machines_where_it_cannot_run_another_is_chosen_and_the_change_is_said():
    machines()
    begun = began()
    machines(ranks=2)
    run = resolve(config(), stored=begun)
    assert run.layout.world_size == 2
    assert run.change.startswith("dp_replicate: 1 -> 2, microbatch: 8 -> 4, because the layout needs 1 devices")
    assert "; losses are equal up to rounding only" in run.change
    machines(memory=f"{(MODULE_BYTES / 2**20 + 1.1) / 0.98} MiB")
    run = resolve(config(), stored=begun)
    assert run.layout.microbatch < 8
    assert re.search(r"because the layout needs 7\d\.\d MiB per device, and a CPU has 7\d\.\d MiB usable;", run.change)
    with pytest.raises(FitError):
        resolve(config(layout__microbatch=8), stored=begun)


def test_the_run_folder_s_own_configuration_pins_only_what_the_run_file_did():
    machines()
    begun = began(layout__recompute="full")
    (own, machine) = load(begun.config), {"cluster.source": "cpu.toml"}
    run = resolve(own, stored=begun)
    assert (run.layout, run.change, run.pinned) == (begun.plan.layout, "", {"recompute": "full"})
    machines(ranks=2)
    run = resolve(load(begun.config, machine), stored=begun)
    assert (run.layout.world_size, run.layout.recompute, run.layout.microbatch) == (2, "full", 4)
    with pytest.raises(LayoutError, match="needs 1 devices"):
        resolve(own)  # as another run's file all of it counts
    machines()
    run = resolve(load(begun.config, {"layout.recompute": "none"}), stored=begun)
    assert run.change.startswith("recompute: 'full' -> 'none', because layout.recompute=none is pinned now;")


def test_plan_json_holds_the_plan(tmp_path):
    machines()
    run = resolve(config(layout__zero=0))
    plan = run.plan
    assert parse_plan(json.loads(plan.text()), "plan.json") == plan
    assert (plan.layout, plan.pinned) == (run.layout, {"zero": 0})
    assert plan.estimate["step_seconds"] == run.step_seconds == pytest.approx(sum(plan.estimate["time"].values()))
    assert plan.estimate["memory_bytes"] == run.memory.total
    assert plan.made_for.device == "a CPU"
    assert read_plan(tmp_path) is None
    for text in ("", "[]", "{}", plan.text().replace('"microbatch": 8', '"microbatch": 0'), plan.text()[:-9]):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(RefusedError, match=r"plan\.json"):
            read_plan(tmp_path)


def test_a_folder_is_opened_with_its_plan_and_one_without_is_searched(tmp_path):
    machines(reserved=FULL)
    run = resolve(config())
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text(dump(config()))
    machines()
    assert open_run(config()).layout.microbatch == 8
    (tmp_path / "run/plan.json").write_text(run.plan.text())
    assert open_run(config()).layout.microbatch == 4
    (tmp_path / "run/config.toml").unlink()  # a start that was killed before the run began
    assert open_run(config()).layout.microbatch == 8


def test_to_resolve_asks_no_hub(tmp_path, monkeypatch):
    machines()
    monkeypatch.setattr(hub, "fetch", None)
    monkeypatch.setattr(hub, "fetch_config", None)
    (tmp_path / "config.json").write_text(json.dumps(RUN["model"]["config"]))
    given = RUN | {"model": {"source": "org/model", "init": "random"}}
    snapshots = {"model.source": hub.Snapshot(tmp_path, "org/model", None, "0" * 40)}
    run = resolve(load(given, {"cluster.source": "cpu.toml"}), snapshots)
    assert (run.source, run.model.hidden_size) == (tmp_path, 32)


def test_the_digest_is_of_what_all_ranks_must_share():
    machines()
    run = resolve(config())
    assert run.digest == resolve(config(train__out="elsewhere", log__every=3)).digest
    for change in ({"layout__microbatch": 4}, {"optim__lr": 1e-5}, {"train__seed": 1}, {"batch__tokens_per_step": 512}):
        assert resolve(config(**change)).digest != run.digest
