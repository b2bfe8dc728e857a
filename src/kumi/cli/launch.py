"""`kumi launch`: show, write or submit the job that trains a run on a cluster."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.cli.arguments import add_run_file, add_verb
from kumi.errors import OK, ConfigError

if TYPE_CHECKING:
    from kumi.config import RunConfig
    from kumi.launch.cluster_launchers import ClusterLauncher
    from kumi.launch.launch_job import LaunchJob


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(
        verbs, "launch", "Show, write or submit the job of a run on a cluster", "kumi launch slurm run.toml --submit"
    )
    kind = parser.add_argument(
        "kind", nargs="?", metavar="KIND", help="slurm, kubernetes, skypilot or ssh; default: launch.kind"
    )
    kind.completer = lambda **_: ["slurm", "kubernetes", "skypilot", "ssh"]  # type: ignore[attr-defined]
    add_run_file(parser)
    parser.add_argument("--out", metavar="DIR", help="write the job's file to this folder instead of printing it")
    parser.add_argument("--submit", action="store_true", help="submit the job")
    parser.add_argument(
        "--unchecked",
        action="store_true",
        help="do not check the model and the plan here: their files are on the cluster only",
    )
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Show, write or submit the job. Return the exit code."""
    from kumi.config import load
    from kumi.launch.cluster_launchers import CLUSTER_LAUNCHERS, cluster_launcher, submit_job, write_launch_file
    from kumi.launch.job_array import array_runs
    from kumi.launch.launch_job import placeholders

    kind, run_file, overrides = arguments.kind, arguments.run, list(arguments.overrides)
    if kind is not None and kind not in CLUSTER_LAUNCHERS:  # `kumi launch RUN.toml KEY=VALUE`
        if "=" not in run_file:
            raise ConfigError(f"launch: {kind!r} is not a launcher; use {', '.join(CLUSTER_LAUNCHERS)}")
        kind, run_file, overrides = None, kind, [run_file, *overrides]
    config = load(run_file, overrides)
    launcher = cluster_launcher(kind or config.launch.kind)
    runs = array_runs(run_file, overrides) if launcher.name == "slurm" else []
    job = _job(launcher, config, run_file, overrides, arguments.out)
    job = replace(job, array=tuple(_job(launcher, run, run_file, list(words), None) for run, words in runs))
    launcher.check(job, submit=False)
    for run_config in [] if arguments.unchecked else [run for run, _ in runs] or [config]:
        _print_plan(run_config)
    text, file, record = launcher.text(job), None, None
    if arguments.out or arguments.submit:
        file = write_launch_file(launcher, job, Path(job.files), replace=not arguments.out)
    if arguments.submit and file is not None:
        record = submit_job(launcher, job, file)
    left = placeholders(text)
    command = shlex.join(launcher.submit_command(str(file or launcher.file_name)))
    if arguments.json:
        output = {"kind": launcher.name, "files": {launcher.file_name: text}, "folder": file and job.files}
        arguments.write_json({**output, "command": command, "placeholders": left, "id": record and record.id})
        return OK
    if file is None:
        print(text, end="")
    else:
        print(f"wrote {file}")
    if record is not None and runs:
        print(
            f"submitted {launcher.name} job {record.id} of {len(runs)} runs; kumi status, logs and stop take one each:"
        )
        for run_config, _ in runs:
            print(f"  {shlex.join([run_file, f'train.out={run_config.train.out}'])}")
        return OK
    if record is not None:
        print(f"submitted {launcher.name} job {record.id}; see kumi status, kumi logs and kumi stop {run_file}")
        return OK
    for name in left:
        print(f"replace {name} before you submit the job", file=sys.stderr)
    advice = command if file else f"write the file with --out {shlex.quote(job.files)}"
    print(f"nothing was submitted; use --submit, or {advice}", file=sys.stderr)
    return OK


def _job(
    launcher: ClusterLauncher, config: RunConfig, run_file: str, overrides: list[str], out: str | None
) -> LaunchJob:
    """Return the job of the run `config`. `out`: the folder for the launcher's file; None for the usual one."""
    from kumi.config.cluster_source import cluster_spec
    from kumi.files.untrusted import RUN_FILE, read_regular
    from kumi.launch.cluster_launchers import files_folder
    from kumi.launch.launch_job import launch_job

    folder = files_folder(launcher, config) if out is None else Path(out).absolute()
    in_container = config.launch.slurm.container is not None
    return launch_job(
        config,
        cluster_spec(config.cluster),
        run_file=run_file,
        run_text=read_regular(Path(run_file), RUN_FILE.size, follow=True).decode(),
        overrides=overrides,
        # Where the nodes have this machine's files, this Python is there, whatever PATH says.
        program=(sys.executable, "-m", "kumi") if launcher.shares_files and not in_container else ("kumi",),
        folder=os.getcwd(),
        files=str(folder),
    )


def _print_plan(config: RunConfig) -> None:
    """Print, on standard error, the layout and the time that the run will need. Raise an error that would end the run
    when it starts."""
    from kumi.config import open_run
    from kumi.units import format_seconds

    run = open_run(config)
    devices = f"{run.cluster.nodes} x {run.cluster.devices_per_node} {run.cluster.device.name}"
    print(f"layout     {run.layout.words} on {devices}", file=sys.stderr)
    if run.step_seconds is not None and run.planned_steps is not None:
        seconds = format_seconds(run.step_seconds * run.planned_steps)
        print(f"time       {seconds} estimated for {run.planned_steps} steps from the beginning", file=sys.stderr)
