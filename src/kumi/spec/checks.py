"""Check one layout against the rules, and return one sentence for each rule that it breaks.

illegal                       the rules that hold for every trainer (`kumi.spec.layout_rules`)
not_divisible                 the subset of these rules that concerns only tensors, for converting a model
unsupported_by_trainer        the limits of this version's trainer (`kumi.spec.trainable`)
unsupported_without_training  the subset of these limits that holds for an evaluation, too
"""

from __future__ import annotations

from kumi.errors import ModelError
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec
from kumi.spec.families import check_trainable
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.layout_rules import layout_rules, shape_rules, tensor_rules
from kumi.spec.legality import UNSUPPORTED, violations
from kumi.spec.model import ModelSpec
from kumi.spec.trainable import forward_rules, trainer_rules


def illegal(model: ModelSpec, layout: Layout, cluster: ClusterSpec, batch: BatchSpec) -> list[str]:
    """Return the reasons why `layout` cannot train `model` on `cluster` with `batch`; empty for a legal layout."""
    return violations(layout_rules(model, cluster, batch), layout)


def not_divisible(model: ModelSpec, layout: Layout) -> list[str]:
    """Return the reasons why `layout` cannot divide the tensors of `model`, whatever the cluster and the batch are."""
    return violations([*shape_rules(), *tensor_rules(model)], layout)


def unsupported_by_trainer(job: Job, layout: Layout) -> list[str]:
    """Return the reasons why this version of kumi can plan but not train `job` with a legal `layout`."""
    try:
        check_trainable(job.model)
    except ModelError as error:
        return [str(error), *layout_unsupported_by_trainer(job, layout)]
    return layout_unsupported_by_trainer(job, layout)


def unsupported_without_training(model: ModelSpec, layout: Layout) -> list[str]:
    """Return the reasons why this version of kumi cannot run `model` on a legal `layout`, even without training it."""
    return violations(forward_rules(model), layout, UNSUPPORTED)


def layout_unsupported_by_trainer(job: Job, layout: Layout) -> list[str]:
    """Return the reasons of `unsupported_by_trainer`, without the reason about the model's family."""
    return violations(trainer_rules(job), layout, UNSUPPORTED)
