"""Routing, dispatch, grouped GEMMs and balancing of experts agree with plain PyTorch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from kumi.inference.batched_decoder import BatchedDecoder
from kumi.inference.sampling import Sampling
from kumi.nn import grouped_gemm, moe
from kumi.nn.decoder import Decoder
from kumi.nn.grouped_gemm import grouped_linear
from kumi.nn.moe import MoE
from kumi.nn.router import Router, _Route, choose_experts, routers
from kumi.spec import ledger, model
from kumi.spec.model import LatentAttention, LayerSpec, ModelSpec, Rope
from weights import init_weights

SPEC = model.MoE(6, 2, 24, 16)
V3 = replace(
    SPEC,
    num_experts=8,
    scoring_func="sigmoid",
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    topk_method="noaux_tc",
)
SHAPE = (3, 5)


def made(spec, dtype=torch.float64, hidden=16):
    module = MoE(hidden, spec, device=None, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return module


def tokens(dtype=torch.float64, shape=(*SHAPE, 16)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def reference(module, x):
    """Return the output of every expert on every token, times a weight that is 0 if it was not chosen."""
    experts, spec = module.experts, module.experts.spec
    first = experts.gate_up_proj if spec.gated else experts.up_proj
    biases = [experts.gate_up_proj_bias if spec.gated else experts.up_proj_bias, experts.down_proj_bias]
    biases = [0.0 if bias is None else bias for bias in biases]
    inner = torch.einsum("...d,xfd->...xf", x, first) + biases[0]
    gate, up = inner.chunk(2, dim=-1) if spec.gated else (inner, None)
    if spec.act_limit is not None:
        gate, up = gate.clamp(max=spec.act_limit), up.clamp(-spec.act_limit, spec.act_limit)
        inner = gate * (spec.act_alpha * gate).sigmoid() * (up + 1)
    else:
        act = {"silu": F.silu, "gelu": F.gelu, "relu2": lambda x: F.relu(x).square()}[spec.hidden_act]
        inner = act(gate) * up if spec.gated else act(gate)
    out = torch.einsum("...xf,xdf->...xd", inner, experts.down_proj) + biases[1]
    routing = module.gate(x.flatten(0, -2), SHAPE)
    weights = x.new_zeros(len(routing.ids), module.gate.spec.num_experts).scatter(1, routing.ids, routing.weights)
    return (out * weights.view(*x.shape[:-1], -1, 1)).sum(-2) + module.shared_experts(x)


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, norm_topk_prob=False),
        V3,
        replace(SPEC, bias=True, act_limit=0.5),
        replace(V3, hidden_act="gelu"),
        replace(SPEC, bias=True, gated=False, hidden_act="relu2"),
    ],
    ids=["plain", "no-norm", "v3", "clamped", "gelu", "not-gated"],
)
@pytest.mark.parametrize("flat", [False, True])
def test_equals_all_experts_on_all_tokens(spec, flat):
    module, x = made(spec), tokens().requires_grad_()
    grad = tokens(shape=x.shape).flip(0)
    expected = reference(module, x)
    grads = torch.autograd.grad(expected, [x, *module.parameters()], grad)
    result = module(x.flatten(0, 1) if flat else x, SHAPE)
    torch.testing.assert_close(result.view(x.shape), expected)
    torch.testing.assert_close(torch.autograd.grad(result.view(x.shape), [x, *module.parameters()], grad), grads)


def test_gradcheck():
    router, x = made(replace(V3, num_experts_per_tok=3)).gate, tokens().flatten(0, 1).requires_grad_()
    weights = tokens(shape=(15, 3)).requires_grad_()
    places = moe.sorted_places(router(x, SHAPE).ids)
    assert torch.autograd.gradcheck(lambda x, w: moe.gather_weighted(moe.spread(x, places), w, places), (x, weights))
    weight = router.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: _Route.apply(x, w, None, router, SHAPE)[0], (x, weight))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 5, 4], [0, 0, 0, 12], [12, 0, 0, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("sizes", [(16, 24), (10, 6)], ids=str)
def test_grouped_products(dtype, counts, sizes):
    generator = torch.Generator().manual_seed(0)
    into, out = sizes
    rows = torch.randn(sum(counts), into, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(4, out, into, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(sum(counts), out, generator=generator).to(dtype)
    parts = zip(rows.split(counts), weight)
    expected = torch.cat([F.linear(part, matrix) for part, matrix in parts])
    result = grouped_linear(rows, weight, torch.tensor(counts))
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(result, expected, **tolerance)
    # The gradient of an output that is read transposed is not contiguous.
    expected_grads = torch.autograd.grad(expected, (rows, weight), grad)
    got = torch.autograd.grad(result, (rows, weight), grad.T.contiguous().T)
    torch.testing.assert_close(got, expected_grads, **tolerance)


def test_the_kernel_is_taken_and_counted_where_there_is_one(monkeypatch):
    monkeypatch.setattr(
        grouped_gemm, "_compiles_kernels", lambda rows: False
    )  # whatever float32 precision an earlier test has chosen
    assert grouped_gemm._has_kernel(torch.zeros(3, 8), 4)
    rows, weight = torch.zeros(12, 16), torch.zeros(4, 24, 16)
    with FlopCounterMode(display=False) as counter:
        grouped_linear(rows, weight, torch.tensor([3, 3, 3, 3]))
    assert counter.get_total_flops() == 2 * 12 * 16 * 24


def test_groups_limit_the_choice():
    scores = torch.tensor([[0.9, 0.1, 0.5, 0.55, 0.2, 0.3, 0.4, 0.45]])
    spec = replace(V3, num_experts=8, n_group=4, topk_group=1)
    # The best expert is in the first group, the two best of one group in the second.
    without_bias = replace(spec, topk_method="group_limited_greedy")
    assert choose_experts(scores, None, without_bias).sort().values.tolist() == [[0, 1]]
    assert choose_experts(scores, torch.zeros(8), spec).sort().values.tolist() == [[2, 3]]
    assert choose_experts(scores, torch.tensor([0.0] * 6 + [1.0] * 2), spec).sort().values.tolist() == [[6, 7]]


def test_the_bias_chooses_and_weighs_nothing():
    module = made(V3)
    x = tokens().flatten(0, 1)
    before = module.gate(x, SHAPE)
    module.gate.e_score_correction_bias += 5.0  # equal for all experts
    after = module.gate(x, SHAPE)
    assert torch.equal(before.ids, after.ids)
    assert torch.equal(before.weights, after.weights)


def test_the_bias_moves_towards_equal_loads():
    router = made(V3).gate
    router.e_score_correction_bias.zero_()
    router.update_bias(torch.tensor([10, 2, 6, 6, 6, 6, 6, 6]), 0.25)
    assert router.e_score_correction_bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0]


def aux_reference(spec, logits, ids, shape, per_sequence):
    """The auxiliary loss of a layer, from the formulas of the papers."""
    scores = logits.softmax(-1) if spec.scoring_func == "softmax" else logits.sigmoid()
    scores = scores / scores.sum(-1, keepdim=True)
    chosen = F.one_hot(ids, spec.num_experts).to(logits.dtype).sum(1)
    if not per_sequence:
        return spec.num_experts * (chosen.mean(0) * scores.mean(0)).sum()
    chosen, scores = (value.view(*shape, -1).mean(1) for value in (chosen, scores))
    return spec.num_experts / spec.num_experts_per_tok * (chosen * scores).sum(-1).mean()


@pytest.mark.parametrize("spec", [SPEC, V3], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_the_gradient_of_the_auxiliary_loss(spec, per_sequence):
    """It is added to the gradient of the layer's output, at any scale."""
    module, x = made(spec), tokens().requires_grad_()
    grad = tokens(shape=x.shape).flip(0)
    out = module(x, SHAPE)
    logits = x.flatten(0, 1) @ module.gate.weight.T
    loss = aux_reference(spec, logits, module.gate(x.flatten(0, 1), SHAPE).ids, SHAPE, per_sequence)
    inputs = [x, *module.parameters()]
    expected = torch.autograd.grad((out * grad).sum() + 0.3 * loss, inputs)
    balance = module.gate.balance
    balance.reset()
    balance.weight, balance.per_sequence = 0.3 / 15, per_sequence
    torch.testing.assert_close(torch.autograd.grad((module(x, SHAPE) * grad).sum(), inputs), expected)
    torch.testing.assert_close(balance.loss, 0.3 * loss.detach())
    assert balance.counts.sum() == 15 * spec.num_experts_per_tok


@pytest.mark.parametrize("per_sequence", [False, True])
def test_ranks_that_share_sequences_count_together(per_sequence):
    """Two halves of a batch that split a sequence, each with the other's counts, give the result of the batch."""
    router, x = made(SPEC).gate, tokens(shape=(24, 16))
    balance, counts = router.balance, []
    balance.weight, balance.per_sequence = 1 / 24, per_sequence

    def train(parts, sum_counts):
        balance.sum_counts, router.weight.grad = sum_counts, None
        balance.reset()
        for balance.part, piece in enumerate(x.chunk(parts)):
            router(piece, (3, 8)).weights.sum().backward()
        return router.weight.grad, balance.loss

    whole = train(1, lambda own: own)
    train(2, lambda own: counts.append(own) or own)
    torch.testing.assert_close(train(2, lambda own: counts[0] + counts[1]), whole)


def test_nothing_is_counted_without_a_backward_and_nothing_twice_with_recomputation():
    module, x = made(SPEC), tokens().requires_grad_()
    with torch.no_grad():
        module(x, SHAPE)
    assert module.gate.balance.counts is None
    torch.utils.checkpoint.checkpoint(module, x, SHAPE, use_reentrant=False).sum().backward()
    assert module.gate.balance.counts.sum() == 15 * 2


LATENT = LatentAttention(2, 8, 8, 4, 4, 6, Rope(100.0))
DECODER = ModelSpec("deepseek_v3", 50, 16, (LayerSpec(LATENT, model.MLP(24)), LayerSpec(LATENT, V3)), 1e-5, 32)


def test_a_decoder_starts_and_writes():
    decoder = Decoder(DECODER)
    init_weights(decoder, DECODER, seed=0)
    ((name, router),) = routers(decoder)
    assert isinstance(router, Router)
    assert {tensor.name: tensor.shape for tensor in ledger.buffers(DECODER)} == {
        f"{name}.e_score_correction_bias": (8,)
    }
    assert decoder.state_dict().keys() == {tensor.name for tensor in ledger.tensors(DECODER)}
    assert not router.e_score_correction_bias.any()
    assert 0.01 < decoder.model.layers["1"].mlp.experts.gate_up_proj.std() < 0.03
    (reply,) = BatchedDecoder(decoder).generate([[1, 2, 3]], Sampling(max_new_tokens=5))
    assert len(reply.ids) == 5


def test_bfloat16_is_close_and_the_router_is_in_float32():
    module, x = made(replace(V3, norm_topk_prob=False), torch.float32), tokens(torch.float32)
    exact = module(x, SHAPE)
    routing = module.gate(x.bfloat16().flatten(0, 1), SHAPE)
    assert routing.weights.dtype == torch.float32
    assert torch.equal(routing.ids.sort(-1).values, module.gate(x.flatten(0, 1), SHAPE).ids.sort(-1).values)
    rough = module(x.bfloat16(), SHAPE)
    assert rough.dtype == torch.bfloat16
    assert (rough - exact).abs().max() <= 0.03 * exact.abs().max()


def test_documents_packed_in_a_row_do_not_see_each_other():
    decoder = Decoder(replace(DECODER, layers=(DECODER.layers[0],) * 2), dtype=torch.float64)
    init_weights(decoder, decoder.spec, seed=0)
    ids = torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    packed = decoder(ids, document_ids=documents)
    torch.testing.assert_close(packed[:, 5:], decoder(ids[:, 5:]))
    torch.testing.assert_close(packed[:, :5], decoder(ids[:, :5]))
