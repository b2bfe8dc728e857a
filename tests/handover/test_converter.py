"""llama.cpp's converter reads kumi's exports: the tensors of the GGUF file are the export's, or it says why not.

Needs llama.cpp's source (`make handover`); `test_gguf_file.py` tests kumi's part alone.
"""

import json

import numpy as np
import pytest
import torch
from llama_cpp import converter, gguf
from tiny_exports import bpe_tokenizer, exported, file_tensors, gguf_tensors, model_folder, split
from tokenizers import pre_tokenizers

from kumi.convert.handover.gguf_file import write_gguf
from kumi.convert.hf.adapter_write import write_adapter
from kumi.convert.load_weights import load_decoder
from kumi.errors import RefusedError
from kumi.nn.decoder import Decoder
from kumi.nn.lora import insert_adapters
from kumi.spec.adapters import is_adapter
from kumi.spec.lora import Lora
from kumi.spec.peft import with_adapters

pytestmark = pytest.mark.exhaustive

# Each with the tokenizer that the converter looks for first in this family.
READ = [
    ("llama", "bpe"),
    ("llama-tied", "sentencepiece"),
    ("llama-biases", "bpe"),
    ("mistral", "sentencepiece"),
    ("mixtral", "sentencepiece"),
    ("qwen2", "bpe"),
    ("qwen3", "bpe"),
    ("qwen3-moe-norm", "bpe"),
    ("gemma", "sentencepiece"),
    ("gemma2", "sentencepiece"),
    ("gemma3", "sentencepiece"),
    ("phi3", "sentencepiece"),
    ("olmo2", "bpe"),
    ("olmoe", "bpe"),
    ("granite", "bpe"),
    ("smollm3", "bpe"),
]


def read(file):
    """The tensors of a GGUF file, and its fields."""
    reader = gguf().GGUFReader(file)
    return {tensor.name: tensor.data for tensor in reader.tensors}, reader


@pytest.mark.parametrize(("case", "tokenizer"), READ)
def test_tensors_read_back_are_those_of_the_export(tmp_path, case, tokenizer):
    home = converter()
    folder = exported(model_folder(tmp_path / "saved", case, tokenizer), tmp_path / "hf")
    write_gguf(folder, tmp_path / "model.gguf", home, "f32")
    tensors, reader = read(tmp_path / "model.gguf")
    expected = gguf_tensors(gguf(), folder)
    assert set(tensors) == set(expected)
    for name, array in expected.items():
        assert np.array_equal(tensors[name], array), name
    assert reader.fields["tokenizer.ggml.model"].contents() == {"bpe": "gpt2", "sentencepiece": "llama"}[tokenizer]
    assert tokenizer != "bpe" or reader.fields["tokenizer.ggml.pre"].contents() == "gpt-2"


def test_sixteen_bits_stay_as_they_are(tmp_path):
    home = converter()
    folder = exported(model_folder(tmp_path / "saved", "llama"), tmp_path / "hf", dtype="bfloat16")
    write_gguf(folder, tmp_path / "model.gguf", home)
    tensors, _ = read(tmp_path / "model.gguf")
    matrix = file_tensors(folder)["model.layers.0.mlp.up_proj.weight"]
    assert np.array_equal(tensors["blk.0.ffn_up.weight"].view(np.uint16), matrix.view(torch.uint16).numpy())


@pytest.mark.parametrize("case", ["llama", "qwen2", "phi3"])
def test_merged_adapters_read_back(tmp_path, case):
    home = converter()
    base = model_folder(tmp_path / "saved", case, "sentencepiece")
    plain = load_decoder(base)
    spec = with_adapters(plain.spec, Lora(4, 6.0, ("all-linear",)))
    decoder = Decoder(spec)
    decoder.load_state_dict(plain.state_dict())
    insert_adapters(decoder, spec, spec.lora, dtype=torch.float32)
    with torch.no_grad():
        for name, value in decoder.named_parameters():
            if is_adapter(name):
                value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    own = dict(decoder.named_parameters())
    write_adapter(tmp_path / "adapter", spec, lambda name: own[name].detach(), base=str(base))
    folder = exported(tmp_path / "adapter", tmp_path / "hf")
    write_gguf(folder, tmp_path / "model.gguf", home, "f32")
    tensors, _ = read(tmp_path / "model.gguf")
    before, expected = gguf_tensors(gguf(), exported(base, tmp_path / "plain")), gguf_tensors(gguf(), folder)
    assert set(tensors) == set(expected)
    assert all(np.array_equal(tensors[name], array) for name, array in expected.items())
    assert not np.array_equal(tensors["blk.1.ffn_down.weight"], before["blk.1.ffn_down.weight"])


REFUSED = [
    ("ministral", "bpe", "Model MinistralForCausalLM is not supported"),
    ("nemotron-h-omni", "bpe", "Model NemotronH_Omni_Reasoning_V3 is not supported"),
    ("qwen3-moe", "bpe", "ValueError: Can not map tensor 'model.layers.0.mlp.down_proj.weight'"),
    ("cohere2-biases", "bpe", "ValueError: Can not map tensor 'lm_head.weight'"),
    ("gemma2", "bpe", "FileNotFoundError: File not found: .*tokenizer.model"),
    ("phi3", "bpe", "ValueError: Error: Missing .*tokenizer.model"),
    ("glm4", "bpe", r"KeyError: '<\|user\|>'"),
    ("glm4-moe", "bpe", r"KeyError: '\[gMASK\]'"),
    ("nemotron-h", "bpe", "AssertionError: SSM inner size 48 not a multiple of head dim 64"),
]


@pytest.mark.parametrize(("case", "tokenizer", "words"), REFUSED)
def test_refusals_are_quoted(tmp_path, case, tokenizer, words):
    home = converter()
    folder = exported(model_folder(tmp_path / "saved", case, tokenizer), tmp_path / "hf")
    with pytest.raises(RefusedError, match=f"llama.cpp's converter refuses it: .*{words}"):
        write_gguf(folder, tmp_path / "model.gguf", home, "f32")
    assert [path.name for path in tmp_path.iterdir() if "gguf" in path.name] == []


def test_a_tokenizer_that_splits_by_another_rule_is_refused(tmp_path):
    home = converter()
    saved = model_folder(tmp_path / "saved", "llama")
    bpe_tokenizer(saved, split(r"\w+|\W+"))
    with pytest.raises(RefusedError, match="NotImplementedError: BPE pre-tokenizer was not recognized"):
        write_gguf(exported(saved, tmp_path / "hf"), tmp_path / "model.gguf", home)


def test_a_config_in_the_run_file_without_architectures_converts(tmp_path):
    home = converter()
    saved = model_folder(tmp_path / "saved", "llama")
    config = json.loads((saved / "config.json").read_text())
    del config["architectures"]
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(RefusedError, match="ValueError: Failed to detect model architecture"):
        write_gguf(saved, tmp_path / "model.gguf", home)
    write_gguf(exported(saved, tmp_path / "hf"), tmp_path / "model.gguf", home)


def test_digits_one_by_one(tmp_path):
    home = converter()
    saved = model_folder(tmp_path / "saved", "llama")
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe_tokenizer(saved, pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]))
    write_gguf(exported(saved, tmp_path / "hf"), tmp_path / "model.gguf", home)
    assert read(tmp_path / "model.gguf")[1].fields["tokenizer.ggml.pre"].contents() == "starcoder"
