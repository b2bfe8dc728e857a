"""Every layout without stages and context parallelism has the replies, the rewards and the losses of one process."""

import shutil
from functools import cache

import pytest
from tests.rollout.conftest import MOE, history, rollout_file, train, write_data
from tests.train.conftest import losses, metrics

from kumi.config import load, plan_input, resolve
from kumi.errors import LayoutError

# Two updates a batch, a reference by a second model, and truncated replies left out; with a critic as well.
OBJECTIVES = {
    "grpo": {"objective": {"kind": "grpo", "kl": "k3", "beta": 0.1}},
    "ppo": {"objective": {"kind": "ppo"}, "critic": {"lr": 3e-3, "value_clip": 0.02}},
}
SETTINGS = {
    "rollout": {"prompts": 8, "group_size": 4, "max_new_tokens": 20, "updates": 2, "mask_truncated": True},
    "train": {"steps": 4, "out": "run", "doctor": False, "seed": 1},
    "layout": {},
}
MODELS = {"dense": None, "moe": MOE}
LAYOUTS = {
    "ddp": {"dp_replicate": 2},
    "zero-1": {"dp_shard": 2, "zero": 1},
    "zero-2": {"dp_shard": 2, "zero": 2},
    "zero-3": {"dp_shard": 2, "zero": 3},
    "tp": {"tp": 2},
    "tp-plain": {"tp": 2, "sequence_parallel": False},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    "tp-zero-3": {"tp": 2, "dp_shard": 2, "zero": 3},
}
OFTEN = (("grpo", "zero-3"), ("grpo", "tp"), ("ppo", "zero-3"))


def ranks_of(layout):
    count = 1
    for name in ("dp_replicate", "dp_shard", "tp"):
        count *= layout.get(name, 1)
    return count


def rolled_out(folder, model, layout, kind="grpo"):
    changes = {**SETTINGS, **OBJECTIVES[kind], "layout": layout, "cluster": {"devices_per_node": ranks_of(layout)}}
    # A balancing loss is one of each microbatch, so it depends on the layout.
    model_section = {} if model is None else {"model__config": model, "model__balance": "none"}
    assert train(folder, **changes, **model_section) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A function from an objective, and the words of a model, to the folder of its run in one process."""

    @cache
    def run(kind, model="dense"):
        folder = tmp_path_factory.mktemp("alone")
        write_data(folder)
        return rolled_out(folder, MODELS[model], {}, kind)

    return run


def check_equal(out, reference):
    assert history(out) == history(reference)
    # The loss of a part of a batch with whitened advantages is near 0, as a sum of terms near 1.
    assert losses(out) == pytest.approx(losses(reference), rel=1e-9, abs=1e-11)
    names = ("train/grad_norm", "train/kl", "train/ratio", "train/mismatch/k3", "rollout/reward", "rollout/entropy")
    names += tuple(f"critic/{name}" for name in ("value", "return", "loss", "grad_norm", "clipped"))
    for own, other in zip(metrics(out), metrics(reference), strict=True):
        values = {name: other[name] for name in names if name in other}
        assert {name: own[name] for name in values} == pytest.approx(values, rel=1e-8, abs=1e-12)
        assert own["tokens"] == other["tokens"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[] if (kind, name) in OFTEN else pytest.mark.exhaustive)
        for kind in OBJECTIVES
        for name in LAYOUTS
    ],
)
def test_a_layout_has_the_results_of_one_process(alone, tmp_path, kind, name):
    reference = alone(kind)
    shutil.copytree(reference.parent, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run"))
    check_equal(rolled_out(tmp_path, None, LAYOUTS[name], kind), reference)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_the_reference_run_has_what_layouts_should_agree_on(alone, kind):
    entries = metrics(alone(kind))
    assert entries[-1]["train/kl"] > 0
    assert abs(entries[1]["train/ratio"] - 1) > 1e-9
    finishes = {finish for entry in history(alone(kind)) for finish in entry["finish"]}
    assert finishes == {"stop", "length"}
    if kind == "ppo":
        assert any(0 < entry["critic/clipped"] < 1 for entry in entries)


@pytest.mark.parametrize("kind", ["grpo", pytest.param("ppo", marks=pytest.mark.exhaustive)])
def test_expert_parallelism_has_the_results_of_one_process(alone, tmp_path, kind):
    reference = alone(kind, "moe")
    shutil.copytree(reference.parent, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run"))
    check_equal(rolled_out(tmp_path, MOE, {"dp_shard": 2, "zero": 3, "ep": 2}, kind), reference)


@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_stages_and_context_parallelism_are_refused(tmp_path, axis):
    write_data(tmp_path)
    path = rollout_file(tmp_path, cluster={"devices_per_node": 2}, layout={axis: 2})
    with pytest.raises(LayoutError, match=rf"\[rollout\] needs layout\.{axis} = 1, but it is 2"):
        resolve(load(path))


def test_the_planner_chooses_neither_of_them(tmp_path):
    write_data(tmp_path)
    path = rollout_file(tmp_path, cluster={"source": "h100-sxm", "nodes": 2, "devices_per_node": 8})
    pinned = plan_input(load(path)).pinned
    assert pinned == {"pp": 1, "cp": 1}
