"""Install SkyPilot into build/skypilot, an environment of its own: what `make skypilot` runs.

It has 100 packages whose versions would bind kumi's environment: 520 MB, without torch, a minute or more.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

PACKAGE = "skypilot[kubernetes]==0.14.1"
HOME = Path(__file__).parents[2] / "build" / "skypilot"
PYTHON = HOME / "bin" / "python"


def install() -> None:
    """Make the environment `HOME`; a half-made one is made anew."""
    shutil.rmtree(HOME, ignore_errors=True)
    venv.create(HOME, with_pip=True)
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, PACKAGE], check=True)
    subprocess.run([str(PYTHON), "-c", "import sky"], check=True, stdout=subprocess.DEVNULL)
    (HOME / "complete").touch()


if __name__ == "__main__":
    if not (HOME / "complete").exists():
        try:
            install()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"SkyPilot cannot be installed here, so the tests with its parser skip: {error}", file=sys.stderr)
