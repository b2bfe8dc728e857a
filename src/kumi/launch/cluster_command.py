"""Run a program of a cluster, such as sbatch or kubectl."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from kumi.errors import ConfigError

_SECONDS = 120.0  # a program that takes longer has failed


def run_cluster_command(command: Sequence[str], *, may_fail: bool = False, stdin: str = "") -> str:
    """Run `command` with `stdin` as its input, and return its standard output; with `may_fail`, "" if it fails.

    Raise ConfigError if the program is missing, fails, or takes more than two minutes.
    """
    try:
        ended = subprocess.run(
            list(command), input=stdin, capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{command[0]} is not installed here; run this on a machine that has it, or submit the file yourself"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{command[0]} did not answer within {_SECONDS:.0f} s; see whether the cluster is up"
        ) from None
    if ended.returncode == 0:
        return ended.stdout
    if may_fail:
        return ""
    reason = (ended.stderr.strip() or ended.stdout.strip() or f"exit code {ended.returncode}").splitlines()
    raise ConfigError(f"{' '.join(command[:2])} failed: {' '.join(reason[-3:])}; correct the section [launch]")
