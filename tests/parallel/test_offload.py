"""Optimizer states and activations on the host and on drives: the same results, and the bytes on each."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from kumi.errors import SaveError
from kumi.parallel import build, build_mesh, clip_gradients, fill_pieces, init_adamw, optimizer_pieces, unwrap
from kumi.parallel.activation_offload import OffloadStream, offload_wrappers
from kumi.parallel.mesh import RankInfo
from kumi.parallel.optim.host_adamw import ALIGNED, init_placed_adamw
from kumi.parallel.optim.nvme_store import open_nvme_store
from kumi.parallel.stage_modules import local_shard
from kumi.plan.layout_batch import batch_layouts
from kumi.plan.memory.activations import model_activations
from kumi.plan.memory.device_memory import host_memory
from kumi.spec.layout import Layout
from kumi.spec.ledger import decayed_names, params
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from kumi.spec.techniques import STAGING_BUFFERS
from planned import job_of, share_of
from steps import SPECS, batch, forward_backward, mesh_of

OPTIM = Optim(lr=1e-2)
# Of `_module`.
MATRICES = ("0.weight", "1.weight", "3.weight")


def _alone(offload):
    return build_mesh(Layout(offload=offload), RankInfo(0, 1, 0, torch.device("cpu")))


def _module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 11), nn.Linear(11, 300), nn.LayerNorm(300), nn.Linear(300, 5))


def _steps(module, optimizer, frozen=()):
    """Four updates; parameters in `frozen` have no gradient in the second."""
    for step in range(4):
        torch.manual_seed(step)
        module(torch.randn(5, 37)).square().sum().backward()
        for name, parameter in module.named_parameters():
            if step == 1 and name in frozen:
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("bucket", [64, 640, 2**20])
@pytest.mark.parametrize("offload", ["optimizer", "optimizer-nvme"])
def test_updates_equal_those_on_the_device_to_the_bit(tmp_path, offload, bucket):
    plain, moved = _module(), _module()
    ours = init_placed_adamw(moved.named_parameters(), MATRICES, OPTIM, _alone(offload), tmp_path, bucket=bucket)
    theirs = init_adamw(plain.named_parameters(), MATRICES, OPTIM)
    for module, optimizer in ((plain, theirs), (moved, ours)):
        _steps(module, optimizer, frozen=("1.weight", "3.bias"))
    for parameter, other in zip(plain.parameters(), moved.parameters()):
        assert torch.equal(parameter, other)
        assert all(torch.equal(ours.state[other][name], value) for name, value in theirs.state[parameter].items())
    assert list(tmp_path.iterdir()) == []


def _mapped_pages():
    """Return the bytes of the files of states that are resident in this process's memory."""
    pages, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = "exp_avg" in line
        elif inside and line.startswith("Rss:"):
            pages += 1024 * int(line.split()[1])
    return pages


def test_memory_holds_three_buckets_of_what_is_on_drives(tmp_path):
    module = nn.Linear(1024, 1024, bias=False)
    module.weight.grad = torch.ones_like(module.weight)
    mesh = _alone("optimizer-nvme")
    optimizer = init_placed_adamw(module.named_parameters(), ("weight",), OPTIM, mesh, tmp_path, bucket=2**16)
    assert len(optimizer.buckets) == 16
    before = _mapped_pages()
    optimizer.step()
    buffers = sum(tensor.nbytes for buffer in optimizer.staging_buffers for tensor in (buffer.means, buffer.squares))
    assert buffers == 3 * 2 * 2**16 * 4
    assert _mapped_pages() == before
    assert optimizer.state[module.weight]["exp_avg"].unique().tolist() == pytest.approx([0.1])
    assert _mapped_pages() >= before + module.weight.nbytes


def test_drives_without_room_are_said(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SaveError, match=r"cannot hold 4096 bytes of optimizer states .*train.offload_dir"):
        open_nvme_store(file, 0, 1024, torch.float32)


def _trained(layout, family, folder):
    """Return parameters and states after two steps; the saved pieces are filled into an optimizer in memory."""
    mesh = mesh_of(layout)
    model = build(SPECS[family], mesh, PRECISIONS["fp32"], weights=3)
    weights = decayed_names(SPECS[family])
    optimizer = init_placed_adamw(unwrap(model).named_parameters(), weights, OPTIM, mesh, Path(folder), bucket=1024)
    for step in range(2):
        forward_backward(model, mesh, step, 2)
        clip_gradients(model, 0.5, mesh)
        optimizer.step()
        optimizer.zero_grad()
    saved = {piece.name: piece.data.clone() for piece in optimizer_pieces(model, optimizer, mesh)}
    plain = init_adamw(unwrap(model).named_parameters(), weights, OPTIM)
    fill_pieces(optimizer_pieces(model, plain, mesh), lambda name, start, shape: saved[name])
    states = [local_shard(value).numpy().copy() for state in plain.state.values() for value in state.values()]
    return [local_shard(value.detach()).numpy().copy() for value in model.parameters()], states


CASES = [
    (Layout(), ("optimizer", "optimizer-nvme", "activations")),
    (Layout(dp_shard=2, zero=1), ("optimizer",)),
    (Layout(dp_shard=2, zero=3), ("optimizer-nvme", "states", "states-nvme", "activations")),
    (Layout(tp=2), ("optimizer-nvme", "activations")),
    (Layout(pp=2), ("activations",)),
]


@pytest.mark.parametrize(("layout", "kinds"), CASES)
def test_layouts_train_alike_wherever_states_are(ranks, layout, kinds, tmp_path):
    on_device = ranks(layout.world_size, _trained, layout, "qwen", str(tmp_path))
    for offload in kinds:
        offloaded = ranks(layout.world_size, _trained, replace(layout, offload=offload), "qwen", str(tmp_path))
        for ours, theirs in zip(offloaded, on_device, strict=True):
            for mine, other in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
                assert (mine == other).all(), offload


def _kept(recompute, kind):
    """Return the offloaded bytes of the forward pass of two layers, and the gradients with and without offloading."""
    spec = SPECS["llama"]
    mesh = build_mesh(Layout(recompute=recompute), RankInfo(0, 1, 0, torch.device("cpu")))
    saved = []
    for moves in (False, True):
        model = build(spec, mesh, PRECISIONS[kind], weights=0)
        stream = OffloadStream(mesh.device)
        if moves:
            for layer, keeper in zip(
                model.model.layers.values(), offload_wrappers(stream, len(spec.layers)), strict=True
            ):
                layer.wrappers.append(keeper)
        part = {name: value.repeat(4, 1) for name, value in batch(0).items()}
        summed, _ = model(**part, token_weights=torch.ones(part["labels"].shape))
        moved = stream.bytes_moved
        summed.backward()
        saved.append([parameter.grad for parameter in model.parameters()])
    return moved, part["labels"].numel(), saved


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_layers_keep_leaves_once_and_comes_back(recompute, kind):
    moved, tokens, (stayed, came) = _kept(recompute, kind)
    assert all(torch.equal(one, other) for one, other in zip(stayed, came))
    spec = SPECS["llama"]
    activations = model_activations(job_of(spec, kind=kind), batch_layouts([Layout()])).layers[0]
    planned = len(spec.layers) * getattr(activations, recompute)[0] * tokens
    # Small tensors stay on the device: log-sum-exps of attention, and document boundaries.
    assert 0.9 * planned <= moved <= planned


@pytest.mark.parametrize("offload", ["optimizer", "optimizer-nvme"])
@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=2, zero=1)])
def test_bytes_of_the_host_are_those_that_are_planned(ranks, layout, offload, tmp_path):
    """Up to the padding in a bucket that aligns every tensor with a cache line."""
    layout = replace(layout, offload=offload)
    job = job_of(SPECS["llama"], kind="fp32")
    (planned,) = host_memory(job, *share_of(job, layout))
    for states, buffers, buckets in ranks(layout.world_size, _host_bytes, layout, str(tmp_path)):
        expected = (0 if offload.endswith("nvme") else states) + buffers * STAGING_BUFFERS / buckets
        assert planned * 0.999 <= expected <= planned + STAGING_BUFFERS * 4 * 4 * ALIGNED * len(params(SPECS["llama"]))


def _host_bytes(layout, folder):
    """Return the bytes of a rank's states, the bytes of its staging buffers, and the number of buckets."""
    mesh = mesh_of(layout)
    model = build(SPECS["llama"], mesh, PRECISIONS["fp32"], weights=3)
    optimizer = init_placed_adamw(
        unwrap(model).named_parameters(), decayed_names(SPECS["llama"]), OPTIM, mesh, Path(folder)
    )
    states = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    tensors = [
        value
        for buffer in optimizer.staging_buffers
        for value in (buffer.parameters, buffer.gradients, buffer.means, buffer.squares)
    ]
    return states, sum(value.nbytes for value in tensors), len(optimizer.staging_buffers)
