"""FlexAttention computes softcaps and ALiBi as the other paths do. On a CPU it runs uncompiled, with all scores."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module

from kumi.nn.attention import flex
from kumi.nn.attention.attention_context import Segments, document_bounds
from kumi.nn.attention.flex import block_mask, flex_attention, supports_flex, with_block_masks
from kumi.nn.attention.grouped_query import attend
from kumi.nn.attention.scores import Scores, alibi_slopes

ROWS, LENGTH, HEADS, SIZE = 2, 11, 4, 16
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]])
SCORES = {
    "softcap": Scores(softcap=3.0, scale=0.3),
    "alibi": Scores(slopes=alibi_slopes(HEADS)),
    "both": Scores(softcap=2.0, slopes=alibi_slopes(HEADS)),
}


@pytest.mark.filterwarnings("default")  # of the tracer, through which PyTorch runs it on a CPU, too
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("document_ids", [None, DOCUMENTS], ids=["rows", "documents"])
def test_it_equals_attention_by_all_scores(monkeypatch, name, window, document_ids):
    monkeypatch.setattr(flex_module, "_validate_device", lambda *args: None)  # it refuses gradients on a CPU
    torch._dynamo.reset()  # a model has one scale and one softcap
    random = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(ROWS, LENGTH, heads, SIZE, generator=random) for heads in (HEADS, 2, 2, HEADS))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected = attend(Segments(document_ids, None), *inputs, window, None, SCORES[name])
    mask = block_mask(torch.zeros(ROWS, LENGTH), document_ids, window)
    result = flex_attention(*inputs, mask, SCORES[name])
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(out, inputs, grad) for out in (result, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_only_compiled_layers_use_it(monkeypatch):
    q, rounded = torch.zeros(1, 4, HEADS, SIZE), Scores(slopes=alibi_slopes(HEADS), bf16_bias=True)
    assert not supports_flex(q, SCORES["softcap"])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert supports_flex(q, SCORES["softcap"])
    assert not supports_flex(q, rounded)
    assert not supports_flex(q[..., :8], SCORES["softcap"])
    monkeypatch.setattr(flex, "flex_attention", lambda *args: "by FlexAttention")
    make = with_block_masks(lambda *batch: partial(attend, Segments(batch[1], document_bounds(batch[1]))), [None])
    attention = make(torch.zeros(1, 4), torch.zeros(1, 4))
    assert attention(q, q, q, None, None, SCORES["softcap"]) == "by FlexAttention"
    assert torch.equal(attention(q, q, q, 2, None, SCORES["softcap"]), q), (
        "a window without a mask is computed in blocks"
    )
