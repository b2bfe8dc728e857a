from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kumi.data import Mixture, SequentialSampler, binfile, text_windows
from kumi.data.text_windows import mean_document_span, windows
from kumi.errors import ConfigError

FIELDS = ("input_ids", "labels", "position_ids", "document_ids")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three token files; every token of all of them is different, so that each can be recognised."""
    folder, made, token = tmp_path_factory.mktemp("mix"), [], 0
    for number, lengths in enumerate([[5, 1, 9, 3, 20, 2], [7] * 30, [100]]):
        with binfile.open_writer(folder / str(number), np.dtype(np.int32)) as append:
            append(np.arange(token, token + sum(lengths), dtype=np.int32), np.array(lengths))
        token += sum(lengths)
        made.append(binfile.open_file(folder / str(number)))
    return made


def same(a, b):
    return all(np.array_equal(a[f], b[f]) for f in FIELDS)


@given(st.integers(0, 10**12), st.integers(1, 6), st.booleans())
@settings(max_examples=50)
def test_a_batch_is_its_samples(files, start, count, cross):
    mixture = Mixture([(files[0], 0.2), (files[1], 1.0), (files[2], 3)], 8, 11, cross)
    batch = mixture.batch(start, count)
    rows = [mixture.batch(start + n, 1) for n in range(count)]
    for field in FIELDS:
        assert np.array_equal(batch[field], np.concatenate([row[field] for row in rows]))


def test_a_mixture_is_a_function_of_its_seed(files):
    parts = [(files[0], 1.0), (files[1], 1.0)]
    assert same(Mixture(parts, 8, 1).batch(5, 20), Mixture(parts, 8, 1).batch(5, 20))
    assert not same(Mixture(parts, 8, 1).batch(5, 20), Mixture(parts, 8, 2).batch(5, 20))
    assert {f: Mixture(parts, 8, 1).batch(0, 2)[f].dtype.name for f in FIELDS} == {
        "input_ids": "int64",
        "labels": "int64",
        "position_ids": "int64",
        "document_ids": "int32",
    }


@pytest.mark.parametrize("seq_len", [1, 4, 13, 39, 64])
@pytest.mark.parametrize("cross", [False, True])
def test_an_epoch_predicts_every_token_once_and_in_another_order_than_the_next(files, seq_len, cross):
    file = files[0]
    count = windows(file, seq_len)
    mixture = Mixture([(file, 1.0)], seq_len, 3, cross)
    epochs = [mixture.batch(count * epoch, count) for epoch in range(3)]
    begins = set() if cross else set(file.tokens[file.starts(np.arange(file.document_count))].tolist())
    predicted = sorted(set(file.tokens[1:].tolist()) - begins)
    for batch in epochs:
        assert sorted(batch["labels"][batch["labels"] != -100].tolist()) == predicted
    if count > 5:
        assert not same(epochs[0], epochs[1])


@pytest.mark.parametrize("cross", [False, True])
def test_windows_equal_a_plain_reading(files, cross):
    """Each row equals that of a loop over tokens, without the index's search."""
    for file in files:
        owner = np.repeat(np.arange(file.document_count), file.lengths)
        for seq_len in (1, 6, 16, 150):
            sweep = SequentialSampler([file], seq_len, cross)
            batch = sweep.batch(0, len(sweep))
            for row in range(len(sweep)):
                check_row(file, owner, seq_len, cross, batch, row)


def check_row(file, owner, seq_len, cross, batch, row):
    document, position, last = 0, -1, None
    for s in range(seq_len):
        place = row * seq_len + s
        inside = place < file.token_count
        mine = (0 if cross else owner[place]) if inside else (0 if cross else -1)
        if last is not None and mine != last:
            document, position = document + 1, -1
        position, last = position + 1, mine
        predicted = place + 1 < file.token_count and (cross or owner[place] == owner[place + 1])
        assert batch["input_ids"][row, s] == (file.tokens[place] if inside else 0)
        assert batch["labels"][row, s] == (file.tokens[place + 1] if predicted else -100)
        assert batch["position_ids"][row, s] == position
        assert batch["document_ids"][row, s] == document


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=3), st.integers(0, 5000))
@settings(max_examples=40)
def test_weights_are_exact_shares_from_any_place_on(files, weights, block):
    mixture = Mixture([(files[n], w) for n, w in enumerate(weights)], 8, 5)
    part, _, _ = mixture.locate(256 * block, 1024)
    for number, weight in enumerate(weights):
        assert abs(np.count_nonzero(part == number) - 1024 * weight / sum(weights)) <= 3


@given(st.integers(0, 3000))
@settings(max_examples=30)
def test_an_epoch_draws_every_window_once(files, consumed):
    mixture = Mixture([(files[0], 1.0), (files[1], 2.5), (files[2], 0.3)], 8, 5)
    part, epoch, window = mixture.locate(0, consumed)
    sizes = [windows(file, 8) for file in files]
    for number, size in enumerate(sizes):
        drawn = window[part == number].tolist()
        assert epoch[part == number].tolist() == [n // size for n in range(len(drawn))]
        for begin in range(0, len(drawn) - size + 1, size):
            assert sorted(drawn[begin : begin + size]) == list(range(size))


def test_a_sweep_covers_every_file_once_and_pads_behind_the_end(files):
    sweep = SequentialSampler(files, 16)
    assert len(sweep) == sum(windows(file, 16) for file in files)
    batch = sweep.batch(0, len(sweep) + 3)
    assert (batch["labels"][len(sweep) :] == -100).all()
    assert batch["input_ids"].shape == (len(sweep) + 3, 16)
    predicted = batch["labels"][batch["labels"] != -100]
    tokens = sum(file.token_count - file.document_count for file in files)
    assert len(set(predicted.tolist())) == len(predicted) == tokens
    assert same(sweep.batch(2, 3), SequentialSampler(files, 16).batch(2, 3))


def test_what_cannot_be_mixed_is_refused(files, tmp_path):
    with binfile.open_writer(tmp_path / "a", np.dtype(np.uint16)) as append:
        append(np.array([1], np.uint16), np.array([1]))
    short = binfile.open_file(tmp_path / "a")
    with pytest.raises(ConfigError, match="has 1 tokens, but a training sequence needs at least 2"):
        Mixture([(short, 1.0)], 8)
    with pytest.raises(ConfigError, match="at least one token file"):
        SequentialSampler([], 8)
    with pytest.raises(ConfigError, match="seq_len=0"):
        SequentialSampler(files, 0)
    with pytest.raises(ConfigError, match="greater than 0"):
        Mixture([(files[0], 0.0)], 8)


def test_a_limited_sweep_is_spread_evenly_over_all_windows(files):
    every, some = SequentialSampler(files, 8), SequentialSampler(files, 8, limit=10)
    assert len(some) == 10
    expected = np.concatenate([every.batch(number * len(every) // 10, 1)["input_ids"] for number in range(10)])
    chosen = some.batch(0, 12)
    assert np.array_equal(chosen["input_ids"][:10], expected)
    assert (chosen["labels"][10:] == -100).all()
    assert same(SequentialSampler(files, 8, limit=10**6).batch(0, 20), every.batch(0, 20))


def test_sources_of_a_sweep_are_spans_of_which_none_is_empty(files):
    every, some = SequentialSampler(files, 8), SequentialSampler(files, 8, limit=2)
    sizes = [windows(file, 8) for file in files]
    assert [stop - start for start, stop in every.spans] == sizes
    assert every.spans[-1][1] == len(every) == sum(sizes)
    assert [stop - start for start, stop in some.spans] == [1, 1, 1], "one of the second source beyond the limit"
    for number, (start, stop) in enumerate(every.spans):
        alone = SequentialSampler([files[number]], 8)
        assert same(every.batch(start, stop - start + 3, stop), alone.batch(0, len(alone) + 3))
    for number, (start, stop) in enumerate(some.spans):
        assert some.batch(start, 1)["input_ids"][0, 0] in files[number].tokens
        assert (some.batch(start, 5, stop)["labels"][1:] == -100).all()


@pytest.mark.parametrize("seq_len", [1, 4, 8, 13, 64])
def test_the_span_is_that_of_the_documents_in_the_rows(files, seq_len):
    for file in files:
        count = windows(file, seq_len)
        batch = SequentialSampler([file], seq_len).batch(0, count)
        ids = [row[: file.token_count - number * seq_len] for number, row in enumerate(batch["document_ids"])]
        spans = [int(np.sum(row == token)) for row in ids for token in row]
        assert mean_document_span(file, seq_len) == pytest.approx(np.mean(spans))


def test_the_span_of_many_rows_is_that_of_some(files, monkeypatch):
    monkeypatch.setattr(text_windows, "_SPAN_WINDOWS", 3)
    assert mean_document_span(files[1], 14) == pytest.approx(7)
    assert mean_document_span(files[2], 10) == pytest.approx(10)
