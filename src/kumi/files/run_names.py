"""The names of files in a run folder that several packages read."""

from __future__ import annotations

# The configuration of the run.
CONFIG_FILE = "config.toml"
