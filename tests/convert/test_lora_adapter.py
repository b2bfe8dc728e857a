"""Folders of adapters: PEFT and kumi compute the same with each other's adapters, and with merged weights."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tiny_models
from kumi.convert import merge
from kumi.convert.hf.adapter_read import initial_adapter_params, read_adapters
from kumi.convert.hf.adapter_write import CONFIG, WEIGHTS, modules, write_adapter
from kumi.convert.load_weights import load_decoder
from kumi.convert.open_model import open_source
from kumi.errors import ConfigError, ModelError
from kumi.nn.decoder import Decoder
from kumi.nn.lora import insert_adapters
from kumi.spec import families, ledger
from kumi.spec.adapters import is_adapter
from kumi.spec.lora import Lora
from kumi.spec.peft import with_adapters

ATTENTION = ("q_proj", "v_proj")
# Plain names, fused rows, groups of heads, matrices the other way round, latents, experts beside.
CASES = [
    ("llama", Lora(4, 6.0, ATTENTION)),
    ("llama", Lora(4, 6.0, ("all-linear",), use_rslora=True)),
    ("llama-biases", Lora(3, 5.0, ("all-linear",), use_dora=True)),
    ("phi3", Lora(4, 6.0, (*ATTENTION, "up_proj", "down_proj"))),
    ("gpt-neox", Lora(4, 6.0, ("all-linear",), use_dora=True, use_rslora=True)),
    ("gpt2", Lora(4, 6.0, ("q_proj", "o_proj", "up_proj"))),
    ("deepseek-v3", Lora(4, 6.0, ("all-linear",))),
    ("qwen3-moe", Lora(4, 6.0, ("q_proj", "o_proj"), use_dora=True)),
]


def adapted(folder, lora, seed=0):
    """The model in `folder` with adapters of random values."""
    plain = load_decoder(folder)
    spec = with_adapters(plain.spec, lora)
    lora = spec.lora
    decoder = Decoder(spec)
    decoder.load_state_dict(plain.state_dict())
    insert_adapters(decoder, spec, lora, dtype=torch.float32)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in decoder.named_parameters():
            if is_adapter(name):
                value.copy_(torch.randn(value.shape, generator=draw) * 0.3 + (1.0 if value.ndim == 1 else 0.0))
    return decoder.eval()


def written(decoder, folder, base):
    own = dict(decoder.named_parameters())
    write_adapter(folder, decoder.spec, lambda name: own[name].detach(), base=str(base))
    return folder


def with_peft(base, folder, trainable=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft  # takes seconds

        model = transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation="eager"
        )
        return peft.PeftModel.from_pretrained(model, folder, is_trainable=trainable).eval()


TOKENS = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("case", "lora"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_peft_computes_the_same_with_it_and_merged(saved, tmp_path, case, lora):
    base = saved(case)
    decoder = adapted(base, lora)
    folder = written(decoder, tmp_path / "adapter", base)
    with torch.no_grad():
        plain, ours = load_decoder(base)(TOKENS), decoder(TOKENS)
        theirs = with_peft(base, folder)(TOKENS).logits
        assert (ours - plain).abs().max() > 0.05
        assert (ours - theirs).abs().max() < 1e-4
    source = merge.open_merged(folder)
    assert merge.check_merged(folder, None, source) < 1e-4
    whole = Decoder(source.spec)
    with torch.no_grad():
        for name, tensor in whole.state_dict().items():
            tensor.copy_(source.read(name))
        assert (whole(TOKENS) - theirs).abs().max() < 1e-4


FAMILIES = {name.split("-")[0]: name for name in reversed(tiny_models.CASES)} | {
    name: name
    for name in ("gpt-neox", "qwen2-moe", "qwen2.5-vl", "qwen3-vl", "gemma3", "gpt-oss", "nemotron-h-moe")
    if name in tiny_models.CASES
}


@pytest.mark.parametrize("case", sorted(set(FAMILIES.values())))
def test_every_module_is_one_of_transformers(case):
    model = tiny_models.build_reference(case)
    spec, there = families.from_hf(model.config.to_dict()), dict(model.named_modules())
    names = modules(spec)
    assert {piece.native for module in names.values() for piece in module.pieces} == {
        op.name for op in ledger.ops(spec) if op.kind == "linear" and not op.experts
    }
    for module in names.values():
        shape = (module.columns, module.rows) if module.transposed else (module.rows, module.columns)
        assert tuple(there[module.name].weight.shape) == shape


def test_gradients_are_those_of_peft(saved, tmp_path):
    base = saved("llama")
    decoder = adapted(base, Lora(4, 6.0, ("all-linear",), use_dora=True, use_rslora=True))
    model = with_peft(base, written(decoder, tmp_path / "adapter", base), trainable=True)
    labels = TOKENS.roll(-1, 1)
    for logits in (decoder(TOKENS), model(TOKENS).logits):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    theirs = {
        name.replace(".default", "").removeprefix("base_model.model.").replace("vector.weight", "vector"): value
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    ours = {name: value for name, value in decoder.named_parameters() if value.grad is not None}
    assert set(ours) == set(theirs)
    assert len(ours) == 2 * 7 * 3
    for name, value in ours.items():
        assert (value.grad - theirs[name].grad).norm() <= 1e-4 * theirs[name].grad.norm(), name


@pytest.mark.parametrize(("case", "lora"), [CASES[2], CASES[3], CASES[4]], ids=lambda value: str(value)[:6])
def test_what_was_written_is_read_again(saved, tmp_path, case, lora):
    base = saved(case)
    decoder = adapted(base, lora)
    folder = written(decoder, tmp_path / "adapter", base)
    adapters = initial_adapter_params(read_adapters(folder, open_source(base).spec), decoder.spec, folder)
    own = {name: value for name, value in decoder.named_parameters() if is_adapter(name)}
    assert set(adapters) == set(own)
    assert all(adapters[name].equal(value) for name, value in own.items())


def test_adapters_that_peft_wrote_are_read(saved, tmp_path):
    base = saved("phi3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft

        model = transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation="eager"
        )
        config = peft.LoraConfig(
            r=4,
            lora_alpha=9,
            target_modules=["qkv_proj", "down_proj"],
            task_type="CAUSAL_LM",
            rank_pattern={"down_proj": 2},
            alpha_pattern={"down_proj": 3},
            init_lora_weights=False,
        )
        model = peft.get_peft_model(model, config).eval()
        model.save_pretrained(tmp_path / "adapter")
    source = merge.open_merged(tmp_path / "adapter", str(base))
    merge.check_merged(tmp_path / "adapter", str(base), source)
    with torch.no_grad():
        whole = Decoder(source.spec)
        for name, tensor in whole.state_dict().items():
            tensor.copy_(source.read(name))
        assert (whole(TOKENS) - model(TOKENS).logits).abs().max() < 1e-4
    rows = source.reader.read("model.layers.1.self_attn.k_proj.weight", (3, 5), (4, 7))
    assert rows.equal(source.read("model.layers.1.self_attn.k_proj.weight")[3:7, 5:12])


def test_the_configuration_names_modules_as_peft_does(saved, tmp_path):
    base = saved("llama")
    folder = written(adapted(base, Lora(4, 6.0, ("self_attn.q_proj", "o_proj"))), tmp_path / "adapter", base)
    config = json.loads((folder / CONFIG).read_text())
    assert config["target_modules"] == ["o_proj", "q_proj"]
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 6, str(base))


def test_matrices_that_peft_takes_for_experts_get_no_adapters(saved):
    spec = open_source(saved("deepseek-v3")).spec
    targets = with_adapters(spec, Lora(4, 6.0)).lora.targets
    assert targets == tuple(
        f"self_attn.{one}" for one in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    )
    with pytest.raises(ConfigError, match="would confuse with a matrix of the routed experts"):
        with_adapters(spec, Lora(4, 6.0, ("gate_proj",)))


def _change(folder, **changes):
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_qalora": True}, "use_qalora=True is a setting"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
        ({"bias": "all"}, "bias='all'"),
        ({"r": 5}, "belong to different models"),
        ({"lora_alpha": "much"}, "must be a number"),
        ({"lora_alpha": -1}, "must be a positive number"),
        ({"lora_alpha": 1e308}, "must be a positive number"),
        ({"alpha_pattern": {"q_proj": 10**30}}, "must be a positive number"),
        ({"rank_pattern": [1]}, "must be an object"),
        ({"use_dora": "yes"}, "must be true or false"),
        ({"rank_pattern": {"(a+)+$": 3}}, "names only"),
        ({"base_model_name_or_path": None}, "--base FOLDER"),
        ({"base_model_name_or_path": "/no/such"}, "is not a folder here"),
    ],
)
def test_what_is_not_understood_is_refused(saved, tmp_path, change, message):
    base = saved("llama")
    folder = written(adapted(base, Lora(4, 6.0, ATTENTION)), tmp_path / "adapter", base)
    _change(folder, **change)
    with pytest.raises((ModelError, ConfigError), match=message.replace("(", r"\(")):
        merge.open_merged(folder)


def test_other_tensors_and_other_models_are_refused(saved, tmp_path):
    base = saved("llama")
    decoder = adapted(base, Lora(4, 6.0, ATTENTION))
    folder = written(decoder, tmp_path / "adapter", base)
    spec, tensors = open_source(base).spec, load_file(folder / WEIGHTS)
    with pytest.raises(ModelError, match=r"change \[lora\] to match"):
        initial_adapter_params(read_adapters(folder, spec), replace(spec, lora=Lora(4, 7.0, ATTENTION)), folder)
    with pytest.raises(ModelError, match="disagree about"):
        initial_adapter_params(read_adapters(folder, spec), replace(spec, lora=Lora(4, 6.0, ("q_proj",))), folder)
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}, folder / WEIGHTS)
    with pytest.raises(ModelError, match="is not an adapter of a layer's matrix"):
        read_adapters(folder, spec)
    (folder / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(ModelError, match="header"):
        read_adapters(folder, spec)


def test_a_merge_that_is_off_is_refused(saved, tmp_path):
    base = saved("llama")
    folder = written(adapted(base, Lora(4, 6.0, ATTENTION)), tmp_path / "adapter", base)
    with pytest.raises(ModelError, match="logits differ"):
        merge.check_merged(folder, None, open_source(base))


def test_part_of_a_fused_matrix_gets_no_magnitude(saved):
    with pytest.raises(ConfigError, match="name all of them"):
        with_adapters(open_source(saved("phi3")).spec, Lora(4, 6.0, ATTENTION, use_dora=True))
