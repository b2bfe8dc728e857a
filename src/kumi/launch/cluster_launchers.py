"""The table of launchers for clusters, and the steps of `kumi launch`, `status`, `stop` and `logs`.

To add a launcher, write a module that has the attributes and the functions of `ClusterLauncher`, and add the module to
the table.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from kumi.config import RunConfig
from kumi.config.stored_config import run_folder
from kumi.errors import ConfigError, RefusedError
from kumi.files.output import make_folder, write_text
from kumi.files.untrusted import RUN_FILE, read_regular
from kumi.launch import kubernetes, skypilot, slurm, ssh
from kumi.launch.launch_job import LAUNCH_FOLDER, LaunchJob, placeholders
from kumi.launch.launch_record import JobState, LaunchRecord, has_record, read_record, write_record
from kumi.launch.stop_file import STOP_FILE

# More bytes than a launcher writes: the text of the run file, in which characters may be escaped, and some lines.
_LARGEST_FILE = 8 * RUN_FILE.size


class ClusterLauncher(Protocol):
    """Starts a run on the machines of a cluster. Each launcher is a module.

    `name`: its key in the table. `file_name`: name of the file that it submits. `shares_files`: True if the nodes have
    the same file system as the machine on which `kumi launch` runs.
    """

    @property
    def name(self) -> str: ...

    @property
    def file_name(self) -> str: ...

    @property
    def shares_files(self) -> bool: ...

    def text(self, job: LaunchJob) -> str:
        """Return the content of the file that the launcher submits. This is a pure function of `job`."""

    def check(self, job: LaunchJob, *, submit: bool) -> None:
        """Raise ConfigError if the launcher cannot start `job`.

        `submit`: also raise it if the environment or the files of this machine lack what the submission needs.
        """

    def submit_command(self, file: str) -> tuple[str, ...]:
        """Return the command by which a person submits `file`."""

    def submit(self, job: LaunchJob, file: Path) -> str:
        """Submit `file` and return the id of the job."""

    def state(self, record: LaunchRecord) -> JobState:
        """Return the state of a submitted job."""

    def stop(self, record: LaunchRecord, out: Path, *, now: bool) -> str:
        """Let a job save and stop, or end it `now`; return a sentence about it."""

    def log_command(self, record: LaunchRecord, lines: int, *, follow: bool) -> tuple[str, ...]:
        """Return the command that prints the last `lines` of the job's output."""


_LAUNCHERS: tuple[ClusterLauncher, ...] = (slurm, kubernetes, skypilot, ssh)
CLUSTER_LAUNCHERS: Mapping[str, ClusterLauncher] = {launcher.name: launcher for launcher in _LAUNCHERS}


def cluster_launcher(kind: str | None) -> ClusterLauncher:
    """Return the launcher `kind`, a key of the table. Raise ConfigError if it is None."""
    if kind is None:
        raise ConfigError(
            f"launch.kind is unset, so the launcher is not known; set it, or name one: kumi launch "
            f"{'|'.join(CLUSTER_LAUNCHERS)} RUN.toml"
        )
    return CLUSTER_LAUNCHERS[kind]


def files_folder(launcher: ClusterLauncher, config: RunConfig) -> Path:
    """Return the folder for the launcher's files of the run `config`.

    It is `launch` in the run folder if this machine and the nodes share files, else `launch/RUN` in the working
    directory, where RUN is the name of the run folder.
    """
    out = run_folder(config)
    assert out is not None, "a configuration that is launched has [train]"
    return (out / LAUNCH_FOLDER if launcher.shares_files else Path(LAUNCH_FOLDER) / out.name).absolute()


def write_launch_file(launcher: ClusterLauncher, job: LaunchJob, folder: Path, *, replace: bool) -> Path:
    """Write the launcher's file of `job` to `folder` and return its path.

    Raise RefusedError if another file of that name exists, unless `replace` is set.
    """
    file, text = folder / launcher.file_name, launcher.text(job)
    if not replace and file.exists() and read_regular(file, _LARGEST_FILE) != text.encode():
        raise RefusedError(
            f"{file} exists, has other text than kumi would write, and is not overwritten; remove it, or name another "
            f"folder with --out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    make_folder(folder)
    write_text(file, text)
    return file


def submit_job(launcher: ClusterLauncher, job: LaunchJob, file: Path) -> LaunchRecord:
    """Submit `file`, the launcher's file of `job`, and return the record, which is written beside the file.

    For a job array, each run's record is in the run's own folder instead. Raise ConfigError if a placeholder is left.
    """
    left = placeholders(launcher.text(job))
    if left:
        raise ConfigError(
            f"{file}: {', '.join(left)} must be replaced before kumi can submit it; the file's comment at each "
            f"placeholder names the key of [launch] to set"
        )
    launcher.check(job, submit=True)
    record = LaunchRecord(launcher.name, launcher.submit(job, file), file.parent, time.strftime("%Y-%m-%dT%H:%M:%S"))
    if not job.array:
        write_record(record)
    for number, run in enumerate(job.array):
        folder = Path(run.files)
        folder.mkdir(parents=True, exist_ok=True)
        make_folder(folder)
        write_record(replace(record, id=f"{record.id}_{number}", folder=folder, output=str(record.folder)))
    return record


def submitted_job(config: RunConfig) -> tuple[ClusterLauncher, LaunchRecord]:
    """Return the launcher and the record of the last job of the run `config`.

    Raise ConfigError if there is none.
    """
    out = run_folder(config)
    if config.launch.slurm.array and out is not None and not has_record(files_folder(slurm, config)):
        raise ConfigError(
            f"the runs of launch.slurm.array are in folders of their own; name one, such as train.out={out}-0"
        )
    if config.launch.kind is not None:
        launcher = cluster_launcher(config.launch.kind)
        return launcher, read_record(files_folder(launcher, config))
    folders = {launcher.name: files_folder(launcher, config) for launcher in CLUSTER_LAUNCHERS.values()}
    written = [read_record(folder) for folder in dict.fromkeys(folders.values()) if has_record(folder)]
    records = sorted(written, key=lambda record: record.submitted)
    if not records or records[-1].kind not in CLUSTER_LAUNCHERS:
        raise ConfigError(
            f"kumi has submitted no job of this run (looked in {', '.join(map(str, set(folders.values())))}); use "
            f"kumi launch with --submit, from the same working directory"
        )
    return CLUSTER_LAUNCHERS[records[-1].kind], records[-1]


def request_stop(out: Path) -> None:
    """Write the stop file of the run in `out`: its nodes save after the current step and end."""
    write_text(out / STOP_FILE, "stop\n")
