"""The pages on parallelism say what the specs and the planner say: tables, pictures, formulas, rules and keys."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kumi.config.job_sections import LayoutSection
from kumi.parallel.ring_attention import positions_of_rank
from kumi.plan.estimate import estimate
from kumi.plan.layout_batch import batch_layouts
from kumi.plan.memory.activations import model_activations
from kumi.plan.time.traffic import collectives
from kumi.spec.batch import BatchSpec
from kumi.spec.checks import illegal
from kumi.spec.layout import CONTEXT, OFFLOAD, Layout
from kumi.spec.ledger import layer_ops, num_params, ops, params
from kumi.spec.op import Dim, Param
from kumi.spec.process_groups import axis
from kumi.spec.schedule import stage_assignment
from kumi.spec.schedules import SCHEDULES
from kumi.spec.sharding import fsdp_units, is_routed, local_numel, local_shape, stage_bounds, tp_style

ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page for page in sorted((ROOT / "docs" / "parallelism").glob("*.md"))}
IMAGES = ROOT / "docs" / "images" / "parallelism"


def _script(path):
    """The module that the script at `path` is."""
    made = importlib.util.spec_from_file_location(f"docs_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(made)
    sys.modules[made.name] = module
    made.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures():
    return _script(ROOT / "docs" / "parallelism" / "figures.py")


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


# Tables and pictures


def test_tables_are_as_computed(figures):
    computed, used = figures.tables(), []
    for page in PAGES.values():
        text = page.read_text()
        assert text.count("<!-- computed:") == len(figures.BLOCK.findall(text)) == text.count("<!-- end -->"), page
        used += [name for _, name, _ in figures.BLOCK.findall(text)]
        assert figures.refreshed(text, computed) == text, f"run python docs/parallelism/figures.py: {page.name}"
    assert sorted(used) == sorted(computed)


def test_pictures_are_as_drawn():
    drawn = _script(IMAGES / "draw.py").pictures()
    assert {f"{name}.svg" for name in drawn} == {file.name for file in IMAGES.glob("*.svg")}
    old = [name for name, text in drawn.items() if (IMAGES / f"{name}.svg").read_text() != text + "\n"]
    assert old == [], "run python docs/images/parallelism/draw.py"


def test_every_page_has_its_picture_and_is_in_the_index():
    index = PAGES["README"].read_text()
    for name, page in PAGES.items():
        assert re.search(r"^!\[.+\]\(\.\./images/(parallelism|tutorial)/[\w-]+\.svg\)$", page.read_text(), re.M), page
        assert name == "README" or f"({name}.md)" in index


def test_every_key_of_a_layout_is_on_a_page():
    text = "\n".join(page.read_text() for page in PAGES.values())
    named = set(re.findall(r"`layout\.(\w+)`", text))
    assert named == set(LayoutSection.model_fields)
    assert {f"`{name}`" for name in SCHEDULES} <= set(re.findall(r"`[\w-]+`", text))
    assert all(f'`"{name}"`' in text for name in CONTEXT)
    assert all(f'`"{name.removesuffix("-nvme")}"`' in text for name in OFFLOAD if name != "none")


# Formulas. w, g: bytes of an element that is computed with, and of a gradient; T: tokens of a microbatch on a rank.

W, G = 2, 4


def listed(job, layout, kind, *axes, when="", what="", rank=0):
    """Return the bytes of unsharded tensors in a step's messages of a kind along axes."""
    return sum(
        one.bytes * one.count
        for one in collectives(job, layout, rank)
        if one.kind == kind
        and one.axis in axes
        and (not when or one.when == when)
        and (one.what == what if what else one.what not in ("norm", "counts"))
    )


@pytest.mark.parametrize("m", [1, 4])
def test_traffic_of_the_data_axes(figures, m):
    job = figures.llama(tokens=8 * m * 8192)
    total = num_params(job.model)
    sizes = [sum(param.numel for param in unit.params) for unit in fsdp_units(ops(job.model))]
    again = sum(sizes[1:-2])  # all layers but the last; the embedding comes before them, the head after
    replicated = Layout(dp_replicate=8)
    assert listed(job, replicated, "all_reduce", "dp") == G * total
    for zero, gathers, reduces in ((1, total, 1), (2, total, m), (3, m * (total + again), m)):
        layout = Layout(dp_shard=8, zero=zero)
        assert listed(job, layout, "all_gather", "dp_shard") == W * gathers
        assert listed(job, layout, "reduce_scatter", "dp_shard") == G * total * reduces
    hybrid = Layout(dp_replicate=2, dp_shard=4, zero=3)
    assert listed(job, hybrid, "all_reduce", "dp_replicate") == G * total / 4


def test_states_take_16_bytes_a_parameter(figures):
    job = figures.llama()
    for layout, parts in ((Layout(dp_replicate=8), 1), (Layout(dp_shard=8, zero=2), 8), (Layout(cp=8, zero=3), 8)):
        state_bytes = figures.states(estimate(job, layout).memory[0])
        assert state_bytes == pytest.approx(16 * num_params(job.model) / parts, rel=1e-6)


def test_what_is_whole_during_a_step(figures):
    """`zero` 1 and 2 gather all parameters, 1 adds up all gradients where there are several microbatches."""
    once, several = figures.llama(tokens=8 * 8192), figures.llama()
    gathered = {
        (zero, name): estimate(job, Layout(dp_shard=8, zero=zero)).memory[0].gathered
        for zero in (1, 2, 3)
        for name, job in (("once", once), ("several", several))
    }
    total = num_params(once.model)
    assert gathered[1, "several"] - gathered[1, "once"] == G * total
    # Peaks are at other moments, when another unit and its gradient are whole.
    unit = (W + G) / 2 * max(sum(param.numel for param in unit.params) for unit in fsdp_units(ops(once.model)))
    assert gathered[2, "several"] == pytest.approx(gathered[2, "once"], abs=unit)
    assert gathered[2, "once"] == gathered[1, "once"] > W * total
    assert gathered[3, "several"] == pytest.approx(gathered[3, "once"], abs=unit)
    assert gathered[3, "once"] < W * total


@pytest.mark.parametrize("tp", [2, 8])
def test_messages_of_tensor_parallelism(figures, tp):
    job = figures.llama()
    for layout in (Layout(dp_shard=8 // tp, tp=tp, zero=1), Layout(cp=8 // tp, tp=tp, zero=1, microbatch=2)):
        tokens = layout.microbatch * job.batch.seq_len / layout.cp
        messages = [one for one in collectives(job, layout) if one.axis == "tp"]
        special = {one.what: one for one in messages if one.what in ("log-probs", "gradients of replicated parameters")}
        assert {one.bytes for one in messages if one.what not in special} == {W * tokens * job.model.hidden_size}
        (head,) = (one for one in messages if one.what == "head" and one.when == "forward")
        assert listed(job, layout, "all_gather", "tp", what="log-probs") == 2 * tp * G * tokens * head.count
        norms = (2 * job.model.num_hidden_layers + 1) * job.model.hidden_size
        copies = special["gradients of replicated parameters"]
        assert (copies.kind, copies.count, copies.bytes) == ("all_reduce", 1, G * norms * tp / 8)


def test_columns_rows_and_the_rest(figures):
    ops = {op.name.rpartition(".")[2]: tp_style(op) for op in layer_ops(figures.llama().model, 0)}
    text = PAGES["tensor"].read_text()
    for how in ("column", "row"):
        (line,) = re.findall(rf"^\| {how} \| (.+?) \|", text, re.M)
        assert set(re.findall(r"`(\w+)`", line)) == {name for name, found in ops.items() if found == how}


def test_sequence_parallelism_divides_all_activations(figures):
    job = figures.llama()
    on, off, alone = (
        model_activations(job, batch_layouts([layout])).layers[0].none[0]
        for layout in (Layout(tp=8), Layout(tp=8, sequence_parallel=False), Layout())
    )
    assert on == pytest.approx(alone / 8, rel=0.01)
    assert on < off < alone


def test_messages_of_a_pipeline(figures):
    job = figures.llama()
    for tp, stages, name in ((1, 1, "1f1b"), (2, 2, "interleaved")):
        layout = Layout(pp=4, tp=tp, dp_shard=8 // 4 // tp, stages=stages, schedule=name, zero=1)
        m = job.batch.microbatches(layout)
        size = W * job.batch.seq_len * job.model.hidden_size / tp
        inner = sum(one.count for one in collectives(job, layout, 1) if one.axis == "pp")
        assert inner == 2 * stages * m
        assert {one.bytes for one in collectives(job, layout, 1) if one.axis == "pp"} == {size}


@pytest.mark.parametrize(
    ("name", "stages", "bubble"), [("gpipe", 1, 9), ("1f1b", 1, 9), ("interleaved", 2, 4.5), ("zb-h1", 1, 3)]
)
def test_how_long_pipelines_wait(figures, name, stages, bubble):
    """Three others times F + I + W = 3, or that over the stages, or F + I - W = 1."""
    simulated = figures.timeline(name, stages)
    assert simulated.seconds == pytest.approx(3 * figures.MICROBATCHES + bubble)
    if bubble == 9:
        assert figures.waiting(simulated) == pytest.approx(3 / (figures.MICROBATCHES + 3))
        most = [figures.in_flight(name, stages, rank) for rank in range(figures.PP)]
        assert most == [figures.MICROBATCHES if name == "gpipe" else figures.PP - rank for rank in range(figures.PP)]


def test_which_stages_ranks_have():
    assert stage_assignment("interleaved", 4, 2)[1] == (1, 5)
    assert stage_assignment("zb-v", 4, 2)[1] == stage_assignment("dualpipe", 4, 2)[1] == (1, 6)
    sizes = [[last - first for first, last in stage_bounds(Layout(pp=4), layers)] for layers in (9, 10, 11)]
    assert sizes == [[2, 3, 2, 2], [2, 3, 3, 2], [3, 3, 3, 2]]


def test_near_and_far_pieces_are_equally_much_work():
    """Queries meet the keys before them: with one piece each, the last rank has seven times the first one's work."""
    length, cp = 4096, 4
    pairs = torch.arange(1, length + 1)
    dealt = [int(pairs[positions_of_rank(length, cp, index)].sum()) for index in range(cp)]
    assert len(set(dealt)) == 1
    first, *_, last = (int(part.sum()) for part in pairs.chunk(cp))
    assert last / first == pytest.approx(7, rel=0.01)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (8, 1), (4, 2)])
def test_messages_of_context_parallelism(figures, cp, tp, recompute):
    job = figures.llama(seq_len=131072, tokens=2**20)
    layout = Layout(cp=cp, tp=tp, dp_shard=8 // cp // tp, zero=3, recompute=recompute)
    (op,) = (op for op in layer_ops(job.model, 0) if op.kind == "attention")
    tokens, often = 131072 / cp, job.model.num_hidden_layers * job.batch.microbatches(layout)
    keys_values, rounds, again = tokens * op.kv_size / tp, (cp - 1) * often, recompute == "full"
    assert listed(job, layout, "send", "cp", when="forward") == rounds * W * keys_values
    assert listed(job, layout, "send", "cp", when="recompute") == again * rounds * W * keys_values
    assert listed(job, layout, "send", "cp", when="backward") == rounds * (W + 4) * keys_values
    dealt = replace(layout, context="ulysses")
    copies = max(1, cp // (job.model.layers[0].attention.num_key_value_heads // tp))
    heads = tokens * (op.source.size + copies * op.kv_size + op.target.size) / tp
    for when, times in (("forward", 1), ("backward", 1), ("recompute", again)):
        assert listed(job, dealt, "all_to_all", "cp", when=when) == times * often * W * heads


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=64, ep=8, zero=3),
        Layout(dp_shard=32, tp=2, ep=8, zero=3),
        Layout(dp_shard=32, tp=2, ep=4, expert_tp=2, zero=3, recompute="full"),
    ],
)
def test_messages_of_expert_parallelism(figures, layout):
    job = figures.mixtral()
    # Each token goes to two experts, with those of the ranks that have parts of the same experts.
    size = W * job.batch.seq_len * job.model.hidden_size * 2 / layout.tp * layout.expert_tp
    times = 2 * job.model.num_hidden_layers * job.batch.microbatches(layout)
    phases = ["forward", "backward", *(["recompute"] if layout.recompute == "full" else [])]
    for when in phases:
        assert listed(job, layout, "all_to_all", "ep", when=when) == times * size
        told = listed(job, layout, "all_to_all", "ep", when=when, what="counts")
        assert told == (when != "backward") * times / 2 * 8 * 8  # of each of eight experts how many, in eight bytes
        parts = listed(job, layout, "all_gather", "expert_tp", when=when)
        assert (parts > 0) == (layout.expert_tp > 1)
    assert {one.when for one in collectives(job, layout) if one.axis == "ep"} == set(phases)


def test_experts_are_cut_by_ep_and_expert_tp_and_divided_over_expert_dp(figures):
    job = figures.mixtral()
    experts = [param for param in params(job.model) if is_routed(param)]
    for layout in (Layout(dp_shard=64, ep=8, zero=3), Layout(dp_shard=32, tp=2, ep=4, expert_tp=2, zero=3)):
        parts = layout.ep * layout.expert_tp * axis(layout, "expert_dp").degree
        assert parts == 64
        assert sum(local_numel(param, layout, 0) for param in experts) == sum(p.numel for p in experts) / parts
        whole, resident = figures.expert_elements(job, layout)
        assert whole == resident * axis(layout, "expert_dp").degree
    param = Param("w", (Dim("experts", 8), Dim("ffn", 64), Dim("embed", 6)))
    assert local_shape(param, Layout(dp_shard=16, ep=4, zero=1), 0) == (2, 16, 6)


def test_full_recomputation_keeps_the_input_of_a_layer(figures):
    job = figures.llama()
    assert model_activations(job, batch_layouts([Layout()])).layers[0].full[0] == W * job.model.hidden_size


# Rules: the layouts that pages call illegal are illegal, and the remedies that they name suffice.

LLAMA_BATCH = BatchSpec(8192, 2**18)


@pytest.mark.parametrize(
    ("layout", "refused"),
    [
        (Layout(dp_replicate=8), ""),
        (Layout(dp_shard=8), "zero=0 shards no states"),
        (Layout(dp_replicate=8, zero=1), "but dp_shard=1"),
        (Layout(pp=2, dp_shard=4, zero=2), "zero=2 with pp=2"),
        (Layout(dp_replicate=8, microbatch=3), "microbatch=3 does not divide"),
        (Layout(tp=8), ""),
        (Layout(tp=8, cp=1, sequence_parallel=False), ""),
        (Layout(pp=8, schedule="gpipe"), ""),
        (Layout(pp=8, stages=2), "needs 1 stage per rank"),
        (Layout(pp=8, stages=1, schedule="zb-v"), "2 stages"),
        (Layout(pp=8, stages=1, schedule="interleaved"), "needs 2 or more"),
        (Layout(pp=8, stages=4, schedule="interleaved"), ""),
        (Layout(pp=8, stages=5, schedule="interleaved"), "the model has 32 layers"),
        (Layout(pp=8, stages=4, schedule="interleaved", microbatch=8), "groups of pp=8"),
        (Layout(pp=8, stages=2, schedule="dualpipe", microbatch=4), "at least 2 x pp = 16"),
        (Layout(pp=8, stages=2, schedule="dualpipe", microbatch=2), ""),
        (Layout(pp=8, stage_layers=(0, 6, 6, 5, 5, 5, 5, 0)), ""),
        (Layout(pp=8, stage_layers=(6, 0, 6, 5, 5, 5, 5, 0)), "only the first and last stage"),
        (Layout(pp=8, stage_layers=(4,) * 7), "one entry per stage"),
        (Layout(pp=8, stage_layers=(3,) * 8), "adds up to 24"),
        (Layout(cp=8, zero=3), ""),
        (Layout(cp=8, zero=3, context="ulysses"), ""),
        (Layout(cp=2, tp=4, context="ulysses"), ""),
        (Layout(cp=8, tp=1, pp=1, context="spiral"), "context='spiral' is unknown"),
        (Layout(ep=8, dp_shard=8, zero=3), "the model has none"),
    ],
)
def test_rules_of_layouts(figures, layout, refused):
    job = figures.llama()
    messages = illegal(job.model, layout, job.cluster, LLAMA_BATCH)
    assert (messages == []) if not refused else any(refused in said for said in messages), messages


@pytest.mark.parametrize(
    ("layout", "seq_len", "refused"),
    [
        (Layout(cp=8, zero=3), 8184, "cp=8 splits sequences into 2 x 8"),
        (Layout(tp=8), 8188, "sequence_parallel=true splits"),
        (Layout(tp=8, sequence_parallel=False), 8188, ""),
        (Layout(dp_replicate=8), 8188, ""),
    ],
)
def test_rules_of_sequences(figures, layout, seq_len, refused):
    job = figures.llama()
    messages = illegal(job.model, layout, job.cluster, BatchSpec(seq_len, 32 * seq_len))
    assert (messages == []) if not refused else any(refused in said for said in messages), messages


@pytest.mark.parametrize(
    ("layout", "refused"),
    [
        (Layout(dp_shard=64, ep=8, zero=3), ""),
        (Layout(dp_shard=16, tp=4, ep=8, expert_tp=8, zero=3), ""),
        (Layout(dp_shard=64, ep=16, zero=3), "ep=16 does not divide num_experts=8"),
        (Layout(dp_shard=16, tp=4, expert_tp=3, zero=3), "expert_tp=3 does not divide"),
        (Layout(pp=16, dp_shard=4, ep=8, zero=3), "does not divide the dp_shard x cp x tp = 4 ranks"),
    ],
)
def test_rules_of_experts(figures, layout, refused):
    job = figures.mixtral()
    messages = illegal(job.model, layout, job.cluster, job.batch)
    assert (messages == []) if not refused else any(refused in said for said in messages), messages


def test_heads_are_dealt_as_wholes(figures):
    job = figures.llama()
    cluster = replace(job.cluster, devices_per_node=64)
    messages = illegal(job.model, Layout(cp=64, context="ulysses"), cluster, job.batch)
    assert any("context='ulysses' cannot distribute the 32 heads" in said for said in messages)
    assert illegal(job.model, Layout(cp=32, dp_replicate=2, context="ulysses"), cluster, job.batch) == []


def test_offloading_needs_to_know_the_host(figures):
    job = figures.llama()
    unknown = replace(job.cluster, host=type(job.cluster.host)())
    for word, missing in (("optimizer", "host.memory"), ("states-nvme", "host.nvme")):
        layout = Layout(dp_shard=8, zero=3, offload=word)
        assert illegal(job.model, layout, job.cluster, job.batch) == []
        assert any(missing in said for said in illegal(job.model, layout, unknown, job.batch))
