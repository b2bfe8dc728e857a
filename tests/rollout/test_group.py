"""Groups in JSON files are exact, and damaged ones are refused."""

import json
import math

import numpy as np
import pytest

from kumi.rollout.group import GeneratedReply, Group, Outcome, as_array, as_text, read_group

REPLIES = tuple(
    GeneratedReply(np.array([7, 2**31 - 1], np.int32), values, finish, 3)
    for values, finish in ((np.array([-0.1, -1e-300]), "stop"), (np.float32([-0.1, -2.5]).astype(np.float64), "length"))
)
GROUP = Group(11, REPLIES, (Outcome(math.nan, {"a": None}), Outcome(1 / 3, {"a": 1 / 3})))


def test_a_group_is_read_as_it_was_written():
    read = read_group(json.loads(json.dumps(GROUP.plain())))
    assert read.prompt == GROUP.prompt
    assert [outcome.parts for outcome in read.outcomes] == [{"a": None}, {"a": 1 / 3}]
    assert math.isnan(read.rewards[0])
    assert read.rewards[1] == 1 / 3
    for reply, other in zip(read.replies, REPLIES, strict=True):
        assert reply.ids.dtype == np.int32
        assert reply.ids.tolist() == other.ids.tolist()
        assert reply.log_probs.dtype == np.float64
        assert reply.log_probs.tolist() == other.log_probs.tolist()
        assert (reply.finish, reply.version, reply.truncated) == (other.finish, 3, other.finish == "length")


def test_numbers_of_single_precision_take_half_the_space():
    single, double = np.float32([0.1, 0.2]).astype(np.float64), np.array([0.1, 0.2])
    assert len(as_text(single)) < len(as_text(double))
    assert as_array(as_text(single)).tolist() == single.tolist()


@pytest.mark.parametrize("change", [{"ids": "<i4:AAAA"}, {"log_probs": "<f8:"}, {"finish": "?"}, {"ids": "<c8:AAAA"}])
def test_damaged_replies_are_refused(change):
    plain = GROUP.plain()
    plain["replies"][0] |= change
    with pytest.raises(ValueError, match=r"reply is damaged|type|base64|Incorrect padding|buffer size"):
        read_group(plain)
    with pytest.raises(ValueError, match="replies, but"):
        read_group(GROUP.plain() | {"rewards": [1.0], "parts": [{}]})
