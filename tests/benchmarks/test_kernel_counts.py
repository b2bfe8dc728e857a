"""The planner's kernels and bytes of a layer on a GPU are those that the trainer's operators launch and move.

benchmarks/launches.py counts the operators that the trainer calls; `test_launches` holds its committed result.
"""

import json
from dataclasses import replace
from pathlib import Path

import launches
import pytest
import shapes

from kumi.plan.layout_batch import batch_layouts
from kumi.plan.time.expert_costs import COUNTED_PASSES
from kumi.plan.time.op_costs import MEMORY_PASSES, LayoutSizes, memory_passes
from kumi.spec import families
from kumi.spec.comm import DEFAULT_COMM, engine_for
from kumi.spec.layout import Layout
from kumi.spec.ledger import unique_layer_ops
from kumi.spec.numerics import Numerics
from planned import GPU, job_of

COUNTED = json.loads((Path(launches.__file__).parent / "results" / "launches.json").read_text())
PRODUCTS = ("mm", "grouped_times", "grouped_outer", "_scaled_dot_product_flash_attention_for_cpu")


def predicted(shape, kernels):
    """Return (gigabytes, launches) of the element-wise operations of a layer, forward and backward each."""
    model = families.from_hf(shapes.with_layers(shape, 1))
    engine = engine_for(DEFAULT_COMM, GPU, Numerics(kernels=kernels))
    job = job_of(model, seq_len=launches.TOKENS, sequences=1, engine=engine)
    sizes = LayoutSizes(job, batch_layouts([Layout()]))
    totals = [0.0] * 4
    (ops,) = unique_layer_ops(model)
    for op in ops:
        if op.kind in MEMORY_PASSES:
            fused = op.kind == "rope" and engine.fused_rotation
            passes = memory_passes(op.kind, "fused" if fused else engine.kernels)
            elements = sizes.output_elements(op)[0]
        elif op.kind in ("dispatch", "combine"):
            passes, elements = COUNTED_PASSES[engine.expert_kernels], sizes.tokens[0] * op.passes * model.hidden_size
        else:
            continue
        for index, scale in enumerate((job.itemsize * elements / 1e9,) * 2 + (1.0, 1.0)):
            totals[index] += passes[index] * scale
    return totals


@pytest.mark.parametrize(
    ("name", "shape", "kernels"),
    [
        ("dense", shapes.LLAMA_8B, ()),
        ("experts", shapes.QWEN_30B_A3B, ()),
        ("dense, kernels", shapes.LLAMA_8B, launches.KERNELS),
        ("experts, kernels", shapes.QWEN_30B_A3B, launches.KERNELS),
    ],
)
def test_a_layer_has_the_launches_and_bytes_of_the_trainer_s_operators(name, shape, kernels):
    """Within 4 %: the counts include weights of norms and routing, which the planner leaves out."""
    forward_bytes, backward_bytes, forward, backward = predicted(shape, kernels)
    for phase, gigabytes, number in (("forward", forward_bytes, forward), ("backward", backward_bytes, backward)):
        counted = COUNTED[name][phase]
        others = counted["launches"] - sum(counted["by_operator"].get(product, [0])[0] for product in PRODUCTS)
        others -= counted["by_operator"].get("_scaled_dot_product_flash_attention_for_cpu_backward", [0])[0]
        assert gigabytes == pytest.approx(counted["gigabytes"], rel=0.04), phase
        assert number == pytest.approx(others, rel=0.04, abs=1), phase


def test_a_run_has_the_kernels_that_were_chosen():
    """An estimate reads the same choice as the trainer: kernels by measurement, layers compiled if asked for."""
    plain = engine_for(DEFAULT_COMM, GPU)
    assert (plain.kernels, plain.loss_kernels, plain.attention) == ("fused-norms", "eager", "pytorch")
    chosen = Numerics(kernels=(("loss", "triton"), ("scan", "mamba-ssm"), ("attention", "fa3")))
    compiled = engine_for(DEFAULT_COMM, GPU, chosen, compiled=True)
    assert compiled == replace(
        plain, kernels="compiled", loss_kernels="triton", scan_kernels="fused", attention="flash-3"
    )
