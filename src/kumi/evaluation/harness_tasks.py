"""Check folders of lm-evaluation-harness tasks for code, which reading a task would run.

The harness reads YAML with tags that import and call Python, renders templates outside of a sandbox, reads data sets in
formats that hold code, and downloads metrics that are code. A folder of tasks from someone else may use any of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kumi.errors import ConfigError
from kumi.files.untrusted import CONFIG, brief, read_regular

TRUST = "--trust-task-code"  # the flag that skips this check
# Files that Python executes when they are imported or read.
_CODE = (".py", ".pyc", ".so", ".pkl", ".pickle", ".pt", ".bin")
# Builders of data sets that read files without running what is in them.
_DATASETS = ("json", "csv", "parquet", "text", "arrow")
# The beginning of YAML's own tags.
_PLAIN_TAGS = "tag:yaml.org,2002:"


def check_task_folder(folder: Path) -> None:
    """Raise ConfigError if the tasks in `folder` run code, or if it is not a folder."""
    if not folder.is_dir():
        raise ConfigError(f"--include-path {folder}: is not a folder; name a folder with task files of lm-eval")
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise _refusal(path, "is a link, which may lead to code elsewhere")
        if path.suffix in _CODE:
            raise _refusal(path, "is code")
        if path.suffix in (".yaml", ".yml") or path.name.endswith("_yaml"):
            _check_file(path, folder)


def _check_file(path: Path, folder: Path) -> None:
    """Raise ConfigError if the YAML file `path` in the task `folder` runs code, or cannot be read."""
    import yaml  # type: ignore[import-untyped]

    try:
        text = read_regular(path, CONFIG.size).decode()
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            tag = getattr(event, "tag", None)
            if tag is not None and (not tag.startswith(_PLAIN_TAGS) or "python" in tag):
                raise _refusal(path, f"has the tag {brief(tag)}, which runs code")
        content = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML ({error}); correct it, or remove it") from None
    for key, value in _entries(content):
        reason = _reason(key, value, path, folder)
        if reason:
            raise _refusal(path, reason)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all keys with their values in the tables of `value`, at any depth."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key), item
            yield from _entries(item)
    elif isinstance(value, list):
        for item in value:
            yield from _entries(item)


def _reason(key: str, value: Any, path: Path, folder: Path) -> str:
    """Return why the key of a task file runs code; "" if it does not."""
    if key in ("hf_evaluate", "unsafe_code", "trust_remote_code") and value:
        return f"sets {key}, which runs code from the hub"
    if key == "dataset_path" and value not in _DATASETS and _is_local(str(value), path):
        return f"reads the data set {brief(value)} from this machine, which may hold code"
    if key == "dataset_path" and str(value) in ("pandas", "webdataset"):
        return f"reads data with {brief(value)}, whose files may hold code"
    included = [value] if isinstance(value, str) else value
    if key == "include" and isinstance(included, list):
        for name in included:
            if not (path.parent / str(name)).resolve().is_relative_to(folder.resolve()):
                return f"includes {brief(name)}, which is outside of the folder"
    return ""


def _is_local(name: str, path: Path) -> bool:
    return name.startswith((".", "/", "~")) or (path.parent / name).exists() or Path(name).exists()


def _refusal(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path}: {reason}; read the folder, and if you trust it, add {TRUST}")
