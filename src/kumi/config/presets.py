"""Read and check descriptions of machines: the presets in `kumi.clusters`, and the user's files."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from kumi.config.cluster_file import DeviceFile, LinkFile, NetworkFile, NodeFile
from kumi.config.section import Section
from kumi.config.validation_messages import describe_errors
from kumi.errors import ConfigError
from kumi.files.untrusted import parse_toml, read_toml
from kumi.paths import cwd_note

_File = TypeVar("_File", bound=Section)


def preset_names(kind: str = "nodes") -> list[str]:
    """Return the names of the presets of `kind`: nodes, devices, links or networks."""
    return sorted(item.name.removesuffix(".toml") for item in _folder(kind).iterdir() if item.name.endswith(".toml"))


def preset_list(kind: str) -> str:
    """Return the names of the presets of `kind`, separated by commas."""
    return ", ".join(preset_names(kind))


def read_node(source: str) -> NodeFile:
    """Return the node `source`, a preset or a TOML file, with its device, links and network."""
    where = f"cluster.source: {source}"
    written = read_machine_toml("nodes", source, "cluster.source", "'auto', ")
    for key, kind in (("device", "devices"), ("network", "networks")):
        if isinstance(written.get(key), str):
            written[key] = read_machine_toml(kind, written[key], f"{where}: {key}")
    links = written.get("links")
    if isinstance(links, list):
        written["links"] = [
            read_machine_toml("links", link, f"{where}: links") if isinstance(link, str) else link for link in links
        ]
    return _checked(NodeFile, written, where)


def read_device(name: str) -> DeviceFile:
    """Return the device preset `name`."""
    return _checked(DeviceFile, read_machine_toml("devices", name), f"device: {name}")


def read_link(name: str) -> LinkFile:
    """Return the preset `name` of a link inside a node."""
    return _checked(LinkFile, read_machine_toml("links", name), f"link: {name}")


def read_network(name: str, key: str = "cluster.network") -> NetworkFile:
    """Return the network `name`, the value of `key`: a preset or a TOML file."""
    return _checked(NetworkFile, read_machine_toml("networks", name, key), f"{key}: {name}")


def read_machine_toml(kind: str, name: str, key: str = "name", also: str = "") -> dict[str, Any]:
    """Return the TOML table of the preset or file `name`, the value of `key`.

    `also`: other valid values, for the error message. Raise ConfigError if there is no such file or it is not TOML.
    """
    file = Path(name) if name.endswith(".toml") else _folder(kind).joinpath(f"{name}.toml")
    if not file.is_file():
        close = get_close_matches(name, preset_names(kind), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        where = cwd_note(name) if name.endswith(".toml") else ""
        raise ConfigError(
            f"{key}: {name!r} is neither a preset nor a TOML file{where}; {hint}use {also}{preset_list(kind)}, or a "
            f"file"
        )
    try:
        return read_toml(file) if isinstance(file, Path) else parse_toml(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {name} cannot be read as TOML ({error}); correct the file") from None


def _folder(kind: str) -> Traversable:
    return files("kumi.clusters").joinpath(kind)


def _checked(kind: type[_File], written: Mapping[str, Any], where: str) -> _File:
    """Return `written` as a table of the class `kind`. Raise ConfigError, which begins with `where`, for mistakes."""
    try:
        return kind.model_validate(written)
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe_errors(error, kind)}; correct the file") from None
