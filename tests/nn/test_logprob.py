"""Chunked log-probs against the plain formula, which holds all logits."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from kumi.nn import logit_chunks, logprob
from kumi.nn.logit_chunks import NO_SHAPING, Shaping
from kumi.objectives import IGNORED

TOKENS, SIZE, VOCAB = 13, 6, 11


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(logit_chunks, "logit_chunk", lambda vocab_size, device_kind: 5)


def inputs(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, SIZE, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, SIZE, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[::4] = IGNORED
    token_weights = torch.rand(TOKENS, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, weight, labels, token_weights


def plain(hidden, weight, labels):
    log_probs = torch.log_softmax(hidden @ weight.T, dim=-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels == IGNORED, 0.0, log_probs)


def test_gradcheck():
    hidden, weight, labels, token_weights = inputs()
    assert torch.autograd.gradcheck(lambda h, w: logprob.log_probs(h, w, labels).log_probs, (hidden, weight))
    assert torch.autograd.gradcheck(lambda h, w: logprob.weighted_sum(h, w, labels, token_weights)[0], (hidden, weight))


def test_both_modes_equal_the_plain_formula():
    hidden, weight, labels, token_weights = inputs()
    expected = plain(hidden, weight, labels)
    expected_grads = torch.autograd.grad((expected * token_weights).sum(), (hidden, weight))
    result = logprob.log_probs(hidden, weight, labels).log_probs
    total, detached = logprob.weighted_sum(hidden, weight, labels, token_weights)
    assert not detached.requires_grad
    for values in (result, detached):
        torch.testing.assert_close(values, expected)
    for value in ((result * token_weights).sum(), total):
        torch.testing.assert_close(value, (expected * token_weights).sum())
        torch.testing.assert_close(torch.autograd.grad(value, (hidden, weight)), expected_grads)


@pytest.mark.parametrize("shaping", [Shaping(0.3), Shaping(1.0, 1.5), Shaping(2.0, 0.7)])
def test_scaled_and_capped_logits(shaping):
    hidden, weight, labels, token_weights = inputs()
    logits = shaping.shape(hidden @ weight.T)
    if shaping.softcap is not None:
        torch.testing.assert_close(
            logits, shaping.softcap * (shaping.scale / shaping.softcap * hidden @ weight.T).tanh()
        )
    expected = torch.log_softmax(logits, dim=-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    expected = torch.where(labels == IGNORED, 0.0, expected)
    grads = torch.autograd.grad((expected * token_weights).sum(), (hidden, weight))
    result = logprob.log_probs(hidden, weight, labels, shaping=shaping).log_probs
    total, _ = logprob.weighted_sum(hidden, weight, labels, token_weights, shaping=shaping)
    torch.testing.assert_close(result, expected)
    for value in ((result * token_weights).sum(), total):
        torch.testing.assert_close(torch.autograd.grad(value, (hidden, weight)), grads)


def test_the_mean_is_the_cross_entropy():
    hidden, weight, labels, _ = inputs(torch.float32)
    loss = F.cross_entropy(hidden @ weight.T, labels)
    counted = (labels != IGNORED).float()
    total, _ = logprob.weighted_sum(hidden, weight, labels, -counted / counted.sum())
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(
        torch.autograd.grad(total, (hidden, weight)), torch.autograd.grad(loss, (hidden, weight))
    )


def test_a_factor_on_the_sum_reaches_the_gradient():
    hidden, weight, labels, token_weights = inputs()
    once = torch.autograd.grad(logprob.weighted_sum(hidden, weight, labels, token_weights)[0], (hidden, weight))
    total = logprob.weighted_sum(hidden, weight, labels, token_weights)[0] * 8.0
    torch.testing.assert_close(torch.autograd.grad(total, (hidden, weight)), tuple(8.0 * grad for grad in once))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_float32_statistics(dtype):
    hidden, weight, labels, token_weights = inputs(dtype)
    # The same rounded logits, all else exact: only the statistics have an error.
    logits = (hidden @ weight.T).detach().double()
    exact = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    exact[labels == IGNORED] = 0.0
    result = logprob.weighted_sum(hidden, weight, labels, token_weights.float())[1]
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), exact, rtol=0, atol=2e-6)


def test_a_gpu_adds_the_heads_gradient_to_float32_without_a_product_in_memory(monkeypatch):
    hidden, weight, labels, token_weights = inputs(torch.bfloat16)
    expected = torch.autograd.grad(logprob.weighted_sum(hidden, weight, labels, token_weights)[0], (hidden, weight))
    sums = []

    def add(total, left, right, dtype, out):
        assert (total.dtype, left.dtype, dtype) == (torch.float32, torch.bfloat16, torch.float32)
        sums.append(out.add_(left.float() @ right.float()))

    monkeypatch.setattr(logit_chunks, "can", lambda device, what: what == "float32 results of 16-bit products")
    monkeypatch.setattr(torch.ops.aten.addmm, "dtype_out", add)
    grads = torch.autograd.grad(logprob.weighted_sum(hidden, weight, labels, token_weights)[0], (hidden, weight))
    assert len(sums) == -(-TOKENS // 5), "one for each chunk"
    torch.testing.assert_close(grads, expected, rtol=2**-6, atol=2**-6)


def test_float16_gradients_survive_small_weights_and_loss_scaling():
    hidden, weight, labels, _ = inputs(torch.float16)
    master = weight.detach().float().requires_grad_()
    token_weights, scale = torch.full((TOKENS,), -1e-6), 2.0**16
    total, _ = logprob.weighted_sum(hidden, master, labels, token_weights)
    grads = torch.autograd.grad(total * scale, (hidden, master))
    wide = hidden.detach().double().requires_grad_(), master.detach().double().requires_grad_()
    expected = torch.autograd.grad((plain(*wide, labels) * -1e-6).sum() * scale, wide)
    assert grads[1].dtype == torch.float32
    for grad, exact in zip(grads, expected):
        assert (grad - exact).abs().max() <= 2e-3 * exact.abs().max()


def test_ties_and_extreme_logits():
    hidden, weight = torch.ones(3, 1), torch.tensor([[200.0], [200.0], [-200.0], [0.0]])
    result = logprob.log_probs(hidden, weight, torch.tensor([0, 1, 2])).log_probs
    torch.testing.assert_close(result, torch.tensor([-0.6931472, -0.6931472, -400.6931472]))


def test_nothing_to_learn_gives_zero_and_no_gradient():
    hidden, weight, labels, token_weights = inputs()
    total, log_probs = logprob.weighted_sum(hidden, weight, torch.full_like(labels, IGNORED), token_weights)
    assert total == 0
    assert not log_probs.any()
    assert not any(grad.any() for grad in torch.autograd.grad(total, (hidden, weight)))
    total, _ = logprob.weighted_sum(hidden, weight, labels, torch.zeros_like(token_weights))
    assert not any(grad.any() for grad in torch.autograd.grad(total, (hidden, weight)))


def test_without_gradients_none_are_formed():
    hidden, weight, labels, token_weights = inputs()
    with torch.no_grad():
        total, log_probs = logprob.weighted_sum(hidden, weight, labels, token_weights)
    assert not total.requires_grad
    torch.testing.assert_close(total, (log_probs * token_weights).sum())


def masked(share, dtype=torch.float64):
    """Return the inputs with `share` of the labels ignored, and the positions of the others."""
    hidden, weight, labels, token_weights = inputs(dtype)
    labels = labels.clamp(min=0)
    ignored = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(3))[: round(share * TOKENS)]
    labels[ignored] = IGNORED
    return hidden, weight, labels, token_weights, (labels != IGNORED).nonzero()[:, 0]


def close(result, expected):
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.4, 0.92, 1.0])
@pytest.mark.parametrize("shaping", [NO_SHAPING, Shaping(2.0, 0.7)], ids=["plain", "capped"])
@pytest.mark.parametrize("chosen", [True, False], ids=["trained", "all"])
def test_trained_tokens_give_the_plain_formula(share, shaping, chosen):
    """Log-probs, both statistics and the gradients of both modes, whether or not the head has positions."""
    hidden, weight, labels, token_weights, positions = masked(share)
    trained = positions if chosen else None
    logits = shaping.shape(hidden @ weight.T)
    probs, counted = logits.detach().softmax(-1), labels != IGNORED
    expected = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[:, None])[:, 0] * counted
    grads = torch.autograd.grad((expected * token_weights).sum(), (hidden, weight))
    options = {"shaping": shaping, "trained": trained}
    total, detached = logprob.weighted_sum(hidden, weight, labels, token_weights, **options)
    scores = logprob.log_probs(hidden, weight, labels, **options, statistics=("entropy", "top"))
    close(scores.entropy, -(probs * probs.log()).sum(-1) * counted)
    assert torch.equal(scores.top, (logits.argmax(-1) == labels) & counted)
    assert not scores.entropy.requires_grad
    for log_probs, value in ((detached, total), (scores.log_probs, (scores.log_probs * token_weights).sum())):
        close(log_probs, expected)
        close(value, (expected * token_weights).sum())
        close(torch.autograd.grad(value, (hidden, weight)), grads)


def test_statistics_are_computed_only_when_asked_for():
    hidden, weight, labels, _ = inputs()
    for statistics in ((), ("entropy",), ("top",)):
        scores = logprob.log_probs(hidden, weight, labels, statistics=statistics)
        assert [name for name in ("entropy", "top") if getattr(scores, name) is not None] == list(statistics)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_entropy_of_sure_and_of_unsure_predictions(dtype):
    """With logits of 0 to 200, rounding must not make a negative entropy."""
    hidden = torch.tensor([[0.0], [0.02], [1.0], [200.0]], dtype=dtype)
    weight = torch.linspace(0, 1, VOCAB)[:, None].to(dtype)
    scores = logprob.log_probs(hidden, weight, torch.full((4,), VOCAB - 1), statistics=("entropy", "top"))
    exact = torch.distributions.Categorical(logits=(hidden @ weight.T).double()).entropy()
    assert scores.entropy.dtype == torch.float32
    torch.testing.assert_close(scores.entropy.double(), exact, rtol=0, atol=1e-6)
    assert scores.entropy.min() >= 0
    assert scores.top.tolist() == [True] * 4  # in the first row all are equally probable


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_of_trained_tokens_is_that_of_all_tokens(dtype):
    hidden, weight, labels, token_weights, positions = masked(0.6, dtype)
    results = []
    for trained in (None, positions):
        total, log_probs = logprob.weighted_sum(hidden, weight, labels, token_weights.float() * 1e-6, trained=trained)
        grads = torch.autograd.grad(total * 2.0**16, (hidden, weight))
        results.append((log_probs, *(grad.double() / grad.double().abs().max() for grad in grads)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_masked_tokens_cost_the_head_no_flops(share):
    hidden, weight, labels, token_weights, positions = masked(share)
    # The backward pass of log-probs repeats the logits. The counter does not see the weight's gradient, an addmm_.
    products = {"weighted sum": 2, "log-probs": 3}
    for mode, count in products.items():
        with FlopCounterMode(display=False) as counter:
            if mode == "weighted sum":
                total, _ = logprob.weighted_sum(hidden, weight, labels, token_weights, trained=positions)
            else:
                total = logprob.log_probs(hidden, weight, labels, trained=positions).log_probs.sum()
            total.backward()
        assert counter.get_total_flops() == count * 2 * len(positions) * SIZE * VOCAB


@pytest.mark.parametrize("shaping", [NO_SHAPING, Shaping(2.0, 0.7)], ids=["plain", "softcap"])
def test_a_cpu_keeps_the_only_chunk_and_computes_its_logits_once(monkeypatch, shaping):
    monkeypatch.setattr(logit_chunks, "logit_chunk", lambda vocab_size, device_kind: TOKENS)
    hidden, weight, labels, token_weights = inputs()
    results, flops = [], []
    for options in ({}, {"pipelined": True}, {"device_kind": "cuda"}):
        scores = logprob.log_probs(hidden, weight, labels, shaping=shaping, statistics=("entropy",), **options)
        with FlopCounterMode(display=False) as counter:
            grads = torch.autograd.grad((scores.log_probs * token_weights).sum(), (hidden, weight), retain_graph=True)
        flops.append(counter.get_total_flops())
        # The second backward pass finds no chunk, and computes it again.
        again = torch.autograd.grad((scores.log_probs * token_weights).sum(), (hidden, weight))
        results.append((scores.log_probs, *grads, *again))
    product = 2 * TOKENS * SIZE * VOCAB
    assert flops == [product, 2 * product, 2 * product]
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
    assert all(map(torch.equal, results[0][1:3], results[0][3:]))
