"""Rows of replies: balanced over ranks, no longer than needed, and each token where its label is."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kumi.objectives import IGNORED
from kumi.rollout.rollout_rows import ReplySequence, fill_rows, read_rows_back
from kumi.spec.balanced_rows import plan_rows

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)


@settings(max_examples=50)
@given(LENGTHS, st.integers(1, 5), st.sampled_from([1, 2, 4]))
def test_every_sequence_is_in_one_row_and_no_row_is_too_long(lengths, ranks, multiple):
    plan = plan_rows(lengths, 40, ranks, multiple)
    assert sorted(number for row in plan.rows for number in row) == list(range(len(lengths)))
    assert len(plan.rows) % ranks == 0
    sums = [sum(lengths[number] for number in row) for row in plan.rows]
    assert max(sums) <= plan.length <= 40
    assert plan.length % multiple == 0
    # A row that is fuller than another by more than its shortest sequence would have given that one away.
    assert max(sums) - min(sums) <= max(lengths)


def test_rows_are_balanced_and_as_short_as_the_fullest():
    plan = plan_rows([10, 9, 8, 7, 6, 5, 4, 3], 100, ranks=2)
    assert [sum([10, 9, 8, 7, 6, 5, 4, 3][number] for number in row) for row in plan.rows] == [26, 26]
    assert plan.length == 26


def sequences(count, seed=0):
    random, result, first = np.random.default_rng(seed), [], 0
    for _ in range(count):
        reply = random.integers(1, 99, random.integers(1, 7)).astype(np.int32)
        result.append(ReplySequence(random.integers(1, 99, random.integers(1, 5)).tolist(), reply, first))
        first += len(reply)
    return result, first


def test_each_label_has_its_token_and_each_column_its_number():
    made, tokens = sequences(9)
    plan = plan_rows([sequence.positions for sequence in made], 24, ranks=2)
    numbers = np.arange(1.0, tokens + 1)
    batch = fill_rows(made, plan.rows, plan.length, {"advantages": numbers})
    seen = np.zeros(tokens)
    for at, row in enumerate(plan.rows):
        start = 0
        for place, sequence in enumerate(made[number] for number in row):
            full = [*sequence.prompt, *sequence.reply.tolist()]
            stop = start + len(full) - 1
            assert batch["input_ids"][at, start:stop].tolist() == full[:-1]
            labels = [IGNORED] * (len(sequence.prompt) - 1) + sequence.reply.tolist()
            assert batch["labels"][at, start:stop].tolist() == labels
            assert batch["position_ids"][at, start:stop].tolist() == list(range(stop - start))
            assert set(batch["segments"][at, start:stop]) == set(batch["document_ids"][at, start:stop]) == {place}
            assert batch["trained"][at, place] == len(sequence.reply)
            columns = batch["advantages"][at, start:stop]
            own = numbers[sequence.first : sequence.first + len(sequence.reply)]
            assert columns.tolist() == [0.0] * (len(sequence.prompt) - 1) + own.tolist()
            start = stop
        assert set(batch["document_ids"][at, start:]) <= {len(row)}
        assert (batch["labels"][at, start:] == IGNORED).all()
    read_rows_back(made, plan.rows, batch["advantages"], seen)
    assert seen.tolist() == numbers.tolist()


def test_a_rank_without_a_sequence_has_a_row_of_padding():
    made, _ = sequences(1)
    plan = plan_rows([made[0].positions], 24, ranks=3)
    batch = fill_rows(made, [plan.rows[2]], plan.length, {})
    assert batch["labels"].tolist() == [[IGNORED] * plan.length]
    assert batch["trained"].tolist() == [[0]]


def test_a_row_holds_the_longest_sequence():
    assert plan_rows([24], 24, ranks=1, multiple=8).length == 24
