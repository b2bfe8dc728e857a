"""The requests that ranks share."""

import pytest

from kumi.rollout.own_engine import share_requests
from kumi.rollout.rollout_engine import SampleRequest


def requests(prompts, samples):
    return [
        SampleRequest(prompt, sample, [prompt + 1], prompt * samples + sample)
        for prompt in range(prompts)
        for sample in range(samples)
    ]


@pytest.mark.parametrize(("prompts", "samples", "ranks"), [(1, 8, 4), (3, 4, 2), (7, 3, 4), (2, 2, 8), (5, 1, 1)])
def test_ranks_share_requests_evenly(prompts, samples, ranks):
    asked = requests(prompts, samples)
    entries = share_requests(asked, ranks)
    assert len(entries) % ranks == 0
    shares = [[request for _, own in entries[rank::ranks] for request in own] for rank in range(ranks)]
    assert [request for share in shares for request in share] == asked
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(own == [] or ids == own[0].ids for ids, own in entries)
    assert all(len({request.prompt for request in own}) <= 1 for _, own in entries)


def test_replies_to_one_prompt_stay_together_where_they_can():
    entries = share_requests(requests(4, 4), 2)
    assert [len(own) for _, own in entries] == [4, 4, 4, 4]
