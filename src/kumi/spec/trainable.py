"""What this version's trainer does not train, although it is legal and can be planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kumi.errors import ModelError
from kumi.spec.checks import expert_rules
from kumi.spec.divisibility import cuts
from kumi.spec.families import check_trained
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.legality import UNTRAINED, Rule, broken
from kumi.spec.model import ModelSpec
from kumi.spec.peft import adapter_rules
from kumi.spec.sharding import zero_degree
from kumi.spec.techniques import float8_rules, optimizer_rules, technique_rules

TRAINED_PRECISIONS = ("bf16", "fp16", "fp32", "fp64", "fp8")


def untrainable(job: Job, layout: Layout) -> list[str]:
    """What keeps this version of kumi from training `job` with a legal `layout`: it can only be planned."""
    try:
        check_trained(job.model)
    except ModelError as error:
        return [str(error), *untrained(job, layout)]
    return untrained(job, layout)


def untrained(job: Job, layout: Layout) -> list[str]:
    """The same, but for the model."""
    return broken(trainer_rules(job), layout, UNTRAINED)


def trainer_rules(job: Job) -> tuple[Rule, ...]:
    """Return what this version's trainer wants of a legal layout, and first the rules of legality that these need."""
    return (
        *_vocabulary(job.model),
        *(_experts(job.model) if cuts(job.model).experts else ()),
        *technique_rules(job.model),
        *float8_rules(job),
        *adapter_rules(job),
        *optimizer_rules(job),
        *_choices(job),
    )


def _vocabulary(model: ModelSpec) -> Iterator[Rule]:
    tokens = model.vocab_size
    yield Rule(
        "vocabulary",
        lambda x: -(-tokens // x.tp) * (x.tp - 1) < tokens,
        lambda layout: (
            f"tp={layout.tp} leaves ranks without any of the vocab_size={tokens} tokens, of which others "
            f"have {-(-tokens // layout.tp)} each; use a smaller tp"
        ),
        scope=UNTRAINED,
    )


def _experts(model: ModelSpec) -> Iterator[Rule]:
    yield from expert_rules(model)
    after = ("experts",)
    yield Rule(
        "tokens of experts",
        lambda x: (x.tp == 1) | (x.sequence_parallel != 0),
        lambda layout: (
            f"sequence_parallel=false with tp={layout.tp}: this version sends each rank's own tokens to experts; "
            f"set sequence_parallel = true, or tp = 1"
        ),
        after,
        UNTRAINED,
    )
    yield Rule(
        "states of experts",
        lambda x: (x.zero == 0) | (x.dp_shard * x.cp > 1) | (zero_degree(x, routed=True) == 1),
        lambda layout: (
            f"zero={layout.zero} would divide the experts only, over {zero_degree(layout, routed=True)} tp ranks: "
            f"dp_shard x cp is 1; set zero = 0"
        ),
        after,
        UNTRAINED,
    )
    yield _rows(model.hidden_size)
    yield from (_rows_of_width(width, model.hidden_size) for width in cuts(model).width)


def _rows(size: int) -> Rule:
    """ZeRO divides the rows of each expert's matrices evenly: `size` of the one that gives hidden states."""
    return Rule(
        "rows of experts",
        lambda x: (x.zero == 0) | (size % zero_degree(x, routed=True) == 0),
        lambda layout: _undivided(layout, size),
        ("experts",),
        UNTRAINED,
    )


def _rows_of_width(width: int, hidden: int) -> Rule:
    """The same of the one that takes them, with gate and up side by side; said once where both have as many."""

    def rows(x: Any) -> Any:
        return 2 * width // x.expert_tp

    return Rule(
        "rows of experts",
        lambda x: (x.zero == 0) | (rows(x) == hidden) | (rows(x) % zero_degree(x, routed=True) == 0),
        lambda layout: _undivided(layout, rows(layout)),
        ("experts",),
        UNTRAINED,
    )


def _undivided(layout: Layout, size: int) -> str:
    return (
        f"zero={layout.zero} divides each expert's matrices over {zero_degree(layout, routed=True)} ranks, which do "
        f"not divide their {size} rows; use a larger ep, or another dp_shard"
    )


def _choices(job: Job) -> Iterator[Rule]:
    yield Rule(
        "precision",
        lambda x: job.precision.kind in TRAINED_PRECISIONS,
        lambda layout: (
            f"precision.kind='{job.precision.kind}': this version trains in {', '.join(TRAINED_PRECISIONS)} only; "
            f"plan it, or set one of these"
        ),
        scope=UNTRAINED,
    )
