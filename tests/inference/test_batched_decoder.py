"""What ends a reply, what must not change it, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from replies import prompts

from kumi.errors import LayoutError, ModelError
from kumi.inference import batched_decoder
from kumi.inference.batched_decoder import BatchedDecoder
from kumi.inference.sampling import Sampling
from kumi.nn.decoder import Decoder
from kumi.spec.cache_state import cache_bytes
from kumi.spec.generation_layout import check_generation_layout
from kumi.spec.layout import Layout
from steps import spec_of
from weights import init_weights

GREEDY = Sampling(max_new_tokens=12, temperature=0)
DRAWN = Sampling(max_new_tokens=12, temperature=1.5, seed=3)


@cache
def decoder_of(family):
    spec = spec_of(family)
    decoder = Decoder(spec, dtype=torch.float64)
    init_weights(decoder, spec, 7)
    return decoder


def replies(family, asked, sampling, *, slots=3, samples=1, **options):
    decoder = BatchedDecoder(decoder_of(family), slots=slots, **options)
    return {(reply.prompt, reply.sample): reply for reply in decoder.generate(asked, sampling, samples=samples)}


def ids_of(answers):
    return {place: reply.ids for place, reply in answers.items()}


@pytest.mark.parametrize("family", ["qwen", "hybrid", "latent", "gemma", "moe"])
def test_slots_samples_and_order_change_no_reply(family, monkeypatch):
    asked = prompts(spec_of(family).vocab_size, lengths=(3, 9, 1, 6, 6, 2, 4))
    expected = ids_of(replies(family, asked, DRAWN, slots=1, samples=3))
    assert len({tuple(ids) for ids in expected.values()}) > 15  # samples differ
    for slots in (2, 5, 64):
        assert ids_of(replies(family, asked, DRAWN, slots=slots, samples=3)) == expected
    backwards = ids_of(replies(family, asked[::-1], DRAWN, slots=4, samples=3))
    assert {(len(asked) - 1 - prompt, sample): ids for (prompt, sample), ids in backwards.items()} == expected
    monkeypatch.setattr(batched_decoder, "PROMPT_TOKENS", 7)  # several passes of prompts
    assert ids_of(replies(family, asked, DRAWN, slots=5, samples=3)) == expected
    assert ids_of(replies(family, asked, DRAWN, slots=5, samples=2)) == {
        place: ids for place, ids in expected.items() if place[1] < 2
    }


def test_replies_of_different_lengths_do_not_wait_for_each_other(monkeypatch):
    asked = prompts(spec_of("qwen").vocab_size, lengths=(3,) * 12)
    whole = replies("qwen", asked, GREEDY, slots=12)
    stop = {reply.ids[4] for reply in list(whole.values())[::2]}
    sampling = Sampling(max_new_tokens=12, temperature=0, stop_ids=frozenset(stop))
    passes = []
    forward = Decoder.forward
    monkeypatch.setattr(
        Decoder, "forward", lambda self, ids, **options: (passes.append(ids.shape), forward(self, ids, **options))[1]
    )
    answers = replies("qwen", asked, sampling, slots=3)
    for place, reply in answers.items():
        uncut = whole[place].ids
        end = next((index for index, token in enumerate(uncut) if token in stop), None)
        assert reply.ids == uncut[:end]
        assert reply.finish == ("length" if end is None else "stop")
        assert len(reply.log_probs) == len(reply.ids)
    tokens = sum(len(reply.ids) for reply in answers.values())
    one_token = [shape for shape in passes if shape[1] == 1]
    assert sum(shape[0] for shape in one_token) <= tokens  # no pass for a slot whose reply has ended


def test_stop_strings_end_a_reply_with_the_token_that_completes_one():
    asked = prompts(spec_of("qwen").vocab_size, lengths=(3, 5))
    whole = replies("qwen", asked, DRAWN)

    def text(ids):
        return "".join(f"<{token}>" for token in ids)

    first, second, third = whole[0, 0].ids[:3]
    assert (first, second) != (second, third)
    sampling = replace(DRAWN, stop_strings=(f"{second}><{third}",))
    answers = replies("qwen", asked, sampling, decode_text=text)
    assert answers[0, 0].ids == whole[0, 0].ids[:3]
    assert answers[0, 0].finish == "stop"
    with pytest.raises(ModelError, match="tokenizer"):
        replies("qwen", asked, sampling)


def test_learned_positions_end_a_reply():
    asked = prompts(spec_of("gpt").vocab_size, lengths=(10, 15))
    answers = replies("gpt", asked, GREEDY)
    assert [len(answers[index, 0].ids) for index in range(2)] == [6, 1]
    assert answers[0, 0].finish == "length"
    with pytest.raises(ModelError, match="16 positions"):
        replies("gpt", [[1] * 16], GREEDY)
    assert len(replies("qwen", [[1, 2]], GREEDY, max_length=6)[0, 0].ids) == 4


def test_each_new_token_is_reported():
    seen = []
    decoder = BatchedDecoder(decoder_of("qwen"), slots=2)
    (reply,) = decoder.generate(
        [[1, 2]], GREEDY, on_token=lambda prompt, sample, ids: seen.append((prompt, sample, list(ids)))
    )
    assert seen == [(0, 0, reply.ids[:count]) for count in range(1, 13)]


@pytest.mark.parametrize("family", ["qwen", "gemma", "latent", "hybrid"])
def test_memory_of_the_cache_is_as_planned(family):
    decoder = decoder_of(family)
    state = batched_decoder.GenerationCache(decoder.spec, 3, 40, dtype=torch.float32, device=torch.device("cpu"), tp=1)
    assert state.nbytes == cache_bytes(decoder.spec, 3, 40, "float32")


def test_compiled_layers_generate_uncompiled():
    """Each pass has another shape, and would be compiled again."""
    spec, graphs = spec_of("qwen"), []
    decoder = Decoder(spec, dtype=torch.float64)
    init_weights(decoder, spec, 7)
    asked = prompts(spec.vocab_size)

    def ids():
        return [reply.ids for reply in BatchedDecoder(decoder, slots=2).generate(asked, GREEDY)]

    expected = ids()

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for layer in decoder.model.layers.values():
        layer.compile(backend=backend)
    assert ids() == expected
    assert graphs == []
    with torch.no_grad():
        decoder(torch.tensor([asked[0]]))
    assert graphs


def test_refusals():
    with pytest.raises(ModelError, match="prompt 1 has no tokens"):
        replies("qwen", [[1], []], GREEDY)
    with pytest.raises(ModelError, match="score head"):
        BatchedDecoder(Decoder(spec_of("qwen-score"), device="meta"))
    assert replies("qwen", [], GREEDY) == {}


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(cp=2)])
def test_layouts_without_generation_are_refused(layout):
    axis = "pp" if layout.pp > 1 else "cp"
    with pytest.raises(LayoutError, match=rf"layout\.{axis} = 1"):
        check_generation_layout(layout)


@pytest.mark.parametrize("family", ["qwen", "hybrid", "latent", "gemma", "scores"])
def test_a_decoder_without_gradients_replies_alike_and_can_train_afterwards(family):
    """Its replies are made in torch's inference mode, whose tensors training must never see."""
    spec = spec_of(family)
    asked = prompts(spec.vocab_size, lengths=(3, 9, 1))
    expected = ids_of(replies(family, asked, DRAWN))
    decoder = Decoder(spec, dtype=torch.float64).requires_grad_(False)
    decoder.load_state_dict(decoder_of(family).state_dict())
    answers = BatchedDecoder(decoder, slots=2).generate(asked, DRAWN)
    replied = {}
    for reply in answers:
        assert not torch.is_inference_mode_enabled()  # the mode does not leak to the caller
        replied[reply.prompt, reply.sample] = reply.ids
    assert replied == expected
    decoder.requires_grad_(True)
    decoder(torch.tensor([asked[1]])).square().mean().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())
