"""Chat templates: where they come from, and the same text as transformers renders."""

import json
from datetime import datetime
from pathlib import Path

import pytest
import trl
from transformers.utils import chat_template_utils

from kumi.data.chat import RowRefused
from kumi.data.chat.sandbox import Renderer
from kumi.data.chat.template import ChatTemplate, load_stops, load_template, load_tokens
from kumi.errors import ConfigError
from kumi.spec.data_source import ChatOptions

TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get", "arguments": {"city": "Zürich <b>"}}}
TOOLS = [{"type": "function", "function": {"name": "get", "description": "d", "parameters": {"type": "object"}}}]
CONVERSATIONS = [
    (["system:be ü", "user:hi", "assistant:yo", "user:q", "assistant:A2 "], None),
    ([("user", "w?"), ("assistant", "", {"tool_calls": [CALL]}), ("tool", "12"), ("assistant", "12")], TOOLS),
    ([("user", "w?"), ("assistant", "a", {"thinking": "hm"}), ("user", "q"), ("assistant", "b", {"name": None})], None),
]


def messages(turns):
    parts = [(*turn.split(":"),) if isinstance(turn, str) else turn for turn in turns]
    return [{"role": role, "content": content, **(more[0] if more else {})} for role, content, *more in parts]


class FixedDatetime(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2025, 1, 1)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_renderings_are_those_of_transformers(path, monkeypatch):
    monkeypatch.setattr(chat_template_utils, "datetime", FixedDatetime)
    text = path.read_text()
    renderer = Renderer(ChatTemplate(text, path.name, ""), TOKENS)
    compared = 0
    for turns, tools in CONVERSATIONS:
        # apply_chat_template leaves out keys without a value before it renders.
        chat = [{key: value for key, value in item.items() if value is not None} for item in messages(turns)]
        for count, prompt in ((len(chat), False), (len(chat) - 1, True)):
            kwargs = {"tools": tools, "add_generation_prompt": prompt, "chat_template": text, "enable_thinking": False}
            try:
                expected = chat_template_utils.render_jinja_template([chat[:count]], **kwargs, **TOKENS)[0][0]
            except Exception:
                with pytest.raises(RowRefused, match=rf"{path.name}:\d+: the chat template raises"):
                    renderer.render(messages(turns)[:count], tools, prompt, enable_thinking=False)
                continue
            assert renderer.render(messages(turns)[:count], tools, prompt, enable_thinking=False) == expected
            compared += 1
    assert compared or path.stem.startswith(("llava", "smolvlm", "idefics"))


def test_a_rendering_depends_on_its_arguments_alone():
    text = "{{ strftime_now('%d %B %Y') }} {{ [1, 2, 3, 4, 5]|random }} {{ lipsum(n=1) }} {{ size }}"
    first, second = (Renderer(ChatTemplate(text, "t", ""), {}, {"size": 3}, "2024-02-29").render([]) for _ in range(2))
    assert first == second
    assert first.startswith("29 February 2024 ")
    assert first.endswith(" 3")
    with pytest.raises(RowRefused, match="may not set 'tools'"):
        Renderer(ChatTemplate(text, "t", ""), {})._render([], None, False, {"tools": 1})
    with pytest.raises(ConfigError, match="'messages' is set by each conversation"):
        Renderer(ChatTemplate(text, "t", ""), {}, {"messages": []})


def test_the_sources_of_a_template_in_order(tmp_path):
    options = ChatOptions()
    with pytest.raises(ConfigError, match="has no chat template"):
        load_template(options, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert load_template(options, tmp_path).text == "one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    template = load_template(options, tmp_path)
    assert (template.text, template.tool_text, template.origin) == ("two", "tools", str(config))
    assert Renderer(template, {}).render([], []) == "tools"
    assert Renderer(template, {}).render([]) == "two"
    assert load_template(ChatOptions(template="tool_use"), tmp_path).text == "tools"
    (tmp_path / "chat_template.jinja").write_bytes(b"three\r\n")
    assert load_template(options, tmp_path).text == "three\n"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/short.jinja").write_text("four")
    assert load_template(ChatOptions(template="short"), tmp_path).text == "four"
    own = tmp_path / "own.jinja"
    own.write_text("five")
    assert load_template(ChatOptions(template=str(own)), tmp_path).text == "five"
    with pytest.raises(ConfigError, match="none of default, short in"):
        load_template(ChatOptions(template="long"), tmp_path)
    own.write_text("x" * (1 << 20) + "y")
    with pytest.raises(ConfigError, match="more than the limit"):
        load_template(ChatOptions(template=str(own)), tmp_path)


def test_special_tokens_are_those_that_transformers_passes(tmp_path):
    config = {"eos_token": {"content": "</s>"}, "image_token": "<i>", "bos_token": None, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "extra_special_tokens": {"tool_token": "<t>"}})
    )
    assert load_tokens(tmp_path) == {"eos_token": "</s>", "image_token": "<i>", "tool_token": "<t>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "<p>"}))
    assert load_tokens(tmp_path)["eos_token"] == "<end>"


def test_stop_tokens_are_tokens_of_the_vocabulary(tokens):
    eos = tokens.decode([tokens.eos_id])
    assert load_stops(tokens, ChatOptions()) == (eos,)
    assert load_stops(tokens, ChatOptions(stop_tokens=("a", eos, "a"))) == ("a", eos)
    with pytest.raises(ConfigError, match="a reply ends with one"):
        load_stops(tokens, ChatOptions(stop_tokens=("zq",)))
