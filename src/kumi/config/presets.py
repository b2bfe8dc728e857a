"""The files about machines that come with kumi, and the user's own: found, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from kumi.config.cluster_file import DeviceFile, LinkFile, NetworkFile, NodeFile
from kumi.config.schema import Section
from kumi.config.validation_messages import sentences
from kumi.errors import ConfigError
from kumi.files.untrusted import parse_toml, read_toml
from kumi.paths import from_where

File = TypeVar("File", bound=Section)


def presets(kind: str = "nodes") -> list[str]:
    """Names of the nodes, devices, links or networks that come with kumi."""
    return sorted(item.name.removesuffix(".toml") for item in _folder(kind).iterdir() if item.name.endswith(".toml"))


def listed(kind: str) -> str:
    """The same as text, for sentences."""
    return ", ".join(presets(kind))


def read_node(source: str) -> NodeFile:
    """The node that `source` names, a preset or a TOML file, with the device, links and network that it refers to."""
    where = f"cluster.source: {source}"
    written = toml_table("nodes", source, "cluster.source", "'auto', ")
    for key, kind in (("device", "devices"), ("network", "networks")):
        if isinstance(written.get(key), str):
            written[key] = toml_table(kind, written[key], f"{where}: {key}")
    links = written.get("links")
    if isinstance(links, list):
        written["links"] = [
            toml_table("links", one, f"{where}: links") if isinstance(one, str) else one for one in links
        ]
    return _checked(NodeFile, written, where)


def read_device(name: str) -> DeviceFile:
    """The device that comes with kumi as `name`."""
    return _checked(DeviceFile, toml_table("devices", name), f"device: {name}")


def read_link(name: str) -> LinkFile:
    """The link inside a node that comes with kumi as `name`."""
    return _checked(LinkFile, toml_table("links", name), f"link: {name}")


def read_network(name: str, key: str = "cluster.network") -> NetworkFile:
    """The network that `name`, the value of `key`, names: a preset or a TOML file."""
    return _checked(NetworkFile, toml_table("networks", name, key), f"{key}: {name}")


def toml_table(kind: str, name: str, key: str = "name", besides: str = "") -> dict[str, Any]:
    """The TOML table that `name`, the value of `key`, names: a preset among the `kind`, or a file."""
    file = Path(name) if name.endswith(".toml") else _folder(kind).joinpath(f"{name}.toml")
    if not file.is_file():
        close = get_close_matches(name, presets(kind), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        where = from_where(name) if name.endswith(".toml") else ""
        raise ConfigError(
            f"{key}: {name!r} is no preset and no TOML file{where}; {hint}use {besides}{listed(kind)}, or a file"
        )
    try:
        return read_toml(file) if isinstance(file, Path) else parse_toml(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {name} cannot be read as TOML ({error}); correct the file") from None


def _folder(kind: str) -> Traversable:
    return files("kumi.clusters").joinpath(kind)


def _checked(kind: type[File], written: Mapping[str, Any], where: str) -> File:
    try:
        return kind.model_validate(written)
    except ValidationError as error:
        raise ConfigError(f"{where}: {sentences(error, kind)}; correct the file") from None
