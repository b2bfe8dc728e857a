"""Packed rows: every unit once and unsplit, by best-fit decreasing; the stored plan; the columns of a row."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kumi.data import Mixture, SequentialSampler, packing
from kumi.data.chat.masked import TRAINED
from kumi.data.packing import PackedRows, best_fit, bins_file, pack
from kumi.errors import ConfigError, RefusedError
from kumi.objectives import LM_ROWS
from memory_units import random_units


def best_fit_decreasing(lengths, seq_len):
    """Return the positions used of each row, from placing one unit at a time."""
    free = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in free if space >= length]
        space = min(fitting, default=seq_len)
        if fitting:
            free.remove(space)
        free.append(space - length)
    return sorted(seq_len - space for space in free)


def used(lengths, bins):
    return [int(lengths[bins.units[a:b]].sum()) for a, b in zip(bins.bounds[:-1], bins.bounds[1:], strict=True)]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=120), st.integers(1, 50), st.integers(0, 2**40))
@settings(max_examples=100)
def test_rows_are_those_of_placing_one_unit_at_a_time(lengths, seq_len, seed):
    lengths = np.array(lengths, np.int32)
    fitting = lengths[(lengths > 0) & (lengths <= seq_len)].tolist()
    bins = pack(lengths, seq_len, seed)
    assert sorted(lengths[bins.units].tolist()) == sorted(fitting)
    assert len(set(bins.units.tolist())) == len(bins.units)
    assert sorted(used(lengths, bins)) == best_fit_decreasing(fitting, seq_len)
    assert (bins.too_long, bins.empty) == (int((lengths > seq_len).sum()), int((lengths == 0).sum()))


def test_each_window_of_shuffled_units_is_packed_alone(monkeypatch):
    monkeypatch.setattr(best_fit, "_WINDOW", 50)
    lengths = np.random.default_rng(0).integers(1, 40, 175).astype(np.int32)
    bins, other = pack(lengths, 64, 1), pack(lengths, 64, 2)
    begin, parts = 0, []
    for size in (50, 50, 50, 25):
        stop = int(np.searchsorted(bins.bounds, begin + size))
        assert bins.bounds[stop] == begin + size
        part = lengths[bins.units[begin : begin + size]].tolist()
        parts.append(set(bins.units[begin : begin + size].tolist()))
        rows = slice(int(np.searchsorted(bins.bounds, begin)), stop)
        assert sorted(used(lengths, bins)[rows]) == best_fit_decreasing(part, 64)
        begin += size
    assert parts[0] != set(range(50))
    assert parts[0] != set(other.units[:50].tolist())
    assert np.array_equal(pack(lengths, 64, 1).units, bins.units)


@pytest.mark.parametrize("name", ["exponential", "uniform", "lognormal"])
def test_short_units_fill_at_least_98_percent(name):
    rng = np.random.default_rng(3)
    lengths = {
        "exponential": rng.exponential(480, 20_000),
        "uniform": rng.uniform(0, 1000, 20_000),
        "lognormal": rng.lognormal(5.5, 1.0, 20_000),
    }[name].astype(np.int32) + 1
    bins = pack(lengths, 4096, 0)
    assert lengths.mean() < 4096 / 8
    assert lengths[bins.units].sum() >= 0.98 * 4096 * bins.rows


@pytest.fixture
def units(tmp_path):
    return random_units(tmp_path, 60, 24, weighted=True)


def packed(units, seq_len=40, seed=5):
    return PackedRows(units, bins_file.pack_units(units, "digest", seq_len, seed), seq_len)


def test_a_plan_is_stored_and_read_again(units, monkeypatch):
    made = bins_file.pack_units(units, "digest", 40, 5)
    monkeypatch.setattr(bins_file, "pack", None)
    read = bins_file.pack_units(units, "digest", 40, 5)
    assert np.array_equal(made.units, read.units)
    assert np.array_equal(made.bounds, read.bounds)
    assert (made.too_long, made.empty) == (read.too_long, read.empty)
    for other in (("other", 40, 5), ("digest", 41, 5), ("digest", 40, 6)):
        with pytest.raises(RefusedError, match="no such plan of packed rows"):
            packing.open_bins(units, *other)
    monkeypatch.setattr(bins_file, "VERSION", 99)
    with pytest.raises(RefusedError, match="no such plan"):
        packing.open_bins(units, "digest", 40, 5)
    assert [path.suffix for path in units.prefix.parent.iterdir()] == [".i4"]


def test_a_damaged_plan_is_refused_and_made_again(units):
    made = bins_file.pack_units(units, "digest", 40, 5)
    (path,) = units.prefix.parent.glob("*.i4")
    raw = path.read_bytes()
    for number in range(0, len(raw), 7):
        path.write_bytes(raw[:number] + bytes([raw[number] ^ 4]) + raw[number + 1 :])
        with pytest.raises(RefusedError, match="is no plan of packed rows"):
            packing.open_bins(units, "digest", 40, 5)
    for short in (b"", raw[:10], raw[:-4], raw[:-1]):
        path.write_bytes(short)
        with pytest.raises(RefusedError, match="is no plan of packed rows"):
            packing.open_bins(units, "digest", 40, 5)
    assert np.array_equal(bins_file.pack_units(units, "digest", 40, 5).units, made.units)
    assert path.read_bytes() == raw


def test_a_plan_of_a_stranger_names_no_foreign_unit(units):
    bins = pack(packing.positions_of(units), 40, 5)
    (path,) = (bins_file._path(units, "digest", 40, 5, LM_ROWS),)
    for wrong in (-1, 60):
        forged = bins.units.copy()
        forged[0] = wrong
        bins_file._write(path, best_fit.Bins(forged, bins.bounds, bins.too_long, bins.empty), 60)
        with pytest.raises(RefusedError, match="lists a unit that does not exist"):
            packing.open_bins(units, "digest", 40, 5)
    bounds = bins.bounds[[0, -1]]
    bins_file._write(path, best_fit.Bins(bins.units, bounds, bins.too_long, bins.empty), 60)
    with pytest.raises(RefusedError, match="more than 40"):
        Mixture([(packed(units), 1.0)], 40).batch(0, 1)


def test_units_that_never_fit_are_refused(units):
    with pytest.raises(ConfigError, match="none of the 60 examples fits a row of 1 tokens"):
        bins_file.pack_units(random_units(units.prefix.parent, 60, 24, pairs=1.0, seed=9), "x", 1, 0)


@pytest.mark.parametrize("seed", range(3))
def test_an_epoch_has_every_sequence_of_the_fitting_units_once(tmp_path, seed):
    """Each document of a row is one sequence: its inputs, labels, weights and positions, and padding is another."""
    units = random_units(tmp_path, 80, 24, seed, weighted=True)
    rows = packed(units)
    assert rows.bins.too_long > 0
    batch = Mixture([(rows, 1.0)], 40, seed).batch(rows.rows, rows.rows)  # the second epoch
    expected, actual = Counter(), Counter()
    for unit in set(range(80)) - set(np.flatnonzero(packing.positions_of(units) > 40).tolist()):
        for ids, mask, weights in units.sequences[unit]:
            labels = np.where(mask[1:] & TRAINED, ids[1:].astype(int), -100)
            expected[(*ids[:-1].tolist(), *labels.tolist(), *weights[1:].tolist())] += len(ids) > 1
    for row in range(rows.rows):
        documents = batch["document_ids"][row]
        for number in range(documents.max() + 1):
            of = slice(*np.flatnonzero(documents == number)[[0, -1]] + [0, 1])
            assert batch["position_ids"][row, of].tolist() == list(range(of.stop - of.start))
            columns = [batch[name][row, of].tolist() for name in ("input_ids", "labels", "loss_weights")]
            padding = (*[0] * len(columns[0]), *[-100] * len(columns[0]), *[1.0] * len(columns[0]))
            if (entry := tuple(value for column in columns for value in column)) != padding:
                actual[entry] += 1
    assert actual == +expected
    assert rows.filled == pytest.approx(1 - (batch["loss_weights"] == 1).mean())
    assert rows.units == 80 - rows.bins.too_long - rows.bins.empty


def test_the_sides_of_a_pair_are_in_one_row_one_after_the_other(tmp_path):
    units = random_units(tmp_path, 40, 12, pairs=1.0, kind="preference")
    rows = packed(units, 64)
    for row in range(rows.rows):
        batch = SequentialSampler([rows], 64).batch(row, 1)
        ids = np.concatenate([ids[:-1] for u in rows.units_of(row) for ids, _, _ in units.sequences[u]])
        assert batch["input_ids"][0, : len(ids)].tolist() == ids.tolist()


def test_all_batches_of_a_mixture_have_weights_or_none(tmp_path):
    plain, weighted = (packed(random_units(tmp_path, 30, 20, n, weighted=n == 1), seed=n) for n in range(2))
    assert "loss_weights" not in Mixture([(plain, 1.0)], 40).batch(0, 4)
    both = Mixture([(plain, 1.0), (weighted, 1.0)], 40)
    part, _, _ = both.locate(0, 20)
    weights = both.batch(0, 20)["loss_weights"]
    assert weights.dtype == np.float32
    assert (weights[part == 0] == 1).all()
    assert (weights[part == 1] != 1).any()


def test_the_span_is_the_mean_over_positions_of_their_sequence(tmp_path):
    units = random_units(tmp_path, 60, 24)
    rows = packed(units)
    lengths = [len(ids) - 1 for u in rows.bins.units for ids, _, _ in units.sequences[u]]
    assert rows.mean_document_span() == pytest.approx(np.average(lengths, weights=lengths))


def test_a_prompt_takes_all_its_tokens(tmp_path):
    units = random_units(tmp_path, 20, 24, pairs=0.0, kind="prompt")
    assert packing.positions_of(units).tolist() == [len(unit[0][0]) for unit in units.sequences]
