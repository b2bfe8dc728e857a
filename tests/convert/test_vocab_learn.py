"""Learnt tokens agree with the library's own trainer, and leave the old tokens unchanged."""

import json
import random

import pytest
from vocabularies import NEW, OLD, byte_level, sentence_piece, unigram

from kumi.convert.vocab.base_tokenizer import load_base
from kumi.convert.vocab.corpus import fertility, read_corpus, words
from kumi.convert.vocab.edit import extended_tokenizer
from kumi.convert.vocab.learn import learn
from kumi.errors import ConfigError


def test_merging_goes_on_as_the_library_would_have(tmp_path):
    """A tokenizer trained further is the one that was trained longer, merge for merge."""
    base = load_base(byte_level(tmp_path / "short", 270))
    pieces = learn(base, words(base, OLD), 50)
    longer = json.loads((byte_level(tmp_path / "long", 320) / "tokenizer.json").read_text())["model"]["merges"]
    assert [list(piece.merge) for piece in pieces] == longer[-50:]
    assert longer[:-50] == base.data["model"]["merges"]


def learnt(folder, count=40):
    base = load_base(folder)
    pieces = learn(base, words(base, NEW), count)
    return base, pieces, extended_tokenizer(base, pieces, [])


@pytest.mark.parametrize("kind", [byte_level, sentence_piece])
def test_new_tokens_are_old_ones_in_a_row(kind, tmp_path):
    """In every text: replacing each new token by the old ones that it merges gives the old encoding."""
    base, pieces, new = learnt(kind(tmp_path / "base"))
    assert len(pieces) == 40
    assert dict(new.vocab).items() >= dict(base.vocab).items()
    made = {base.size + number: list(piece.parts) for number, piece in enumerate(pieces)}
    draw, used = random.Random(0), set()
    letters = "ka rimotu nesolß ü北京市 .\n\tx9"
    texts = [*OLD, *NEW, *("".join(draw.choices(letters, k=60)) for _ in range(200))]
    for text in texts:
        before, after = (one.backend.encode(text, add_special_tokens=False).ids for one in (base, new))
        assert [old for one in after for old in made.get(one, [one])] == before, text
        used.update(after)
    whole = {piece.text for piece in pieces} - {part for piece in pieces if piece.merge for part in piece.merge}
    assert whole <= {new.backend.id_to_token(one) for one in used}, "every token that is no step to another is reached"
    old, now = (fertility(one.backend, NEW)["bytes_per_token"] for one in (base, new))
    assert now > 2 * old
    assert fertility(base.backend, OLD)["tokens"] == fertility(new.backend, OLD)["tokens"]


def test_characters_that_were_bytes_become_tokens_and_then_words(tmp_path):
    base, pieces, _ = learnt(sentence_piece(tmp_path / "base"))
    by_text = {piece.text: piece for piece in pieces}
    assert by_text["北"].merge is None
    assert [base.backend.id_to_token(part) for part in by_text["北"].parts] == ["<0xE5>", "<0x8C>", "<0x97>"]
    assert by_text["▁北京市"].parts[-9:] == by_text["北"].parts + by_text["京"].parts + by_text["市"].parts
    assert "\n" not in "".join(by_text), "the end of a line is no letter"
    assert not any("▁" in text.lstrip("▁") for text in by_text)


def test_what_is_learnt_is_the_same_every_time_and_ends(tmp_path):
    base, pieces, _ = learnt(byte_level(tmp_path / "base"))
    shuffled = dict(random.Random(1).sample(sorted(words(base, NEW).items()), len(words(base, NEW))))
    assert learn(base, shuffled, 40) == pieces
    assert len(learn(base, words(base, NEW), 10**6)) < 200
    assert learn(base, words(base, ["x y z"]), 5) == [], "what occurs once is not learnt"
    taken = pieces[0].text
    assert taken not in {piece.text for piece in learn(base, words(base, NEW), 40, [taken])}


def test_tokenizers_that_are_not_made_by_merging_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is a Unigram tokenizer, and kumi learns tokens by BPE merges only; name"):
        learnt(unigram(tmp_path / "unigram"))
    folder = byte_level(tmp_path / "bpe", end_of_word_suffix="</w>")
    with pytest.raises(ConfigError, match="has markers for the end or continuation of words"):
        learnt(folder)
    data = json.loads((byte_level(tmp_path / "bare") / "tokenizer.json").read_text()) | {"pre_tokenizer": None}
    (tmp_path / "bare" / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="has no rule for where words begin"):
        learnt(tmp_path / "bare")


def test_a_corpus_is_drawn_by_its_texts_and_split(tmp_path):
    lines = [json.dumps({"body": f"{number} " * 20}) for number in range(400)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{broken"]) + "\n")
    corpus = read_corpus([str(tmp_path / "a.jsonl")], "body")
    assert len(corpus.learn) + len(corpus.measure) == 400
    assert corpus.faults == 1
    assert 20 <= len(corpus.measure) <= 60
    assert not set(corpus.learn) & set(corpus.measure)
    size = (tmp_path / "a.jsonl").stat().st_size
    part = read_corpus([str(tmp_path / "a.jsonl")], "body", size // 4)
    assert 60 <= len(part.learn) + len(part.measure) <= 140
    assert set(part.learn) | set(part.measure) < set(corpus.learn) | set(corpus.measure)
    with pytest.raises(ConfigError, match=r"--data: .*a\.jsonl holds no text under the key 'text' \(401 records"):
        read_corpus([str(tmp_path / "a.jsonl")], "text")


def test_words_that_are_tokens_are_found_whole_where_the_tokenizer_does_that(tmp_path):
    """Like Llama 3's tokenizer, which looks up a word before it merges tokens."""
    base = load_base(byte_level(tmp_path / "base", ignore_merges=True))
    pieces = learn(base, words(base, NEW), 40)
    new = extended_tokenizer(base, pieces, [])
    for text in (*OLD, *NEW):
        ids = new.backend.encode(text, add_special_tokens=False).ids
        assert new.backend.decode(ids, skip_special_tokens=False) == text
    assert fertility(base.backend, OLD)["tokens"] == fertility(new.backend, OLD)["tokens"]
    assert fertility(new.backend, NEW)["tokens"] < fertility(base.backend, NEW)["tokens"] / 2
    for number, piece in enumerate(pieces, base.size):
        assert [token.id for token in new.backend.model.tokenize(piece.text)] == [number]
