"""Document boundaries reach attention from the host's columns, so that no microbatch waits for a GPU to know them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kumi.objectives import OBJECTIVES
from kumi.parallel import build, run_microbatches
from kumi.parallel.mesh import RankInfo, build_mesh
from kumi.parallel.run_microbatches import decoder_inputs, shard_batch
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from steps import SPECS, VOCAB

CPU = RankInfo(0, 1, 0, torch.device("cpu"))
PACKED = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
WHOLE = torch.zeros_like(PACKED)


def batch_of(document_ids):
    ids = torch.randint(VOCAB, document_ids.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids, "document_ids": document_ids}


def sharded(document_ids, device):
    mesh = replace(build_mesh(Layout(), CPU), rank_info=replace(CPU, device=torch.device(device)))
    return shard_batch(OBJECTIVES["lm"](), batch_of(document_ids), mesh)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_boundaries_of_packed_rows_stay_on_the_host(device):
    columns = sharded(PACKED, device)
    assert columns["document_ids"].device.type == device
    assert columns["cu_seqlens"].device.type == "cpu"
    assert decoder_inputs(columns)["cu_seqlens"] == (0, 2, 5, 6, 12)


def test_rows_of_one_document_need_no_ids_on_a_device():
    assert set(sharded(WHOLE, "meta")) == {"input_ids", "labels"}
    assert set(sharded(WHOLE, "cpu")) == {"input_ids", "labels", "document_ids", "cu_seqlens"}


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_losses_are_those_of_boundaries_read_from_the_ids(family):
    decoder = build(SPECS[family], build_mesh(Layout(), CPU), PRECISIONS["fp32"], weights=7)
    inputs = decoder_inputs(sharded(PACKED, "cpu"))
    without = {name: value for name, value in inputs.items() if name != "cu_seqlens"}
    assert torch.equal(decoder(**inputs), decoder(**without))


def test_columns_go_to_a_gpu_from_pinned_memory(monkeypatch):
    pinned, column = [], torch.arange(3)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    assert run_microbatches._to_device(column, torch.device("cpu")) is column
    assert pinned == []
    monkeypatch.setattr(run_microbatches, "is_gpu", lambda device: True)
    run_microbatches._to_device(column, torch.device("meta"))
    assert pinned == [column]
