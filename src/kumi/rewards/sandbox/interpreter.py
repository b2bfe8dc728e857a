"""The Python interpreter of programs in a sandbox, and the folders that it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kumi.errors import ConfigError

# A program that prints the folders of its interpreter, and the file of the interpreter without links.
_ASK = "import json, os, sys; print(json.dumps([sys.prefix, sys.base_prefix, os.path.realpath(sys.executable)]))"
# Folders of the system, which every sandbox has.
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64")


@dataclass(frozen=True)
class Interpreter:
    """`path`: the file to run. `folders`: the folders that it needs and that are not the system's."""

    path: str
    folders: Sequence[str]


def interpreter_at(path: str) -> Interpreter:
    """Return the interpreter at `path`, or for "" the one on which this process's virtual environment is based.

    Raise ConfigError if the interpreter does not run, or if a folder that it needs contains the home folder.
    """
    path = os.path.abspath(os.path.expanduser(path)) if path else getattr(sys, "_base_executable", sys.executable)
    try:
        answer = subprocess.run([path, "-I", "-c", _ASK], capture_output=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"python={path!r} cannot be run ({error}); name a Python interpreter") from None
    prefix, base_prefix, real = json.loads(answer)
    needed = {folder for folder in (prefix, base_prefix, str(Path(real).parent)) if not _inside(folder, _SYSTEM)}
    # Folders inside of others come with them.
    folders = sorted(folder for folder in needed if not _inside(folder, needed - {folder}))
    home = os.path.realpath(Path.home())
    exposed = next((folder for folder in folders if _inside(home, [os.path.realpath(folder)])), None)
    if exposed is not None:
        raise ConfigError(
            f"python={path!r} needs the folder {exposed}, which has your home folder in it; name an interpreter "
            "elsewhere, such as /usr/bin/python3"
        )
    return Interpreter(path, folders)


def _inside(folder: str, others: Sequence[str] | set[str]) -> bool:
    """Return True if `folder` is one of `others` or inside of one."""
    return any(Path(folder).is_relative_to(other) for other in others)
