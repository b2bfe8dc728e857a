"""Which part each sequence of a mixture comes from: exact shares by weights, exact passes by counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kumi.data import Mixture, binfile
from kumi.data.interleaving import by_counts, by_weights
from kumi.errors import ConfigError

COUNTS = st.lists(st.integers(1, 700), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Token files of 13, 40 and 3 windows of 8 tokens, of 26, 20 and 3 documents."""
    folder, made = tmp_path_factory.mktemp("parts"), []
    for number, lengths in enumerate([[4] * 26, [16] * 20, [8] * 3]):
        with binfile.open_writer(folder / str(number), np.dtype(np.int32)) as append:
            append(np.arange(sum(lengths), dtype=np.int32), np.array(lengths))
        made.append(binfile.open_file(folder / str(number)))
    return made


@pytest.mark.parametrize("weights", [(0.1, 0.2, 0.7), (1 / 3, 3.14159, 1e-3), (97.0, 1.0, 1.0, 0.5)])
def test_odd_weights_are_exact_over_a_million_draws(weights):
    mixed, total = by_weights(weights, 5), 256 * 3907
    part, draw = mixed.draws(0, total)
    for number, weight in enumerate(weights):
        count = np.count_nonzero(part == number)
        assert abs(count - total * weight / sum(weights)) < 2
        assert np.array_equal(draw[part == number], np.arange(count))
    assert mixed.drawn(total) == np.bincount(part).tolist()


def test_the_draws_of_weights_never_change():
    """Runs that have started depend on this order."""
    part, draw = by_weights((1.0, 2.5, 0.3), 7).draws(1000, 12)
    assert part.tolist() == [1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    assert draw.tolist() == [658, 262, 659, 263, 660, 661, 662, 663, 664, 665, 264, 265]


@given(COUNTS, st.integers(0, 5), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_round_has_exactly_its_counts(counts, rounds, seed):
    mixed = by_counts(counts, seed)
    part, draw = mixed.draws(rounds * mixed.round, mixed.round)
    assert np.bincount(part, minlength=len(counts)).tolist() == counts
    for number, count in enumerate(counts):
        assert np.array_equal(draw[part == number], rounds * count + np.arange(count))
    assert mixed.drawn(rounds * mixed.round) == [rounds * count for count in counts]


@given(COUNTS, st.integers(0, 5000), st.integers(1, 700))
@settings(max_examples=60, deadline=None)
def test_draws_from_any_place_on_are_those_of_the_whole(counts, start, count):
    mixed = by_counts(counts, 1)
    whole, some = mixed.draws(0, start + count), mixed.draws(start, count)
    assert np.array_equal(whole[0][start:], some[0])
    assert np.array_equal(whole[1][start:], some[1])
    assert mixed.drawn(start) == np.bincount(whole[0][:start], minlength=len(counts)).tolist()


def test_parts_are_spread_over_the_round_and_rounds_differ():
    mixed = by_counts((900, 100), 3)
    first, second = (mixed.draws(1000 * number, 1000)[0] for number in range(2))
    assert all(abs(first[begin : begin + 256].sum() - 25.6) < 2 for begin in (0, 256, 512))
    assert not np.array_equal(first, second)


def test_rounds_of_more_sequences_than_32_bits_are_exact():
    counts = (3 * 10**10 + 7, 10**10 + 1)
    mixed = by_counts(counts, 0)
    assert mixed.drawn(2 * mixed.round) == [2 * count for count in counts]
    part, draw = mixed.draws(2 * mixed.round - 300, 600)
    for number, count in enumerate(counts):
        drawn = draw[part == number]
        assert np.array_equal(drawn, drawn[0] + np.arange(len(drawn)))
        assert drawn[0] < 2 * count <= drawn[-1]


@pytest.mark.parametrize("epochs", [(1, 1, 1), (2, 1, 5), (1, 0.5, 3), (0.01, 2.5, 1)])
def test_epochs_read_every_row_exactly_that_often(files, epochs):
    mixture = Mixture([(file, 1.0) for file in files], 8, 4, epochs=epochs)
    counts = [max(1, round(rows * number)) for rows, number in zip((13, 40, 3), epochs, strict=True)]
    assert mixture.round == sum(counts)
    part, _, row = mixture.locate(0, 2 * mixture.round)
    for number, (rows, count) in enumerate(zip((13, 40, 3), counts, strict=True)):
        often = np.bincount(row[part == number], minlength=rows)
        assert often.sum() == 2 * count
        assert often.max() - often.min() <= (2 * count % rows != 0)


def test_one_source_has_the_same_rows_by_epochs_as_by_weight(files):
    """So a run in steps may go on in epochs."""
    by_weight, by_epochs = (Mixture([(files[0], 1.0)], 8, 4, epochs=epochs).locate(7, 60) for epochs in (None, (1,)))
    assert all(np.array_equal(*pair) for pair in zip(by_weight, by_epochs, strict=True))


def test_weights_by_sequences_are_shares_of_documents(files):
    """A window has 2, 0.5 and 1 documents, so as many documents from each source take 1, 4 and 2 windows."""
    part, _, _ = Mixture([(file, 1.0) for file in files], 8, 4, by="sequences").locate(0, 256 * 70)
    shares = np.bincount(part) / len(part)
    rows = np.array([13 / 26, 40 / 20, 3 / 3])
    assert shares == pytest.approx(rows / rows.sum(), abs=2e-4)


def test_wrong_shares_are_refused(files):
    with pytest.raises(ConfigError, match=r"weights \[1, 0\] must all be greater than 0"):
        by_weights([1, 0], 0)
    with pytest.raises(ConfigError, match=r"counts \[0\] must all be at least 1"):
        by_counts([0], 0)
    with pytest.raises(ConfigError, match="a mixture by 'rows' must be one by tokens or sequences"):
        Mixture([(files[0], 1.0)], 8, by="rows")
