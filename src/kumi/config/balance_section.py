"""Load balancing of routed experts: the run file's choice, completed by the model's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from kumi.config.job_sections import ModelSection
from kumi.errors import ConfigError
from kumi.spec.model import ModelSpec, MoE

# The step of the bias in DeepSeek-V3's training (arXiv:2412.19437, section 4.2).
_BIAS_STEP = 0.001


@dataclass(frozen=True)
class Balance:
    """The load balancing of routed experts.

    `kind`: "none", "aux" (an auxiliary loss) or "loss-free" (a bias of the router that is adjusted after every step).
    `coef`: the weight of the loss, or the step of the bias.
    `per_sequence`: True if the loss is over each sequence instead of each microbatch.
    """

    kind: str = "none"
    coef: float = 0.0
    per_sequence: bool = False


def choose_balance(model: ModelSpec, section: ModelSection) -> Balance:
    """Return the balancing that `section` sets; values that it leaves out come from the config.json of `model`.

    Raise ConfigError if the model does not support the balancing.
    """
    kind, coef = section.balance, section.balance_coef
    experts = next((layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)), None)
    if experts is None:
        if kind not in ("auto", "none") or coef is not None:
            raise ConfigError(
                f"model.balance={kind!r} with balance_coef={coef} balances routed experts, and this {model.family} "
                f"model has none; remove both"
            )
        return Balance()
    if model.lora is not None:
        if kind not in ("auto", "none"):
            raise ConfigError(
                f"model.balance={kind!r} with [lora]: routers are frozen, so their load cannot be balanced; remove "
                f"model.balance"
            )
        return Balance()
    if kind == "auto":
        weight = experts.router_aux_loss_coef if coef is None else coef
        kind = "loss-free" if experts.has_correction_bias else "aux" if weight else "none"
    if kind == "none":
        return Balance()
    if kind == "loss-free":
        if not experts.has_correction_bias:
            raise ConfigError(
                f"model.balance='loss-free' needs a router with a correction bias, and this {model.family} model has "
                f"none; set model.balance = 'aux'"
            )
        return Balance(kind, _BIAS_STEP if coef is None else coef)
    coef = experts.router_aux_loss_coef if coef is None else coef
    if not coef:
        raise ConfigError(
            f"model.balance={kind!r} with a loss of weight 0, from model.balance_coef or the config.json of this "
            f"{model.family} model; set model.balance_coef above 0, or model.balance = 'none'"
        )
    return Balance("aux", coef, kind == "sequence-aux" or experts.seq_aux)
