"""A dry run is the real program: to the byte, message for message; and the planner is near it."""

from __future__ import annotations

import contextlib
import gc
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from grids import sampled
from kumi.cli import main
from kumi.dryrun import dry_run, select_ranks
from kumi.dryrun.compare import compare_rank, model_flops
from kumi.dryrun.program import dry_step, microbatches_to_run, run_step, track_head, track_states
from kumi.dryrun.track import Tracker
from kumi.errors import LayoutError
from kumi.parallel import init_adamw, unwrap
from kumi.parallel.build import assemble, with_ddp
from kumi.parallel.stage_modules import local_shard
from kumi.plan.memory.device_memory import rank_training_memory
from kumi.spec import families
from kumi.spec.cluster import ClusterSpec, Device
from kumi.spec.layout import Layout
from kumi.spec.ledger import decayed_names
from kumi.spec.model import MLP, Attention, LayerSpec
from kumi.spec.optim import Optim
from kumi.spec.optim_states import OPTIM_KINDS
from kumi.spec.rollout import RolloutSpec
from kumi.spec.sharding import state_bytes
from planned import job_of
from steps import LENGTH, SEQUENCES, SPECS, mesh_of, spec_of

CPU = Device("CPU", "cpu", 1 << 34, ("float32", "bfloat16"), (("bfloat16", 1e12),))
LAYERS = 2
MODELS = Path(__file__).parents[2] / "examples" / "models"


def _job(family: str, layers: int | None = None):
    model = spec_of(family)
    model = replace(model, layers=model.layers[:layers])
    return job_of(model, seq_len=LENGTH, sequences=SEQUENCES, device=CPU)


@contextlib.contextmanager
def _nothing_collected():
    """Turn off garbage collection: the time at which Python frees cycles depends on earlier tests."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_products_that_add_in_place_are_counted():
    """Without recomputation a step computes the model's FLOPs, and the scores again in attention's backward."""
    job, layout = _job("llama"), Layout(tp=2, microbatch=6)
    assert dry_step(job, layout, 0).flops >= model_flops(job, layout, 0)


@_nothing_collected()
def _really(layout: Layout, family: str):
    """Bytes at the peak by kind, and the messages, of a real step on the rank that calls."""
    job, mesh = _job(family, LAYERS), mesh_of(layout)
    laid, tracker = assemble(job.model, mesh, job.precision).to_empty(device=mesh.device), Tracker()
    for parameter in laid.parameters():
        local_shard(parameter.detach()).fill_(0.01)
    with tracker:
        model = with_ddp(laid, mesh, job.precision)
    optimizer = init_adamw(unwrap(model).named_parameters(), decayed_names(job.model), job.optim)
    track_head(model, tracker)
    track_states(model, optimizer, tracker)
    tracker.begin()
    with tracker.resizing():
        run_step(model, mesh, job, optimizer, tracker, job.batch.microbatches(layout))
    sent = Counter()
    for message, count in tracker.messages.items():
        sent[message.kind, message.bytes] += count
    return tracker.peak(), tracker.flops.total(), sent


@pytest.mark.parametrize("layout", [Layout(dp_shard=2, zero=3), Layout(dp_replicate=2), Layout(tp=2)], ids=str)
def test_a_critic_and_a_reference_are_in_memory_with_the_planned_bytes(layout):
    plain = _job("llama", layers=1)
    critic, layout = replace(plain.model, head="score", tie_word_embeddings=False), replace(layout, microbatch=6)
    rollout = RolloutSpec(4, 4, 8, 4, 1, 1, 8.0, 8, 8.0, reference=True)
    job = replace(plain, critic=critic, rollout=rollout)
    # The plan is that of the rank with the largest shard: rank 0 has the row of the score head.
    measured, planned = dry_step(job, layout, 0), rank_training_memory(job, layout)
    states = state_bytes(critic, layout, 0, job.precision, job.optim)
    assert planned.critic == states.total - (0 if layout.zero == 0 < layout.dp - 1 else states.grads)
    assert (measured.memory["critic"], measured.memory["reference"]) == (planned.critic, planned.reference)
    alone = dry_step(plain, layout, 0)
    assert measured.peak == alone.peak + planned.critic + planned.reference
    assert measured.messages == alone.messages


@pytest.mark.parametrize("kind", OPTIM_KINDS)
def test_the_states_of_every_optimizer_are_the_planned_ones(kind):
    job, layout = _job("moe", layers=1), Layout(dp_shard=2, tp=2, zero=3, ep=2, microbatch=6)
    job = replace(job, optim=Optim(kind=kind))
    planned = state_bytes(job.model, layout, 1, job.precision, job.optim)
    assert dry_step(job, layout, 1).memory["optimizer"] == planned.optimizer


LAYOUTS = [
    Layout(dp_replicate=2, microbatch=3),
    Layout(dp_replicate=2, dp_shard=2, zero=3, microbatch=3, recompute="full"),
    Layout(dp_shard=2, zero=1, microbatch=2, recompute="selective"),
    Layout(dp_shard=2, zero=2, tp=2, microbatch=3),
    Layout(tp=2, sequence_parallel=False, microbatch=6),
    Layout(pp=2, microbatch=3),
    Layout(pp=2, dp_shard=2, zero=1, microbatch=2, schedule="zb-h1"),
    Layout(dp_shard=2, zero=3, cp=2, context="ulysses", microbatch=3, recompute="selective"),
]
# Recomputation and the division of optimizer states, which one of them has alone, others have, too.


CASES = [*((layout, "llama") for layout in LAYOUTS), (Layout(tp=2, dp_shard=2, zero=2, microbatch=3), "llama-score")]


@pytest.mark.parametrize(
    ("layout", "family"), sampled(CASES, lambda place: place != 2, lambda *case: " ".join(map(str, case)))
)
def test_a_dry_run_is_the_real_run_to_the_byte(ranks, layout, family):
    really = ranks(layout.world_size, _really, layout, family)
    for rank in {0, layout.world_size - 1}:  # those between are like one of them
        memory, flops, sent = really[rank]
        with _nothing_collected():
            planned = dry_step(_job(family, LAYERS), layout, rank)
        dry = Counter()
        for message, count in planned.messages.items():
            dry[message.kind, message.bytes] += count
        assert (planned.flops, dry) == (flops, sent)
        if layout.pp == 1:
            # To the byte, except buffers that gloo's threads have not freed yet at the peak.
            assert set(planned.memory) == set(memory)
            loose = 0.05 * sum(memory.values())
            assert all(abs(size - memory[kind]) <= loose for kind, size in planned.memory.items())
            assert abs(sum(memory.values()) - sum(planned.memory.values())) <= loose
            continue
        # Sent tensors stay until they are received: in a dry run that takes no time.
        waiting = sum(message[1] * count for message, count in sent.items() if message[0] == "send")
        assert 0 <= sum(memory.values()) - planned.peak <= waiting or layout.schedule == "zb-h1"


@pytest.mark.parametrize(
    ("layout", "many"),  # more microbatches than such a layout carries out
    [
        (Layout(dp_shard=2, zero=3, microbatch=1), 6),
        (Layout(pp=2, microbatch=1), 10),
        pytest.param(Layout(pp=2, stages=2, schedule="interleaved", microbatch=1), 20, marks=pytest.mark.exhaustive),
    ],
    ids=["zero3", "1f1b", "interleaved"],
)
def test_a_step_that_is_not_carried_out_to_its_end_costs_what_all_of_it_does(layout, many, monkeypatch):
    job = job_of(SPECS["llama" if layout.stages == 1 else "deep"], seq_len=LENGTH, sequences=many * layout.dp)
    some = dry_step(job, layout, 0)
    monkeypatch.setattr("kumi.dryrun.program.microbatches_to_run", lambda layout, microbatches: (microbatches, 0))
    every = dry_step(job, layout, 0)
    assert some.microbatches < every.microbatches == many
    assert some.messages == every.messages
    assert some.flops == every.flops
    # Of every microbatch the arguments are there from the start: 28 bytes a token.
    tokens = many * LENGTH
    assert 0 <= every.peak - some.peak <= 28 * tokens


def test_schedules_that_keep_everything_are_carried_out_to_their_end():
    assert microbatches_to_run(Layout(pp=4, schedule="gpipe"), 100) == (100, 0)
    assert microbatches_to_run(Layout(pp=4, stages=2, schedule="interleaved"), 100) == (16, 4)
    assert microbatches_to_run(Layout(), 5) == (5, 0)


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard=64, zero=3, recompute="full"), Layout(dp_shard=8, tp=8, zero=1, recompute="full")],
    ids=["fsdp", "tp"],
)
@pytest.mark.parametrize("head", ["lm", "score"])
def test_the_planner_is_near_an_8b_model_on_64_ranks(layout, head):
    model = families.from_hf(json.loads((MODELS / "llama-3.1-8b" / "config.json").read_text()))
    model = replace(model, layers=model.layers[:6], head=head)
    job = job_of(model, seq_len=8192, sequences=64 // layout.tp)
    compared = compare_rank(job, layout, 0, dry_step(job, layout, 0))
    # Without logits the peak is in the backward pass, where the planner adds up tensors that are never alive together,
    # as it does for a language model with a vocabulary of a thousand.
    least = -0.05 if head == "lm" else -0.2
    assert least < compared["memory"]["difference"] < 0.05
    assert compared["collectives"]
    assert all(row["agrees"] for row in compared["collectives"])
    again = compared["flops"]["measured"] / compared["flops"]["model"]
    assert 1.2 < again < 4 / 3 + 0.1  # every layer goes forward twice, and its scores are made a third time


def test_experts_get_equally_many_tokens():
    model = families.from_hf(json.loads((MODELS / "qwen3-30b-a3b" / "config.json").read_text()))
    model = replace(model, layers=model.layers[:2])
    job, layout = job_of(model, seq_len=512, sequences=8), Layout(dp_shard=8, zero=3, ep=8)
    compared = compare_rank(job, layout, 3, dry_step(job, layout, 3))
    rows = {row["bytes"]: row for row in compared["collectives"] if row["kind"] == "all_to_all"}
    tokens = rows[512 * 8 * 2048 * 2]  # eight experts for each of 512 tokens, 2048 wide, in bfloat16
    assert tokens["agrees"]
    assert tokens["sent"] == 2 * 4  # there and back, and their gradients, in two layers


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2), Layout(cp=2, context="ulysses")], ids=str)
def test_scores_of_every_kind_keep_on_a_gpu_what_plain_ones_keep(layout):
    """Scores without a fused kernel are computed in blocks, which save no scores either."""
    plain = Attention(4, 2, 8, None)
    kinds = (
        plain,
        replace(plain, softcap=2.0, sliding_window=5),
        replace(plain, alibi=True),
        replace(plain, score_scale=0.3),
    )
    steps = []
    for attention in kinds:
        model = replace(SPECS["llama"], layers=(LayerSpec(attention, MLP(32)),))
        steps.append(dry_step(job_of(model, seq_len=64, sequences=2), layout, 0))
    # A kernel also saves the state of its random numbers.
    assert all(0 <= steps[0].peak - other.peak <= 64 for other in steps[1:])
    assert all(other.flops == steps[0].flops for other in steps[1:])


def test_ranks_are_chosen_and_refused():
    from kumi.plan.estimate import estimate

    job, layout = replace(_job("deep"), cluster=ClusterSpec("test", CPU, 4)), Layout(pp=2, dp_shard=2, zero=1)
    estimated = estimate(job, layout)
    assert select_ranks(estimated, "all-stages") == [0, 2]
    assert select_ranks(estimated, "3") == [3]
    assert select_ranks(estimated, None)[0] in (0, 2)
    with pytest.raises(LayoutError, match="--rank first is not a rank; give a number"):
        select_ranks(estimated, "first")
    with pytest.raises(LayoutError, match="rank 4 is not in the layout; give a rank from 0 to 3"):
        dry_run(job, layout, [4])
    with pytest.raises(LayoutError, match=r"dry run: .*tp.?5"):
        dry_run(job, replace(layout, tp=5), [0])


RUN = """
[model]
init = "random"
[model.config]
model_type = "llama"
rms_norm_eps = 1e-5
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
vocab_size = 256
max_position_embeddings = 128
[cluster]
source = "h100-sxm"
nodes = 2
[batch]
seq_len = 64
tokens_per_step = 4096
[layout]
tp = 2
pp = 2
zero = 1
"""


def test_the_verb_prints_tables_and_json(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    assert main(["train", "--dry-run", str(file), "--rank", "all-stages", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [rank["coordinates"]["pp"] for rank in printed["ranks"]] == [0, 1]
    assert printed["ranks_in_all"] == 16
    assert main(["train", "--dry-run", str(file)]) == 0
    output = capsys.readouterr().out
    for words in ("memory at the peak", "dry run", "planner", "it fits", "CPU seconds", "reduce_scatter"):
        assert words in output
    assert main(["train", str(file), "--rank", "1"]) == 2
    assert "--rank has no effect without --dry-run" in capsys.readouterr().err


def test_what_does_not_fit_is_exit_code_4(tmp_path, capsys, monkeypatch):
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    monkeypatch.setattr(
        "kumi.dryrun.dry_run", lambda *_: {"ranks_in_all": 1, "ranks": [{"memory": {"fits": False}}], "cost": {}}
    )
    assert main(["train", "--dry-run", str(file), "--json"]) == 4
