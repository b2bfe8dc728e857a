"""What this version's trainer does not train, although it is legal and can be planned: in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from kumi.errors import ModelError
from kumi.spec.checks import expert_rules
from kumi.spec.cuts import cuts
from kumi.spec.families import check_trained
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.legality import broken
from kumi.spec.model import ModelSpec
from kumi.spec.peft import untrained_adapters
from kumi.spec.sharding import zero_degree
from kumi.spec.techniques import untrained_float8, untrained_techniques

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
    return [*_untrained_axes(job.model, layout), *_untrained_choices(job, layout)]


def _untrained_axes(model: ModelSpec, layout: Layout) -> Iterator[str]:
    rows = -(-model.vocab_size // layout.tp)
    if rows * (layout.tp - 1) >= model.vocab_size:
        yield (
            f"tp={layout.tp} leaves ranks without any of the vocab_size={model.vocab_size} tokens, of which others "
            f"have {rows} each; use a smaller tp"
        )
    if not cuts(model).experts or not _experts_are_legal(model, layout):
        return
    if layout.tp > 1 and not layout.sequence_parallel:
        yield (
            f"sequence_parallel=false with tp={layout.tp}: this version sends each rank's own tokens to experts; "
            f"set sequence_parallel = true, or tp = 1"
        )
    parts = zero_degree(layout, routed=True)
    if layout.zero and layout.dp_shard * layout.cp == 1 and parts > 1:
        yield (
            f"zero={layout.zero} would divide the experts only, over {parts} tp ranks: dp_shard x cp is 1; set zero = 0"
        )
    for size in sorted({model.hidden_size, *(2 * width // layout.expert_tp for width in cuts(model).width)}):
        if layout.zero and size % parts:
            yield (
                f"zero={layout.zero} divides each expert's matrices over {parts} ranks, which do not divide their "
                f"{size} rows; use a larger ep, or another dp_shard"
            )


def _experts_are_legal(model: ModelSpec, layout: Layout) -> bool:
    return not broken(expert_rules(model), layout)


def _untrained_choices(job: Job, layout: Layout) -> Iterator[str]:
    yield from untrained_techniques(job.model, layout)
    yield from untrained_float8(job, layout)
    yield from untrained_adapters(job, layout)
    if job.optim.kind != "adamw":
        yield f"optim.kind='{job.optim.kind}': this version trains with adamw; plan it, or set optim.kind = 'adamw'"
    if job.precision.kind not in TRAINED_PRECISIONS:
        yield (
            f"precision.kind='{job.precision.kind}': this version trains in {', '.join(TRAINED_PRECISIONS)} only; "
            f"plan it, or set one of these"
        )
