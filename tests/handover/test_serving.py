"""What vLLM and SGLang do with exports, by kumi's table of their source; neither engine runs here."""

import ast
import json
import os
import re
from pathlib import Path

import pytest
import transformers
from tiny_exports import model_folder

from kumi.cli import main
from kumi.convert.handover.serving import DIFFERS, LOADS, REFUSES, serving_of_folder, serving_of_model
from kumi.convert.handover.serving_rules import ENGINES, SGLANG, VLLM
from kumi.spec import families
from kumi.spec.families import FAMILIES
from kumi.spec.families._shared.classifiers import CLASSIFIERS
from kumi.spec.weights import stored_tensors
from tiny_models import CASES, config_of

# The cases that are not plainly loaded by both engines: (vLLM, SGLang).
EXCEPTIONS = {
    "llama-biases": (LOADS, DIFFERS),
    "mistral-window": (LOADS, DIFFERS),
    "qwen2-window": (REFUSES, DIFFERS),
    "qwen3-biases": (DIFFERS, LOADS),
    "qwen3-window": (REFUSES, DIFFERS),
    "mixtral-window": (LOADS, DIFFERS),
    "qwen3-moe": (DIFFERS, LOADS),
    "deepseek-v2": (DIFFERS, DIFFERS),
    "deepseek-v3-plain": (DIFFERS, DIFFERS),
    "qwen2-moe-sparse": (DIFFERS, DIFFERS),
    "glm4-moe-plain": (DIFFERS, DIFFERS),
    "ministral3": (DIFFERS, LOADS),
    "ministral3-window": (DIFFERS, DIFFERS),
    "granite-biases": (LOADS, DIFFERS),
    "cohere2-biases": (DIFFERS, DIFFERS),
    "ministral3-sees": (DIFFERS, LOADS),
    "qwen2.5-vl-tied": (REFUSES, DIFFERS),
    "qwen3-vl-tied": (DIFFERS, LOADS),
    "starcoder2-window": (LOADS, DIFFERS),
    "phi3-partial": (LOADS, DIFFERS),
    "gemma": (LOADS, DIFFERS),
    "gemma-biases": (DIFFERS, DIFFERS),
    "gpt-oss": (DIFFERS, LOADS),
    "gpt2-wide": (REFUSES, REFUSES),
    **{case: (LOADS, REFUSES) for case in CASES if case.startswith(("falcon", "bloom"))},
}


def spec_of(case, **changes):
    family, own = CASES[case]
    return families.from_hf(config_of(family, own | changes).to_dict())


def reasons(case, engine, **changes):
    servings = {serving.engine: serving for serving in serving_of_model(spec_of(case, **changes))}
    return servings[engine].reasons


def test_verdicts_of_every_tiny_model():
    verdicts = {case: tuple(serving.verdict for serving in serving_of_model(spec_of(case))) for case in CASES}
    assert {case: pair for case, pair in verdicts.items() if pair != (LOADS, LOADS)} == EXCEPTIONS


@pytest.mark.parametrize(
    ("case", "engine", "reason"),
    [
        ("qwen3-biases", "vLLM", ("skips self_attn.o_proj.bias",)),
        ("llama-biases", "SGLang", ("skips mlp.gate_proj.bias, mlp.up_proj.bias, mlp.down_proj.bias",)),
        ("glm4-moe-plain", "SGLang", ("has lm_head.weight always, and leaves arbitrary values there",)),
        ("gpt2-wide", "vLLM", ("accepts no scale_attn_by_inverse_layer_idx",)),
        ("gpt-oss", "vLLM", ("clamps experts at 7, whatever swiglu_limit is",)),
    ],
)
def test_reasons_name_what_is_in_the_files(case, engine, reason):
    assert reasons(case, engine) == reason


def test_a_property_that_rules_ask_for_decides():
    assert reasons("gpt-oss", "vLLM", swiglu_limit=7.0) == ()
    plain = {"rope_type": "default", "rope_theta": 1000.0}
    assert reasons("gpt-oss", "vLLM", rope_parameters=plain) == ("reads the keys of YaRN from rope_parameters",)
    full = ["full_attention"] * 2
    assert reasons("gpt-oss", "vLLM", swiglu_limit=7.0, layer_types=full) == (
        "has sliding windows in layers 0, 2, 4 ... only",
    )
    assert reasons("mistral", "SGLang", sliding_window=64) == ()  # as long as the context
    assert len(reasons("mistral", "SGLang", sliding_window=63)) == 1


def test_every_architecture_of_kumi_is_in_the_table():
    written = {module.ARCHITECTURE for module in FAMILIES.values()}
    assert written - (VLLM.own | VLLM.transformers) == set()
    assert written - (SGLANG.own | SGLANG.transformers) == {"BloomForCausalLM", "FalconForCausalLM"}
    for engine in ENGINES:
        assert engine.own | engine.transformers <= written
        assert engine.own.isdisjoint(engine.transformers)
        named = set(engine.skipped) | set(engine.unset) | engine.without_lora
        assert named.union(*(rule.architectures for rule in engine.rules)) <= engine.own
        assert (engine.classifiers or set()) <= set(CLASSIFIERS.values())


# Configurations beside the tiny models that show a rule.
VARIANTS = [
    ("olmoe", {"norm_topk_prob": True}),
    ("gemma2", {"layer_types": ["full_attention"] * 2}),
    ("gemma2", {"tie_word_embeddings": False}),
    ("gemma3", {"tie_word_embeddings": False}),
    ("nemotron-h", {"tie_word_embeddings": True}),
    ("gpt-oss", {"tie_word_embeddings": True}),
    ("gpt-oss", {"layer_types": ["full_attention"] * 2}),
    ("gpt-oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
    ("olmoe", {"tie_word_embeddings": True}),
    ("qwen3-moe", {"tie_word_embeddings": True}),
    ("deepseek-v2", {"tie_word_embeddings": True}),
    ("deepseek-v3", {"tie_word_embeddings": True}),
    ("gpt2", {"activation_function": "relu"}),
    ("mistral-sees", {"text_config": {"sliding_window": 7}}),
]


def all_specs():
    return [spec_of(case) for case in CASES] + [spec_of(case, **changes) for case, changes in VARIANTS]


def test_every_row_of_the_table_concerns_a_model_that_kumi_writes():
    specs = [*all_specs(), reward_spec("qwen2"), reward_spec("qwen3")]
    architectures = [FAMILIES[spec.family].ARCHITECTURE for spec in specs]
    for engine in ENGINES:
        for rule in engine.rules:
            hits = {name for name, spec in zip(architectures, specs, strict=True) if rule.applies(spec)}
            assert hits & rule.architectures, rule
        for table in (engine.skipped, engine.unset):
            for name, entry in table.items():
                models = [spec for other, spec in zip(architectures, specs, strict=True) if other == name]
                assert any(concerns(entry, list(stored_tensors(spec))) for spec in models), (engine.name, name)


def concerns(entry, names):
    if isinstance(entry, str):
        return any(re.search(entry, name) for name in names)
    return not any(name.endswith(entry[0]) for name in names)


def reward_spec(case):
    return families.from_hf(families.with_score_head(families.to_hf(spec_of(case))))


def test_reward_models():
    vllm, sglang = serving_of_model(reward_spec("qwen2"))
    assert (vllm.verdict, vllm.through) == (LOADS, "own class")
    assert "use_activation" in vllm.notes[0]
    assert sglang.reasons == ("adds a bias to the score that no file has, the same for all texts",)
    assert serving_of_model(reward_spec("llama"))[1].verdict == LOADS
    vllm, sglang = serving_of_model(reward_spec("gpt-neox"))
    assert (vllm.verdict, vllm.through) == (LOADS, "transformers")
    assert (sglang.verdict, sglang.through) == (DIFFERS, "transformers")
    assert "skips score.weight" in sglang.reasons[0]


@pytest.mark.parametrize(
    ("changes", "base", "vllm", "sglang"),
    [
        ({}, "llama", (LOADS, "--max-lora-rank 16"), (LOADS, "")),
        ({"r": 17}, None, (LOADS, "--max-lora-rank 32"), (LOADS, "")),
        ({"rank_pattern": {"q_proj": 64}}, "llama", (LOADS, "--max-lora-rank 64"), (DIFFERS, "rank_pattern")),
        ({"r": 513}, None, (REFUSES, "ranks up to 512, not 513"), (LOADS, "")),
        ({"use_dora": True}, None, (REFUSES, "DoRA"), (REFUSES, "DoRA")),
        ({"modules_to_save": ["lm_head", "score"]}, None, (REFUSES, "lm_head"), (DIFFERS, "modules_to_save")),
        ({"use_rslora": True}, "llama", (LOADS, "--max-lora-rank 16"), (DIFFERS, "does not read use_rslora")),
        ({}, "gpt2", (REFUSES, "takes no adapters for GPT2LMHeadModel"), (LOADS, "")),
        ({}, "qwen3-biases", (DIFFERS, "o_proj.bias (base model)"), (LOADS, "")),
    ],
)
def test_adapters(tmp_path, changes, base, vllm, sglang):
    folder = tmp_path / "adapter"
    folder.mkdir()
    if base is not None:
        family, own = CASES[base]
        config_of(family, own).save_pretrained(tmp_path / "base")
    config = {"peft_type": "LORA", "r": 16, "base_model_name_or_path": str(tmp_path / "base"), **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    for serving, (verdict, words) in zip(serving_of_folder(folder), (vllm, sglang), strict=True):
        assert serving.verdict == verdict
        assert words in str(serving)
    assert serving_of_folder(folder)[0].through == ("own class" if base and vllm[0] != REFUSES else "")


def test_the_commands_say_so(tmp_path, capsys):
    saved = model_folder(tmp_path / "saved", "gemma")
    assert main(["convert", str(saved), str(tmp_path / "hf"), "--to", "hf"]) == 0
    printed = capsys.readouterr().out
    lines = (
        "serving engines, from their source, not tried:\n"
        f"  vLLM {VLLM.version}: should load it\n"
        f"  SGLang {SGLANG.version}: should load it, but compute another function than kumi: it computes the exact "
        "GELU, not its tanh approximation\n"
    )
    assert printed.endswith(lines)
    assert main(["describe", str(tmp_path / "hf")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'hf'}: GemmaForCausalLM\n{lines}"
    assert main(["describe", str(tmp_path / "hf"), "--json"]) == 0
    engines = json.loads(capsys.readouterr().out)["engines"]
    assert [engine["verdict"] for engine in engines] == [LOADS, DIFFERS]
    assert main(["describe", str(tmp_path / "hf"), "layout.tp=2"]) == 2
    assert "layout.tp=2 is for run files" in capsys.readouterr().err


def sources():
    """The folder with the packages `vllm` and `sglang` of the versions in the table, unpacked."""
    folder = os.environ.get("KUMI_SERVING_SOURCES")
    if folder is None:
        pytest.skip("KUMI_SERVING_SOURCES names no folder with the source of vLLM and SGLang")
    return Path(folder)


def is_compatible(name):
    return getattr(transformers, name).is_backend_compatible()


def test_the_table_is_that_of_vllm():
    package = sources() / "vllm"
    version = (package / "_version.py").read_text()
    assert f"version = '{VLLM.version}'" in version
    assert VLLM.commit in version
    registry = (package / "model_executor" / "models" / "registry.py").read_text()
    modules = dict(re.findall(r'"(\w+)": \(\s*"([\w.]+)",', registry))
    assert {name for name in VLLM.own if modules.get(name, "transformers") == "transformers"} == set()
    for name in VLLM.transformers:
        assert modules.get(name) == "transformers" or (name not in modules and is_compatible(name)), name
    ranks = re.search(r"MaxLoRARanks = Literal\[(.*)\]", (package / "config" / "lora.py").read_text())
    assert VLLM.lora_ranks == tuple(int(rank) for rank in ranks[1].split(","))


def test_the_table_is_that_of_sglang():
    package = sources() / "sglang"
    assert f"version = '{SGLANG.version}'" in (package / "_version.py").read_text()
    served = set()
    for file in (package / "srt" / "models").glob("*.py"):
        for statement in ast.parse(file.read_text()).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "EntryClass":
                value = statement.value
                served |= {ast.unparse(item) for item in (value.elts if isinstance(value, ast.List) else [value])}
    written = {module.ARCHITECTURE for module in FAMILIES.values()}
    assert served & written == SGLANG.own
    assert {name for name in written - SGLANG.own if is_compatible(name)} == SGLANG.transformers
    assert served & set(CLASSIFIERS.values()) == SGLANG.classifiers
