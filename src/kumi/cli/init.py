"""`kumi init`: write a run file from a recipe, and the files that it names, to the working directory."""

from __future__ import annotations

import re
from argparse import Namespace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from kumi.cli.arguments import add_verb
from kumi.errors import OK, ConfigError, RefusedError

_DEFAULT_RECIPE = "quickstart"


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(verbs, "init", "Write a run file to start from", "kumi init && kumi train run.toml")
    names = parser.add_argument(
        "recipe", nargs="?", metavar="RECIPE", help=f"a name that --list shows; default: {_DEFAULT_RECIPE}"
    )
    names.completer = lambda **_: list(recipes())  # type: ignore[attr-defined]
    parser.add_argument("--list", action="store_true", help="list the recipes")
    parser.add_argument("--out", default="run.toml", metavar="FILE.toml", help="the new run file; default: run.toml")
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Write the recipe's files, or list the recipes. Return the exit code."""
    if arguments.list:
        return _list(arguments)
    name = arguments.recipe or _DEFAULT_RECIPE
    texts = recipe_files(name, arguments.out)
    _write(texts)
    command = f"kumi {'plan' if name.startswith('plan/') else 'train'} {arguments.out}"
    if arguments.json:
        arguments.write_json({"recipe": name, "files": list(texts), "next": command})
    for file in texts:
        print(f"wrote {file}")
    print(f"next: {command}")
    return OK


def recipes() -> dict[str, str]:
    """Return the purpose of each recipe, the first line of its file, by name."""
    folder = _folder()
    purposes = {}
    for prefix, place in (("", folder), ("plan/", folder.joinpath("plan"))):
        for file in sorted(place.iterdir(), key=lambda entry: entry.name):
            if file.name.endswith(".toml"):
                head = file.read_text(encoding="utf-8").partition("\n")[0]
                purposes[prefix + file.name.removesuffix(".toml")] = head.lstrip("# ")
    return purposes


def recipe_files(name: str, out: str) -> dict[str, str]:
    """Return the files of the recipe `name` by path: the run file `out`, and those of the example folders it names.

    Raise ConfigError for an unknown name.
    """
    if name not in recipes():
        from difflib import get_close_matches

        close = get_close_matches(name, recipes(), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"init: {name!r} is not a recipe; {hint}use {', '.join(recipes())}")
    text = _folder().joinpath(*f"{name}.toml".split("/")).read_text(encoding="utf-8")
    text = text.replace(f"examples/{name}.toml", out)
    named: dict[str, str] = {}
    for path in re.findall(r'"examples/([^"{}*]+)"', text):
        place = _folder().joinpath(*path.split("/"))
        parts = [(f"{path}/{part.name}", part) for part in place.iterdir()] if place.is_dir() else [(path, place)]
        named |= {name: part.read_text(encoding="utf-8") for name, part in sorted(parts) if not name.endswith(".py")}
    return {out: text.replace('"examples/', '"'), **named}


def _list(arguments: Namespace) -> int:
    """Print the recipes. Return the exit code."""
    if arguments.json:
        arguments.write_json({"recipes": recipes()})
        return OK
    width = max(map(len, recipes()))
    for name, purpose in recipes().items():
        print(f"{name:{width}}  {purpose}")
    return OK


def _write(texts: dict[str, str]) -> None:
    """Write new files. Raise RefusedError, before anything is written, if one of them exists."""
    for name in texts:
        if Path(name).exists() or Path(name).is_symlink():
            raise RefusedError(
                f"init: {name} exists and is not overwritten; remove it, use another folder, or set another --out"
            )
    for name, text in texts.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        with open(name, "x", encoding="utf-8") as file:
            file.write(text)


def _folder() -> Traversable:
    return files("kumi").joinpath("recipes")
