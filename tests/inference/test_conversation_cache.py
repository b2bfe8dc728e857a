"""A conversation whose cache stays between turns has the replies of one computed anew, on every kind of layer."""

from __future__ import annotations

import pytest
import torch
from test_batched_decoder import decoder_of

from kumi.inference.batched_decoder import BatchedDecoder
from kumi.inference.conversation_cache import ConversationCache
from kumi.inference.sampling import Sampling
from kumi.nn.decoder import Decoder
from kumi.spec.cache_state import CacheTensor
from kumi.spec.op import Dim
from steps import VOCAB

GREEDY = Sampling(max_new_tokens=6, temperature=0)
FAMILIES = ("qwen", "gemma", "sinks", "latent", "hybrid", "moe")


def ids(count, seed):
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Turns:
    """A conversation with a cache. `computed`: tokens of the forward passes of prompts."""

    def __init__(self, family, sampling=GREEDY):
        self.decoder, self.sampling = BatchedDecoder(decoder_of(family), slots=1), sampling
        self.conversation = ConversationCache()

    def answer(self, prompt, **options):
        """Return the reply to `prompt`, after comparing it with that of a decoder without an earlier cache."""
        (reply,) = self.decoder.converse(self.conversation, prompt, self.sampling, **options)
        (anew,) = self.decoder.generate([prompt], self.sampling)
        assert (reply.ids, reply.finish) == (anew.ids, anew.finish)
        assert torch.allclose(torch.tensor(reply.log_probs), torch.tensor(anew.log_probs), atol=1e-6)
        return reply.ids


@pytest.mark.parametrize("family", FAMILIES)
def test_replies_over_turns_are_those_without_a_cache(family):
    """Turns end by a stop id, whose tokens are all in the cache, or by the length, without the last one."""
    turns, text, computed = Turns(family), ids(9, 0), []
    for turn in range(5):
        reply = turns.answer(text)
        computed.append(turns.conversation.computed)
        text = text + reply + ids(4 + turn, turn + 1)
    assert computed == [9, *(4 + turn + 1 for turn in range(4))]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_that_changes_goes_on_from_the_common_beginning(family):
    """A template that leaves out parts of earlier replies, a question that is asked anew, and another conversation."""
    turns, start = Turns(family), ids(12, 0)
    reply = turns.answer(start)
    cut = [*start, *reply[:3], *ids(5, 1)]
    turns.answer(cut)
    goes_back = {"qwen": 5, "latent": 5, "moe": 5}  # no recurrent state, and no window that has lost positions
    assert turns.conversation.computed == goes_back.get(family, len(cut))
    turns.answer(cut)
    assert turns.conversation.computed == (1 if family in goes_back else len(cut))
    turns.answer(ids(7, 9))
    assert turns.conversation.computed == 7


def test_a_window_that_has_lost_no_position_goes_back():
    turns = Turns("sinks", Sampling(max_new_tokens=1, temperature=0))  # a window of 5
    turns.answer([1, 2, 3, 4])
    turns.answer([1, 2, 7])
    assert turns.conversation.computed == 1
    turns.answer([1, 2, 7, *ids(8, 1)])
    assert turns.conversation.computed == 8
    turns.answer([1, 2, 7, *ids(8, 1)[:-1], 3])
    assert turns.conversation.computed == 1
    turns.answer([1, 2, 7, 8])
    assert turns.conversation.computed == 4


def test_a_tensor_goes_back_as_far_as_it_has_positions():
    dims = (Dim("x", 1),)
    assert CacheTensor("key", dims).can_shorten(9, 0)
    window = CacheTensor("key", dims, window=5)
    assert [window.can_shorten(5, to) for to in (0, 5)] == [True, True]
    assert [window.can_shorten(6, to) for to in (0, 4, 5, 6)] == [False, False, True, True]
    state = CacheTensor("ssm", dims, grows=False)
    assert [state.can_shorten(6, to) for to in (5, 6)] == [False, True]


@pytest.mark.parametrize("stop", [0, 1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupted_turn_leaves_a_cache_that_can_be_used(family, stop, monkeypatch):
    """Interrupted between layers of the pass number `stop`, and between passes."""
    turns, text = Turns(family), ids(11, 3)
    turns.answer(text)
    longer = [*text, *ids(6, 4)]
    layers, passes = list(decoder_of(family).model.layers.values()), []
    forward = Decoder.forward

    def count(self, row, **options):
        passes.append(len(passes))
        return forward(self, row, **options)

    def interrupt(*_):
        if len(passes) == stop + 1:
            raise KeyboardInterrupt

    handle = layers[-1].register_forward_pre_hook(interrupt)
    monkeypatch.setattr(Decoder, "forward", count)
    with pytest.raises(KeyboardInterrupt):
        list(turns.decoder.converse(turns.conversation, longer, GREEDY))
    monkeypatch.setattr(Decoder, "forward", forward)
    handle.remove()
    turns.answer(longer)

    def between(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turns.answer([*longer, 5, 6], on_token=between)
    turns.answer([*longer, 5, 6, 7])


def test_a_change_of_all_rotations_computes_all_keys_anew():
    """LongRoPE: 'scores' rotates with other factors from 7 tokens on."""
    family = Turns("scores", Sampling(max_new_tokens=2, temperature=0))
    family.answer([1, 2, 3])
    family.answer([1, 2, 3, 4])
    assert family.conversation.computed == 1
    family.answer([1, 2, 3, 4, 5, 6, 7, 8])
    assert family.conversation.computed == 8
    family.answer([1, 2, 3, 4, 5, 6, 7, 9])
    family.answer([1, 2, 3, 4])
    assert family.conversation.computed == 4


def test_forgetting_frees_the_cache():
    turns = Turns("qwen")
    turns.answer(ids(5, 0))
    assert turns.conversation.nbytes > 0
    turns.conversation.forget()
    assert (turns.conversation.nbytes, turns.conversation.tokens) == (0, [])
    turns.answer(ids(5, 0))
    assert turns.conversation.computed == 5
