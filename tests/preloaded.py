"""Imports of the fork server, which the ranks then share. A rank repeats an import that fails here."""

import contextlib
import importlib

for name in ("kumi.parallel", "kumi.train.loop", "kumi.dryrun", "steps", "planned"):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
