"""Stock chat templates of the installed trl, with test tokenizers and the stop tokens of their models."""

from __future__ import annotations

import functools
import hashlib
import re
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from kumi.data.chat.encode import ConversationEncoder
from kumi.data.chat.sandbox import Renderer
from kumi.data.chat.template import ChatTemplate
from kumi.data.formats import Conversation, Example
from kumi.data.tokenizer import Tokenizer
from kumi.spec.data_source import ChatOptions

# Templates whose content must be a list of texts and images.
IMAGES = {"idefics3", "llava_next", "smolvlm"}

IM, QWEN = ("<|im_end|>",), ("<|im_end|>", "<|endoftext|>")
DEEPSEEK = "<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"
GEMMA4 = ("<eos>", "<turn|>", "<|tool_response>")
LLAMA31 = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
PHI = ("<|endoftext|>", "<|assistant|>", "<|end|>")
# Prefix of the name -> bos, eos and the stop tokens, as eos_token_id of the model's generation_config.json has them.
# The longest prefix counts.
MODELS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",)),
    "deepseek": (*DEEPSEEK, DEEPSEEK[1:]),
    "diffusion_gemma": ("<bos>", "<eos>", GEMMA4),
    "gemma": ("<bos>", "<eos>", ("<eos>", "<end_of_turn>")),
    "gemma4": ("<bos>", "<eos>", GEMMA4),
    "glm4moe": ("", "<|endoftext|>", ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "gptoss": ("<|startoftext|>", "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>")),
    "lfm2": ("<|startoftext|>", "<|im_end|>", IM),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", ("<|end_of_text|>", "<|eot_id|>")),
    "llama3_": ("<|begin_of_text|>", "<|eot_id|>", LLAMA31),
    "muse_glimmer": ("<|begin_of_text|>", "<|eot|>", ("<|eot|>",)),
    "nemotron": ("<s>", "<|im_end|>", ("</s>", "<|im_end|>")),
    "phi3": ("<s>", "<|endoftext|>", PHI),
    "qwen": ("", "<|im_end|>", QWEN),
}
# Added tokens that are not special: the model writes them in its text.
PLAIN_ADDED = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")
CONTROL = re.compile(
    r"<\|[^<>|\s]+\|>|<\|[a-z_\"]+\|?>|<[a-z_]+\|>|<\uff5c[^<>\s]+\uff5c>|<(?:[A-Z]+_TOKEN|SPECIAL_\d+|seed:[a-z]+)>"
    r"|</?s>|<(?:bos|eos|sop|start_of_turn|end_of_turn)>|\]~!?b[\[\]]|\[e~\["
    r"|\[(?:gMASK|BOS|/?(?:INST|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|SYSTEM_PROMPT|THINK|ARGS|CALL_ID))\]"
)
TEXT = "The cat sat on the mat, and the dog user assistant system said: what is the weather in Oslo? " * 4

USER, REPLY, NEXT, LAST = "hi Q1", "yo A1", "again Q2", "ok A2"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "A city."}},
                "required": ["city"],
            },
        },
    }
]
CALL = {"type": "function", "id": "call12345", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}


def stock() -> dict[str, str]:
    """Return the stock templates by name, without those of `IMAGES`."""
    import trl

    folder = Path(trl.__file__).parent / "chat_templates"
    texts = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
    return {name: text for name, text in texts.items() if not name.endswith("_training") and name not in IMAGES}


def model_of(name: str) -> tuple[str, str, tuple[str, ...]]:
    """Return bos, eos and the stop tokens of the model of the template `name`."""
    return MODELS[max((prefix for prefix in MODELS if name.startswith(prefix)), key=len)]


@functools.cache
def trained_backend() -> str:
    """Return a byte-level BPE tokenizer without added tokens, as JSON."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT], trainer)
    return str(backend.to_str())


def make_tokenizer(text: str, bos: str, eos: str, stops: tuple[str, ...]) -> Tokenizer:
    """Return a tokenizer with the control tokens of the template `text`."""
    backend = Backend.from_str(trained_backend())
    special = dict.fromkeys([*filter(None, (bos, eos)), *stops, *CONTROL.findall(text)])
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    plain = dict.fromkeys(PLAIN_ADDED.findall(text))
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    bos_id = backend.token_to_id(bos) if bos else None
    digest = hashlib.sha256(backend.to_str().encode()).hexdigest()
    return Tokenizer(Path("test"), digest, backend.get_vocab_size(), backend.token_to_id(eos), bos_id, backend)


def make_encoder(name: str, text: str, model: Any = None, turns: str = "all") -> ConversationEncoder:
    """Return an encoder with the template `text` and a test tokenizer."""
    bos, eos, stops = model or model_of(name)
    template = ChatTemplate(text, f"{name}.jinja", hashlib.sha256(text.encode()).hexdigest())
    renderer = Renderer(template, {"bos_token": bos, "eos_token": eos})
    return ConversationEncoder(renderer, make_tokenizer(text, bos, eos, stops), stops, turns)


def make_chat(messages: list[dict[str, Any]], tools: Any = None, **fields: Any) -> Example:
    """Return a chat in which all replies are trained."""
    values = {"train": tuple(message["role"] == "assistant" for message in messages), "weight": (1.0,) * len(messages)}
    return Example("chat", (Conversation(tuple(messages), tools=tools, **(values | fields)),), "test.jsonl", 1)


def turns(first: dict[str, Any], last: dict[str, Any]) -> list[dict[str, Any]]:
    """Return two questions with the given replies."""
    return [
        {"role": "user", "content": USER},
        {"role": "assistant", **first},
        {"role": "user", "content": NEXT},
        {"role": "assistant", **last},
    ]


CONVERSATIONS = {
    "plain": (turns({"content": REPLY}, {"content": LAST}), None),
    "tools": (
        [
            {"role": "user", "content": USER},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "get_weather", "tool_call_id": "call12345", "content": '{"sky": "blue"}'},
            {"role": "assistant", "content": REPLY},
            {"role": "user", "content": NEXT},
            {"role": "assistant", "content": LAST},
        ],
        TOOLS,
    ),
    "thoughts": (
        turns(
            {"reasoning_content": "the cat T1", "content": REPLY}, {"reasoning_content": "the dog T2", "content": LAST}
        ),
        None,
    ),
}


class _FixedDate(datetime):
    """The date that kumi gives to templates by default."""

    @classmethod
    def now(cls, tz: Any = None) -> _FixedDate:
        return cls.fromisoformat(ChatOptions.date)


def transformers_render(
    text: str, model: Any, messages: list[dict[str, Any]], tools: Any = None, prompt: bool = False, **kwargs: Any
) -> str:
    """Return the rendering by transformers' own function."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tokens = {"bos_token": model[0], "eos_token": model[1]}
    with mock.patch.object(utils, "datetime", _FixedDate):
        rendered, _ = utils.render_jinja_template(
            [messages], tools=tools, chat_template=text, add_generation_prompt=prompt, **tokens, **kwargs
        )
    return str(rendered[0])
