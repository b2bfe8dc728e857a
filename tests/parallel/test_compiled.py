"""Compiled layers compute the same as uncompiled ones. They are only traced: generated code needs a C++ compiler."""

import pytest
import torch
from torch import nn

from kumi.parallel import RankInfo, build, build_mesh, clip_gradients, pipeline
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
    for compiled in (False, True):
        model = build(SPECS[family], mesh, PRECISIONS["fp64"], weights=0, compile=compiled)
        loss = pipeline.train_microbatches(model, mesh, [inputs])
        results.append((loss.item(), clip_gradients(model, 1.0, mesh).item()))
    assert results[1] == pytest.approx(results[0], rel=1e-12)
