"""Compiled layers compute the same as uncompiled ones. They are only traced: generated code needs a C++ compiler."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.attention.flex_attention as flex_attention
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.attention import varlen

from kumi.nn.attention import flash_partial, grouped_query
from kumi.nn.attention.attention_context import OnHost, Segments, document_bounds
from kumi.nn.attention.grouped_query import attend
from kumi.parallel import RankInfo, build, build_mesh, clip_gradients, compiled, pipeline
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from steps import SPECS, batch


@pytest.mark.filterwarnings("default")  # of the tracer, which looks at more than a program does
@pytest.mark.parametrize(("family", "recompute"), [("llama", "full"), ("moe", "selective")])
def test_compiled_layers_train_as_others(monkeypatch, family, recompute):
    compile = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda layer: compile(layer, backend="aot_eager"))
    mesh, results = build_mesh(Layout(recompute=recompute), RankInfo(0, 1, 0, torch.device("cpu"))), []
    inputs = batch(0)
    inputs["token_weights"] = torch.full(inputs["labels"].shape, -0.01, dtype=torch.float64)
    for compiles in (False, True):
        model = build(SPECS[family], mesh, PRECISIONS["fp64"], weights=0, compile=compiles)
        loss = pipeline.train_microbatches(model, mesh, [inputs])
        results.append((loss.item(), clip_gradients(model, 1.0, mesh).item()))
    assert results[1] == pytest.approx(results[0], rel=1e-12)


def _kernel(q, *args, **options):
    """The shapes of PyTorch's variable-length kernel, which exists on GPUs only."""
    return torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0]), torch.zeros(2, dtype=torch.uint64)


def _on_device(tokens, document_ids, cu_seqlens=None):
    """The attention function of a batch on a GPU, with the boundaries as a tensor."""
    rows, length = tokens.shape
    bounds = list(cu_seqlens or range(0, rows * length + 1, length))
    return partial(attend, Segments(document_ids, torch.tensor(bounds, dtype=torch.int32), OnHost(bounds)))


@pytest.fixture
def kernels_of_gpus(monkeypatch):
    """Let CPU tensors in 16 bits take the path of a GPU: no generated code, and kernels without content."""
    for module in (grouped_query, flash_partial):
        monkeypatch.setattr(module, "has_varlen", lambda q: q.dtype.itemsize == 2)
    monkeypatch.setitem(varlen._varlen_attn._backend_fns, None, lambda *args: _kernel(*args))
    monkeypatch.setitem(
        varlen._varlen_attn_backward._backend_fns,
        None,
        lambda grad, q, k, v, *rest: tuple(map(torch.zeros_like, (q, k, v))),
    )


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("documents", [1, 3])
def test_a_layer_on_a_gpu_is_one_graph(monkeypatch, kernels_of_gpus, recompute, documents):
    """A graph break is an error here (`fullgraph`), and other documents need no other graph than the second batch's."""
    graphs, compile = [], nn.Module.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(nn.Module, "compile", lambda layer: compile(layer, backend=backend, fullgraph=True))
    torch._dynamo.reset()
    mesh = build_mesh(Layout(recompute=recompute), RankInfo(0, 1, 0, torch.device("cpu")))
    model = build(SPECS["llama"], mesh, PRECISIONS["bf16-pure"], weights=0, compile=True)
    model.make_attention = _on_device
    counts = []
    for number in range(3):
        inputs = batch(0)
        rows, length = inputs["input_ids"].shape
        inputs["token_weights"] = torch.full((rows, length), -0.01)
        inputs.pop("document_ids", None)
        if documents > 1:
            ids = (torch.arange(length) * (documents + number) // length).expand(rows, -1).contiguous()
            inputs |= {"document_ids": ids, "cu_seqlens": tuple(document_bounds(ids).tolist())}
        pipeline.train_microbatches(model, mesh, [inputs])
        counts.append(len(graphs))
    assert counts[0] >= 1
    assert counts[1] == counts[2], "every batch compiles again"
    assert counts[2] <= 2


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_softcap_on_a_gpu_is_part_of_the_graph(monkeypatch, kernels_of_gpus, recompute):
    """FlexAttention, which a CPU runs without its kernel, takes the place of attention in blocks."""
    compile = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda layer: compile(layer, backend="aot_eager", fullgraph=True))
    monkeypatch.setattr(compiled, "_has_flex", lambda mesh: True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *args: None)
    torch._dynamo.reset()
    spec = SPECS["llama"]
    attention = [replace(layer.attention, head_dim=16, softcap=5.0) for layer in spec.layers]
    spec = replace(spec, layers=tuple(replace(layer, attention=own) for layer, own in zip(spec.layers, attention)))
    mesh = build_mesh(Layout(recompute=recompute), RankInfo(0, 1, 0, torch.device("cpu")))
    inputs = batch(0)
    inputs["token_weights"] = torch.full(inputs["labels"].shape, -0.01)
    inputs["cu_seqlens"] = tuple(document_bounds(inputs["document_ids"]).tolist())
    norms = []
    for compiles in (False, True):
        model = build(spec, mesh, PRECISIONS["fp32"], weights=0, compile=compiles)
        loss = pipeline.train_microbatches(model, mesh, [dict(inputs)])
        norms.append((loss.item(), clip_gradients(model, 1.0, mesh).item()))
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
