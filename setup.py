"""What pyproject.toml cannot say: a long description that renders outside of the repository, and project URLs.

The home of the repository is given when a release is built: `KUMI_HOME=https://host/org/kumi python -m build`. Links
and pictures then become absolute. Without it links become text and pictures their descriptions; there are no URLs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

PAGES = {"Source": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}


def description(readme: str, home: str) -> str:
    """Return `readme` for readers outside of the repository; `home` is its address, or empty."""

    def picture(match: re.Match[str]) -> str:
        return f"![{match[1]}]({home}/raw/main/{match[2]})" if home else f"*{match[1]}*"

    def link(match: re.Match[str]) -> str:
        return f"[{match[1]}]({home}/blob/main/{match[2]})" if home else match[1]

    readme = re.sub(r"!\[([^\]]*)\]\((?!\w+:)([^)]+)\)", picture, readme)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)", link, readme)


def urls(home: str) -> dict[str, str]:
    """Return the project's URLs by name; empty where its home is not known."""
    return {name: home + page for name, page in PAGES.items()} if home else {}


if __name__ == "__main__":
    from setuptools import setup

    address = os.environ.get("KUMI_HOME", "").rstrip("/")
    text = Path("README.md").read_text(encoding="utf-8")
    setup(
        long_description=description(text, address), long_description_content_type="text/markdown",
        project_urls=urls(address),
    )  # fmt: skip
