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
from kumi.plan.time.expert_costs import add_token_exchange
from kumi.plan.time.op_costs import MEMORY_PASSES, LayoutSizes, MicrobatchCost
from kumi.spec import families
from kumi.spec.comm import DEFAULT_COMM, engine_for
from kumi.spec.layout import Layout
from kumi.spec.ledger import unique_layer_ops
from kumi.spec.numerics import Numerics
from planned import GPU, job_of

COUNTED = json.loads((Path(launches.__file__).parent / "results" / "launches.json").read_text())
PRODUCTS = ("mm", "grouped_times", "grouped_outer", "_scaled_dot_product_flash_attention_for_cpu")


# Moves one gigabyte a second, so that the seconds of a cost are gigabytes.
DEVICE = replace(GPU, memory_bandwidth=1e9, stream=1.0)


def predicted(shape, kernels):
    """Return the planner's cost of the element-wise operations of a layer, in gigabytes and launches."""
    model = families.from_hf(shapes.with_layers(shape, 1))
    engine = engine_for(DEFAULT_COMM, DEVICE, Numerics(kernels=kernels))
    job = job_of(model, seq_len=launches.TOKENS, sequences=1, engine=engine, device=DEVICE)
    sizes, cost = LayoutSizes(job, batch_layouts([Layout()])), MicrobatchCost.zero(1)
    (ops,) = unique_layer_ops(model)
    for op in ops:
        if op.kind in MEMORY_PASSES:
            sizes.add_elementwise(cost, op.kind, sizes.output_elements(op))
        elif op.kind in ("dispatch", "combine"):
            add_token_exchange(sizes, cost, op)
    return cost


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
    cost = predicted(shape, kernels)
    for phase in ("forward", "backward"):
        (gigabytes,), (number,) = getattr(cost, phase), getattr(cost, f"kernels_{phase}")
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
