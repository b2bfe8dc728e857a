"""The mixture as batches of steps: each sequence once, whatever the ranks, the batch and the start."""

from types import SimpleNamespace

import numpy as np
import pytest

from kumi.data import MixtureSource

# Sequence n is the number n.
NUMBERS = SimpleNamespace(batch=lambda start, count: {"input_ids": np.arange(start, start + count)})


def sequences(source, step):
    return source.at(step)["input_ids"].tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_share_consecutive_sequences(ranks):
    sources = [MixtureSource(NUMBERS, 8, index, ranks) for index in range(ranks)]
    for step in range(3):
        shares = [sequences(source, step) for source in sources]
        assert [number for share in shares for number in share] == list(range(8 * step, 8 * step + 8))
        assert len({source.state(step)["sequences"] for source in sources}) == 1


def test_a_resume_with_another_batch_goes_on_where_the_checkpoint_was():
    saved = MixtureSource(NUMBERS, 8).state(5)
    assert saved == {"sequences": 40}
    resumed = MixtureSource(NUMBERS, 12, first_step=5, first_sequence=saved["sequences"])
    assert sequences(resumed, 5) == list(range(40, 52))
    assert resumed.state(7) == {"sequences": 64}


def test_a_step_that_was_read_but_not_done_is_in_no_state():
    source = MixtureSource(NUMBERS, 8)
    before = source.state(3)
    first = sequences(source, 3)
    assert source.state(3) == before
    assert sequences(source, 3) == first
