"""Tables of runs are read unchanged: blanks stay blank, unusable rows are refused with a reason."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from planner_defaults import ENGINE_OF, NODE_OF, engine_of, first
from planner_experiments import LEAST_ROWS, POOL, campaign_of, experiments_of
from planner_jobs import Case, case_of
from planner_models import parameters
from planner_rows import read, run_of

from kumi.plan.engines import ENGINES
from kumi.plan.memory.device_memory import rank_memory

HERE = Path(__file__).parent
CLUSTERS = HERE.parents[1] / "src" / "kumi" / "clusters"
PLAIN = {
    "id": "new-1",
    "source": "a blog",
    "model_name": "something",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "vocab": "32000",
    "seq_len": "2048",
    "gpu": "H100-80GB",
    "gpus": "8",
    "tp": "1",
    "pp": "1",
    "micro_batch": "2",
    "global_batch": "32",
    "precision": "bf16",
    "step_time_s": "1.5",
}


def case(**cells):
    return case_of(run_of(PLAIN | cells))


def test_a_plain_row_is_a_job_and_a_layout():
    plain = case(tp="2", pp="2", recompute="full")
    assert isinstance(plain, Case)
    assert (plain.layout.tp, plain.layout.pp, plain.layout.dp, plain.layout.recompute) == (2, 2, 2, "full")
    assert (plain.job.batch.sequences, plain.job.batch.seq_len, plain.seconds) == (32, 2048, 1.5)
    assert plain.job.cluster.device.name == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("cells", "seconds"),
    [
        ({"step_time_s": "", "tokens_per_s_per_gpu": "4096"}, 32 * 2048 / 8 / 4096),
        ({"step_time_s": "2", "tokens_per_s_per_gpu": "4096"}, 2.0),
    ],
)
def test_a_step_s_time_is_stated_or_follows_from_tokens(cells, seconds):
    assert case(**cells).seconds == pytest.approx(seconds)


def test_tflops_count_recomputation_only_where_their_source_does():
    plain = case(step_time_s="", tflops_per_gpu="400", recompute="full")
    counted = case(step_time_s="", tflops_per_gpu="400", recompute="full", source="SC'21, arXiv 2104.04473")
    assert 1.25 < counted.seconds / plain.seconds < 1.34


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"gpu": "TPU v5p"}, "gpu"),
        ({"gpus": "6", "tp": "4"}, "layout: tp x pp x dp x cp is not the number of GPUs"),
        ({"layers": "", "hidden": ""}, "model: the row has no layers and hidden size"),
        ({"heads": "24", "hidden": "4097"}, "model: 24 heads"),
        ({"precision": "int8"}, "precision: 'int8' is not known"),
        ({"zero_stage_or_fsdp": "sometimes"}, "layout: sharding 'sometimes' is not known"),
        ({"step_time_s": ""}, "measured"),
        ({"seq_len": ""}, "seq_len: not given"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(cells, reason):
    assert str(case(**cells)).startswith(reason)


def test_a_cell_that_is_no_number_is_refused_with_its_line(tmp_path):
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, PLAIN)
        writer.writeheader()
        writer.writerows([PLAIN, PLAIN | {"tp": "two"}])
    with pytest.raises(ValueError, match=r"runs\.csv:3: tp: 'two' is no number above zero"):
        list(read(path))
    path.write_text("one,two\n1,2\n")
    with pytest.raises(ValueError, match="column"):
        list(read(path))


@pytest.mark.parametrize(("name", "rows"), [("runs", 4218), ("failures", 1792), ("torchtitan", 83), ("megatron", 95)])
def test_every_published_row_is_read_and_is_a_case_or_has_a_reason(name, rows):
    cases = [case_of(run, measured=name != "failures") for run in read(HERE / f"{name}.csv")]
    assert len(cases) == rows
    reasons = [one for one in cases if isinstance(one, str)]
    assert all(": " in reason for reason in reasons)
    assert len(reasons) <= {"runs": 31, "failures": 0, "torchtitan": 5, "megatron": 30}[name]


def test_models_have_the_parameters_that_their_rows_state():
    """Of sources that state both; elsewhere "530B" is a rounded name."""
    seen = set()
    for run in read(HERE / "runs.csv"):
        stated, key = run.params, (run.model, run.layers, run.hidden)
        published = None if key in seen or not stated else case_of(run)
        seen.add(key)
        if isinstance(published, Case) and run.source in ("vtrain-s", "vtrain-m", "titan"):
            assert parameters(published.job.model) == pytest.approx(stated, rel=0.03), key


def test_an_unknown_trainer_has_megatron_s_habits_where_the_model_is_divided():
    assert engine_of(run_of(PLAIN)).name == "torchtitan"
    assert engine_of(run_of(PLAIN | {"tp": "2"})).name == "megatron-lm"
    assert engine_of(run_of(PLAIN | {"pp": "2"})).name == "megatron-lm"
    assert engine_of(run_of(PLAIN | {"source": "Megatron-Bridge v0.2"})).name == "megatron-bridge"
    assert engine_of(run_of(PLAIN | {"flash_attention": "n"})).attention == "fused-softmax"


def test_every_trainer_and_every_node_of_the_tables_exists_and_says_where_it_was_read():
    assert {name for _, name in ENGINE_OF} <= set(ENGINES)
    assert all(engine.source and engine.name == name for name, engine in ENGINES.items())
    for _, name in NODE_OF:
        assert (CLUSTERS / "nodes" / f"{name}.toml").is_file()
    assert first(NODE_OF, "nvidia a100-sxm4-40gb") == "a100-sxm-40gb"
    assert first(NODE_OF, "h100-96gb-hbm2e-500w") == "h100-96gb"


def test_an_experiment_is_a_campaign_and_small_ones_are_pooled():
    def runs(name, count, **cells):
        return [run_of(PLAIN | {"id": f"{name}-{number}"} | cells) for number in range(count)]

    assert {campaign_of(run) for name in ("nano", "nano-dp", "nano-tp", "nano-fail") for run in runs(name, 1)} == {
        "nanotron"
    }
    assert {campaign_of(run) for name in ("vtrain-m", "vtrain-s") for run in runs(name, 1)} == {"vtrain"}
    assert campaign_of(*runs("hag-oom", 1)) == "hag"
    assert [campaign_of(*runs("mbridge", 1, gpu=gpu)) for gpu in ("B200", "GB200")] == ["mbridge-b200", "mbridge-gb200"]
    assert [campaign_of(*runs("dgxc", 1, source=name)) for name in ("MaxText", "NeMo")] == ["dgxc-xla", "dgxc"]
    experiments = experiments_of([*runs("one", LEAST_ROWS), *runs("two", LEAST_ROWS - 1), *runs("three", 1)])
    assert set(experiments.values()) == {"one", POOL}
    assert [experiments[name] for name in ("one-0", "two-0", "three-0")] == ["one", POOL, POOL]


def test_lora_trains_adapters_alone_and_sft_all_parameters():
    full, sft, lora, half = (
        case(notes=notes) for notes in ("", "SFT", "LoRA of all linear layers, rank 16", "LoRA rank=64")
    )
    assert sft.job.model == full.job.model
    assert (lora.job.model.lora.r, half.job.model.lora.r) == (16, 64)
    assert lora.model_flops < 0.75 * full.model_flops
    of_full, of_lora = (rank_memory(one.job, one.layout) for one in (full, lora))
    assert of_lora.optimizer + of_lora.grads < 0.05 * (of_full.optimizer + of_full.grads)
    assert of_lora.params > 0.4 * of_full.params
    assert case(source="NVIDIA NeMo", notes="LoRA").job.model.lora.r == 32
    assert case(notes="QLoRA").job.model.lora.quantize == "nf4"


def test_other_adapters_and_tflops_of_adapters_are_refused():
    assert case(notes="prefix tuning").startswith("model: its adapters")
    assert case(notes="LoRA", step_time_s="", tflops_per_gpu="300").startswith("measured")


@pytest.mark.parametrize("notes", ["cut to 4 layers", "4 of 61 layers", "the first 4 layers only"])
def test_a_cut_model_has_the_layers_that_are_left_and_not_the_parameters_of_the_whole(notes):
    cut = case(notes=notes, params_B="7")
    assert cut.job.model.num_hidden_layers == 4
    assert parameters(cut.job.model) == parameters(case(layers="4").job.model)
    assert (
        case(
            model_name="DeepSeek V3", layers="", hidden="", heads="", vocab="", notes=notes
        ).job.model.num_hidden_layers
        == 4
    )
