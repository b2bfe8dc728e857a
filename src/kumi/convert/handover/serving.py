"""Whether vLLM and SGLang serve a model folder, by the rules in `serving_rules`, which were read from their source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kumi.convert.handover.serving_rules import ENGINES, Engine
from kumi.files.untrusted import read_object
from kumi.spec import families
from kumi.spec.families import FAMILIES
from kumi.spec.model import ModelSpec
from kumi.spec.weights import stored_tensors

LOADS, DIFFERS, REFUSES = "loads", "differs", "refuses"
ADAPTER_CONFIG = "adapter_config.json"
HEADING = "serving engines, from their source, not tried"
_SENTENCES = {
    LOADS: "should load it",
    DIFFERS: "should load it, but compute another function than kumi",
    REFUSES: "should refuse it",
}


@dataclass(frozen=True)
class Serving:
    """What an engine does with a folder.

    - `verdict`: "loads", "differs" (it loads, but computes something else than kumi and transformers) or "refuses".
    - `through`: "own class", "transformers", or "" if the folder is refused or the base model of adapters is unknown.
    - `reasons`: reasons for "differs" or "refuses"; each completes "it ...".
    - `notes`: settings of the engine that the folder needs.
    """

    engine: str
    version: str
    verdict: str
    through: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        sentence = f"{self.engine} {self.version}: {_SENTENCES[self.verdict]}"
        if self.verdict == LOADS and self.through == "transformers":
            sentence += ", through the modules of transformers"
        if self.reasons:
            sentence += ": it " + "; it ".join(self.reasons)
        return "; ".join((sentence, *self.notes))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data for --json."""
        fields = asdict(self)
        return fields | {"reasons": list(self.reasons), "notes": list(self.notes)}


def serving_of_model(spec: ModelSpec) -> tuple[Serving, ...]:
    """Return what each engine does with the export of `spec`, a folder with config.json."""
    return tuple(_serving_of_spec(engine, spec) for engine in ENGINES)


def describe_folder(folder: Path) -> dict[str, Any]:
    """Return what `folder` holds and what each engine does with it, as plain data.

    Errors are those of `serving_of_folder`.
    """
    name = "adapters" if _has_adapters(folder) else families.architecture(_spec_in(folder))
    return {"folder": str(folder), "model": name, "engines": [x.as_dict() for x in serving_of_folder(folder)]}


def serving_lines(servings: Iterable[Serving]) -> str:
    """Return the heading and a line for each engine."""
    return "\n".join((f"{HEADING}:", *(f"  {serving}" for serving in servings)))


def serving_of_folder(folder: Path) -> tuple[Serving, ...]:
    """Return what each engine does with `folder`, a model's export or adapters in PEFT's format.

    The class of adapters' base model is checked if their base is a folder of this machine. Raise ModelError for models
    that kumi does not support, and RefusedError for damaged files.
    """
    if _has_adapters(folder):
        config = read_object(folder, ADAPTER_CONFIG)
        base = config.get("base_model_name_or_path")
        local = isinstance(base, str) and (Path(base) / "config.json").is_file()
        spec = _spec_in(Path(str(base))) if local else None
        return tuple(_serving_of_adapters(engine, config, spec) for engine in ENGINES)
    return serving_of_model(_spec_in(folder))


def is_model_folder(path: Path) -> bool:
    """True if `path` is a folder with a model's config.json, or with adapters."""
    return (path / "config.json").exists() or _has_adapters(path)


def _has_adapters(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).exists() and not (folder / "config.json").exists()


def _spec_in(folder: Path) -> ModelSpec:
    return families.from_hf(families.read_config(folder))


def _serving_of_spec(engine: Engine, spec: ModelSpec) -> Serving:
    """Return what `engine` does with the export of `spec`.

    `decoder` is the architecture of the language model, `name` that of the export, which differs for reward models.
    """
    name, decoder = families.architecture(spec), str(FAMILIES[spec.family].ARCHITECTURE)
    is_reward = spec.head == "score"
    serves_head = not is_reward or engine.classifiers is None or name in engine.classifiers
    if decoder not in engine.own | engine.transformers:
        reason = f"has no class for {name}, and the class of transformers does not run with another program's attention"
        return Serving(engine.name, engine.version, REFUSES, "", (reason,))
    through = "own class" if decoder in engine.own and serves_head else "transformers"
    if not serves_head:
        reason = f"has no class for {name}, and its class for modules of transformers skips score.weight"
        return Serving(engine.name, engine.version, DIFFERS, through, (reason,))
    refusals, deviations = _matching_rules(engine, spec, decoder)
    if through == "own class":
        deviations += _tensor_deviations(engine, spec, decoder)
    verdict = REFUSES if refusals else DIFFERS if deviations else LOADS
    notes = (engine.reward_note,) if is_reward and engine.reward_note and not refusals else ()
    through = "" if refusals else through
    return Serving(engine.name, engine.version, verdict, through, tuple(refusals or deviations), notes)


def _matching_rules(engine: Engine, spec: ModelSpec, decoder: str) -> tuple[list[str], list[str]]:
    """Return the reasons for which the engine refuses a model, and those for which it computes something else."""
    hits = [rule for rule in engine.rules if decoder in rule.architectures and rule.applies(spec)]
    return [rule.reason for rule in hits if rule.refuses], [rule.reason for rule in hits if not rule.refuses]


def _tensor_deviations(engine: Engine, spec: ModelSpec, decoder: str) -> list[str]:
    """Return reasons about tensors that the engine's class skips, or has and does not find in the files."""
    names, reasons = list(stored_tensors(spec)), []
    pattern = engine.skipped.get(decoder)
    skipped = [name for name in names if pattern and re.search(pattern, name)]
    if skipped:
        reasons.append(f"skips {_listed(_endings(skipped))}")
    needed = [end for end in engine.unset.get(decoder, ()) if spec.head == "lm" or not end.startswith("lm_head")]
    missing = [end for end in needed if not any(name.endswith(end) for name in names)]
    if missing:
        reasons.append(f"has {_listed(end.lstrip('.') for end in missing)} always, and leaves arbitrary values there")
    return reasons


def _serving_of_adapters(engine: Engine, config: Mapping[str, Any], spec: ModelSpec | None) -> Serving:
    """Return what the engine does with the adapters of adapter_config.json on the base model `spec`, if known."""
    ranks = [rank for rank in (config.get("r"), *(config.get("rank_pattern") or {}).values()) if isinstance(rank, int)]
    rank = max(ranks, default=0)
    refusals, deviations, notes = [], [], []
    if spec is not None and FAMILIES[spec.family].ARCHITECTURE in engine.without_lora:
        refusals.append(f"takes no adapters for {FAMILIES[spec.family].ARCHITECTURE}")
    if config.get("use_dora"):
        refusals.append("accepts no DoRA; merge the adapters")
    saved = sorted(set(config.get("modules_to_save") or ()) - (engine.saved_modules or set()))
    if saved and engine.saved_modules is not None:
        refusals.append(f"accepts no modules_to_save {_listed(saved)}; merge the adapters")
    if ignored := [key for key in engine.ignored_keys if config.get(key)]:
        deviations.append(f"does not read {_listed(ignored)}; merge the adapters")
    if engine.lora_ranks and rank > engine.lora_ranks[-1]:
        refusals.append(f"accepts ranks up to {engine.lora_ranks[-1]}, not {rank}; merge the adapters")
    elif engine.lora_ranks:
        notes.append(f"start it with --enable-lora --max-lora-rank {min(x for x in engine.lora_ranks if x >= rank)}")
    base = None if spec is None else _serving_of_spec(engine, spec)
    if base is not None and base.reasons:
        (refusals if base.verdict == REFUSES else deviations).extend(
            f"{reason} (base model)" for reason in base.reasons
        )
    verdict = REFUSES if refusals else DIFFERS if deviations else LOADS
    through = "" if base is None or refusals else base.through
    reasons = tuple(refusals or deviations)
    return Serving(engine.name, engine.version, verdict, through, reasons, () if refusals else tuple(notes))


def _endings(names: Iterable[str]) -> list[str]:
    """Return the ends of the names, behind the last number of a layer or expert, each once."""
    return list(dict.fromkeys(re.sub(r".*\.\d+\.", "", name) for name in names))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
