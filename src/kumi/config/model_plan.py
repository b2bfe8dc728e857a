"""Plan a model without a run file, on GPUs written as 16xh100-sxm."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from math import log2
from pathlib import Path
from typing import Any

from kumi import hub
from kumi.config.cluster_source import cluster_spec
from kumi.config.load import Overrides, RunFile, load_plan, plan_from_dict, with_overrides
from kumi.config.model_source import read_hf_config
from kumi.config.presets import preset_names, read_node
from kumi.config.schema import PlanConfig
from kumi.errors import ConfigError
from kumi.remote.addresses import is_url
from kumi.spec import families

# Defaults: the sequence length of most pre-training, and the batch of about four million tokens with which the
# training of Llama 3 started (arXiv:2407.21783).
_SEQ_LEN = 8192
_TOKENS_PER_STEP = 2**22


def is_model(source: str) -> bool:
    """Return True if `source` names a model: a folder with config.json, a .json file, a URL, or a hub id."""
    if is_url(source):
        return not source.endswith(".toml")
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        return (path / "config.json").is_file()
    if path.exists() or source.endswith(".toml"):
        return path.suffix == ".json"
    return hub.is_id(source)


def load_plan_or_model(run: RunFile, gpus: str | None, overrides: Overrides) -> tuple[PlanConfig, dict[str, int]]:
    """Return the plan of the run file `run`, or of the model that `run` names, and the defaults that it got, by key.

    `gpus`, such as 16xh100-sxm, replaces [cluster] of a run file. For a model, either `gpus` or the override
    cluster.source is required.
    """
    cluster = None if gpus is None else parse_gpus(gpus)
    if not isinstance(run, Mapping) and is_model(str(run)):
        return plan_of_model(str(run), cluster, overrides)
    return load_plan(run, overrides, cluster), {}


def plan_of_model(
    source: str, cluster: Mapping[str, Any] | None, overrides: Overrides
) -> tuple[PlanConfig, dict[str, int]]:
    """Return the plan of the model `source` on `cluster`, a [cluster] section, and the defaults that it got, by key.

    Raise ConfigError if no machines are given.
    """
    tree: dict[str, Any] = {"model": {"source": source}}
    tree |= {} if cluster is None else {"cluster": dict(cluster)}
    with_overrides(tree, overrides)
    if "source" not in tree.get("cluster", {}):
        raise ConfigError(
            f"{source} is a model, and no machines are given; name them, such as --gpus 8xh100-sxm, or "
            f"cluster.source=auto for this machine"
        )
    partial = plan_from_dict(tree | {"batch": {"seq_len": 1, "tokens_per_step": 1} | tree.get("batch", {})})
    defaults = _batch_defaults(partial, tree.setdefault("batch", {}))
    tree["batch"] |= defaults
    return plan_from_dict(tree), {f"batch.{key}": value for key, value in defaults.items()}


def _batch_defaults(config: PlanConfig, given: Mapping[str, Any]) -> dict[str, int]:
    """Return seq_len and tokens_per_step unless `given` has them. Every device gets the same number of sequences."""
    defaults, seq_len = dict[str, int](), config.batch.seq_len
    if "seq_len" not in given:
        longest = families.from_hf(read_hf_config(config.model)).max_position_embeddings
        seq_len = defaults["seq_len"] = min(_SEQ_LEN, longest)
    if "tokens_per_step" not in given:
        devices = cluster_spec(config.cluster).devices
        sequences = 2 ** int(log2(max(1.0, _TOKENS_PER_STEP / seq_len / devices)))
        defaults["tokens_per_step"] = sequences * devices * seq_len
    return defaults


def parse_gpus(text: str) -> dict[str, Any]:
    """Return the [cluster] section for `text`, such as 16xh100-sxm: full nodes, or one node with fewer devices.

    Raise ConfigError for an unknown name, with suggestions, and for a number of devices that does not fill its nodes.
    """
    match = re.fullmatch(r"(\d+)[x*](.+)", text.strip())
    if match is None or int(match[1]) == 0:
        raise ConfigError(
            f"--gpus {text}: not a number and a name; write it as 16xh100-sxm, where the name is one of "
            f"{', '.join(preset_names())}, or a cluster file"
        )
    count, name = int(match[1]), match[2] if match[2].endswith(".toml") else match[2].lower()
    if not name.endswith(".toml") and name not in preset_names():
        raise ConfigError(f"--gpus {text}: {match[2]!r} is not a known node; {_suggestion(name, match[1])}")
    size = read_node(name).devices_per_node
    if count < size:
        return {"source": name, "devices_per_node": count}
    if count % size:
        raise ConfigError(
            f"--gpus {text}: {name} has nodes of {size} devices, and {count} do not fill them; use "
            f"{count // size * size} or {(count // size + 1) * size}"
        )
    return {"source": name, "nodes": count // size}


def _suggestion(name: str, count: str) -> str:
    """Return the remedy for the unknown node `name`: similar presets with `count` devices, or all presets."""
    close = [preset for preset in preset_names() if name in preset] or get_close_matches(name, preset_names(), n=3)
    if close:
        return f"did you mean {' or '.join(f'{count}x{preset}' for preset in close)}?"
    return f"use {', '.join(preset_names())}, or a cluster file"
