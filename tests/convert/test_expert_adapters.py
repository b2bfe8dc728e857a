"""Adapters of routed experts: PEFT computes the same with them, merged or not, and reads what kumi wrote, and the other
way round."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import transformers
from test_lora_adapter import TOKENS, adapted, with_peft, written

import tiny_models
from kumi.convert import merge
from kumi.convert.hf.adapter_read import initial_adapter_params, read_adapters
from kumi.convert.hf.adapter_write import CONFIG
from kumi.convert.hf.expert_adapters import expert_matrices
from kumi.convert.load_weights import load_decoder
from kumi.convert.open_model import open_source
from kumi.errors import ConfigError, ModelError
from kumi.nn.decoder import Decoder
from kumi.nn.lora import without_adapters
from kumi.spec import families
from kumi.spec.adapters import is_adapter
from kumi.spec.lora import Lora
from kumi.spec.peft import with_adapters

BOTH = Lora(4, 6.0, ("q_proj", "experts"))
CASES = [
    ("mixtral", BOTH),
    ("qwen3-moe", Lora(3, 5.0, ("experts",), use_rslora=True)),
    # Gate and up alternate, and matrices are the other way round; the fused query, key and value have another rank.
    ("gpt-oss", Lora(4, 6.0, ("all-linear", "experts"))),
    ("deepseek-v3", Lora(4, 6.0, ("all-linear", "experts"))),
    pytest.param("qwen3-moe", Lora(4, 6.0, ("o_proj", "experts.down_proj")), marks=pytest.mark.exhaustive),
    pytest.param("mixtral", Lora(4, 6.0, ("experts.gate_up_proj",)), marks=pytest.mark.exhaustive),
    pytest.param("glm4-moe", BOTH, marks=pytest.mark.exhaustive),
    pytest.param("qwen2-moe", BOTH, marks=pytest.mark.exhaustive),
    pytest.param("olmoe", BOTH, marks=pytest.mark.exhaustive),
    pytest.param("nemotron-h-moe", BOTH, marks=pytest.mark.exhaustive),
]


def _apart(first, second):
    """The largest difference of logits, relative to the largest logit."""
    return float((first - second).abs().max() / second.abs().max())


@pytest.mark.parametrize(("case", "lora"), CASES)
def test_peft_computes_the_same_with_it_and_merged(saved, tmp_path, case, lora):
    base = saved(case)
    decoder = adapted(base, lora)
    folder = written(decoder, tmp_path / "adapter", base)
    with torch.no_grad():
        plain, ours = load_decoder(base)(TOKENS), decoder(TOKENS)
        with without_adapters(decoder):
            assert decoder(TOKENS).equal(plain)
        model = with_peft(base, folder)
        theirs = model(TOKENS).logits
        assert _apart(ours, plain) > 0.02
        assert _apart(ours, theirs) < 1e-5
        merged = model.merge_and_unload()(TOKENS).logits
    source = merge.open_merged(folder)
    assert merge.check_merged(folder, None, source) < 1e-4
    whole = Decoder(source.spec)
    with torch.no_grad():
        for name, tensor in whole.state_dict().items():
            tensor.copy_(source.read(name))
        assert _apart(whole(TOKENS), merged) < 1e-5
    again = initial_adapter_params(read_adapters(folder, open_source(base).spec), decoder.spec, folder)
    own = {name: value for name, value in decoder.named_parameters() if is_adapter(name)}
    assert set(again) == set(own)
    assert all(again[name].equal(value) for name, value in own.items())


def test_slices_are_merged_as_the_whole(saved, tmp_path):
    base = saved("mixtral")
    source = merge.open_merged(written(adapted(base, BOTH), tmp_path / "adapter", base))
    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
        part = source.reader.read(name, (1, 3, 5), (2, 4, 7))
        torch.testing.assert_close(part, source.read(name)[1:3, 3:7, 5:12])


def test_adapters_that_peft_wrote_are_read(saved, tmp_path):
    base = saved("qwen3-moe")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft

        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        config = peft.LoraConfig(
            r=4,
            lora_alpha=9,
            target_modules=["o_proj"],
            target_parameters=["mlp.experts.down_proj", "experts.gate_up_proj"],
            rank_pattern={"experts.down_proj": 2},
            init_lora_weights=False,
        )
        model = peft.get_peft_model(model, config).eval()
        model.save_pretrained(tmp_path / "adapter")
    source = merge.open_merged(tmp_path / "adapter", str(base))
    merge.check_merged(tmp_path / "adapter", str(base), source)
    decoder = merge.unmerged_decoder(merge.open_unmerged(tmp_path / "adapter", str(base)))
    with torch.no_grad():
        assert _apart(decoder(TOKENS), model(TOKENS).logits) < 1e-5


@pytest.mark.parametrize(
    "case", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek-v3", "glm4-moe", "gpt-oss", "nemotron-h-moe"]
)
def test_every_matrix_is_a_parameter_of_transformers(case):
    model = tiny_models.build_reference(case)
    spec, there = families.from_hf(model.config.to_dict()), dict(model.named_parameters())
    matrices = expert_matrices(spec)
    assert matrices
    for matrix in matrices.values():
        assert set(there[matrix.parameter].shape) == {matrix.experts, len(matrix.order), matrix.columns}
        assert matrix.order.sort().values.equal(torch.arange(len(matrix.order)))


def test_gradients_are_those_of_peft(saved, tmp_path):
    base = saved("mixtral")
    decoder = adapted(base, BOTH)
    model = with_peft(base, written(decoder, tmp_path / "adapter", base), trainable=True)
    labels = TOKENS.roll(-1, 1)
    for logits in (decoder(TOKENS), model(TOKENS).logits):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    theirs = dict(model.named_parameters())
    for layer in range(2):
        path = f"base_model.model.model.layers.{layer}.mlp.experts"
        for name, place in (("gate_up_proj", f"{path}.base_layer"), ("down_proj", path)):
            matrix = expert_matrices(decoder.spec)[f"model.layers.{layer}.mlp.experts.{name}"]
            grads = {f"lora_{one}.weight": theirs[f"{place}.lora_{one}.default.weight"].grad for one in "AB"}
            for factor, grad in zip("AB", matrix.factors(grads), strict=True):
                own = decoder.get_parameter(f"{matrix.native}_lora_{factor}").grad
                assert (own - grad).norm() <= 1e-4 * grad.norm()


def test_the_configuration_names_parameters_as_peft_does(saved, tmp_path):
    base = saved("mixtral")
    folder = written(adapted(base, BOTH), tmp_path / "adapter", base)
    config = json.loads((folder / CONFIG).read_text())
    assert config["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    assert config["target_modules"] == ["q_proj"]
    (folder / CONFIG).write_text(json.dumps(config | {"target_parameters": ["experts.down_proj"]}))
    with pytest.raises(ModelError, match="is not an adapter of a layer's matrix"):
        read_adapters(folder, open_source(base).spec)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (Lora(4, 6.0, ("experts",), dropout=0.1), r"lora.dropout=0.1 with 'experts' .* set lora.dropout = 0"),
        (Lora(4, 6.0, ("experts.down_proj",), use_dora=True), "lora.use_dora=true with 'experts.down_proj'"),
        (Lora(4, 6.0, ("gate_up_proj",)), "selected by 'experts.gate_up_proj'"),
        (Lora(4, 6.0, ("down_proj",)), "selected by 'experts.down_proj'"),
        (Lora(4, 6.0, ("experts.gate_proj",)), "have experts.gate_up_proj, experts.down_proj"),
    ],
)
def test_targets_that_cannot_be_are_refused(saved, lora, message):
    with pytest.raises(ConfigError, match=message):
        with_adapters(open_source(saved("mixtral")).spec, lora)


def test_a_dense_model_has_no_experts(saved):
    with pytest.raises(ConfigError, match="has no routed experts"):
        with_adapters(open_source(saved("llama")).spec, BOTH)
    assert with_adapters(open_source(saved("mixtral")).spec, Lora(4, 6.0)).lora.targets == tuple(
        f"self_attn.{one}_proj" for one in "qkvo"
    )
