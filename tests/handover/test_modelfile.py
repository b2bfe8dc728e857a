"""The Modelfile beside a GGUF file, read back by the grammar of Ollama."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ollama import parse
from tiny_exports import exported, model_folder

from kumi.convert.handover.modelfile import modelfile_of, modelfile_text, quoted
from kumi.errors import ModelError, RefusedError

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def folder(tmp_path):
    return exported(model_folder(tmp_path / "saved", "llama"), tmp_path / "hf")


def commands(folder, settings=None, gguf="my-run.gguf"):
    if settings is not None:
        (folder / "generation_config.json").write_text(json.dumps(settings))
    return parse(modelfile_text(folder, folder.parent / gguf))


def test_the_parser_of_the_tests_reads_the_examples_of_ollama():
    text = '# one\nFROM llama3.2\nparameter temperature 1\nSYSTEM """a\n"b"\n"""\nPARAMETER stop "<|x|>"\nTEMPLATE a b '
    assert parse(text) == [
        ("from", "llama3.2"),
        ("temperature", "1"),
        ("system", 'a\n"b"\n'),
        ("stop", "<|x|>"),
        ("template", "a b"),
    ]
    for wrong in ("SYSTEM a", 'FROM x\nSYSTEM "', "FROM x\nBAD y", "FROM x\nPARAMETER", 'FROM x\nSYSTEM """a""'):
        with pytest.raises(ValueError, match=r"FROM|end of file|must be"):
            parse(wrong)


def test_a_base_model_gets_prompts_as_they_are(folder):
    assert commands(folder, {"eos_token_id": 0}) == [
        ("from", "./my-run.gguf"),
        ("template", "{{ .Prompt }}"),
        ("stop", "<|endoftext|>"),
        ("num_ctx", "64"),
    ]


@pytest.mark.parametrize("place", ["jinja", "tokenizer_config"])
def test_the_template_of_a_chat_model_is_left_to_the_gguf_file(folder, place):
    if place == "jinja":
        (folder / "chat_template.jinja").write_text(CHATML)
    else:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHATML}))
    stops = {"eos_token_id": [2, 0, 2]}
    assert commands(folder, stops)[1:3] == [("stop", "<|im_end|>"), ("stop", "<|endoftext|>")]


def test_sampling_is_that_of_generation_config(folder):
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}
    parameters = dict(commands(folder, sampling | {"repetition_penalty": 1.05, "max_new_tokens": 512}))
    assert parameters == {
        **{"from": "./my-run.gguf", "template": "{{ .Prompt }}", "temperature": "0.6", "top_k": "20"},
        **{"top_p": "0.95", "min_p": "0.0", "repeat_penalty": "1.05", "num_predict": "512", "num_ctx": "64"},
    }
    assert dict(commands(folder, {"do_sample": False, "temperature": 0.6}))["temperature"] == "0"
    assert "temperature" not in dict(commands(folder, {}))


@pytest.mark.parametrize("wrong", [{"temperature": "0.6"}, {"top_k": 1.5}, {"top_p": True}, {"min_p": -1}])
def test_settings_of_the_wrong_type_are_refused(folder, wrong):
    (key,) = wrong
    with pytest.raises(ModelError, match=f"generation_config.json: {key}=.* must be a"):
        commands(folder, wrong)


def test_a_long_context_is_left_to_ollama(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 4096}))
    assert "num_ctx" not in dict(commands(folder))


def test_stops_of_a_sentencepiece_tokenizer_come_from_its_settings(folder):
    (folder / "tokenizer.json").unlink()
    decoder = {"2": {"content": "</s>", "special": True}, "x": {"content": "no"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert ("stop", "</s>") in commands(folder, {"eos_token_id": 2})
    (folder / "tokenizer_config.json").unlink()
    assert "stop" not in dict(commands(folder))


def test_names_of_files_are_read_back(folder):
    assert modelfile_of(folder / "a b.gguf") == folder / "a b.Modelfile"
    for name in ("a b.gguf", 'say "hi".gguf', "# no comment.gguf", "two\nlines.gguf"):
        assert commands(folder, gguf=name)[0] == ("from", f"./{name}")


@given(st.text(alphabet=st.sampled_from('"\n\t #ab{<\\\u200b'), max_size=12))
@settings(max_examples=300)
def test_values_are_read_back_or_refused(value):
    try:
        written = quoted(value)
    except RefusedError:
        assert "\u200b" in value or '"""\n' in value
        return
    assert parse(f"FROM x\nPARAMETER stop {written}\nPARAMETER seed 1") == [
        ("from", "x"),
        ("stop", value),
        ("seed", "1"),
    ]
