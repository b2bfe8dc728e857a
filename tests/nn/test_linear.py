import pytest
import torch

from kumi.nn.linear import Linear, linears


def gradients(put_off, bias, recompute):
    torch.manual_seed(0)
    layers = [Linear(5, 7, bias=bias, device=None, dtype=torch.float64) for _ in range(2)]
    for layer in layers:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        layer.defers_wgrad, layer.deferred_wgrads = put_off is not None, put_off
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)

    def forward(x):
        return (layers[0](x) * layers[1](x)).tanh()

    for _ in range(2):
        out = torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False) if recompute else forward(x)
        out.square().sum().backward()
    return layers, x


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_weight_gradients_that_wait_are_the_same(bias, recompute):
    plain, expected = gradients(None, bias, recompute)
    later = []
    layers, x = gradients(later, bias, recompute)
    torch.testing.assert_close(x.grad, expected.grad, rtol=1e-13, atol=0)
    assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())
    assert len(later) == 4
    for add in later:
        add()
    for layer, other in zip(layers, plain):
        for mine, whole in zip(layer.parameters(), other.parameters()):
            torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-12, atol=1e-14)


def test_a_layer_that_may_split_does_not_where_nobody_asks():
    layer = Linear(3, 4, bias=True, device=None, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    layer.defers_wgrad = True
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *_: layer(x), (x, *layer.parameters()))
    assert linears(torch.nn.Sequential(layer, torch.nn.ReLU())) == [layer]
