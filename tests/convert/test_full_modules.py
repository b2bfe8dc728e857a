"""Modules that are trained in full beside adapters: PEFT loads them, kumi reads them again, and merges them."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_lora_adapter import FAMILIES, TOKENS, adapted, with_peft, written

import tiny_models
from kumi.convert import merge
from kumi.convert.hf.adapter_read import adapters_reader, read_full_modules
from kumi.convert.hf.adapter_write import CONFIG, PREFIX, WEIGHTS
from kumi.convert.hf.full_modules import full_tensors
from kumi.convert.load_weights import load_decoder
from kumi.convert.open_model import open_source
from kumi.errors import ConfigError, ModelError
from kumi.nn.decoder import Decoder
from kumi.spec import families
from kumi.spec.adapters import is_adapter
from kumi.spec.ledger import ops, trained_names
from kumi.spec.lora import Lora
from kumi.spec.peft import with_adapters

SOME = Lora(4, 6.0, ("q_proj", "o_proj"), modules=("embed_tokens", "lm_head"))
# Two tables, one tied table, layer norms with biases under other names, norms of zero-centred weights.
CASES = [
    ("llama", replace(SOME, modules=("embed_tokens", "lm_head", "norm", "input_layernorm"))),
    ("qwen3-biases", replace(SOME, modules=("lm_head", "q_norm"))),
    ("gpt2", replace(SOME, modules=("embed_tokens", "embed_positions", "norm"))),
    pytest.param(
        "gpt-neox", replace(SOME, modules=("lm_head", "post_attention_layernorm")), marks=pytest.mark.exhaustive
    ),
    pytest.param("gemma3", replace(SOME, modules=("embed_tokens", "norm")), marks=pytest.mark.exhaustive),
    pytest.param("mixtral", replace(SOME, targets=("experts",)), marks=pytest.mark.exhaustive),
]


def trained(base, lora):
    """The model in `base` with random adapters, and changed modules that are trained in full."""
    decoder = adapted(base, lora)
    draw = torch.Generator().manual_seed(3)
    full = [name for name in sorted(trained_names(decoder.spec)) if not is_adapter(name)]
    with torch.no_grad():
        for name in full:
            value = decoder.get_parameter(name)
            value += 0.2 * torch.randn(value.shape, generator=draw)
    return decoder, full


@pytest.mark.parametrize(("case", "lora"), CASES)
def test_peft_computes_the_same_with_it_and_merged(saved, tmp_path, case, lora):
    base = saved(case)
    decoder, full = trained(base, lora)
    folder = written(decoder, tmp_path / "adapter", base)
    with torch.no_grad():
        ours, theirs = decoder(TOKENS), with_peft(base, folder)(TOKENS).logits
        assert (ours - adapted(base, replace(lora, modules=()))(TOKENS)).abs().max() > 0.05
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert set(read_full_modules(folder, open_source(base).spec)) == set(full)
    source = merge.open_merged(folder)
    assert merge.check_merged(folder, None, source) < 1e-4
    whole = Decoder(source.spec)
    with torch.no_grad():
        for name, tensor in whole.state_dict().items():
            tensor.copy_(source.read(name))
        assert (whole(TOKENS) - theirs).abs().max() <= 2e-5 * theirs.abs().max()
    read = adapters_reader(folder, decoder.spec)
    for name in full:
        value = decoder.get_parameter(name)
        assert read(f"model/{name}", (0,) * value.ndim, tuple(value.shape)).equal(value)


def test_modules_that_peft_trained_are_read(saved, tmp_path):
    base = saved("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft

        model = transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation="eager"
        )
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"], init_lora_weights=False
        )
        model = peft.get_peft_model(model, config)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "modules_to_save" in name:
                    value.mul_(1.5)
        model.eval().save_pretrained(tmp_path / "adapter")
    decoder = merge.unmerged_decoder(merge.open_unmerged(tmp_path / "adapter", str(base)))
    with torch.no_grad():
        theirs = model(TOKENS).logits
        assert (decoder(TOKENS) - theirs).abs().max() <= 1e-5 * theirs.abs().max()
        assert (theirs - load_decoder(base)(TOKENS)).abs().max() > 0.05


def test_a_tied_table_and_head_must_be_equal(saved, tmp_path):
    base = saved("qwen3-biases")
    spec = open_source(base).spec
    folder = written(trained(base, SOME)[0], tmp_path / "adapter", base)
    config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    assert config["modules_to_save"] == ["lm_head", "model.embed_tokens"]
    head = f"{PREFIX}lm_head.weight"
    save_file({**tensors, head: tensors[head] + 1}, folder / WEIGHTS)
    with pytest.raises(ModelError, match="the token table and the head differ"):
        read_full_modules(folder, spec)
    save_file({name: tensor for name, tensor in tensors.items() if name != head}, folder / WEIGHTS)
    with pytest.raises(ModelError, match=r"has no 'lm_head\.weight'"):
        read_full_modules(folder, spec)
    (folder / CONFIG).write_text(json.dumps(config | {"ensure_weight_tying": True}))
    assert set(read_full_modules(folder, spec)) == {"model.embed_tokens.weight"}


def test_other_modules_are_refused(saved, tmp_path):
    base = saved("llama")
    folder = written(trained(base, SOME)[0], tmp_path / "adapter", base)
    spec = open_source(base).spec
    for modules in ((), ("lm_head",)):
        with pytest.raises(ModelError, match=r"lora\.modules_to_save disagree about"):
            adapters_reader(folder, with_adapters(spec, replace(SOME, modules=modules)))
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, f"{PREFIX}lm_head.weight": torch.zeros(3, 4)}, folder / WEIGHTS)
    with pytest.raises(ModelError, match=r"has the shape \(3, 4\)"):
        read_full_modules(folder, spec)


@pytest.mark.parametrize(
    ("modules", "quantize", "message"),
    [
        (("lm_hed",), "", "did you mean 'lm_head'"),
        (("up_proj",), "", "trained by adapters only"),
        (("up_proj",), "nf4", "keeps in four bits and cannot train"),
    ],
)
def test_modules_that_cannot_be_are_refused(saved, modules, quantize, message):
    with pytest.raises(ConfigError, match=message):
        with_adapters(open_source(saved("llama")).spec, replace(SOME, modules=modules, quantize=quantize))


@pytest.mark.parametrize("case", sorted(set(FAMILIES.values())))
def test_every_tensor_is_one_of_transformers(case):
    model = tiny_models.build_reference(case)
    spec, there = families.from_hf(model.config.to_dict()), model.state_dict()
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = ("embedding", "positions", "norm", "log_prob")
    names = tuple(dict.fromkeys(op.name for op in ops(spec) if op.kind in kinds))
    full = full_tensors(replace(spec, lora=Lora(4, 6.0, modules=names)))
    assert {tensor.native for tensor in full.values()} >= {"model.embed_tokens.weight", "model.norm.weight"}
    for name, tensor in full.items():
        assert tuple(there[name].shape) == tensor.shape
        # PEFT takes the entry as the end of a name, which must not select another module.
        module = name.rpartition(".")[0]
        assert [other for other in modules if other.endswith(module)] == [module]
