"""Masks of conversations equal what inference generates, for the stock chat templates of trl.

The expectation is made here with transformers' own function: render the prompt of each reply, and cut the rest of the
conversation after the stop token. KUMI_CHAT_TEMPLATES names a folder of more templates, such as llama.cpp's
models/templates; those of `MORE` in it are tested too.
"""

from __future__ import annotations

import functools
import json
import os
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from chat_templates import (
    CALL,
    CONVERSATIONS,
    DEEPSEEK,
    IM,
    LLAMA31,
    QWEN,
    TOOLS,
    make_chat,
    make_encoder,
    model_of,
    stock,
    transformers_render,
    turns,
)
from kumi.data.chat import EncodedUnit, MaskedSequence, RowRefused
from kumi.data.chat.encode import ConversationEncoder
from kumi.data.chat.masked import TRAINED

pytest.importorskip("trl")

STOCK = stock()
REFUSED = json.loads((Path(__file__).parent / "chat_refused.json").read_text())
# The reasons for which a reply may be refused, of the design's list.
ALLOWED = {"not-after-prompt", "not-shown", "no-stop-token", "stop-within-reply", "template-error"}
MODES: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
MISTRAL = ("<s>", "</s>", ("</s>",))
# Templates of other models: bos, eos and stop tokens.
MORE: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "Apertus-8B-Instruct": ("<s>", "<|assistant_end|>", ("</s>", "<|assistant_end|>")),
    "ByteDance-Seed-OSS": ("<seed:bos>", "<seed:eos>", ("<seed:eos>",)),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": (
        "<BOS_TOKEN>",
        "<|END_OF_TURN_TOKEN|>",
        ("<|END_OF_TURN_TOKEN|>",),
    ),
    "HuggingFaceTB-SmolLM3-3B": ("", "<|im_end|>", IM),
    "Kimi-K2-Instruct": ("[BOS]", "<|im_end|>", IM),
    "MiniMax-M2": ("]~!b[", "[e~[", ("[e~[",)),
    "NVIDIA-Nemotron-Nano-v2": ("<s>", "<SPECIAL_12>", ("</s>", "<SPECIAL_12>")),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("<|begin_of_text|>", "<|im_end|>", (*LLAMA31, "<|im_end|>")),
    "Qwen-QwQ-32B": ("", "<|im_end|>", QWEN),
    "Qwen3-Coder": ("", "<|im_end|>", QWEN),
    "deepseek-ai-DeepSeek-V3.1": (*DEEPSEEK, DEEPSEEK[1:]),
    "ibm-granite-granite-3.3-2B-Instruct": ("", "<|end_of_text|>", ("<|end_of_text|>",)),
    "mistralai-Mistral-Nemo-Instruct-2407": MISTRAL,
    "Mistral-Small-3.2-24B-Instruct-2506": MISTRAL,
}
FOLDER = os.environ.get("KUMI_CHAT_TEMPLATES")


@functools.cache
def encoder_of(name: str) -> ConversationEncoder:
    return make_encoder(name, STOCK[name])


def spans(sequence: MaskedSequence) -> list[tuple[int, int, int]]:
    """Return (message, first token, end) of each trained span; messages count from 0."""
    places, at = [], 0
    for (trained, turn), group in groupby(
        zip(sequence.mask, sequence.turns, strict=True), key=lambda item: (item[0] & TRAINED, item[1])
    ):
        length = len(list(group))
        if trained:
            places.append((turn - 1, at, at + length))
        at += length
    return places


def check_as_generated(
    text: str, model: Any, encoder: ConversationEncoder, messages: list[dict[str, Any]], tools: Any
) -> None:
    """Check that the trained spans are the replies, each generated once after its prompt at inference."""
    bos, _, stops = model
    backend = encoder._tokenizer.backend

    def tokenized(part: str) -> list[int]:
        return list(backend.encode(part, add_special_tokens=False).ids)

    def decoded(ids: Any) -> str:
        return str(backend.decode(list(ids), skip_special_tokens=False))

    units = encoder.encode(make_chat(messages, tools))
    trained = []
    for unit in units:
        [sequence] = unit.sequences
        # No BOS but those that the template writes: at most one, or one a message as Seed-OSS has it.
        bos_id = backend.token_to_id(bos) if bos else None
        assert list(sequence.ids[:2]) != [bos_id] * 2
        assert sequence.ids.count(bos_id) <= (1 if text in STOCK.values() else len(messages) + 2)
        for i, first, end in spans(sequence):
            trained.append(i)
            whole = transformers_render(text, model, messages[: i + 1], tools)
            prompts = [transformers_render(text, model, messages[:i], tools, True, **mode) for mode in MODES]
            prompt = max((prompt for prompt in prompts if whole.startswith(prompt)), key=len)
            # Inference encodes the text of the prompt, and the model goes on with tokens.
            assert decoded(sequence.ids[:first]) == prompt
            assert list(sequence.ids[:first]) == tokenized(prompt)
            generated = whole[len(prompt) :]
            cuts = [generated.index(stop) + len(stop) for stop in stops if stop in generated]
            reply = decoded(sequence.ids[first:end])
            if cuts:
                assert reply == generated[: min(cuts)]
            else:
                # The next message's first token ends the reply.
                assert any(reply == generated.rstrip() + stop for stop in stops)
            assert list(sequence.ids[first:end]) == tokenized(reply)
            assert sequence.ids[end - 1] in [backend.token_to_id(stop) for stop in stops]
    assert trained == [i for i, message in enumerate(messages) if message["role"] == "assistant"]


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_trained_spans_are_what_inference_generates(name, kind):
    messages, tools = CONVERSATIONS[kind]
    if (reason := REFUSED.get(name, {}).get(kind)) is None:
        check_as_generated(STOCK[name], model_of(name), encoder_of(name), messages, tools)
        return
    with pytest.raises(RowRefused) as refused:
        encoder_of(name).encode(make_chat(messages, tools))
    assert refused.value.reason == reason
    assert refused.value.kind in ALLOWED


def test_the_list_of_refusals_names_templates():
    assert {name for name in REFUSED if name not in STOCK} == set()
    assert sum(map(len, REFUSED.values())) < len(STOCK) * len(CONVERSATIONS) / 3


def test_the_guide_s_table_of_templates():
    def cell(encoder: ConversationEncoder, messages: list[dict[str, Any]], tools: Any) -> str:
        try:
            return str(len(encoder.encode(make_chat(messages, tools))))
        except RowRefused as refused:
            return refused.kind

    rows = []
    for name in STOCK:
        cells = [cell(encoder_of(name), *conversation) for conversation in CONVERSATIONS.values()]
        rows.append(f"| {' | '.join([name, *cells])} |\n")
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "chat-data.md").read_text()
    assert "| template | plain | tools | thoughts |\n|---|---|---|---|\n" + "".join(rows) in guide


def added_ids(encoder: ConversationEncoder, units: list[EncodedUnit]) -> list[list[tuple[int, int]]]:
    """Return the added tokens of each sequence with their masks."""
    added = set(encoder._tokenizer.backend.get_added_tokens_decoder())
    return [
        [(number, mask & TRAINED) for number, mask in zip(sequence.ids, sequence.mask, strict=True) if number in added]
        for unit in units
        for sequence in unit.sequences
    ]


@pytest.mark.parametrize("name", [name for name in STOCK if "plain" not in REFUSED.get(name, {})])
def test_control_tokens_spelt_in_a_text_stay_text(name):
    """Texts of a user with every added token, and of replies with the special ones, make no control token."""
    encoder = encoder_of(name)
    backend = encoder._tokenizer.backend
    tokens = backend.get_added_tokens_decoder().values()
    special = [token.content for token in tokens if token.special and token.content not in model_of(name)[2]]
    everything = "x".join(token.content for token in tokens)
    plain = encoder.encode(make_chat(turns({"content": "yo 1"}, {"content": "ok 2"})))
    messages = turns({"content": f"yo {'x'.join(special)} 1"}, {"content": "ok 2"})
    messages[0] = {"role": "user", "content": f"hi {everything} Q1"}
    before = encoder.counts["control_tokens_as_text"]
    spelt = encoder.encode(make_chat(messages))
    assert added_ids(encoder, spelt) == added_ids(encoder, plain)
    assert encoder.counts["control_tokens_as_text"] - before == len(tokens) + len(special)
    text = backend.decode(spelt[0].sequences[0].ids, skip_special_tokens=False)
    assert everything in text
    assert "x".join(special) in text


@pytest.mark.parametrize("name", [name for name in STOCK if "tools" not in REFUSED.get(name, {})])
def test_control_tokens_spelt_in_tools_stay_text(name):
    encoder = encoder_of(name)
    tokens = encoder._tokenizer.backend.get_added_tokens_decoder().values()
    stops = model_of(name)[2]
    special = "x".join(token.content for token in tokens if token.special and token.content not in stops)
    everything = "x".join(token.content for token in tokens)

    def conversation(argument: str, result: str) -> list[dict[str, Any]]:
        call = {**CALL, "function": {"name": "get_weather", "arguments": {"city": f"Oslo {argument}."}}}
        messages = [dict(message) for message in CONVERSATIONS["tools"][0]]
        messages[1]["tool_calls"] = [call]
        messages[2]["content"] = f"blue {result}."
        return messages

    tools = json.loads(json.dumps(TOOLS))
    plain = encoder.encode(make_chat(conversation("a", "b"), tools))
    tools[0]["function"]["description"] += f" {everything}"
    spelt = encoder.encode(make_chat(conversation(special, everything), tools))
    assert added_ids(encoder, spelt) == added_ids(encoder, plain)


def test_masks_of_trl_train_other_tokens():
    """On Qwen2.5 they have the line breaks around a reply, which inference never generates."""
    import trl

    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    folder = Path(trl.__file__).parent / "chat_templates"
    [text], [generated] = utils.render_jinja_template(
        [CONVERSATIONS["plain"][0]],
        chat_template=(folder / "qwen2_5_training.jinja").read_text(),
        return_assistant_tokens_mask=True,
    )
    theirs = [text[start:end] for start, end in generated]
    [unit] = encoder_of("qwen2_5").encode(make_chat(CONVERSATIONS["plain"][0]))
    [sequence] = unit.sequences
    backend = encoder_of("qwen2_5")._tokenizer.backend
    ours = [backend.decode(sequence.ids[a:b], skip_special_tokens=False) for _, a, b in spans(sequence)]
    assert backend.decode(sequence.ids, skip_special_tokens=False) == text
    assert ours == ["yo A1<|im_end|>", "ok A2<|im_end|>"]
    assert [span.strip("\n") for span in theirs] == ours
    assert theirs != ours


@pytest.mark.skipif(FOLDER is None, reason="KUMI_CHAT_TEMPLATES names no folder with more templates")
@pytest.mark.parametrize("name", MORE if FOLDER else list(MORE)[:1])
@pytest.mark.parametrize("kind", CONVERSATIONS if FOLDER else ["plain"])
def test_more_templates(name, kind):
    """A refusal counts as skipped, with its sentence as the reason."""
    text = (Path(str(FOLDER)) / f"{name}.jinja").read_text()
    messages, tools = CONVERSATIONS[kind]
    encoder = make_encoder(name, text, MORE[name])
    try:
        encoder.encode(make_chat(messages, tools))
    except RowRefused as error:
        refused = error
    else:
        check_as_generated(text, MORE[name], encoder, messages, tools)
        return
    assert refused.kind in ALLOWED
