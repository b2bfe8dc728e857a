"""Imports of the fork server, which the ranks then share. A rank repeats an import that fails here."""

import contextlib
import gc
import importlib

for name in ("pytest", "kumi.parallel", "kumi.train.loop", "kumi.dryrun", "steps", "planned"):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
# Otherwise every rank would copy the memory shared with it, because its garbage collections visit all objects.
gc.freeze()
