"""The states of every optimizer: bytes as PyTorch's classes keep them, and names."""

from __future__ import annotations

import pytest
import torch

from kumi.errors import ConfigError
from kumi.spec.op import Dim, Param
from kumi.spec.optim import Optim
from kumi.spec.optim_states import OPTIM_KINDS, bytes_per_element, optimizer_state_bytes, states_of


def param_of(*shape, name="model.layers.0.weight"):
    return Param(name, tuple(Dim(f"dim{place}", size) for place, size in enumerate(shape)))


def experts_of(*shape):
    return Param("model.layers.0.mlp.experts", (Dim("experts", 4), *param_of(*shape).dims))


def _torch_bytes(optimizer, shape):
    """Bytes of the state tensors of a PyTorch optimizer after a step on one float32 parameter."""
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.ones_like(parameter)
    made = optimizer([parameter])
    made.step()
    return sum(value.nbytes for value in made.state[parameter].values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("shape", [(24, 40), (40,), (24, 1, 4)])
@pytest.mark.parametrize(
    ("kind", "made", "options"),
    [
        ("adamw", torch.optim.AdamW, {}),
        ("adafactor", torch.optim.Adafactor, {}),
        ("sgd", lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), {}),
        ("sgd", lambda params: torch.optim.SGD(params, lr=0.1), {"betas": (0.0, 0.0)}),
    ],
)
def test_bytes_are_those_of_pytorch(kind, made, options, shape):
    assert optimizer_state_bytes(Optim(kind=kind, **options), param_of(*shape), 4) == _torch_bytes(made, shape)


def test_muon_keeps_one_momentum_for_the_matrices_of_layers_only():
    optim, matrix, table = Optim(kind="muon"), param_of(24, 40), param_of(24, 40, name="model.embed_tokens.weight")
    assert optimizer_state_bytes(optim, matrix, 4) == _torch_bytes(torch.optim.Muon, (24, 40))
    assert optimizer_state_bytes(optim, experts_of(24, 40), 4) == 4 * _torch_bytes(torch.optim.Muon, (24, 40))
    for other in (table, param_of(40), param_of(24, 1, 4), experts_of(40)):
        assert states_of(optim, other) == states_of(Optim(), other)


def test_moments_of_eight_bits():
    optim = Optim(kind="adamw-8bit")
    assert optimizer_state_bytes(optim, param_of(64, 64), 4) == 2 * (4096 + 4 * 64) + 4
    assert optimizer_state_bytes(optim, param_of(16, 600), 4) == 2 * (9600 + 4 * 16 * 3) + 4
    for other in (param_of(63, 65), param_of(8192), Param("model.layers.0.bias", experts_of(8192).dims)):
        assert states_of(optim, other) == states_of(Optim(), other)


def test_adafactor_factors_matrices_and_no_vectors_of_experts():
    optim = Optim(kind="adafactor")
    assert {state.name: state.shape for state in states_of(optim, experts_of(24, 40))} == {
        "step": (),
        "row_var": (4, 24, 1),
        "col_var": (4, 1, 40),
    }
    assert {state.name: state.shape for state in states_of(optim, experts_of(24))} == {"step": (), "variance": (4, 24)}


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ConfigError, match=r"optim\.kind='adam' is unknown; use one of adamw, "):
        states_of(Optim(kind="adam"), param_of(2, 2))


def test_bytes_of_an_element_of_a_large_matrix():
    each = {kind: bytes_per_element(Optim(kind=kind), 4) for kind in OPTIM_KINDS}
    expected = {"adamw": 8, "adamw-8bit": 2 + 8 / 256, "muon": 4, "adafactor": 8 / 4096, "sgd": 4}
    assert each == pytest.approx(expected, rel=1e-3)
