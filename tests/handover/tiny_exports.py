"""Exports of tiny models with tokenizers, and the tensors that a GGUF file of an export must have."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kumi.convert import convert
from tiny_models import CASES, reference_of

VOCABULARY = 320
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and doesn't stop: it's 1234567 miles away!",
    "def f(x):\n    return {'a': x + 1}  # two  spaces\n\n\ttab",
    "Größe, naïve café; Добрый день, 你好世界. They'll say we've WON'T.",
]


def bpe_tokenizer(folder: Path, splitter: Any = None, ignore_merges: bool = False) -> Tokenizer:
    """Write a byte-level BPE tokenizer as `kumi train` makes them, or with another rule for splitting text."""
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = splitter or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return backend


def split(pattern: str) -> Any:
    """A rule that splits text by a regular expression, as Llama 3 and Qwen have it."""
    rule = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([rule, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def sentencepiece_model(folder: Path) -> None:
    """Write a tokenizer.model."""
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:2] * 3),
        model_writer=written,
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())


def model_folder(folder: Path, case: str, tokenizer: str = "bpe") -> Path:
    """`folder` with the tiny model `case` of tests/parity, as transformers saves it, and a tokenizer."""
    family, changes = CASES[case]
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    changes = changes | ({"text_config": changes["text_config"] | sizes} if "text_config" in changes else sizes)
    reference_of(family, changes).save_pretrained(folder)
    if tokenizer == "bpe":
        bpe_tokenizer(folder)
    else:
        sentencepiece_model(folder)
    return folder


def exported(folder: Path, target: Path, **options: Any) -> Path:
    """The model in `folder` as kumi writes it."""
    convert(folder, target, to="hf", verify=False, **options)
    return target


def file_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an export."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def gguf_tensors(gguf: Any, folder: Path) -> dict[str, np.ndarray]:
    """The tensors of the GGUF file of an export in float32, by the rules that llama.cpp documents: rows of rotary
    queries and keys in pairs for Llama's kin, Gemma's norms plus one, the experts of a layer in one tensor."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config) | {"architectures": config["architectures"]}
    names = gguf.get_tensor_name_map(_architecture(gguf, config), config["num_hidden_layers"])
    result = {}
    for name, tensor in _stacked(file_tensors(folder)):
        native = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert native is not None, name
        result[native] = _transformed(config, name, tensor.float()).numpy()
    return result


def _architecture(gguf: Any, config: dict[str, Any]) -> Any:
    arch = gguf.MODEL_ARCH
    return {
        "MistralForCausalLM": arch.LLAMA,
        "MixtralForCausalLM": arch.LLAMA,
        "LlamaForCausalLM": arch.LLAMA,
        "Gemma3ForConditionalGeneration": arch.GEMMA3,
        **{f"{name}ForCausalLM": arch[name.upper()] for name in ("Gemma", "Gemma2", "Gemma3", "Granite", "SmolLM3")},
        **{f"{name}ForCausalLM": arch[name.upper()] for name in ("Qwen2", "Qwen3", "Phi3", "Olmo2", "Olmoe")},
        "Qwen3MoeForCausalLM": arch.QWEN3MOE,
    }[config["architectures"][0]]


def _stacked(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if match:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            yield name, tensor
    for name, parts in experts.items():
        yield name, torch.stack([parts[index] for index in range(len(parts))])


def _transformed(config: dict[str, Any], name: str, tensor: torch.Tensor) -> torch.Tensor:
    family = config["architectures"][0]
    if family.startswith("Gemma") and "norm" in name:
        return tensor + 1
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    matrix = name.split(".")[-2]
    if matrix in heads and family.startswith(("Llama", "Mistral", "Mixtral", "Granite", "SmolLM3")):
        return tensor.unflatten(0, (config[heads[matrix]], 2, -1)).transpose(1, 2).reshape(tensor.shape)
    return tensor
