"""What a model was made of, as far as is known: from the card in its folder, or from where on the hub it came."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kumi.errors import RefusedError
from kumi.files.untrusted import INDEX, inside, open_stream, read_object

# Of a card no more than this is read in search of its header.
_LONGEST = 2**20
_LICENSE = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Origin:
    """The repository and commit that a model was made of, None where it was none that is known; with what the card
    said of its licence, by the header's keys, and of the datasets it was trained on. `relation` is how, as in
    "finetune"; None where the model is that one in another format."""

    base_model: str | None = None
    commit: str | None = None
    license: Mapping[str, str] = field(default_factory=dict)
    datasets: tuple[str, ...] = ()
    relation: str | None = None

    @property
    def published(self) -> str | None:
        """The repository that is this very model; None where it is only known what it descends from."""
        return self.base_model if self.commit else None

    def plain(self) -> dict[str, Any]:
        """As data, for a checkpoint's meta.json."""
        return asdict(self)


UNKNOWN = Origin()


def origin_of(folder: Path, name: str | None = None, commit: str | None = None) -> Origin:
    """The origin of what is made of the model in `folder`, a Hugging Face folder or a checkpoint of kumi.

    `name` and `commit` are the repository's where it is the hub's copy of one. Of another folder it is not known where
    it is published, so that the nearest published model it was made of stands for it.
    """
    if (folder / "meta.json").is_file() and not (folder / "config.json").is_file():
        return from_plain(_meta(folder).get("origin") or {})
    if name is None and (cached := re.search(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})$", str(folder))):
        name, commit = f"{cached[1]}/{cached[2]}", cached[3]
    header = card_header(folder)
    license = {key: str(header[key]) for key in _LICENSE if isinstance(header.get(key), str)}
    datasets = _words(header.get("datasets"))
    if name is not None:
        return Origin(name, commit, license, datasets)
    above, relation = header.get("base_model"), header.get("base_model_relation")
    above = above[0] if isinstance(above, list) and len(above) == 1 else above
    if not (isinstance(above, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", above)):
        return Origin(license=license, datasets=datasets)
    return Origin(above, None, license, datasets, relation if isinstance(relation, str) else "finetune")


def from_plain(data: Mapping[str, Any]) -> Origin:
    """The origin that `plain` wrote."""
    return Origin(
        data.get("base_model"),
        data.get("commit"),
        data.get("license") or {},
        _words(data.get("datasets")),
        data.get("relation"),
    )


def card_header(folder: Path) -> dict[str, Any]:
    """The header of the model card in `folder`, empty where there is none that can be read."""
    import yaml  # type: ignore[import-untyped]

    if not (folder / "README.md").is_file():
        return {}
    with open_stream(inside(folder, "README.md")) as file:
        match = re.match(r"﻿?---\r?\n(.*?)\n---", file.read(_LONGEST).decode(errors="replace"), re.S)
    try:
        found = yaml.safe_load(match[1]) if match else {}
    except (yaml.YAMLError, ValueError, RecursionError):  # written by hand, and nothing that a model depends on
        return {}
    return found if isinstance(found, dict) else {}


def _words(value: Any) -> tuple[str, ...]:
    return tuple(word for word in value if isinstance(word, str)) if isinstance(value, list | tuple) else ()


def _meta(folder: Path) -> dict[str, Any]:
    found = read_object(folder, "meta.json", RefusedError, INDEX).get("meta")
    return found if isinstance(found, dict) else {}
