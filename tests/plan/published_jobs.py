"""Jobs of published models on published machines, as a run file describes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kumi.config import job, plan_from_dict
from kumi.spec.engine import KUMI
from kumi.spec.job import Job

MODELS = Path(__file__).parents[2] / "examples" / "models"


def planned(model, cluster, nodes, seq_len, sequences, *, engine=KUMI, kind="bf16", **section) -> Job:
    """`sequences` sequences a step of one of the example models, or of a config.json, on `nodes` nodes of `cluster`."""
    config = {"config": model} if isinstance(model, dict) else {"source": str(MODELS / model)}
    made = job(
        plan_from_dict(
            {
                "model": config | {"init": "random"},
                "cluster": {"source": cluster, "nodes": nodes, **section},
                "batch": {"seq_len": seq_len, "tokens_per_step": seq_len * sequences},
                "precision": {"kind": kind},
            }
        )
    )
    return replace(made, engine=engine)
