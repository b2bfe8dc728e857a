"""The page on architecture, its picture and CONTRIBUTING name what exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from test_imports import ORDER, TORCH_FREE, _imports, _package

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kumi"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


@pytest.fixture(scope="module")
def drawing():
    spec = importlib.util.spec_from_file_location("docs_floors", ROOT / "docs" / "images" / "floors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_as_drawn(drawing):
    assert (ROOT / "docs" / "images" / "floors.svg").read_text() == drawing.floors() + "\n"


def test_every_package_stands_on_the_floor_that_imports_allow(drawing):
    floors = [packages for _, packages in drawing.FLOORS]
    assert sorted(name for packages in floors for name in packages) == sorted({*ORDER} - {"__main__"})
    height = {name: -number for number, packages in enumerate(floors) for name in packages}
    for file in SOURCE.rglob("*.py"):
        package = _package(file)
        for module, _ in _imports(file) if package in height else ():
            below = module.split(".")[1] if module.startswith("kumi.") else package
            assert height[below] <= height[package] if below in height else True, f"{file} imports {module}"
    assert {*ORDER} - {*TORCH_FREE, "clusters"} == drawing.TORCH


def test_paths_on_the_page_exist():
    named = set(re.findall(r"`([a-z_]+/[\w/]+(?:\.py)?)`", PAGE)) - {
        "src/kumi",
        "tests/agreement",
        "tests/test_imports.py",
    }
    assert len(named) > 40
    assert [path for path in named if not (SOURCE / path).exists()] == []


def test_types_on_the_page_stand_where_it_says():
    for types, files in re.findall(r"^\| (`[A-Z][^|]*) \| (`[^|]*) \|", PAGE, re.M):
        text = "".join((SOURCE / file).read_text() for file in re.findall(r"`([^`]*)`", files))
        for name in re.findall(r"`(\w+)`", types):
            assert re.search(rf"^(class {name}\b|{name} =)", text, re.M), name


def test_contributing_names_every_package():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## The house")[2].partition("## Adding")[0]
    named = {name for cell in re.findall(r"^\| (`[^|]*) \|", table, re.M) for name in re.findall(r"`(\w+)`", cell)}
    assert {*ORDER} - {"__main__"} - named == set()


def test_what_contributing_says_to_touch_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## Adding")[2].partition("## Releasing")[0]
    paths = re.findall(r"`((?:src|tests|docs|[a-z]+)/[\w/.]*)`", table)
    assert len(paths) >= 6
    assert [path for path in paths if not any((root / path).exists() for root in (ROOT, SOURCE))] == []
