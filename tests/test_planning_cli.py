"""`kumi plan` from the command line to the files it writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from kumi.cli import _parser, main
from kumi.config import load, resolve
from kumi.errors import FitError
from kumi.export import TRAINERS

ROOT = Path(__file__).parents[1]

# A small model on eight GPUs: planned in a moment.
SMALL = """
[model]
init = "random"
config = { model_type = "llama", architectures = ["LlamaForCausalLM"], vocab_size = 32000, hidden_size = 1024,
           intermediate_size = 2816, num_hidden_layers = 8, num_attention_heads = 8, num_key_value_heads = 4,
           max_position_embeddings = 8192, rms_norm_eps = 1e-5, rope_theta = 10000.0, tie_word_embeddings = false }

[cluster]
source = "h100-sxm"
price_per_hour = 2.5

[batch]
seq_len = 2048
tokens_per_step = 131_072
"""
FSDP = ["layout.dp_shard=8", "layout.zero=2", "layout.microbatch=8", "layout.recompute=none", "layout.offload=none"]
PIPELINE = ["layout.pp=4", "layout.tp=2", "layout.schedule=1f1b", "layout.microbatch=4"]


@pytest.fixture
def run(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(SMALL.replace("\n           ", " "))
    return file


def plan(run, *words):
    return main(["plan", str(run), *words])


def test_json_has_every_figure(run, capsys):
    assert plan(run, "--json", "--top", "3") == 0
    printed = json.loads(capsys.readouterr().out)
    best = printed["best"]
    assert best["fits"]
    assert sum(best["time"].values()) == pytest.approx(best["step_seconds"])
    assert best["tokens_per_second"] == pytest.approx(131_072 / best["step_seconds"])
    assert len(printed["others"]) == 3
    assert printed["searched"] >= printed["fitting"] > 0
    assert {"model", "cluster", "expected", "uncertainty"} <= set(printed)
    assert [count["nodes"] for count in printed["node_counts"]] == [2]
    assert printed["node_counts"][0]["best"]["step_seconds"] < best["step_seconds"]


def test_a_plan_is_the_estimate_of_the_run(run, capsys, tmp_path):
    """With options of the trainer that change its time: compressed gradients, compiled layers, a loss kernel."""
    keys = ["comm.compress=bf16", "precision.kernels=loss:triton", *FSDP]
    run.write_text(
        f'name = "small"\n{run.read_text()}\n[data]\ntokenizer = {{ vocab_size = 32000 }}\n'
        f'sources = [{{ path = "documents.jsonl" }}]\n[train]\nsteps = 10\nout = "{tmp_path}/out"\ncompile = true\n'
    )
    assert plan(run, *keys, "--json") == 0
    printed = json.loads(capsys.readouterr().out)["best"]
    estimate = resolve(load(run, keys)).estimate
    assert (printed["step_seconds"], printed["layout"]["zero"]) == (estimate.step_seconds, 2)
    assert plan(run, *keys, "precision.kernels=torch", "train.compile=false", "--json") == 0
    assert json.loads(capsys.readouterr().out)["best"]["step_seconds"] > 1.1 * estimate.step_seconds


def test_the_report_names_the_layout_and_what_decides(run, capsys):
    assert plan(run, "--explain") == 0
    output = capsys.readouterr().out
    for heading in ("tokens/s", "memory", "time of a step", "runners-up", "standard layouts for comparison"):
        assert heading in output.lower(), heading
    assert not [line for line in output.splitlines() if line != line.rstrip()], "blanks that only fill lines"


@pytest.mark.parametrize(("nodes", "once"), [(1, ""), (2, " once on every node (kumi launch does this)")])
def test_the_brief_says_how_to_start_each_node(run, capsys, nodes, once):
    assert plan(run, *PINS, f"cluster.nodes={nodes}") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"kumi train planned.toml{once} assumed" in printed


def test_pages_pictures_and_traces_are_written_anew_each_time(run, tmp_path, capsys):
    page, folder, trace = tmp_path / "new" / "plan.html", tmp_path / "pictures", tmp_path / "trace.json"
    words = [*PIPELINE, "--html", str(page), "--svg", str(folder), "--trace", str(trace)]
    for _ in range(2):
        assert plan(run, *words) == 0
        assert f"wrote {page}" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "http://" not in text.replace("http://www.w3.org", "")
    drawn = sorted(folder.glob("*.svg"))
    assert {"memory", "timeline"} <= {file.stem for file in drawn}
    for file in drawn:
        assert ElementTree.fromstring(file.read_text()).tag.endswith("svg")
    events = json.loads(trace.read_text())
    assert len(events["traceEvents"] if isinstance(events, dict) else events) >= 4 * 2 * 16


def test_a_trace_needs_a_pipeline(run, tmp_path, capsys):
    """The plan is printed all the same."""
    assert plan(run, "layout.pp=1", "--trace", str(tmp_path / "trace.json")) == 2
    printed = capsys.readouterr()
    assert "pin layout.pp to see one" in printed.err
    assert "tokens/s" in printed.out


def test_a_timeline_of_millions_of_microbatches_is_not_drawn(run, tmp_path, capsys):
    words = [*PIPELINE, "layout.microbatch=1", "batch.tokens_per_step=2_048_000_000"]
    assert plan(run, *words, "--trace", str(tmp_path / "trace.json")) == 2
    assert "1,000,000 are too many" in capsys.readouterr().err


def test_a_saved_plan_is_a_run_file_with_everything_pinned(run, tmp_path, capsys):
    saved = tmp_path / "saved.toml"
    assert plan(run, "layout.pp=2", "layout.schedule=1f1b", "--json", "--save", str(saved)) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert plan(saved, "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["best"] == best
    assert again["searched"] <= 2
    before = saved.read_text()
    assert plan(run, "--save", str(saved)) == 2
    assert "saved.toml exists and is not overwritten; name another path" in capsys.readouterr().err
    assert saved.read_text() == before


def test_an_export_is_written_once(run, tmp_path, capsys):
    folder = tmp_path / "exported"
    assert plan(run, "layout.pp=1", "--export", "torchtitan", "--out", str(folder)) == 0
    assert str(folder) in capsys.readouterr().out
    assert any(folder.iterdir())
    assert plan(run, "--export", "torchtitan", "--out", str(folder)) == 2
    assert "exported exists" in capsys.readouterr().err
    assert plan(run, "--export", "no-such-trainer", "--out", str(tmp_path / "other")) == 2
    assert "no-such-trainer" in capsys.readouterr().err


PINS = ["layout.pp=1", "layout.cp=1", "layout.microbatch=1"]


@pytest.mark.parametrize("words", [["--days", "0"], ["--days", "1e3"], ["--tokens", "0"], ["--top", "0"]])
def test_amounts_of_nothing_are_wrong_usage(run, words):
    with pytest.raises(SystemExit) as stopped:
        plan(run, "--tokens", "1T", "--days", "2", *words)
    assert stopped.value.code == 2


def test_half_a_day_is_one():
    assert _parser().parse_args(["plan", "run.toml", "--tokens", "1T", "--days", "0.5"]).days == 0.5


def test_sizes_are_those_of_the_trainer_that_is_named(run, capsys):
    pins = [*PINS, "layout.zero=2", "layout.recompute=full"]
    results = []
    for words in ([], ["--engine", "deepspeed"]):
        assert plan(run, *pins, "--tokens", "1T", "--days", "30", *words, "--json") == 0
        results.append(json.loads(capsys.readouterr().out)[-1]["days"])
    assert results[0] != results[1]


def test_sizes_as_a_table(run, capsys):
    assert plan(run, *PINS, "--tokens", "1T", "--days", "2") == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith("1T tokens in 2 days: ")
    nodes = int(output[0].split(": ")[1].split()[0])
    assert {"nodes", "days", "cost", "MWh", "layout"} <= set(output[1].split())
    rows = [int(line.split()[0]) for line in output[2:] if line.strip() and line.split()[0].isdigit()]
    assert rows == sorted(rows)
    assert rows[-1] == nodes > 1


def test_sizes_as_json(run, capsys):
    assert plan(run, *PINS, "--tokens", "1e12", "--days", "2", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed[-1]["days"] <= 2 < printed[0]["days"]
    for size in printed:
        assert size["device_hours"] == pytest.approx(24 * size["days"] * size["devices"])
        assert size["cost"] == pytest.approx(2.5 * size["device_hours"])
        assert size["best"]["devices"] == size["devices"] == 8 * size["nodes"]


@pytest.mark.parametrize(
    ("words", "errors"),
    [
        (["--days", "2"], "--days has no effect without --tokens"),
        (["layout.tp=3"], "tp=3"),
        (["layout.zero=2", "layout.pp=2"], "zero=2 with pp=2"),
        (["layout.tpp=2"], "layout.tpp"),
        (["cluster.source=no-such-machine"], "no-such-machine"),
        (["layout.dp_shard=3", "layout.zero=1"], "dp_shard"),
        (["--engine", "no-such-trainer"], "no-such-trainer"),
        (["batch.tokens_per_step=131_073"], "tokens_per_step"),
        (["--trainable", "precision.kind=bf16-pure"], "precision.kind='bf16-pure'"),
        (["--out", "somewhere"], "name a trainer with --export"),
        (["--tokens", "1T", "--days", "2", "--html", "plan.html"], "--html needs one plan"),
        (["--tokens", "1T", "--days", "2", "--trainable", "precision.kind=bf16-pure"], "precision.kind='bf16-pure'"),
        (["--export", "nanotron", "layout.cp=2", "--out", "somewhere"], "nanotron's Llama does not support it"),
        (["--engine", "deepspeed", "layout.pp=2"], "PipelineModule"),
        (["--html", "."], "is a folder; name a file"),
        (["--svg", __file__], "is a file; name a folder"),
        (["--save", f"{__file__}/saved.toml"], "is not a writable folder"),
    ],
)
def test_what_cannot_be_planned_is_exit_code_2_and_one_sentence(run, words, errors, capsys):
    assert plan(run, *words) == 2
    error = capsys.readouterr().err
    assert errors in error
    assert error.count("\n") == 1


def test_what_does_not_fit_is_exit_code_4_with_a_way_out(run, capsys):
    assert FitError.exit_code == 4
    large = ["hidden_size=16384", "intermediate_size=57344", "num_hidden_layers=64"]
    assert plan(run, *(f"model.config.{word}" for word in large), "layout.offload=none") == 4
    error = capsys.readouterr().err
    assert "the model does not fit" in error
    assert "set cluster.nodes=" in error


MODEL = str(ROOT / "examples" / "models" / "llama-3-8b")
# Pins that make the search short.
SHORT = ["layout.pp=1", "layout.cp=1", "layout.tp=1", "layout.microbatch=1", "layout.recompute=full"]


def test_a_model_is_planned_on_machines_without_a_run_file(tmp_path, capsys):
    saved = tmp_path / "run.toml"
    assert main(["plan", MODEL, "--gpus", "16xh100-sxm", *SHORT, "--save", str(saved)]) == 0
    printed = capsys.readouterr().out
    assert "batch.seq_len=8_192 by default" in printed
    assert "batch.tokens_per_step=4_194_304 by default" in printed
    assert "on 16 x NVIDIA H100" in printed
    run = tomllib.loads(saved.read_text())
    assert run["model"]["source"] == MODEL
    assert (run["cluster"]["source"], run["cluster"]["nodes"]) == ("h100-sxm", 2)
    assert (run["batch"]["seq_len"], run["batch"]["tokens_per_step"]) == (8192, 4_194_304)


def test_overrides_count_without_a_run_file(capsys):
    words = ["batch.seq_len=1024", "cluster.price_per_hour=2", "--tokens", "200B", "--json"]
    assert main(["plan", f"{MODEL}/config.json", "--gpus", "24xH100-SXM", *SHORT, *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["batch"] == {"seq_len": 1024, "tokens_per_step": 128 * 24 * 1024, "document_span": None}
    assert plan["defaults"] == {"batch.tokens_per_step": 128 * 24 * 1024}
    assert plan["cluster"]["devices"] == 24
    takes = plan["training"]
    assert takes["days"] == pytest.approx(200e9 / plan["best"]["tokens_per_second"] / 86_400)
    assert takes["device_hours"] == pytest.approx(24 * takes["days"] * 24)
    assert takes["cost"] == pytest.approx(2 * takes["device_hours"])


def test_gpus_replace_the_machines_of_a_run_file(run, capsys):
    assert plan(run, *PINS, "--gpus", "4xa100-sxm-80gb", "--json") == 0
    cluster = json.loads(capsys.readouterr().out)["cluster"]
    assert (cluster["devices"], cluster["device"]["price"]) == (4, 0)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([MODEL], f"{MODEL} is a model, and no machines are given; name them, such as --gpus 8xh100-sxm"),
        ([MODEL, "--gpus", "8"], "not a number and a name; write it as 16xh100-sxm"),
        ([MODEL, "--gpus", "0xh100-sxm"], "not a number and a name"),
        ([MODEL, "--gpus", "8xh100"], "did you mean 8xh100-96gb or 8xh100-pcie or 8xh100-sxm?"),
        ([MODEL, "--gpus", "8xh10-sxm"], "did you mean 8xh100-sxm"),
        ([MODEL, "--gpus", "8xabacus"], "'abacus' is not a known node; use a100-pcie-80gb, "),
        ([MODEL, "--gpus", "12xh100-sxm"], "h100-sxm has nodes of 8 devices, and 12 do not fill them; use 8 or 16"),
        ([str(ROOT / "examples")], f"name a run file in it: {ROOT}/examples/chat.toml, {ROOT}/examples/dpo.toml, "),
        ([str(ROOT / "docs")], "holds neither a TOML run file nor a model's config.json"),
    ],
)
def test_what_is_no_run_file_is_said_to_be(words, text, capsys):
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "run.toml" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("priced", [True, False])
def test_tokens_alone_say_days_hours_and_cost(run, priced, capsys):
    words = [] if priced else ["cluster.price_per_hour=0"]
    assert plan(run, *PINS, *words, "--tokens", "1T") == 0
    line = " ".join(capsys.readouterr().out.split())
    assert re.search(r"cost 1T tokens take [\d.,]+ days \([\d.,]+ to [\d.,]+\), [\d.,]+ device hours, ", line)
    assert ("at 2.5 per device hour" in line) == priced
    assert ("cost unknown without cluster.price_per_hour" in line) != priced
    assert plan(run, *PINS, *words, "--tokens", "1T", "--explain") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("1T tokens take "))
    assert re.match(r"1T tokens take [\d.,]+ days, [\d.,]+ device hours, ", line)
    assert ("set cluster.price_per_hour to see the cost" in line) != priced


def test_a_missing_run_file_is_exit_code_2(tmp_path, capsys):
    assert main(["plan", str(tmp_path / "none.toml")]) == 2
    assert "no such run file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--no-such-flag", "x.toml"])
    assert stopped.value.code == 2


def test_planning_imports_no_torch(run, tmp_path):
    """Not with all it can write, either: it must answer at once, and where there is no torch."""
    words = ["plan", str(run), *PIPELINE, "--html", str(tmp_path / "plan.html"), "--save", str(tmp_path / "saved.toml")]
    script = f"import sys; from kumi.cli import main; assert main({words!r}) == 0; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_the_saved_plan_is_what_kumi_train_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = [
        'data.sources=[{path="{stdlib}/email/*.py"}]',
        "data.validation=0.2",
        "data.workers=1",
        "eval.every=0",
        "data.tokenizer.vocab_size=400",
        "model.config.num_hidden_layers=1",
        "model.config.hidden_size=32",
        "model.config.intermediate_size=32",
        "train.steps=2",
        "export.enabled=false",
        "cluster.devices_per_node=1",
    ]
    assert (
        main(["plan", str(ROOT / "examples" / "quickstart.toml"), *small, "--trainable", "--save", "saved.toml"]) == 0
    )
    pinned = load("saved.toml").layout
    assert (pinned.pp, pinned.tp, pinned.microbatch) != (None, None, None)
    assert main(["train", "saved.toml"]) == 0
    assert (tmp_path / "runs" / "quickstart").is_dir()


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_exports_carry_the_warm_up_in_steps(run, tmp_path, trainer):
    """Ten of 200 steps, or of the thousand that an export has by default."""
    ones = [f"layout.{key}=1" for key in ("pp", "tp", "cp", "microbatch")] + ["layout.offload=none"]
    for name, keys in (
        ("run", ["optim.warmup_ratio=0.05", "train.steps=200", "train.out=x"]),
        ("plan", ["optim.warmup_ratio=0.01"]),
    ):
        folder = tmp_path / name
        assert plan(run, *ones, *keys, "--engine", trainer, "--export", trainer, "--out", str(folder)) == 0
        text = "".join(file.read_text() for file in folder.iterdir())
        assert re.search(r"warmup[-_](iters|steps)\W{1,3}10\b", text)
