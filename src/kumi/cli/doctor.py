"""`kumi doctor`: check this machine, or all nodes of a run, before training."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kumi.cli.arguments import add_run_file, add_verb, not_negative
from kumi.errors import OK, ConfigError


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(
        verbs,
        "doctor",
        "Check this machine, or all nodes of a run, before training",
        "kumi doctor examples/quickstart.toml",
    )
    add_run_file(parser, nargs="?")
    parser.add_argument(
        "--nodes",
        action="store_true",
        help="check all nodes together; start the command on every node, as the launcher starts `kumi train`",
    )
    parser.add_argument(
        "--node",
        type=not_negative,
        metavar="N",
        help="with --nodes: the number of this node, from 0; default: the launcher's",
    )
    parser.add_argument(
        "--head", metavar="HOST:PORT", help="with --nodes: an address of node 0 that all nodes reach, and a free port"
    )
    parser.add_argument(
        "--wait",
        type=_seconds,
        metavar="S",
        help="with --nodes: seconds in which all nodes must have come; default: 15",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="measure and compare what kumi does on this machine's GPU, in at most 8 minutes, and write a report",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="with --gpu: the device; cpu tries the report with tiny sizes; default: cuda, which is also ROCm's name",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="with --gpu: the folder for the report; default: kumi-gpu-report"
    )
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Examine, and print the table on node 0. Return the exit code: 2 if a check failed."""
    from kumi.config import load
    from kumi.doctor.examine import ARRIVAL_SECONDS
    from kumi.doctor.findings_table import plain_examination, render_examination
    from kumi.doctor.run_doctor import doctor
    from kumi.report.run_description import print_content

    _refuse_without(arguments, "gpu", ("device", "out"))
    if arguments.gpu:
        return _validate(arguments)
    _refuse_without(arguments, "nodes", ("node", "head", "wait"))
    if arguments.nodes and arguments.run is None:
        raise ConfigError("doctor: --nodes needs the run file, which names the number of nodes; add RUN.toml")
    examination = doctor(
        None if arguments.run is None else load(arguments.run, arguments.overrides),
        nodes=arguments.nodes,
        node=arguments.node,
        head=arguments.head,
        wait=ARRIVAL_SECONDS if arguments.wait is None else arguments.wait,
    )
    if examination.shown_here:
        if arguments.json:
            arguments.write_json(plain_examination(examination))
        else:
            print_content(render_examination(examination))
    return ConfigError.exit_code if examination.verdict == "fail" else OK


def _refuse_without(arguments: Namespace, flag: str, names: Sequence[str]) -> None:
    """Raise ConfigError if one of the options `names` is given without `flag`."""
    for name in names:
        if getattr(arguments, name) is not None and not getattr(arguments, flag):
            raise ConfigError(f"doctor: --{name} has no effect without --{flag}; add --{flag}, or remove --{name}")


def _validate(arguments: Namespace) -> int:
    """Run the validation of the GPU, and print where the report is. Return the exit code: 2 if a part did not end."""
    from kumi.validation.run_parts import JSON_FILE, PAGE_FILE, validate

    if arguments.nodes or arguments.run is not None:
        other = "--nodes" if arguments.nodes else "a run file"
        raise ConfigError(f"doctor: --gpu examines this machine's GPU by itself, without {other}; give one of both")
    if arguments.device is None:
        _require_gpu()
    out = Path(arguments.out or "kumi-gpu-report")
    report = validate(out, arguments.device or "cuda", show=lambda line: print(line, flush=True))
    bad = [part["name"] for part in report["parts"] if part["status"] not in ("ok", "skipped")]
    if arguments.json:
        arguments.write_json(report)
    else:
        print(
            f"\nThe report is in {out / PAGE_FILE}, and the same as data in {out / JSON_FILE}. Names, paths and values "
            f"of variables are taken out. Please read it before you send it; docs/gpu-report.md says where to."
        )
    return ConfigError.exit_code if bad else OK


def _require_gpu() -> None:
    """Raise ConfigError if this machine is known to have no GPU."""
    from kumi.config.cluster_source import cluster_spec
    from kumi.config.job_sections import ClusterSection

    try:
        gpu = cluster_spec(ClusterSection(source="auto")).device.is_gpu
    except ConfigError:  # a GPU that cannot be listed, such as AMD's or a partition
        return
    if not gpu:
        raise ConfigError(
            "doctor: --gpu, and nvidia-smi lists no GPU here; run it on a machine with one, or try the report with "
            "--device cpu"
        )


def _seconds(text: str) -> float:
    """Return `text` as a positive number of seconds, at most an hour."""
    if not text.replace(".", "", 1).isdecimal() or not 0 < float(text) <= 3600:
        raise argparse.ArgumentTypeError(f"must be a number of seconds up to 3600, got {text!r}")
    return float(text)
