"""The documentation as a site: every page is on it, links lead somewhere, and it loads nothing over the network."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(site, tmp_path_factory):
    """The folder of the site, built as `make docs` does, elsewhere."""
    folder = tmp_path_factory.mktemp("site")
    site.stage(folder / "build" / "docs")
    (folder / "zensical.toml").write_text((ROOT / "zensical.toml").read_text())
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    return folder / "build" / "site"


def _listed(entries):
    """Pages in `nav`, in their order."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from _listed([value] if isinstance(value, str) else value)


def test_every_page_stands_once_in_the_navigation(site):
    listed = list(_listed(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    staged = {place for place in site.pages().values() if place.endswith(".md")}
    decisions = {place for place in staged if place.startswith("decisions/")}
    assert sorted(listed) == sorted(staged - decisions | {"decisions/index.md"})


def test_every_page_is_built(site, built):
    for place in site.pages().values():
        page = Path(place).with_suffix(".html") if place.endswith(".md") else Path(place)
        page = page.with_name("index.html") if page.name == "README.html" else page
        assert (built / page).is_file(), place


def test_pages_load_nothing_over_the_network(built):
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\"\s>]+)")
    assert {url for page in built.rglob("*.html") for url in loads.findall(page.read_text())} == set()


def test_links_out_of_the_documentation_become_absolute_or_text(site):
    pages = site.pages()
    text = "[here](data.md#a) [an example](../examples/lora.toml) ![picture](images/x.svg) [web](https://x.org)\n```\n[a](b)\n```"
    plain = site.rewritten(text, "docs/lora.md", pages)
    assert plain == text.replace("[an example](../examples/lora.toml)", "an example").replace(
        "![picture](images/x.svg)", "picture"
    )
    home = site.rewritten(text, "docs/lora.md", pages, "https://host/kumi")
    assert "[an example](https://host/kumi/blob/main/examples/lora.toml)" in home
    readme = site.rewritten("[data](docs/parallelism/data.md) [why](docs/decisions/)", "README.md", pages)
    assert readme == "[data](parallelism/data.md) [why](decisions/index.md)"
    deep = site.rewritten("[planning](../planning.md)", "docs/parallelism/README.md", pages)
    assert deep == "[planning](../planning.md)"
