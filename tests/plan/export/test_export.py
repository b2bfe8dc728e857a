"""Exports, read back without the trainers: degrees, batches, the model and the text."""

import ast
import json
import math
import re
import shlex
from dataclasses import replace

import pytest
import yaml
from export_jobs import EVERYONE, EXAMPLES, LLAMA2_7B, MIXED_WINDOWS, job

from kumi.errors import ConfigError, LayoutError
from kumi.export import TRAINERS, export, megatron_lm, unsupported
from kumi.export.text import as_comment, command_line_options, to_yaml
from kumi.plan.engines import ENGINES
from kumi.spec.layout import Layout
from kumi.spec.uniform_layers import as_repeated_lists, uniform_layers

ABLE = [(name, trainer) for name, (_, _, able) in EXAMPLES.items() for trainer in able]


def files(name, trainer, **more):
    work, layout, _ = EXAMPLES[name]
    return export(work, layout, trainer, **more)


def bash_options(text):
    """Return the options in the array ARGS of a shell file: name -> values."""
    options = {}
    for line in re.search(r"^ARGS=\((.*?)^\)", text, re.M | re.S).group(1).splitlines():
        words = shlex.split(line, comments=True)
        if words:
            options[words[0].removeprefix("--")] = words[1:]
    return options


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_plan_is_exported_for_exactly_the_trainers_that_support_it(name):
    work, layout, able = EXAMPLES[name]
    assert tuple(trainer for trainer in EVERYONE if not unsupported(work, layout, trainer)) == able
    for trainer in set(EVERYONE) - set(able):
        with pytest.raises(LayoutError, match=f"{trainer} does not support this plan: "):
            export(work, layout, trainer)


@pytest.mark.parametrize(("name", "trainer"), ABLE)
def test_an_export_is_text_that_its_format_reads(name, trainer):
    exported = files(name, trainer)
    assert exported
    for file, text in exported.items():
        assert text.endswith("\n")
        assert not text.endswith("\n\n")
        assert all(line == line.rstrip() for line in text.splitlines()), file
        if file.endswith(".json"):
            json.loads(text)
        elif file.endswith(".yaml"):
            assert isinstance(yaml.safe_load(text), dict)
        elif file.endswith(".py"):
            ast.parse(text)
        else:
            assert text.startswith("#!/usr/bin/env bash\n")
            assert bash_options(text)


def test_an_export_is_a_pure_function():
    assert all(files(name, trainer) == files(name, trainer) for name, trainer in ABLE)


@pytest.mark.parametrize("name", [name for name, (_, _, able) in EXAMPLES.items() if "megatron-lm" in able])
def test_megatron_s_degrees_and_batch_multiply(name):
    work, layout, _ = EXAMPLES[name]
    text = files(name, "megatron-lm")["megatron_lm.sh"]
    options = bash_options(text)
    keys = (
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "context-parallel-size",
        "micro-batch-size",
        "global-batch-size",
        "seq-length",
        "num-layers",
    )
    number = {key: int(options[key][0]) for key in keys}
    launch = dict(re.findall(r"--(nnodes|nproc-per-node) (\d+)", text))
    world = int(launch.get("nnodes", 1)) * int(launch["nproc-per-node"])
    parallel = math.prod(number[f"{axis}-parallel-size"] for axis in ("tensor-model", "pipeline-model", "context"))
    assert world == layout.world_size
    assert world // parallel == layout.dp
    assert number["global-batch-size"] * number["seq-length"] == work.batch.tokens_per_step
    assert number["global-batch-size"] % (layout.dp * number["micro-batch-size"]) == 0
    assert number["num-layers"] == work.model.num_hidden_layers
    assert ("use-distributed-optimizer" in options) == (layout.zero > 0)
    assert ("use-megatron-fsdp" in options) == (layout.zero > 1)


def test_megatron_lm_as_a_whole():
    text = files("3d", "megatron-lm")["megatron_lm.sh"]
    options = bash_options(text)
    assert options["num-query-groups"] == ["8"]
    assert options["rope-scaling-factor"] == ["8.0"]
    assert options["recompute-modules"] == ["layernorm"]
    assert options["min-lr"] == ["3e-05"]
    assert {"sequence-parallel", "swiglu", "disable-bias-linear", "untie-embeddings-and-output-weights"} <= set(options)
    assert "add-qkv-bias" not in options
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" in text
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS\n" in files("fsdp", "megatron-lm")["megatron_lm.sh"]
    assert "gated products of dense" in " ".join(text.replace("#", "").split())


def test_megatron_s_arguments_list_every_layer_that_differs():
    options = bash_options(files("windows", "megatron-lm")["megatron_lm.sh"])
    assert options["window-size"] == ["1023,0"]
    assert eval(options["window-attn-skip-freq"][0]) == [1, 1, 1, 0] * 9
    assert options["window-attn-skip-freq"] == ["([1]*3+[0])*9"]
    options = bash_options(files("mla", "megatron-lm")["megatron_lm.sh"])
    assert eval(options["moe-layer-freq"][0]) == [0] * 3 + [1] * 58
    assert options["pipeline-model-parallel-layout"][0].count("t*4") == 13
    assert sum(map(int, re.findall(r"t\*(\d+)", options["pipeline-model-parallel-layout"][0]))) == 61
    options = bash_options(files("uneven", "megatron-lm")["megatron_lm.sh"])
    assert options["pipeline-model-parallel-layout"] == ["Et*7|t*9|t*9|t*7L"]


def test_recomputed_layers_of_a_rank_are_counted_per_stage():
    work, layout, _ = EXAMPLES["interleaved"]
    some = replace(layout, recompute="full", recompute_layers=10)
    options = bash_options(export(work, some, "megatron-lm")["megatron_lm.sh"])
    assert [*options["recompute-method"], *options["recompute-num-layers"]] == ["block", "2"]
    assert any(
        "recompute_layers=7" in reason and "multiple of 5" in reason
        for reason in unsupported(work, replace(some, recompute_layers=7), "megatron-lm")
    )


def test_a_plan_for_megatron_recomputes_what_megatron_does():
    work, layout, _ = EXAMPLES["3d"]
    text = export(replace(work, engine=ENGINES["megatron-lm"]), layout, "megatron-lm")["megatron_lm.sh"]
    assert bash_options(text)["recompute-modules"] == ["core_attn"]
    assert "gated products" not in text


def test_gradients_travel_as_the_planned_engine_has_them():
    work, layout, _ = EXAMPLES["3d"]
    for engine, half in (("megatron-lm", False), ("megatron-bridge", True)):
        planned = replace(work, engine=ENGINES[engine])
        options = bash_options(export(planned, layout, "megatron-lm")["megatron_lm.sh"])
        recipe = export(planned, layout, "megatron-bridge")["megatron_bridge_recipe.py"]
        assert ("grad-reduce-in-bf16" in options) == ("tp-comm-overlap" in options) == half
        assert f"grad_reduce_in_fp32={not half}," in recipe
        assert ("tp_comm_overlap=True," in recipe) == half
    work, layout, _ = EXAMPLES["zero2"]
    for engine, word in (("kumi", "fp32"), ("deepspeed", "bf16")):
        planned = replace(work, engine=ENGINES[engine])
        config = json.loads(export(planned, layout, "deepspeed")["ds_config.json"])
        assert config["communication_data_type"] == word
        note = "# Gradients:" in export(planned, layout, "accelerate-fsdp")["accelerate_fsdp.yaml"]
        assert note == (engine == "kumi")


def test_megatron_bridge_has_the_same_model_and_layout():
    recipe = files("interleaved", "megatron-bridge")["megatron_bridge_recipe.py"]
    for line in (
        "num_layers=80",
        "virtual_pipeline_model_parallel_size=5",
        "tensor_model_parallel_size=8",
        "global_batch_size=256",
        "params_dtype=torch.bfloat16",
        "rope_scaling_factor=8.0",
        "activation_func=torch.nn.functional.silu",
        "should_pad_vocab=True",
    ):
        assert f"    {line},\n" in recipe
    latent = files("mla", "megatron-bridge")["megatron_bridge_recipe.py"]
    assert "from megatron.bridge.models.mla_provider import MLAModelProvider\n" in latent


@pytest.mark.parametrize("name", [name for name, (_, _, able) in EXAMPLES.items() if "deepspeed" in able])
def test_deepspeed_s_batch_multiplies(name):
    work, layout, _ = EXAMPLES[name]
    config = json.loads(files(name, "deepspeed")["ds_config.json"])
    ranks = layout.world_size // config.get("tensor_parallel", {}).get("autotp_size", 1)
    assert ranks == layout.dp
    share = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == share * ranks == work.batch.sequences
    assert config["zero_optimization"]["stage"] == layout.zero
    options = bash_options(files(name, "deepspeed")["deepspeed.sh"])
    assert int(options["per_device_train_batch_size"][0]) == config["train_micro_batch_size_per_gpu"]
    assert int(options["gradient_accumulation_steps"][0]) == config["gradient_accumulation_steps"]


def test_deepspeed_moves_states_where_the_plan_has_them():
    zero = {
        name: json.loads(files(name, "deepspeed")["ds_config.json"])["zero_optimization"]
        for name in ("offload-optimizer", "offload", "nvme", "fsdp")
    }
    assert zero["offload-optimizer"]["offload_optimizer"]["device"] == "cpu"
    assert "offload_param" not in zero["offload-optimizer"]
    assert zero["offload"]["offload_param"]["device"] == "cpu"
    assert zero["nvme"]["offload_param"]["device"] == zero["nvme"]["offload_optimizer"]["device"] == "nvme"
    assert not [key for key in zero["fsdp"] if key.startswith("offload")]


@pytest.mark.parametrize("name", [name for name, (_, _, able) in EXAMPLES.items() if "accelerate-fsdp" in able])
def test_accelerate_s_degrees_multiply(name):
    _, layout, _ = EXAMPLES[name]
    config = yaml.safe_load(files(name, "accelerate-fsdp")["accelerate_fsdp.yaml"])
    assert config["num_processes"] == layout.world_size
    if layout.zero:
        assert math.prod(config["parallelism_config"].values()) == layout.world_size
        assert config["fsdp_config"]["fsdp_reshard_after_forward"] == (layout.zero == 3)
    else:
        assert config["distributed_type"] == ("MULTI_GPU" if layout.world_size > 1 else "NO")


def test_layers_are_recomputed_once_not_twice():
    both = files("fsdp", "accelerate-fsdp")
    assert yaml.safe_load(both["accelerate_fsdp.yaml"])["fsdp_config"]["fsdp_activation_checkpointing"] is True
    assert bash_options(both["accelerate_fsdp.sh"])["gradient_checkpointing"] == ["false"]
    assert bash_options(files("fsdp", "deepspeed")["deepspeed.sh"])["gradient_checkpointing"] == ["true"]


def test_torchtitan_s_stages_are_the_plan_s():
    module = files("uneven", "torchtitan")["kumi_torchtitan.py"]
    parts = eval(re.search(r"module_fqns_per_model_part=(\[.*?\]),\n        \),", module, re.S).group(1))
    layers = [[name for name in part if name.startswith("layers.")] for part in parts]
    assert [len(part) for part in layers] == [7, 9, 9, 7]
    assert [name for part in layers for name in part] == [f"layers.{index}" for index in range(32)]
    assert parts[0][0] == "tok_embeddings"
    assert parts[-1][-2:] == ["norm", "lm_head"]
    # A pipeline takes a rank's sequences at once.
    assert "local_batch_size=32," in module
    assert "pipeline_parallel_microbatch_size=1," in module


def test_torchtitan_holds_logits_as_the_planned_engine_does():
    assert "loss=ChunkedLossWrapper.Config(" in files("uneven", "torchtitan")["kumi_torchtitan.py"]
    assert "loss=CrossEntropyLoss.Config(" in files("zb-v", "torchtitan")["kumi_torchtitan.py"]


# The keys of nanotron's repository (v0.5). Its parser, which no package includes, refuses others.
NANOTRON = {
    "general": {
        "project",
        "run",
        "seed",
        "step",
        "consumed_train_samples",
        "benchmark_csv_path",
        "ignore_sanity_checks",
    },
    "parallelism": {
        "dp",
        "pp",
        "tp",
        "pp_engine",
        "tp_mode",
        "tp_linear_async_communication",
        "recompute_layer",
        "moe_layer_recompute",
        "tp_recompute_allgather",
        "expert_parallel_size",
        "context_parallel_size",
    },
    "model": {"model_config", "init_method", "dtype", "make_vocab_size_divisible_by", "ddp_bucket_cap_mb"},
    "tokens": {
        "sequence_length",
        "train_steps",
        "micro_batch_size",
        "batch_accumulation_per_replica",
        "val_check_interval",
        "limit_val_batches",
        "limit_test_batches",
    },
    "optimizer": {
        "optimizer_factory",
        "zero_stage",
        "weight_decay",
        "clip_grad",
        "accumulate_grad_in_fp32",
        "learning_rate_scheduler",
        "weight_decay_exclude_named_params",
    },
    "tokenizer": {"tokenizer_name_or_path", "tokenizer_revision", "tokenizer_max_length"},
    "checkpoints": {
        "checkpoints_path",
        "checkpoint_interval",
        "save_initial_state",
        "save_final_state",
        "resume_checkpoint_path",
        "load_lr_scheduler",
        "load_optimizer",
        "checkpoints_path_is_shared_file_system",
    },
    "logging": {"log_level", "log_level_replica", "iteration_step_info_interval"},
}


@pytest.mark.parametrize("name", [name for name, (_, _, able) in EXAMPLES.items() if "nanotron" in able])
def test_nanotron_s_repository_knows_every_key(name):
    work, layout, _ = EXAMPLES[name]
    config = yaml.safe_load(files(name, "nanotron")["nanotron.yaml"])
    assert set(config) == {*NANOTRON, "data_stages"}
    for section, keys in NANOTRON.items():
        assert set(config[section]) <= keys, section
    degrees, tokens = config["parallelism"], config["tokens"]
    assert degrees["dp"] * degrees["pp"] * degrees["tp"] == layout.world_size
    share = tokens["micro_batch_size"] * tokens["batch_accumulation_per_replica"]
    assert share * degrees["dp"] * tokens["sequence_length"] == work.batch.tokens_per_step


def test_nanotron_s_old_release_gets_a_file_only_where_it_can():
    assert set(files("zero1", "nanotron")) == {"nanotron.yaml", "nanotron-0.4.yaml"}
    exported = files("one", "nanotron")
    assert set(exported) == {"nanotron.yaml"}
    assert "Release 0.4 lacks rope_theta=500000.0" in exported["nanotron.yaml"]


def test_the_number_of_steps_is_the_run_s():
    assert bash_options(files("zero1", "megatron-lm", steps=77)["megatron_lm.sh"])["train-iters"] == ["77"]
    assert yaml.safe_load(files("zero1", "nanotron", steps=77)["nanotron.yaml"])["tokens"]["train_steps"] == 77
    assert "steps=77," in files("ddp", "torchtitan", steps=77)["kumi_torchtitan.py"]


def test_an_unknown_trainer_is_refused_with_the_known_trainers():
    work, layout, _ = EXAMPLES["ddp"]
    with pytest.raises(ConfigError, match=r"trainer 'megatron' is unknown; kumi exports to megatron-lm, .*nanotron$"):
        export(work, layout, "megatron")
    assert tuple(TRAINERS) == EVERYONE


def test_every_reason_is_named_at_once():
    work, layout, _ = EXAMPLES["4d"]
    with pytest.raises(LayoutError) as error:
        export(work, replace(layout, schedule="dualpipe"), "megatron-lm")
    assert "schedule=dualpipe" in str(error.value)
    assert "zero=3 with pp=2" in str(error.value)


@pytest.mark.parametrize(
    ("trainer", "change", "words"),
    [
        ("megatron-lm", {"zero": 3, "pp": 2, "dp_shard": 4}, "Megatron-FSDP supports tp, cp and ep, not pp"),
        (
            "megatron-lm",
            {"pp": 2, "dp_shard": 4, "zero": 1, "schedule": "interleaved", "stages": 3, "microbatch": 16},
            "1 microbatches: Megatron interleaves them in groups of pp=2; use a multiple of 2",
        ),
        ("deepspeed", {"cp": 2, "dp_shard": 4, "zero": 3}, "cp=2: DeepSpeed shards sequences"),
        ("megatron-lm", {"cp": 2, "context": "ulysses"}, "context='ulysses': exports support ring attention only"),
        ("deepspeed", {"ep": 2, "dp_shard": 8, "zero": 3}, "AutoEP supports mixtral, .* not llama; set ep = 1"),
        ("deepspeed", {"dp_shard": 4, "dp_replicate": 2, "zero": 1}, "set dp_shard = 8 and dp_replicate = 1"),
        ("accelerate-fsdp", {"pp": 2, "dp_shard": 4, "zero": 3}, "accelerate has no pipeline"),
        ("accelerate-fsdp", {"dp_shard": 8, "zero": 1}, "use 0, 2 or 3"),
        ("torchtitan", {"dp_shard": 8, "zero": 1}, "use 0, 2 or 3"),
        ("torchtitan", {"pp": 4, "dp_shard": 2, "zero": 3, "schedule": "zb-h2"}, "schedule=zb-h2: torchtitan"),
        ("torchtitan", {"pp": 4, "dp_shard": 2, "zero": 3, "schedule": "zb-v"}, "runs it with 2 per rank"),
        (
            "torchtitan",
            {"tp": 8, "dp_shard": 1, "zero": 0, "recompute": "full", "recompute_layers": 3},
            "recompute_layers=3: torchtitan recomputes in all layers or in none",
        ),
        ("nanotron", {"dp_shard": 8, "zero": 2}, "zero=2: nanotron shards optimizer states at most; use 0 or 1"),
        ("nanotron", {"pp": 4, "dp_shard": 2, "zero": 1, "stages": 2, "schedule": "interleaved"}, "set stages = 1"),
        ("nanotron", {"tp": 2, "cp": 2, "dp_shard": 2, "zero": 1}, "cp=2: nanotron's Llama does not support it"),
        ("nanotron", {"dp_shard": 8, "zero": 1, "offload": "optimizer"}, "offload=optimizer: nanotron does not keep"),
        ("torchtitan", {"dp_replicate": 8, "microbatch": 3}, "24 sequences of 4096 tokens"),
    ],
)
def test_unsupported_values_are_refused_with_the_supported(trainer, change, words):
    reasons = unsupported(job(LLAMA2_7B, 8, 64), Layout(**change), trainer)
    assert any(re.search(words, reason) for reason in reasons), reasons


FOREIGN = {
    "capped": {"attention": {"softcap": 50.0}},
    "scaled": {"attention": {"score_scale": 0.1}},
    "biased": {"attention": {"alibi": True, "rope": None}},
    "neighbours": {"rope": {"interleave": True}},
    "no norms before": {"layer": {"pre_norms": False, "post_norms": True}},
    "logits": {"logit_softcap": 30.0},
    "embeddings": {"embedding_scale": 8.0},
    "positions": {"learned_positions": 64},
    "longrope": {"rope": {"scaling": "longrope"}},
    "tables": {"attention": {"rope": None}, "learned_positions": 64},
}


@pytest.mark.parametrize("trainer", ["torchtitan", "nanotron", "megatron-lm", "megatron-bridge"])
@pytest.mark.parametrize("name", FOREIGN)
def test_features_that_a_trainer_s_layers_lack_are_never_dropped(name, trainer):
    change = dict(FOREIGN[name])
    layer, of_layer, of_rope = LLAMA2_7B.layers[0], change.pop("layer", {}), change.pop("rope", {})
    attention = replace(layer.attention, rope=replace(layer.attention.rope, **of_rope))
    layer = replace(layer, attention=replace(attention, **change.pop("attention", {})), **of_layer)
    layout = Layout(dp_shard=8, zero=1 if trainer == "nanotron" else 3)
    plain, reasons = (
        set(unsupported(job(model, 8, 64), layout, trainer))
        for model in (LLAMA2_7B, replace(LLAMA2_7B, layers=(layer,) * 32, **change))
    )
    # Of these features, Megatron-LM supports only learned positions.
    assert bool(reasons - plain) == (trainer in ("torchtitan", "nanotron") or name not in ("tables", "positions"))


def test_every_reason_names_a_value_and_ends_without_a_stop():
    for work, layout, able in EXAMPLES.values():
        for trainer in set(EVERYONE) - set(able):
            for reason in unsupported(work, layout, trainer):
                assert not reason.endswith((".", ";", " "))
                assert len(reason) < 240
                assert "\n" not in reason


def test_layers_may_differ_in_their_windows_only():
    layers = uniform_layers(MIXED_WINDOWS)
    assert layers.window == 1024
    assert layers.windows == (1024, 1024, 1024, None) * 9
    different = replace(MIXED_WINDOWS.layers[0], post_norms=True)
    assert uniform_layers(replace(MIXED_WINDOWS, layers=(different, *MIXED_WINDOWS.layers[1:]))) is None


@pytest.mark.parametrize("flags", [[1], [0, 1], [1] * 5, [1, 1, 0] * 4, [0, 0, 0, *[1] * 58], [1, 0, 0, 1, 1, 0]])
def test_runs_of_flags_evaluate_to_themselves(flags):
    assert eval(as_repeated_lists(flags)) == flags
    assert re.fullmatch(r"[,\d\[\]()+*]+", as_repeated_lists(flags))


def test_arguments_are_quoted_for_the_shell():
    options = command_line_options({"flag": True, "no": False, "none": None, "text": "a b|c", "list": [1, 2]})
    assert options == ["--flag", "--text 'a b|c'", "--list 1 2"]


def test_small_numbers_stay_numbers_in_yaml():
    value = {"eps": 1e-8, "rate": 3e-4, "big": 1.5e20, "list": [1, 2]}
    assert yaml.safe_load(to_yaml(value, ["a head"])) == value


def test_comments_are_folded_but_commands_are_not():
    words = "word " * 40
    folded = as_comment([words.strip(), "$ " + words.strip()])
    lines = folded.splitlines()
    assert all(len(line) <= 104 for line in lines[:-1])
    assert lines[-1] == "# $ " + words.strip()
    assert " ".join(folded.replace("#", "").split()) == (words + "$ " + words).strip()


def test_the_model_of_every_megatron_example_has_its_arguments_once():
    for name, (work, layout, able) in EXAMPLES.items():
        if "megatron-lm" in able:
            groups = megatron_lm.argument_groups(work, layout, 10).values()
            keys = [key for group in groups for key in group]
            assert len(keys) == len(set(keys)), name
