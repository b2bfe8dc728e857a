"""The published model that a model was made from, as the card in its folder or its path in the hub's cache tells."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kumi.errors import RefusedError
from kumi.files.untrusted import INDEX, inside, open_stream, read_object

# Bytes of a card that are searched for its header.
_LONGEST = 2**20
_LICENSE = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Origin:
    """The published model that a model was made from, and the facts of its card that carry over.

    base_model   repository on the hub; None if unknown
    commit       its commit; None unless the model is that repository's own
    license      license keys of the card's header
    datasets     training datasets
    relation     such as "finetune"; None where the model is `base_model` in another format
    """

    base_model: str | None = None
    commit: str | None = None
    license: Mapping[str, str] = field(default_factory=dict)
    datasets: tuple[str, ...] = ()
    relation: str | None = None

    @property
    def published(self) -> str | None:
        """The repository of this very model; None if only its ancestor is known."""
        return self.base_model if self.commit else None

    def plain(self) -> dict[str, Any]:
        """Return plain data for a checkpoint's meta.json."""
        return asdict(self)


UNKNOWN = Origin()


def origin_of(folder: Path, name: str | None = None, commit: str | None = None) -> Origin:
    """Return the origin of a model made from `folder`, a Hugging Face folder or a kumi checkpoint.

    For a download, `name` and `commit` are its repository and commit; the path of a folder in the hub's cache has both.
    A checkpoint stores its origin. For any other folder the origin is the base model that its card names.
    """
    if (folder / "meta.json").is_file() and not (folder / "config.json").is_file():
        return from_plain(_meta(folder).get("origin") or {})
    if name is None and (cached := re.search(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})$", str(folder))):
        name, commit = f"{cached[1]}/{cached[2]}", cached[3]
    header = card_header(folder)
    license = {key: str(header[key]) for key in _LICENSE if isinstance(header.get(key), str)}
    datasets = _strings(header.get("datasets"))
    if name is not None:
        return Origin(name, commit, license, datasets)
    base_model, relation = header.get("base_model"), header.get("base_model_relation")
    base_model = base_model[0] if isinstance(base_model, list) and len(base_model) == 1 else base_model
    if not (isinstance(base_model, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", base_model)):
        return Origin(license=license, datasets=datasets)
    return Origin(base_model, None, license, datasets, relation if isinstance(relation, str) else "finetune")


def from_plain(data: Mapping[str, Any]) -> Origin:
    """Return the origin from `Origin.plain`'s data."""
    return Origin(
        data.get("base_model"),
        data.get("commit"),
        data.get("license") or {},
        _strings(data.get("datasets")),
        data.get("relation"),
    )


def card_header(folder: Path) -> dict[str, Any]:
    """Return the YAML header of the model card in `folder`, empty if there is none or it is malformed."""
    import yaml  # type: ignore[import-untyped]

    if not (folder / "README.md").is_file():
        return {}
    with open_stream(inside(folder, "README.md")) as file:
        match = re.match(r"﻿?---\r?\n(.*?)\n---", file.read(_LONGEST).decode(errors="replace"), re.S)
    try:
        header = yaml.safe_load(match[1]) if match else {}
    except (yaml.YAMLError, ValueError, RecursionError):  # headers are written by hand, and no model depends on them
        return {}
    return header if isinstance(header, dict) else {}


def _strings(value: Any) -> tuple[str, ...]:
    """Return the strings in a list, nothing for other values."""
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list | tuple) else ()


def _meta(folder: Path) -> dict[str, Any]:
    """Return the `meta` of a checkpoint, empty if there is none."""
    meta = read_object(folder, "meta.json", RefusedError, INDEX).get("meta")
    return meta if isinstance(meta, dict) else {}
