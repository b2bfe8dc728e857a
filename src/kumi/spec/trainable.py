"""The limits of this version's trainer: rules for legal layouts that can be planned but not trained."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from kumi.spec.divisibility import divisibility
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.layout_rules import expert_rules, tp_rules
from kumi.spec.ledger import unique_layer_ops
from kumi.spec.legality import UNSUPPORTED, LayoutRule
from kumi.spec.model import ModelSpec
from kumi.spec.peft import adapter_rules
from kumi.spec.sharding import zero_degree
from kumi.spec.techniques import float8_rules, optimizer_rules, technique_rules

_TRAINED_PRECISIONS = ("bf16", "fp16", "fp32", "fp64", "fp8")


def trainer_rules(job: Job) -> tuple[LayoutRule, ...]:
    """Return the trainer's rules for a legal layout, together with the rules of legality that they depend on."""
    return (
        *forward_rules(job.model),
        *technique_rules(job.model),
        *float8_rules(job),
        *adapter_rules(job),
        *optimizer_rules(job),
        *_precision(job),
        *_reward_models(job),
    )


def forward_rules(model: ModelSpec) -> tuple[LayoutRule, ...]:
    """Return the rules of a model on a legal layout that hold without training, too."""
    return (*_vocabulary(model), *(_experts(model) if divisibility(model).experts else ()))


def _reward_models(job: Job) -> Iterator[LayoutRule]:
    """Yield the rules of the reward models of a run with rollouts: on the policy's layout, but not trained."""
    for name, model in () if job.rollout is None else job.rollout.reward_models:
        for rule in (*tp_rules(model), *forward_rules(model)):
            # Topic and `after` are replaced: a rule that one model breaks must not skip the rules of another model.
            yield LayoutRule(
                f"reward model {name}", rule.holds, partial(_reward_model_message, name, rule), scope=UNSUPPORTED
            )


def _reward_model_message(name: str, rule: LayoutRule, layout: Layout) -> str:
    return f"reward {name!r} has a model that cannot lie on this layout: {rule.message(layout)}"


def _vocabulary(model: ModelSpec) -> Iterator[LayoutRule]:
    """Yield the rule that every tp rank has rows of the vocabulary."""
    tokens = model.vocab_size
    yield LayoutRule(
        "vocabulary",
        lambda x: -(-tokens // x.tp) * (x.tp - 1) < tokens,
        lambda layout: (
            f"tp={layout.tp} leaves ranks without rows of the vocabulary, because vocab_size={tokens} is divided into "
            f"shards of {-(-tokens // layout.tp)}; use a smaller tp"
        ),
        scope=UNSUPPORTED,
    )


def _experts(model: ModelSpec) -> Iterator[LayoutRule]:
    """Yield the rules of routed experts: of their legality, and of the trainer for their tokens, states and rows."""
    yield from expert_rules(model)
    after = ("experts",)
    yield LayoutRule(
        "tokens of experts",
        lambda x: (x.tp == 1) | (x.sequence_parallel != 0),
        lambda layout: (
            f"sequence_parallel=false with tp={layout.tp} is not supported for models with experts, because each tp "
            "rank routes only its own tokens; set sequence_parallel = true, or tp = 1"
        ),
        after,
        UNSUPPORTED,
    )
    yield LayoutRule(
        "states of experts",
        lambda x: (x.zero == 0) | (x.dp_shard * x.cp > 1) | (zero_degree(x, routed=True) == 1),
        lambda layout: (
            f"zero={layout.zero} with dp_shard x cp = 1 would shard only the experts, over "
            f"{zero_degree(layout, routed=True)} tp ranks, which is not supported; set zero = 0"
        ),
        after,
        UNSUPPORTED,
    )
    yield _down_proj_rule(model.hidden_size)
    yield from (_gate_up_proj_rule(width, model.hidden_size) for width in divisibility(model).width)
    adapters = [op for ops in unique_layer_ops(model) for op in ops if op.kind == "lora" and op.experts]
    yield from (
        _adapter_rule(width) for width in sorted({op.source.size for op in adapters if op.source.name == "ffn"})
    )


def _down_proj_rule(size: int) -> LayoutRule:
    """Return the rule that ZeRO shards the `size` rows of each expert's down projection evenly."""
    return LayoutRule(
        "rows of experts",
        lambda x: (x.zero == 0) | (size % zero_degree(x, routed=True) == 0),
        lambda layout: _uneven_rows(layout, size),
        ("experts",),
        UNSUPPORTED,
    )


def _gate_up_proj_rule(width: int, hidden: int) -> LayoutRule:
    """Return the rule that ZeRO shards the rows of each expert's fused gate and up projection evenly.

    It also holds if there are as many rows as in the down projection, whose rule then reports the number.
    """

    def rows(x: Any) -> Any:
        return 2 * width // x.expert_tp

    return LayoutRule(
        "rows of experts",
        lambda x: (x.zero == 0) | (rows(x) == hidden) | (rows(x) % zero_degree(x, routed=True) == 0),
        lambda layout: _uneven_rows(layout, rows(layout)),
        ("experts",),
        UNSUPPORTED,
    )


def _adapter_rule(width: int) -> LayoutRule:
    """Return the rule that ZeRO shards the adapters of the experts' down projections evenly: A has a row for each of
    the `width` inputs."""
    return LayoutRule(
        "rows of experts",
        lambda x: (x.zero == 0) | (width // x.expert_tp % zero_degree(x, routed=True) == 0),
        lambda layout: _uneven_rows(layout, width // layout.expert_tp),
        ("experts",),
        UNSUPPORTED,
    )


def _uneven_rows(layout: Layout, size: int) -> str:
    return (
        f"zero={layout.zero} shards each expert's matrices over {zero_degree(layout, routed=True)} ranks, which do not "
        f"divide their {size} rows; use a larger ep, or another dp_shard"
    )


def _precision(job: Job) -> Iterator[LayoutRule]:
    yield LayoutRule(
        "precision",
        lambda x: job.precision.kind in _TRAINED_PRECISIONS,
        lambda layout: (
            f"precision.kind='{job.precision.kind}' can be planned for but not trained; "
            f"set precision.kind to one of {', '.join(_TRAINED_PRECISIONS)}"
        ),
        scope=UNSUPPORTED,
    )
