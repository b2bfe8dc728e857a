"""Random conversations with every stock template: each reply after the tokens of its prompt, and no control token."""

from __future__ import annotations

import random
from typing import Any

import pytest

from chat_templates import CALL, TOOLS, make_chat, make_encoder, model_of, stock, transformers_render
from kumi.data.chat import RowRefused
from kumi.data.chat.masked import ROLE_SHIFT, TRAINED
from kumi.data.formats.example import ROLES

pytest.importorskip("trl")

STOCK = stock()
TEXTS = (
    "hi",
    "  lead",
    " trail ",
    "a\n\nb",
    "0",
    "null",
    "[1]",
    '{"a": "b"}',
    "日本語 e\u0301",
    "\r\nx",
    "user",
    "assistant",
)
MARKUP = ("<think>", "</think>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "[/INST]", "</s>", "{{ x }}", "{% raw %}")
MODES: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})


def conversation(draw: random.Random) -> tuple[list[dict[str, Any]], Any]:
    """Return messages of one to four questions, and tools or None."""
    pool = TEXTS + MARKUP if draw.random() < 0.3 else TEXTS
    tools = TOOLS if draw.random() < 0.3 else None
    messages = [{"role": "system", "content": draw.choice(pool)}] if draw.random() < 0.3 else []
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": draw.choice(pool)})
        if tools and draw.random() < 0.5:
            calls: Any = [CALL] * draw.randint(1, 2)
            messages.append({"role": "assistant", "content": draw.choice(("", "so")), "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": "call12345", "content": draw.choice(pool)} for _ in calls]
        thoughts = {"reasoning_content": draw.choice(TEXTS)} if draw.random() < 0.2 else {}
        inline = f"<think>{draw.choice(TEXTS)}</think>" if draw.random() < 0.1 else ""
        messages.append({"role": "assistant", "content": inline + draw.choice(pool), **thoughts})
    return messages, tools


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STOCK)
def test_random_conversations_are_trained_as_generated(name):
    draw = random.Random(name)
    encoder, model = make_encoder(name, STOCK[name]), model_of(name)
    backend = encoder._tokenizer.backend
    stops = {backend.token_to_id(stop) for stop in model[2]}
    encoded_rows = 0
    for _ in range(150):
        messages, tools = conversation(draw)
        train = [message["role"] == "assistant" and draw.random() < 0.8 for message in messages]
        try:
            units = encoder.encode(make_chat(messages, tools, train=tuple(train)))
        except RowRefused:
            continue
        spelt = encoder._controls.marked(messages, tools)[2] != ""
        replies = []
        for [sequence] in (unit.sequences for unit in units):
            assert model[0] == "" or list(sequence.ids).count(encoder._tokenizer.bos_id) <= 1
            last = max(sequence.turns)
            for i in range(last):
                marked = [n for n, turn in enumerate(sequence.turns) if turn == i + 1 and sequence.mask[n] & TRAINED]
                if not marked:
                    continue
                replies.append(i)
                assert marked == list(range(marked[0], marked[-1] + 1))
                assert {sequence.mask[n] >> ROLE_SHIFT for n in marked} == {ROLES.index("assistant")}
                assert [n for n in marked if sequence.ids[n] in stops] == [marked[-1]]
                prompts = [] if spelt else generation_prompts(name, messages[:i], tools)
                encoded = [backend.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
                assert not prompts or list(sequence.ids[: marked[0]]) in encoded
        encoded_rows += 1
        assert sorted(replies) == [i for i, trained in enumerate(train) if trained]
    assert encoded_rows >= (0 if name.startswith("deepseek") else 40)


def generation_prompts(name: str, messages: list[dict[str, Any]], tools: Any) -> list[str]:
    """Return the prompts that transformers renders; none if the template needs the arguments of calls as text."""
    try:
        return [transformers_render(STOCK[name], model_of(name), messages, tools, True, **mode) for mode in MODES]
    except TypeError:
        return []
