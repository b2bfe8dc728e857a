from __future__ import annotations

import json
import shutil

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer as Backend

from kumi.data import Source, bpe, load_tokenizer, tokenizer
from kumi.data.bpe import train as train_tokenizer
from kumi.data.encode_rows import content_of
from kumi.data.formats import detect, to_example
from kumi.data.job_checks import in_validation
from kumi.errors import ConfigError, RefusedError

JSON_SOURCES = Source("{stdlib}/{json,email,http,logging}/*.py")
HARD = "def f(x):\n    return 'é 漢字 🎉'\r\n\n\t# 1234 <|endoftext|> end  "


@given(st.text())
def test_any_text_comes_back(tokens, text):
    assert tokens.decode(tokens.encode(text)) == text


def test_a_trained_folder_is_one_that_transformers_loads(tokens, texts):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokens.folder)
    for text in [HARD, *texts[:20]]:
        assert theirs(text).input_ids == tokens.encode(text)
        assert theirs.decode(tokens.encode(text)) == text
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id, len(theirs)) == (0, 0, 1, tokens.vocab_size)


def test_training_again_gives_the_same_tokenizer_on_any_number_of_threads(tokens, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    again = train_tokenizer([JSON_SOURCES], 600, tmp_path / "again")
    assert again.digest == tokens.digest
    assert again.vocab_size == 600


def test_a_trained_folder_is_used_again_only_for_the_same_request(tmp_path, write_jsonl, texts, monkeypatch):
    source = Source(str(write_jsonl(tmp_path / "a.jsonl", texts[:100])))
    first = train_tokenizer([source], 300, tmp_path / "t")
    with monkeypatch.context() as patch:
        patch.setattr("kumi.data.bpe._run", None)
        assert train_tokenizer([source], 300, tmp_path / "t") == first
    write_jsonl(tmp_path / "a.jsonl", texts[100:])
    assert train_tokenizer([source], 300, tmp_path / "t").digest != first.digest
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/config.json").write_text("{}")
    with pytest.raises(RefusedError, match="has files, but no tokenizer trained by kumi"):
        train_tokenizer([source], 300, tmp_path / "foreign")


def test_a_sample_is_taken_of_a_large_corpus(tmp_path, write_jsonl, monkeypatch):
    monkeypatch.setattr("kumi.data.bpe._CHUNK", 2000)
    source = Source(str(write_jsonl(tmp_path / "a.jsonl", [f"{n} number {n}" for n in range(2000)])))
    seen = []
    monkeypatch.setattr("kumi.data.bpe._run", lambda job: seen.append(job["chosen"]))
    for folder in ("a", "b"):
        with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
            train_tokenizer([source], 300, tmp_path / folder, sample_bytes=10_000)
    assert seen[0] == seen[1]
    size = sum(segment["bytes"] for unit in seen[0] for segment in unit["segments"])
    assert 10_000 <= size < 12_500
    starts = [unit["segments"][0]["start"] for unit in seen[0]]
    assert starts == sorted(starts)
    assert starts != list(range(0, 10_000, 2000))


def test_what_cannot_be_learnt_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text(" ")
    with pytest.raises(ConfigError, match="at least 258"):
        train_tokenizer([JSON_SOURCES], 200, tmp_path / "t")
    with pytest.raises(ConfigError, match="no text to train a tokenizer on"):
        train_tokenizer([Source(str(tmp_path / "a.txt"))], 300, tmp_path / "t")


def word_tokens(tokens, words):
    """The words that are one token, after a space or at the beginning."""
    return {word for word in words if 1 in (len(tokens.encode(word)), len(tokens.encode(f" {word}")))}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_texts_of_messages_are_learnt_and_held_out_rows_are_not(tmp_path):
    call = {"function": {"name": "weather", "arguments": {"city": "Zanzibar"}}}
    chats = [
        {"role": "user", "content": "xylophone " * 9},
        {"role": "assistant", "content": "quokka " * 9, "reasoning_content": "zeppelin " * 9, "tool_calls": [call] * 5},
    ]
    train = write_rows(tmp_path / "chats.jsonl", [{"messages": chats}, {"messages": "none"}])
    own = write_rows(tmp_path / "held.jsonl", [{"messages": [{**chats[0], "content": "walrus " * 9}]}])
    pairs = [{"prompt": "marzipan " * 9, "chosen": "kumquat " * 9, "rejected": "daffodil " * 9}]
    parquet.write_table(pyarrow.Table.from_pylist(pairs), tmp_path / "pairs.parquet")
    sources = [
        Source(train, validation=own),
        Source(str(tmp_path / "pairs.parquet")),
        # Files that another source holds out are not read for this one.
        Source(str(tmp_path / "*.jsonl"), exclude=("chats.jsonl",)),
    ]
    tokens = train_tokenizer(sources, 400, tmp_path / "t")
    shown = {"xylophone", "quokka", "zeppelin", "weather", "Zanzibar", "marzipan", "kumquat", "daffodil"}
    assert word_tokens(tokens, {*shown, "walrus", "messages", "role", "assistant"}) == shown
    with pytest.raises(ConfigError, match="which is also trained on"):
        train_tokenizer([Source(str(tmp_path / "*.jsonl"), validation=own)], 300, tmp_path / "t2")


def test_rows_that_the_preparation_holds_out_are_not_learnt(tmp_path, monkeypatch):
    rows = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(400)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    own = write_rows(tmp_path / "own.jsonl", rows[:1])
    jobs = []
    monkeypatch.setattr(bpe, "_run", jobs.append)
    for number, source in enumerate([Source(path), Source(path, validation=own)]):
        with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
            train_tokenizer([source], 300, tmp_path / str(number), validation=0.25)
    part, everything = (list(bpe._texts(job, [])) for job in jobs)
    assert everything == [text for row in rows for text in (row["prompt"], row["completion"])]
    prompts = {text for text in part if text.startswith("question")}
    # The same rows as the preparation holds out.
    fmt = detect(rows, Source(path))
    contents = [content_of(to_example(fmt, row, path, line)) for line, row in enumerate(rows, 1)]
    learnt = {row["prompt"] for row, content in zip(rows, contents, strict=True) if not in_validation(content, 0.25)}
    assert prompts == learnt
    assert 250 < len(learnt) < 350


def edited(tokens, tmp_path, **files):
    folder = tmp_path / "edited"
    shutil.copytree(tokens.folder, folder, dirs_exist_ok=True)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "<|pad|>"}},
        {"tokenizer_config": {"eos_token": {"content": "<|pad|>", "special": True}}},
        {"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": "<|pad|>"}},
        {"generation_config": {"eos_token_id": [1]}},
        {"config": {"eos_token_id": 1}},
    ],
)
def test_the_end_mark_is_found_where_hugging_face_writes_it(tokens, tmp_path, files):
    tokenizer = load_tokenizer(edited(tokens, tmp_path, **files))
    assert (tokenizer.eos_id, tokenizer.bos_id) == (1, None)


@pytest.mark.parametrize("token", [{}, {"bos_token": None}, {"bos_token": "<|pad|>"}])
def test_the_token_that_begins_a_text_is_that_of_transformers(tokens, tmp_path, token):
    """A bos_token_id of the model's files is no bos of its tokenizer; without one, none is added."""
    from transformers import AutoTokenizer

    ids = {"bos_token_id": 5, "eos_token_id": 0}
    folder = edited(
        tokens,
        tmp_path,
        tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", **token},
        config={"model_type": "qwen2", **ids},
        generation_config=ids,
    )
    theirs = AutoTokenizer.from_pretrained(folder)
    assert load_tokenizer(folder).bos_id == theirs.bos_token_id == (1 if token.get("bos_token") else None)
    assert theirs("x").input_ids == load_tokenizer(folder).encode("x")


def test_an_unknown_end_mark_is_refused(tokens, tmp_path):
    with pytest.raises(ConfigError, match="the eos token is unknown"):
        load_tokenizer(edited(tokens, tmp_path))
    with pytest.raises(ConfigError, match="the eos token is unknown"):
        load_tokenizer(edited(tokens, tmp_path, generation_config={"eos_token_id": [0, 1]}))
    with pytest.raises(ConfigError, match=r"eos_token '</s>' is not in the vocabulary"):
        load_tokenizer(edited(tokens, tmp_path, tokenizer_config={"eos_token": "</s>"}))
    with pytest.raises(ConfigError, match=r"eos_token_id 7000 is not in the vocabulary"):
        load_tokenizer(edited(tokens, tmp_path, config={"eos_token_id": 7000}))


def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a readable tokenizer"):
        load_tokenizer(tmp_path)


def test_saved_truncation_and_padding_do_not_touch_documents(tokens, tmp_path):
    folder = edited(tokens, tmp_path, tokenizer_config={"eos_token": "<|endoftext|>"})
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode(HARD) == tokens.encode(HARD)


def test_a_long_text_in_pieces_is_the_same_tokens(tokens, texts, monkeypatch):
    text = "\n\n".join(texts[:60])
    whole = tokens.encode(text)
    monkeypatch.setattr(tokenizer, "PIECE", 1000)
    assert len(tokenizer.pieces(text, 1000)) > len(text) / 1000
    assert "".join(tokenizer.pieces(text, 1000)) == text
    assert tokens.encode(text) == whole
    assert tokenizer.pieces("x" * 2500, 1000) == ["x" * 1000, "x" * 1000, "x" * 500]
