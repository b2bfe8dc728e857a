"""Examples of each kind as units of tokens, their masks, roles, turns and weights, and the rows that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from chat_templates import CALL, TOOLS, make_chat, make_encoder, make_tokenizer, turns
from kumi.data.chat import MaskedSequence, RowRefused
from kumi.data.chat.encode import ConversationEncoder
from kumi.data.chat.masked import ROLE_SHIFT, TRAINED
from kumi.data.chat.sandbox import Renderer
from kumi.data.chat.template import ChatTemplate
from kumi.data.formats import Conversation, Example, PlainText
from kumi.data.formats.example import ROLES
from kumi.data.tokenizer import Tokenizer
from kumi.errors import ConfigError

IM = "<|im_end|>"
MODEL = ("<s>", IM, (IM, "<|call|>"))
# ChatML, with a think block that inference supplies in one mode and that earlier replies lose, as Qwen3 has it.
CHATML = """{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>
{{ m.reasoning_content or '' }}
</think>
{% endif %}{{ m.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>
{% endif %}{% endif %}"""
PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CHAT = turns({"content": "yo A1"}, {"content": "ok A2"})


@pytest.fixture(scope="module")
def plain() -> ConversationEncoder:
    return make_encoder("plain", PLAIN, MODEL)


@pytest.fixture(scope="module")
def thinking() -> ConversationEncoder:
    return make_encoder("chatml", CHATML, MODEL)


def decode(encoder: ConversationEncoder, ids: Any) -> str:
    return str(encoder._tokenizer.backend.decode(list(ids), skip_special_tokens=False))


def trained(encoder: ConversationEncoder, sequence: MaskedSequence) -> list[str]:
    """Return the texts of the trained spans."""
    tokens = zip(sequence.ids, sequence.mask, sequence.turns, strict=True)
    return [
        decode(encoder, [number for number, _, _ in group])
        for (mask, _), group in groupby(tokens, key=lambda token: (token[1] & TRAINED, token[2]))
        if mask
    ]


def by_role(encoder: ConversationEncoder, sequence: MaskedSequence) -> list[tuple[str, int, str]]:
    """Return (role, turn, text) of each run of tokens."""
    tokens = zip(sequence.ids, sequence.mask, sequence.turns, strict=True)
    return [
        (ROLES[role], turn, decode(encoder, [number for number, _, _ in group]))
        for (role, turn), group in groupby(tokens, key=lambda token: (token[1] >> ROLE_SHIFT, token[2]))
    ]


def refusal(encoder: ConversationEncoder, example: Example) -> tuple[str, str]:
    with pytest.raises(RowRefused) as refused:
        encoder.encode(example)
    return refused.value.kind, refused.value.reason


def test_roles_and_turns_of_all_tokens(plain):
    messages = [{"role": "system", "content": "the mat"}, *CHAT]
    [unit] = plain.encode(make_chat(messages))
    assert by_role(plain, unit.sequences[0]) == [
        ("", 0, "<|im_start|>system\n"),
        ("system", 1, "the mat"),
        ("", 1, f"{IM}\n<|im_start|>user\n"),
        ("user", 2, "hi Q1"),
        ("", 2, f"{IM}\n<|im_start|>assistant\n"),
        ("assistant", 3, f"yo A1{IM}"),
        ("", 3, "\n<|im_start|>user\n"),
        ("user", 4, "again Q2"),
        ("", 4, f"{IM}\n<|im_start|>assistant\n"),
        ("assistant", 5, f"ok A2{IM}"),
        ("", 5, "\n"),
    ]


def test_short_texts_are_not_looked_for_in_the_template_s_own(plain):
    """Each is in a header, in the text that the template adds, or in a longer message."""
    added = "{% if messages[0].role != 'system' %}<|im_start|>system\nthe user at hand{{ IM }}\n{% endif %}"
    encoder = make_encoder("added", added.replace("{{ IM }}", IM) + PLAIN, MODEL)
    messages = turns({"content": "yo A1"}, {"content": "ok A2"})
    for first, second in (("user", "us"), ("a", " s "), ("t", "e"), ("the", "\n")):
        messages[0]["content"], messages[2]["content"] = first, second
        for each in (plain, encoder):
            [unit] = each.encode(make_chat(messages))
            runs = by_role(each, unit.sequences[0])
            shown = [(turn, text.strip()) for role, turn, text in runs if role == "user"]
            assert shown == [(turn, text.strip()) for turn, text in ((1, first), (3, second)) if text.strip()]
            assert sum("<|im_start|>user\n" in text for role, _, text in runs if role == "") == 2
    [[sample, texts]] = plain.samples(make_chat(messages).sides[0])
    assert [sample.text[place.start : place.end] for place in texts] == ["the", f"yo A1{IM}", f"ok A2{IM}"]


def test_a_template_that_refuses_or_rewrites_a_mark_has_its_texts_searched(plain):
    for change in (
        "{% if m.content not in ['hi Q1', 'yo A1', 'b', 'ok A2'] %}{{ raise_exception('no') }}{% endif %}",
        "{% if m.role == 'user' %}{{ m.content | length }}{% endif %}",
    ):
        encoder = make_encoder(
            "changed", PLAIN.replace("<|im_start|>{{ m.role }}", change + "<|im_start|>{{ m.role }}"), MODEL
        )
        messages = [*CHAT[:2], {"role": "user", "content": "b"}, CHAT[3]]
        [unit] = encoder.encode(make_chat(messages))
        assert ("user", 3, "b") in by_role(encoder, unit.sequences[0])


def test_a_history_that_the_template_rewrites_becomes_several_samples(thinking):
    messages = turns({"reasoning_content": "the cat", "content": "yo A1"}, {"content": "ok A2"})
    first, second = (unit.sequences[0] for unit in thinking.encode(make_chat(messages)))
    assert trained(thinking, first) == [f"the cat\n</think>\nyo A1{IM}".join(["<think>\n", ""])]
    # The mode without thoughts supplies the empty block.
    assert trained(thinking, second) == [f"ok A2{IM}"]
    assert ("assistant", 2, "yo A1") in by_role(thinking, second)
    assert "the cat" not in decode(thinking, second.ids)


def test_a_mode_that_the_row_or_the_run_file_sets_is_the_only(thinking):
    [example] = [make_chat(CHAT[:2], template_kwargs={"enable_thinking": True})]
    [unit] = thinking.encode(example)
    assert trained(thinking, unit.sequences[0]) == [f"<think>\n\n</think>\nyo A1{IM}"]
    template = ChatTemplate(CHATML, "chatml.jinja", "0")
    renderer = Renderer(template, {"bos_token": "<s>"}, {"enable_thinking": True})
    encoder = ConversationEncoder(renderer, thinking._tokenizer, MODEL[2])
    [unit] = encoder.encode(make_chat(CHAT[:2]))
    assert trained(encoder, unit.sequences[0]) == [f"<think>\n\n</think>\nyo A1{IM}"]


def test_train_weight_and_turns(plain):
    [unit] = plain.encode(make_chat(CHAT, train=(False, True, False, False)))
    assert trained(plain, unit.sequences[0]) == [f"yo A1{IM}"]
    last = make_encoder("plain", PLAIN, MODEL, turns="last")
    [unit] = last.encode(make_chat(CHAT))
    assert trained(last, unit.sequences[0]) == [f"ok A2{IM}"]
    assert ("assistant", 2, "yo A1") in by_role(last, unit.sequences[0])
    assert unit.sequences[0].weights is None
    [unit] = plain.encode(make_chat(CHAT, weight=(1.0, 0.5, 1.0, 2.0)))
    sequence = unit.sequences[0]
    assert sequence.weights is not None
    weights = {
        (mask & TRAINED, turn): weight
        for mask, turn, weight in zip(sequence.mask, sequence.turns, sequence.weights, strict=True)
    }
    assert (weights[TRAINED, 2], weights[TRAINED, 4]) == (0.5, 2.0)
    assert {weight for (mask, _), weight in weights.items() if not mask} == {1.0}


def test_a_prompt_is_rendered_for_generation_and_not_trained(plain):
    example = replace(make_chat(CHAT[:3], train=(False,) * 3), kind="prompt", extra={"answer": "42"})
    [unit] = plain.encode(example)
    assert decode(plain, unit.sequences[0].ids).endswith(f"again Q2{IM}\n<|im_start|>assistant\n")
    assert not any(mask & TRAINED for mask in unit.sequences[0].mask)
    # Rewards and other tokenizers read the messages again.
    assert unit.extra == {"answer": "42", "prompt": list(example.sides[0].messages)}


def pair(chosen: list[dict[str, Any]], rejected: list[dict[str, Any]], **fields: Any) -> Example:
    def only_last(messages: list[dict[str, Any]]) -> Conversation:
        train = (False,) * (len(messages) - 1) + (True,)
        return Conversation(tuple(messages), train, (1.0,) * len(messages))

    return Example("preference", (only_last(chosen), only_last(rejected)), "test.jsonl", 1, **fields)


def test_a_preference_is_a_unit_of_two_sequences_after_the_same_prompt(plain, thinking):
    [unit] = plain.encode(pair(CHAT, turns({"content": "yo A1"}, {"content": "no A3"}), margin=0.5))
    assert unit.margin == 0.5
    assert [trained(plain, sequence) for sequence in unit.sequences] == [[f"ok A2{IM}"], [f"no A3{IM}"]]
    # A side without thoughts follows the prompt of the side with thoughts.
    [unit] = thinking.encode(pair(CHAT[:2], turns({"reasoning_content": "the cat", "content": "yo A1"}, {})[:2]))
    assert [trained(thinking, sequence)[0] for sequence in unit.sequences] == [
        f"<think>\n\n</think>\nyo A1{IM}",
        f"<think>\nthe cat\n</think>\nyo A1{IM}",
    ]
    assert refusal(plain, pair(CHAT, CHAT))[0] == "sides-equal"
    other = [{"role": "user", "content": "you"}, *CHAT[1:]]
    assert refusal(plain, pair(CHAT, other))[0] == "sides-differ"
    two = make_chat(CHAT).sides[0]
    kind, reason = refusal(thinking, Example("preference", (two, two), "test.jsonl", 1))
    assert kind == "several-samples"
    assert reason.startswith("the chosen side becomes 2 samples")


def test_feedback_has_its_label(plain):
    [unit] = plain.encode(replace(make_chat(CHAT[:2]), kind="feedback", label=False))
    assert unit.label is False


def test_a_plain_completion_is_trained_with_eos_and_encoded_apart(plain):
    example = Example("prompt-completion", (PlainText("the c", "at <|im_start|>on"),), "test.jsonl", 1)
    [unit] = plain.encode(example)
    [sequence] = unit.sequences
    assert by_role(plain, sequence) == [("user", 1, "the c"), ("assistant", 2, f"at <|im_start|>on{IM}")]
    assert trained(plain, sequence) == [f"at <|im_start|>on{IM}"]
    assert plain._tokenizer.backend.token_to_id("<|im_start|>") not in sequence.ids
    backend = Backend.from_str(plain._tokenizer.backend.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    tokenizer = replace(plain._tokenizer, backend=backend)
    with_bos = ConversationEncoder(plain._renderer, tokenizer, MODEL[2])
    [unit] = with_bos.encode(example)
    assert list(unit.sequences[0].ids) == [tokenizer.bos_id, *sequence.ids]
    assert unit.sequences[0].mask[0] == unit.sequences[0].turns[0] == 0
    [unit] = with_bos.encode(replace(example, kind="prompt"))
    assert decode(with_bos, unit.sequences[0].ids) == "<s>the c"
    assert refusal(plain, replace(example, sides=(PlainText("the c", " "),)))[0] == "empty-completion"
    assert refusal(plain, replace(example, sides=(PlainText("the c", f"at{IM}"),)))[0] == "stop-spelt"


def refused_chats() -> dict[str, tuple[str, Example, str]]:
    """Return template, example and the beginning of the sentence by kind."""
    user, reply = CHAT[:2]
    chat = make_chat(CHAT)
    think_prompt = PLAIN.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>{% endif")
    goes_on = PLAIN.replace("{{ m.content }}", "{{ m.content }}<|call|>so")
    calls = [user, {"role": "assistant", "content": "so", "tool_calls": [CALL]}]
    bot, empty = [{"role": "bot", "content": "x"}], turns({"content": " "}, {"content": "x"})
    spelt = turns({"content": f"a {IM}"}, {"content": "x"})
    return {
        "no-reply": (PLAIN, make_chat([user]), "no message of the assistant is to be trained"),
        "assistant-first": (PLAIN, make_chat([reply]), "the conversation begins with the assistant"),
        "unknown-role": (PLAIN, make_chat(bot), "message 1: role 'bot' is none of system"),
        "empty-completion": (PLAIN, make_chat(empty), "message 2 is an empty reply"),
        "not-after-prompt": (think_prompt, chat, "message 2: the template does not render the reply after the prompt"),
        "stop-within-reply": (goes_on, chat, "message 2: the stop token <|call|> is followed by 'so"),
        "no-stop-token": (PLAIN.replace("<|im_end|>", ""), chat, "message 2: no stop token ends the reply"),
        "not-shown": (PLAIN, make_chat(calls), "message 2: the template does not show 'get_weather' of the reply"),
        "two-bos": ("{{ bos_token }}<s>" + PLAIN, chat, "the rendering begins with two BOS tokens"),
        "stop-spelt": (PLAIN, make_chat(spelt), "message 2: the reply spells the stop token <|im_end|>"),
        "template-error": (PLAIN + "{{ raise_exception('no') }}", chat, "refused.jinja:4: the chat template raises"),
    }


@pytest.mark.parametrize("kind", refused_chats())
def test_refusals_are_sentences(kind):
    template, example, beginning = refused_chats()[kind]
    got, reason = refusal(make_encoder("refused", template, MODEL), example)
    assert (got, reason[: len(beginning)]) == (kind, beginning)


def test_texts_that_the_template_drops_are_refused(plain):
    system = [{"role": "system", "content": "the mat"}, *CHAT]
    encoder = make_encoder("x", PLAIN.replace("messages %}", "messages if m.role != 'system' %}"), MODEL)
    assert refusal(encoder, make_chat(system))[1].endswith("does not show 'the mat' of the system's message")
    for text in ("0", "true", "null", "[1, 2]", "{}", '{"cat": 1}'):
        system[0]["content"] = text
        assert refusal(encoder, make_chat(system))[0] == "not-shown"
    assert refusal(plain, make_chat(CHAT, TOOLS)) == ("not-shown", "the template does not show the tool 'get_weather'")
    long = make_chat(turns({"content": "x" * (4 << 20)}, {"content": "y"}))
    assert refusal(plain, long)[0] == "too-long"


RESULTS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content WRITTEN if m.role == 'tool' else m.content }}{% for c in m.tool_calls %}{{ c.function.name }}
{%- for name, value in c.function.arguments.items() %} {{ name }}={{ value ARGUMENT }}{% endfor %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize(
    ("result", "written", "argument", "refused"),
    [
        ('{"cats": 31, "mean": 1.0}', "", "", None),
        ('{"cats": 31, "mean": 1.0}', "| replace('1.0', '1')", "| int", None),
        ('{"cats": 31, "mean": 1.0}', "| replace('31', '31.00') | replace('{', '')", "", None),
        ('{"cats": 31, "mean": 1.0}', "| replace('31', '')", "", "31 of the tool's"),
        ('{"cats": 31, "mean": 1.0}', "| replace('31', '314')", "", "31 of the tool's"),
        ('{"cats": 31, "mean": 1.0}', "| replace('1.0', '')", "", "1.0 of the tool's"),
        ("[-4, 88]", "| replace('-', '')", "", "-4 of the tool's"),
        ("[-4, 88]", "| replace('8', '')", "", "88 of the tool's"),
        ('{"tame": true, "wild": null}', "| replace('true', 'True') | replace('null', '')", "", None),
        ('{"tame": true, "wild": null}', "| replace('true', '')", "", "True of the tool's"),
        ("[]", "| string", "if value is string", "7 of the reply"),
        ("[]", "| string", "| round(1)", None),
        ("[]", "| string", "+ 1", "7 of the reply"),
    ],
)
def test_numbers_and_truth_values_that_the_template_drops_are_refused(result, written, argument, refused):
    text = RESULTS.replace("WRITTEN", written).replace("ARGUMENT", argument)
    encoder = make_encoder("results", text, MODEL)
    call = {"function": {"name": "count", "arguments": {"days": 7}}}
    messages = [
        {"role": "user", "content": "hi Q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": "so many"},
    ]
    if refused is None:
        assert len(encoder.encode(make_chat(messages))) == 1
        return
    kind, reason = refusal(encoder, make_chat(messages))
    assert kind == "not-shown"
    assert f"the template does not show {refused}" in reason


def test_a_stop_token_must_be_an_added_token(plain):
    with pytest.raises(ConfigError, match="stop token 'cat' is not among the added tokens"):
        ConversationEncoder(plain._renderer, plain._tokenizer, ("cat",))


def llama_tokenizer(legacy: bool) -> Tokenizer:
    """Return a tokenizer that adds a space at the start of a text, and with `legacy` after each added token."""
    pieces = ["▁", "▁cat", "cat", "▁[", "[", "Q", "]", "▁]", "/", "▁the", "the", "\n", "s", ">", "<", "e"]
    backend = Backend(
        models.Unigram([("<unk>", 0.0), *((piece, -float(len(pieces) - len(piece))) for piece in pieces)], 0)
    )
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<s>", "</s>")])
    return Tokenizer(
        Path("t"), "0", backend.get_vocab_size(), backend.token_to_id("</s>"), backend.token_to_id("<s>"), backend
    )


@pytest.mark.parametrize("legacy", [True, False])
def test_tokenizers_that_add_spaces_encode_pieces_as_the_whole(legacy):
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[Q] {{ m.content }} [/Q]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    tokenizer = llama_tokenizer(legacy)
    renderer = Renderer(ChatTemplate(template, "t", "0"), {"bos_token": "<s>"})
    encoder = ConversationEncoder(renderer, tokenizer, ("</s>",))
    messages = turns({"content": "cat"}, {"content": "the cat"})
    messages[0] = {"role": "user", "content": "the"}
    messages[2] = {"role": "user", "content": "cat cat"}
    text = renderer.render(messages)
    [unit] = encoder.encode(make_chat(messages))
    assert list(unit.sequences[0].ids) == tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert len(trained(encoder, unit.sequences[0])) == 2
    # The same where the text spells a control token.
    messages[2] = {"role": "user", "content": "cat </s>"}
    [unit] = encoder.encode(make_chat(messages))
    assert unit.sequences[0].ids.count(tokenizer.eos_id) == 2


def test_added_tokens_that_take_white_space_along(plain):
    """The line break after the stop token is not a token, as when the whole text is encoded."""
    content = json.loads(plain._tokenizer.backend.to_str())
    for token in content["added_tokens"]:
        token["rstrip"] = True
    tokenizer = replace(plain._tokenizer, backend=Backend.from_str(json.dumps(content)))
    encoder = ConversationEncoder(plain._renderer, tokenizer, MODEL[2])
    [unit] = encoder.encode(make_chat(CHAT))
    text = plain._renderer.render(CHAT)
    assert list(unit.sequences[0].ids) == tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert trained(encoder, unit.sequences[0]) == [f"yo A1{IM}", f"ok A2{IM}"]


def test_a_token_that_the_vocabulary_has_as_text_is_refused():
    """A vocabulary may have a control token among its pieces, so that plain text becomes it."""
    tokenizer = make_tokenizer(PLAIN, *MODEL)
    pieces = [("<unk>", 0.0), (IM, -1.0), *((chr(code), -9.0) for code in range(10, 127))]
    backend = Backend(models.Unigram(pieces, 0))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in (IM, "<|im_start|>")])
    tokenizer = replace(tokenizer, backend=backend, eos_id=backend.token_to_id(IM), bos_id=None)
    renderer = Renderer(ChatTemplate(PLAIN, "t", "0"), {})
    encoder = ConversationEncoder(renderer, tokenizer, (IM,))
    messages = [{"role": "user", "content": f"so {IM} it"}, *CHAT[1:]]
    assert refusal(encoder, make_chat(messages))[0] == "control-token"
