"""Recomputation changes the saved tensors, and nothing else."""

from __future__ import annotations

import gc
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from allocation import count_allocated
from grids import sampled
from kumi.parallel import build, build_mesh, host_values
from kumi.parallel.mesh import RankInfo
from kumi.parallel.recompute import Recompute, _policy, is_saved
from kumi.spec.layout import Layout
from kumi.spec.ledger import params
from kumi.spec.precision import PRECISIONS
from steps import SPECS, batch


def _forward_backward(how: str, family: str, kind: str = "fp32") -> tuple[int, dict[str, torch.Tensor]]:
    """Return the bytes saved by the forward pass, and the gradients."""
    mesh = build_mesh(Layout(recompute=how), RankInfo(0, 1, 0, torch.device("cpu")))
    model = build(SPECS[family], mesh, PRECISIONS[kind], weights=0)
    part = batch(0)
    with count_allocated() as allocated:
        summed, _ = model(**part, token_weights=torch.ones(part["labels"].shape))
    summed.backward()
    return allocated.bytes, {name: parameter.grad for name, parameter in model.named_parameters()}


CASES = list(product(("fp32", "bf16"), SPECS))
# By default each kind of layer. Half precision changes only the dtypes of saved tensors: one model is enough.
OFTEN = [("fp32", name) for name in SPECS if name not in ("deep", "deep-tied", "latent-dense")] + [("bf16", "llama")]


@pytest.mark.parametrize(("kind", "family"), sampled(CASES, lambda place: CASES[place] in OFTEN))
def test_gradients_and_names_stay_and_memory_falls(family, kind):
    saved, grads = zip(*(_forward_backward(how, family, kind) for how in ("none", "selective", "full")))
    assert sorted(grads[0]) == sorted(param.name for param in params(SPECS[family]))
    for other in grads[1:]:
        assert list(other) == list(grads[0])
        assert all(torch.equal(other[name], grad) for name, grad in grads[0].items())
    assert saved[0] > saved[1] > saved[2]


def test_evaluation_does_not_recompute():
    mesh = build_mesh(Layout(recompute="full"), RankInfo(0, 1, 0, torch.device("cpu")))
    model = build(SPECS["llama"], mesh, PRECISIONS["fp32"], weights=0)
    with torch.no_grad():
        assert not model(batch(0)["input_ids"]).requires_grad


def test_only_the_first_layers_recompute():
    """`recompute_layers` counts the first layers, and all layers by default."""
    counts = []
    for count in (0, 1, 2, None):
        mesh = build_mesh(Layout(recompute="full", recompute_layers=count), RankInfo(0, 1, 0, torch.device("cpu")))
        model = build(SPECS["llama"], mesh, PRECISIONS["fp32"], weights=0)
        counts.append(sum(len(layer.wrappers) for layer in model.model.layers.values()))
    assert counts == [0, 1, 2, len(SPECS["llama"].layers)]


def test_selective_modes_are_made_of_classes_that_exist():
    """A class for each checkpoint would be garbage in cycles: 64 a microbatch with 32 layers."""

    def classes(kind: type) -> int:
        return 1 + sum(map(classes, kind.__subclasses__()))

    _forward_backward("selective", "llama")
    before = classes(TorchDispatchMode)
    _forward_backward("selective", "llama")
    assert classes(TorchDispatchMode) == before


def test_a_replay_that_differs_from_its_forward_is_refused():
    weight = torch.ones(2, 2, requires_grad=True)
    products = [lambda x: torch.bmm(x[None], weight[None])[0], lambda x: torch.mm(x, weight)]
    out = Recompute("selective")(lambda x: products.pop()(x).exp(), torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r"calls aten\.bmm\.default, where its forward called aten\.mm\.default"):
        out.sum().backward()


def test_the_matmuls_of_float8_are_saved():
    assert is_saved(torch.ops.aten._scaled_mm.default)
    assert not is_saved(torch.ops.aten.mul.Tensor)


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_a_step_leaves_no_tensors_to_the_garbage_collector(how):
    """Ranks with GPUs collect every 50 steps only: a tensor in a cycle would hold its memory until then."""
    _forward_backward(how, "llama")
    while gc.collect():  # what compilers leave behind in other tests takes several collections
        pass
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        _forward_backward(how, "llama")
        gc.collect()
        large = [x for x in gc.garbage if isinstance(x, torch.Tensor) and not isinstance(x, torch.nn.Parameter)]
        assert [x.shape for x in large] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("how", ["selective", "full"])
def test_the_host_reads_numbers_of_a_layer_once(how, monkeypatch):
    """A read makes the host wait for a GPU: a replay takes what its forward has read, also if others ran between."""
    reads = []
    monkeypatch.setattr(host_values, "_to_host", lambda values: reads.append(1) or values.tolist())
    seen = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        sizes = host_values.read_once(x.detach().abs().sum(0).round())
        seen.append(sizes)
        return torch.sin(x) * sizes[0]

    wrapper = Recompute(how)
    first, second = (torch.full((2, 3), value, requires_grad=True) for value in (1.0, 2.0))
    (wrapper(layer, first).sum() + wrapper(layer, second).sum()).backward()
    assert len(reads) == 2
    assert sorted(seen) == [[2.0] * 3] * 2 + [[4.0] * 3] * 2
    assert host_values.read_once(first.detach()) == [[1.0] * 3] * 2  # outside of a layer


def test_compiled_layers_keep_the_scales_of_float8():
    aten = torch.ops.aten
    operators = (aten.max.default, aten.amax.default, aten.mul.Tensor)
    policies = [_policy(None, operator) for operator in operators]
    assert [policy == CheckpointPolicy.MUST_SAVE for policy in policies] == [True, True, False]
