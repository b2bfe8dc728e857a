"""Whole models with all Triton kernels, interpreted: recomputed, compiled, and as PyTorch's operators."""

from __future__ import annotations

import torch

from kumi.nn.moe import sorted_places
from kumi.nn.numerics import kernel, use_kernels
from kumi.parallel import build, build_mesh
from kumi.parallel.mesh import RankInfo
from kumi.spec.layout import Layout
from kumi.spec.numerics import KERNELS
from kumi.spec.precision import PRECISIONS
from steps import SPECS, batch
from triton_process import interpreted

ALL = tuple((operation, "triton") for operation in KERNELS)


def forward_backward(family, recompute):
    """Return the loss and the gradients of a small model."""
    mesh = build_mesh(Layout(recompute=recompute), RankInfo(0, 1, 0, torch.device("cpu")))
    model = build(SPECS[family], mesh, PRECISIONS["fp32"], weights=0)
    # Three documents, each of some tokens.
    part = {name: value[:1, :12] for name, value in batch(0).items()}
    total, _ = model(**part, token_weights=torch.ones(part["labels"].shape))
    total.backward()
    return [total.detach(), *(parameter.grad for parameter in model.parameters())]


@interpreted
def test_recomputed_gradients_are_those_of_the_plain_path():
    """Selective recomputation keeps what the operators of the kernels return, or calls them again."""
    for family in ("moe", "hybrid"):
        use_kernels(())
        expected = forward_backward(family, "none")
        use_kernels(ALL)
        results = [forward_backward(family, recompute) for recompute in ("none", "selective", "full")]
        for value, reference in zip(results[0], expected, strict=True):
            assert (value - reference).abs().max() <= 2e-5 * max(1.0, reference.abs().max().item())
        for other in results[1:]:
            assert all(torch.equal(value, reference) for value, reference in zip(other, results[0], strict=True))


@interpreted
def test_operators_agree_with_their_fakes_and_schemas():
    """`torch.compile` and the dry run use the fakes: shapes, dtypes, and what an operator writes."""
    use_kernels(ALL)
    random = torch.Generator().manual_seed(0)
    places = sorted_places(torch.tensor([[0, 2], [1, 2], [2, 3]]))
    x, weights = torch.randn(3, 10, generator=random), torch.rand(3, 2, generator=random)
    rows = torch.randn(6, 10, generator=random)
    heads, angles = torch.randn(1, 3, 2, 8, generator=random), torch.rand(1, 3, 1, 8, generator=random)
    head = rows, torch.tensor([0, 1, 2, 3, 4, -1]), torch.zeros(4, 6), 9, 1.0, 2.0
    experts, loss = kernel("experts"), kernel("loss")
    calls = [
        (experts.to_experts, (x, places)),
        (experts.from_experts, (rows, weights, places)),
        (experts.from_experts, (rows, None, places)),
        (experts.from_experts_backward, (x, rows, weights, places)),
        (kernel("rotation").rotated, (heads, angles, angles, False, True)),
        (loss.scores_, (*head, True)),
        (loss.errors_, head),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@interpreted
def test_compiled_in_one_graph():
    use_kernels(())
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 10, generator=random).requires_grad_()
    weights = torch.rand(3, 2, generator=random).requires_grad_()
    places = sorted_places(torch.tensor([[0, 2], [1, 2], [2, 3]]))

    from kumi.nn.moe import gather_weighted, spread
    from kumi.nn.rope import rotate

    def layer(x, weights):
        heads = gather_weighted(spread(x, places), weights, places).view(1, 3, 1, 10)
        return rotate(heads, x.cos().view(heads.shape), x.sin().view(heads.shape)).square().sum()

    expected = torch.autograd.grad(layer(x, weights), (x, weights))
    use_kernels(ALL)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, weights), (x, weights)), expected)
