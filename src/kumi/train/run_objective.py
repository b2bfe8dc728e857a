"""The objective of a run, with what its options take from other sections of the run file."""

from __future__ import annotations

from dataclasses import replace

from kumi.config import ResolvedRun
from kumi.objectives import Objective
from kumi.objectives.policy_gradient import PolicyGradient


def run_objective(run: ResolvedRun) -> Objective:
    """Return the objective of `run`. Where its loss divides by a constant that the run file leaves out, the constant is
    rollout.max_new_tokens."""
    objective, section = run.config.objective.build(), run.config.rollout
    if not isinstance(objective, PolicyGradient) or section is None:
        return objective
    if objective.average != "constant" or objective.constant is not None:
        return objective
    return replace(objective, constant=float(section.max_new_tokens))
