"""The kernels of the loss head: interpreted, against the plain path, and compiled for GPUs."""

from __future__ import annotations

import torch

from kumi.nn import logit_chunks, logprob
from kumi.nn.logit_chunks import FULL_VOCABULARY, Shaping, Vocabulary
from kumi.nn.numerics import use_kernels
from kumi.objectives import IGNORED
from triton_process import check_compiled, compiled_launches, compiling, interpreted

KERNEL = (("loss", "triton"),)
# Largest difference from the plain path, of the largest value. Sums are in another order; and where a GPU rounds the
# gradient of a logit to bfloat16 to nearest, the interpreter cuts off, up to 2^-7, and the result is rounded again.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
# (tokens, hidden size, vocabulary): one token, odd sizes, several blocks of columns.
SHAPES = [(1, 8, 1), (1, 16, 5), (19, 24, 37), (6, 8, 4097), (3, 8, 9000)]
SHAPINGS = [Shaping(), Shaping(0.3), Shaping(2.0, 0.7)]


def inputs(shape, dtype):
    tokens, size, vocab = shape
    random = torch.Generator().manual_seed(sum(shape))
    hidden, weight = (torch.randn(n, size, generator=random).to(dtype).requires_grad_() for n in (tokens, vocab))
    labels = torch.randint(0, vocab, (tokens,), generator=random)
    labels[1::4] = IGNORED
    return hidden, weight, labels, torch.rand(tokens, generator=random)


def near(results, expected, dtype):
    assert len(results) == len(expected)
    for value, reference in zip(results, expected):
        assert value.dtype == reference.dtype
        limit = TOLERANCE[dtype] * max(1.0, reference.abs().max().item())
        assert (value.float() - reference.float()).abs().max().item() <= limit


def both(shape, dtype, shaping, vocabulary=FULL_VOCABULARY):
    """Return the numbers and gradients of `log_probs` and of `weighted_sum`."""
    hidden, weight, labels, token_weights = inputs(shape, dtype)
    leaves, options = (hidden, weight), {"vocabulary": vocabulary, "shaping": shaping}
    scores = logprob.log_probs(hidden, weight, labels, statistics=("entropy", "top"), **options)
    grads = torch.autograd.grad((scores.log_probs * token_weights).sum(), leaves)
    total, detached = logprob.weighted_sum(hidden, weight, labels, token_weights, **options)
    return [*scores[:2], detached, total, *grads, *torch.autograd.grad(total, leaves)], scores.top


@interpreted
def test_equal_to_the_plain_path():
    logit_chunks.logit_chunk = lambda vocab_size, device_kind: 2  # with the kernel 4 in float32, 8 in 16 bits
    cases = [(torch.float32, shape, shaping) for shape in SHAPES for shaping in SHAPINGS]
    cases += [(dtype, SHAPES[2], shaping) for dtype in (torch.bfloat16, torch.float16) for shaping in SHAPINGS]
    for dtype, shape, shaping in cases:
        use_kernels(())
        expected, expected_top = both(shape, dtype, shaping)
        use_kernels(KERNEL)
        results, top = both(shape, dtype, shaping)
        near(results, expected, dtype)
        assert torch.equal(top, expected_top)


class Slice(Vocabulary):
    """The second of three slices of a vocabulary, the last two columns of it padding. The others have fixed logits."""

    first = 40

    def padding(self, weight):
        return 2

    def rows(self, labels):
        rows = labels - self.first
        return rows.clamp(0, 36), (rows >= 0) & (rows < 37)

    def join(self, numbers):
        others = torch.stack([numbers * 0.5, numbers * 0.25])
        return torch.cat((others[:1], numbers[None], others[1:]))


@interpreted
def test_a_slice_of_the_vocabulary():
    """Labels on other ranks, padding columns, and a log-sum-exp over all ranks."""
    for dtype in TOLERANCE:
        use_kernels(())
        expected, _ = both((30, 24, 39), dtype, Shaping(1.0, 1.5), Slice())
        use_kernels(KERNEL)
        results, _ = both((30, 24, 39), dtype, Shaping(1.0, 1.5), Slice())
        near(results, expected, dtype)


@interpreted
def test_large_logits_and_no_tokens():
    """Logits of 10,000 do not overflow, a sure prediction has no entropy, and a batch may have no trained token."""
    use_kernels(KERNEL)
    hidden, weight = torch.tensor([[100.0], [-100.0]]), torch.tensor([[100.0], [0.0], [-100.0]])
    scores = logprob.log_probs(hidden, weight, torch.tensor([0, 0]), statistics=("entropy",))
    assert scores.log_probs.tolist() == [0.0, -20000.0]
    assert scores.entropy.tolist() == [0.0, 0.0]
    hidden, weight, labels, token_weights = inputs((3, 4, 5), torch.float32)
    total, _ = logprob.weighted_sum(hidden, weight, labels, token_weights, trained=torch.empty(0, dtype=torch.int64))
    total.backward()
    assert total.item() == 0
    assert not hidden.grad.any()


@interpreted
def test_float64_takes_the_plain_path():
    use_kernels(KERNEL)
    hidden, weight, labels, token_weights = inputs((7, 6, 11), torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: logprob.weighted_sum(h, w, labels, token_weights.double())[0], (hidden, weight)
    )


@compiling
def test_compiled_for_gpus():
    use_kernels(KERNEL)
    with compiled_launches() as launches:
        for shaping in SHAPINGS[1:]:
            both((3, 16, 5000), torch.bfloat16, shaping)
    check_compiled(launches, {"score_rows", "write_errors"})
