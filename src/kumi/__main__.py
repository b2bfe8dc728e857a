"""`python -m kumi`: the same as `kumi`."""

from __future__ import annotations

import sys

from kumi.cli import main

if __name__ == "__main__":
    sys.exit(main())
