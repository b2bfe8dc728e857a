"""Names are nouns that describe their value, a public name stands for one thing, and docstrings are no riddles."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kumi"
FILES = [file for file in sorted(SOURCE.rglob("*.py")) if "recipes" not in file.parts]
# Tests, benchmarks and scripts of the documentation: their names and prose are held to the same standard.
OTHERS = [
    file for folder in ("tests", "benchmarks", "docs", "examples") for file in sorted((ROOT / folder).rglob("*.py"))
]
# Names that do not describe their value.
EMPTY = {"found", "one", "said", "held", "kept", "known", "wanted"}
# Files of one name: the same thing on another floor, a command and its package, an old path.
SAME_STEM = {"lora", "numerics", "push", "convert", "common"}
# Functions and constants that every entry of a table has.
TABLES = {
    "cli": {"add", "run"},
    "export": {"files", "unsupported"},
    "launch": {
        "name",
        "file_name",
        "shares_files",
        "text",
        "check",
        "submit_command",
        "submit",
        "state",
        "stop",
        "log_command",
    },
    # Implementations of Mamba's recurrence.
    "nn": {"scan", "scan_backward", "takes"},
    "spec": {"ARCHITECTURE", "KEYS", "WEIGHTS", "from_hf", "to_hf", "SCHEDULE", "bubble", "in_flight", "program"},
}


@cache
def _tree(file):
    return ast.parse(file.read_text())


def _place(file, node):
    return f"{file.relative_to(ROOT)}:{node.lineno}"


def _prose(file):
    """Return the docstrings and comments of `file`."""
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(_tree(file)) if isinstance(node, documented)]
    return "\n".join(docstrings + comments)


def _bindings(tree):
    """Yield every binding with its name: assignments, arguments, functions; not those of comprehensions."""
    loops = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    comprehensions = [node for node in ast.walk(tree) if isinstance(node, loops)]
    inside = {id(name) for node in comprehensions for loop in node.generators for name in ast.walk(loop.target)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in inside:
            yield node, node.id
        elif isinstance(node, ast.arg):
            yield node, node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node, node.name


def test_no_binding_has_an_empty_name():
    # `Calibration.kept` is a key of --json.
    allowed = {("src/kumi/plan/calibration/calibrate.py", "kept")}
    empty = [
        f"{_place(file, node)} {name}"
        for file in FILES + OTHERS
        for node, name in _bindings(_tree(file))
        if name in EMPTY and (str(file.relative_to(ROOT)), name) not in allowed
    ]
    assert empty == []


@pytest.mark.parametrize("files", [FILES, OTHERS], ids=["source", "others"])
def test_prose_has_no_riddles(files):
    prose = {file: _prose(file) for file in files}
    relative = [
        f"{file.relative_to(ROOT)}: {match.group()}"
        for file, text in prose.items()
        for match in re.finditer(r"\bof (?:which|whom|whose)\b|^Nothing, when", text, re.I | re.M)
    ]
    assert relative == []
    words = re.findall(r"[a-z']+", "\n".join(prose.values()).lower())
    assert 1000 * words.count("what") / len(words) <= 3


def test_a_file_s_name_stands_for_one_thing():
    stems = defaultdict(list)
    for file in FILES:
        if not file.stem.startswith("__"):
            stems[file.stem].append(str(file.relative_to(SOURCE)))
    assert {stem: files for stem, files in stems.items() if len(files) > 1 and stem not in SAME_STEM} == {}


def _public(tree):
    """Yield the public names that a module defines."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                name.id
                for target in targets
                for name in ast.walk(target)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            )


def test_a_public_name_stands_for_one_thing_in_its_package():
    names = defaultdict(set)
    for file in FILES:
        package = file.relative_to(SOURCE).parts[0]
        for name in _public(_tree(file)):
            if not name.startswith("_") and name not in TABLES.get(package, set()):
                names[package, name].add(str(file.relative_to(SOURCE)))
    assert {key: sorted(files) for key, files in names.items() if len(files) > 1} == {}


def test_no_string_is_cut_in_two():
    """No text is a statement of its own, and no docstring has the quotes of two joined strings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    cut = []
    for file in FILES:
        tree = _tree(file)
        docstrings = {id(node.body[0]) for node in ast.walk(tree) if isinstance(node, documented) and node.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.JoinedStr):
                text = getattr(node.value, "value", "")
                joined = isinstance(text, str) and re.search(r'"\n *"', text) is not None
                if joined or (id(node) not in docstrings and text is not ...):
                    cut.append(_place(file, node))
    assert cut == []
