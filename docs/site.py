"""Stage the Markdown of the repository for the site, and build it: `make docs` runs `python docs/site.py`.

`stage` copies pages, pictures and scripts into build/docs. The README becomes the first page. Links between staged
pages stay links; a link to any other file of the repository becomes absolute where KUMI_HOME gives the repository's
address, and plain text where it does not. zensical.toml names the pages in their order. Zensical, in strict mode, fails
on a link to a page or an anchor that does not exist.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAGED = ROOT / "build" / "docs"
# Path in the repository -> path on the site; pages below docs/ keep theirs.
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
COPIED = (".svg", ".png", ".js")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```.*?^```)", re.M | re.S)


def pages(root: Path = ROOT) -> dict[str, str]:
    """Return the path on the site of every page, picture and script, by its path in the repository."""
    files = [path for path in (root / "docs").rglob("*") if path.suffix in (".md", *COPIED)]
    below = {path.relative_to(root).as_posix(): path.relative_to(root / "docs").as_posix() for path in sorted(files)}
    return MOVED | below


def rewritten(text: str, page: str, places: dict[str, str], home: str = "") -> str:
    """Return the Markdown `text` of the file `page` with links that hold on the site.

    `places` is what `pages` returns; `home` is the address of the repository, or empty.
    """

    def link(match: re.Match[str]) -> str:
        mark, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        path = "docs/decisions/index.md" if path == "docs/decisions" else path
        if path in places or path == "docs/decisions/index.md":
            here = posixpath.dirname(places[page])
            there = places.get(path, "decisions/index.md")
            return f"{mark}[{words}]({posixpath.relpath(there, here or '.')}{anchor})"
        return f"{mark}[{words}]({home}/blob/main/{path}{anchor})" if home else words

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def stage(target: Path = STAGED, root: Path = ROOT, home: str = "") -> None:
    """Write the pages, pictures and scripts of the repository `root` into the folder `target`, which is made anew."""
    shutil.rmtree(target, ignore_errors=True)
    places = pages(root)
    for source, place in places.items():
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        if place.endswith(".md"):
            text = rewritten((root / source).read_text(encoding="utf-8"), source, places, home)
            (target / place).write_text(text, encoding="utf-8")
        else:
            shutil.copyfile(root / source, target / place)
    (target / "decisions" / "index.md").write_text(_decisions(root), encoding="utf-8")


def _decisions(root: Path) -> str:
    """Return a page that lists the decisions by their titles."""
    titles = {
        path.name: path.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")
        for path in sorted((root / "docs" / "decisions").glob("*.md"))
    }
    lines = [f"- [{title}]({name})" for name, title in titles.items()]
    return "# Decisions\n\nWhy kumi is as it is, a page for each choice that someone may want to reverse.\n\n" + (
        "\n".join(lines) + "\n"
    )


def main() -> int:
    stage(home=os.environ.get("KUMI_HOME", "").rstrip("/"))
    return subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
