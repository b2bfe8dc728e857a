"""Stores of examples: packed before they are read, and never trained as text."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from shutil import copytree

import numpy as np
import pytest

from kumi.data import old_plans, open_store
from kumi.errors import ConfigError, RefusedError
from kumi.spec.batch import BatchSpec

SEQ_LEN = 512


@pytest.fixture(scope="module")
def packed_chats(stored_chats, tmp_path_factory):
    """A copy of the chats and its packed training rows; tests only read them."""
    store = open_store(copytree(stored_chats.folder, tmp_path_factory.mktemp("packed") / "tokens"))
    return store, [*store.pack(SEQ_LEN, 3).values()]


def test_examples_have_no_rows_before_they_are_packed(stored_chats):
    for side in ("train", "validation"):
        with pytest.raises(RefusedError, match="no such plan of packed rows"):
            stored_chats.row_sources(side, SEQ_LEN, 3)


def test_packed_rows_of_a_store_have_all_units_that_fit(packed_chats):
    store, (rows,) = packed_chats
    source = store.sources[0]
    assert rows.units + rows.bins.too_long + rows.bins.empty == source.train_units
    reopened = open_store(store.folder)
    batch = reopened.mixture(SEQ_LEN, 3).batch(0, rows.rows)
    assert np.count_nonzero(batch["labels"] != -100) > 0
    assert (batch["document_ids"].max(axis=1) > 0).any()
    held_out = reopened.sweep(SEQ_LEN)
    assert len(held_out) == reopened.row_sources("validation", SEQ_LEN, 9)[0].rows
    assert np.count_nonzero(held_out.batch(0, len(held_out))["labels"] != -100) > 0


def test_trained_labels_are_the_trained_tokens(packed_chats):
    store, (rows,) = packed_chats
    units = store.open_units(store.sources[0], "train")
    trained = [units.tokens_of(int(u)) for u in rows.bins.units]
    labels = store.mixture(SEQ_LEN, 3).batch(0, rows.rows)["labels"]
    # The first token of a sequence is no label.
    expected = sum(int((t.mask & 1).sum()) - int((t.mask[np.cumsum(t.lengths) - t.lengths] & 1).sum()) for t in trained)
    assert np.count_nonzero(labels != -100) == expected


def test_the_document_span_is_that_of_the_sequences(packed_chats):
    store, (rows,) = packed_chats
    batch = store.mixture(SEQ_LEN, 3).batch(0, rows.rows)
    padding = (batch["labels"] == -100) & (batch["input_ids"] == 0)
    counts = [np.bincount(ids[~empty]) for ids, empty in zip(batch["document_ids"], padding, strict=True)]
    lengths = np.concatenate(counts)
    assert store.document_span(SEQ_LEN) == pytest.approx((lengths**2).sum() / lengths.sum(), rel=0.01)
    assert BatchSpec(SEQ_LEN, SEQ_LEN, store.document_span(SEQ_LEN)).attention_len < SEQ_LEN


def test_attention_across_examples_is_refused(packed_chats):
    store, _ = packed_chats
    with pytest.raises(ConfigError, match=r"data\.cross_document: source .* has examples \(chat\)"):
        store.mixture(SEQ_LEN, 3, cross_document=True)


def test_rows_that_language_modelling_does_not_train_are_refused(stored_chats):
    pairs = replace(stored_chats, sources=(replace(stored_chats.sources[0], kind="preference"),))
    with pytest.raises(ConfigError, match="has rows of kind 'preference', but the objective trains text and chat"):
        pairs.pack(SEQ_LEN, 3)


def test_plans_that_nobody_used_for_long_are_removed(stored_chats, tmp_path):
    copytree(stored_chats.folder, tmp_path / "copy")
    store = open_store(tmp_path / "copy")
    [source] = store.sources
    plans = {}
    for seq_len in range(500, 512):
        before = set(tmp_path.rglob("*.i4"))
        store.pack(seq_len, 0)
        plans[seq_len] = set(tmp_path.rglob("*.i4")) - before
        assert {path.name.split(".bins.")[0] for path in plans[seq_len]} == {source.train.name, source.validation.name}
    month, now = old_plans.UNUSED_SECONDS, time.time()
    for seq_len, (read, written) in {500: (0, 0), 501: (0, 0), 502: (now, 0), 503: (0, now)}.items():
        for path in plans[seq_len]:
            os.utime(path, (read, written))
    left = source.train.with_name(f"{source.train.name}.bins.x.i4.7.partial")
    left.write_bytes(b"x")
    store.pack(511, 0)
    assert left.exists(), "another process may be writing it"
    assert set(tmp_path.rglob("*.i4")) == set().union(*plans.values()) - plans[500] - plans[501]
    os.utime(left, (0, now - month - 60))
    for seq_len in range(502, 510):
        for path in plans[seq_len]:
            os.utime(path, (0, 0))
    store.pack(511, 0)
    assert not left.exists()
    # The eight that were used last stay.
    assert len(set(tmp_path.rglob("*.i4"))) == 2 * old_plans.LAST_PLANS
    assert plans[510] | plans[511] <= set(tmp_path.rglob("*.i4"))
    assert store.pack(500, 0)
