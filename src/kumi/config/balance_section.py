"""How routed experts are kept equally busy in a run: what a run file says, and what the model has for it."""

from __future__ import annotations

from dataclasses import dataclass

from kumi.config.schema import ModelSection
from kumi.errors import ConfigError
from kumi.spec.model import ModelSpec, MoE

# The step of the bias in DeepSeek-V3's training (arXiv:2412.19437, section 4.2).
BIAS_STEP = 0.001


@dataclass(frozen=True)
class Balance:
    """`kind` is "none", "aux" (a loss of weight `coef`, over batches or with `per_sequence` over sequences) or
    "loss-free" (a bias that moves by `coef` a step)."""

    kind: str = "none"
    coef: float = 0.0
    per_sequence: bool = False


def choose_balance(model: ModelSpec, section: ModelSection) -> Balance:
    """What `section` asks for, completed by the config.json of `model`. ConfigError where the model cannot have it."""
    kind, coef = section.balance, section.balance_coef
    experts = next((layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)), None)
    if experts is None:
        if kind not in ("auto", "none") or coef is not None:
            raise ConfigError(
                f"model.balance={kind!r} with balance_coef={coef} is for routed experts, of which this "
                f"{model.family} model has none; remove both"
            )
        return Balance()
    if model.lora is not None:
        if kind not in ("auto", "none"):
            raise ConfigError(
                f"model.balance={kind!r} with [lora]: routers are frozen, and their experts as busy as "
                f"they were; remove it"
            )
        return Balance()
    if kind == "auto":
        wanted = experts.router_aux_loss_coef if coef is None else coef
        kind = "loss-free" if experts.has_correction_bias else "aux" if wanted else "none"
    if kind == "none":
        return Balance()
    if kind == "loss-free":
        if not experts.has_correction_bias:
            raise ConfigError(
                f"model.balance='loss-free' needs a router with a correction bias, which a "
                f"{model.family} model has not; set model.balance = 'aux'"
            )
        return Balance(kind, BIAS_STEP if coef is None else coef)
    coef = experts.router_aux_loss_coef if coef is None else coef
    if not coef:
        raise ConfigError(
            f"model.balance={kind!r} with weight 0: the config.json of this {model.family} model names "
            f"none; set model.balance_coef, or model.balance = 'none'"
        )
    return Balance("aux", coef, kind == "sequence-aux" or experts.seq_aux)
