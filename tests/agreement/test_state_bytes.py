"""The bytes that `kumi.spec.sharding` computes for a rank equal measured ones."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grids import sampled
from kumi.parallel import build, init_adamw, unwrap
from kumi.parallel.stage_modules import local_shard
from kumi.spec.layout import Layout
from kumi.spec.ledger import decayed_names, ops
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from kumi.spec.sharding import fsdp_units, state_bytes
from planned import gathered_of
from steps import SPECS, forward_backward, mesh_of

DIVIDED = [
    *(Layout(dp_shard=4, zero=zero) for zero in (1, 2, 3)),
    *(Layout(dp_replicate=2, dp_shard=2, zero=zero) for zero in (1, 3)),
]
OPTIM = Optim()


def _bytes(tensors):
    return sum(local_shard(tensor).nbytes for tensor in tensors)


def _measured_states(layout, family, microbatches):
    """Bytes of parameters, gradients and optimizer states between backward and update, and after the update."""
    mesh = mesh_of(layout)
    model = build(SPECS[family], mesh, PRECISIONS["bf16"], weights=0)
    optimizer = init_adamw(unwrap(model).named_parameters(), decayed_names(SPECS[family]), OPTIM)
    measured = []
    for step in range(2):
        forward_backward(model, mesh, step, microbatches)
        parameters = list(model.parameters())
        states = [value for state in optimizer.state.values() for value in state.values()]
        measured.append((_bytes(parameters), _bytes(value.grad for value in parameters), _bytes(states)))
        optimizer.step()
        optimizer.zero_grad()
    return measured


# test_model_layouts compares the same bytes in every layout; here a few layouts in half precision.
STATES = list(product([Layout(), Layout(dp_replicate=4), *DIVIDED], SPECS))
OFTEN_STATES = [(layout, "llama") for layout in (Layout(), DIVIDED[0], DIVIDED[-1])]


@pytest.mark.parametrize(("layout", "family"), sampled(STATES, lambda place: STATES[place] in OFTEN_STATES))
def test_states(ranks, layout, family):
    for rank, measured in enumerate(ranks(layout.world_size, _measured_states, layout, family, 3)):
        planned = state_bytes(SPECS[family], layout, rank, PRECISIONS["fp32"], OPTIM)
        assert measured == [(planned.params, planned.grads, planned.optimizer)] * 2


def _whole(model):
    """Return the bytes of currently unsharded parameters, and of their unsharded gradients."""
    unsharded = [value for value in model.parameters() if not isinstance(value, DTensor)]
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in unsharded}
    grads = {id(value.grad): value.grad.nbytes for value in unsharded if value.grad is not None}
    for module in model.modules():
        # Gradients that wait for the last microbatch in another dtype than the parameters.
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        accumulated = [value.unsharded_accumulated_grad for value in group.fsdp_params] if group else []
        grads |= {id(grad): grad.nbytes for grad in accumulated if grad is not None}
    return sum(storages.values()), sum(grads.values())


def _measured_gathered(layout, family, kind):
    """Return peak bytes of unsharded parameters and gradients, for each number of `MICROBATCHES`.

    They are measured before a forward, in a backward, and after the step.
    """
    mesh = mesh_of(layout)
    model = build(SPECS[family], mesh, PRECISIONS[kind], weights=0)
    forward, backward, peaks = [], [], []

    def look_in_backward(module, args, output):
        output.register_hook(lambda grad: backward.append(_whole(model)))

    for module in (model.model.embed_tokens, *model.model.layers.values(), model.model.norm):
        module.register_forward_pre_hook(lambda *_: forward.append(_whole(model)))
        module.register_forward_hook(look_in_backward)
    for microbatches in MICROBATCHES:
        forward_backward(model, mesh, 0, microbatches, dtype=getattr(torch, PRECISIONS[kind].param))
        params = max(params for params, _ in forward + backward)
        gradients = (max(grads for _, grads in seen) for seen in (forward, backward))
        peaks.append((params, *gradients, _whole(model)))
        model.zero_grad()
        forward.clear()
        backward.clear()
    return peaks


MICROBATCHES = (1, 3)
GATHERED = [(layout, family, kind) for layout, family in product(DIVIDED, SPECS) for kind in ("fp32", "bf16")]
# By default every layout in both precisions, and these models in one of the layouts. The others have the same kinds of
# units, which test_units lists. In "gpt" and "hybrid" the last layer, which ZeRO-3 keeps beside the head, is not the
# largest.
OFTEN = ("llama", "qwen", "moe", "latent", "gpt", "scores", "gemma", "hybrid", "biased-moe", "deep-tied")


def _often(place):
    layout, family, kind = GATHERED[place]
    if family not in OFTEN:
        return False
    number = OFTEN.index(family)
    return (layout, kind) == (DIVIDED[number % len(DIVIDED)], ("fp32", "bf16")[number % 2])


@pytest.mark.parametrize(("layout", "family", "kind"), sampled(GATHERED, _often))
def test_gathered(ranks, layout, family, kind):
    for peaks in ranks(4, _measured_gathered, layout, family, kind):
        for microbatches, (params, accumulated, grads, after) in zip(MICROBATCHES, peaks, strict=True):
            planned = gathered_of(SPECS[family], layout, kind, microbatches)
            assert (params, accumulated) == (planned.params, planned.accumulated)
            assert grads <= planned.accumulated + planned.grads
            assert after == (0, 0)


def _units(layout, family):
    """The parameter names of each unit that FSDP gathers as one, the root last."""
    model = build(SPECS[family], mesh_of(layout), PRECISIONS["fp32"], weights=0)
    units = {}
    for prefix, module in reversed(list(model.named_modules())):
        if isinstance(module, FSDPModule):
            names = {f"{prefix}.{name}".lstrip(".") for name, _ in module.named_parameters()}
            # Several modules, such as two tables, may be one unit.
            unit = id(module._get_fsdp_state())
            units[unit] = units.get(unit, set()) | names.difference(*units.values())
    return sorted(sorted(names) for names in units.values() if names)  # the root may have no parameters


@pytest.mark.parametrize("family", SPECS)
def test_units(ranks, family):
    planned = sorted(sorted(param.name for param in unit.params) for unit in fsdp_units(ops(SPECS[family])))
    assert ranks(2, _units, Layout(dp_shard=2, zero=3), family)[0] == planned
