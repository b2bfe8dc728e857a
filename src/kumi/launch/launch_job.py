"""The job that `kumi launch` hands to a cluster: one `kumi train` on each node, described without any launcher.

    run file, cluster --launch_job--> LaunchJob --text--> the file that a launcher submits

Each node runs the same command. It learns its place from three variables that the launcher's file sets:

    KUMI_HEAD   host:port of node 0, where the nodes meet
    KUMI_NODES  number of nodes
    KUMI_NODE   number of this node, from 0
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kumi import __version__
from kumi.config import RunConfig
from kumi.config.launch_section import LINE, LaunchSection
from kumi.errors import ConfigError
from kumi.remote.addresses import is_url
from kumi.remote.cache_folder import local_run_folder
from kumi.spec.cluster import ClusterSpec
from kumi.units import parse_bytes, parse_duration

# Port of node 0 at which the nodes meet.
HEAD_PORT = 29400
# Folder of a launcher's files: in the run folder if the nodes share this machine's files, else where kumi runs.
LAUNCH_FOLDER = "launch"
# Exit codes after which the same command may continue the run: a node was lost, the run saved because it was asked to,
# the run was terminated after it saved.
RESUMABLE_CODES = (7, 75, 143)
# Exit codes with which the same command would end again: a refused file or key, bad data, too little memory, a loss
# that diverged.
HOPELESS_CODES = (2, 3, 4, 6)
_PLACEHOLDER = re.compile(r"REPLACE-WITH-[A-Z]+(?:-[A-Z]+)*")
# A label of a host name has at most 63 characters, and launchers append "-node-0-" and a number to the job's name.
_NAME_LENGTH = 48


@dataclass(frozen=True)
class LaunchJob:
    """A run on a cluster, for any launcher.

    - `name`: of the run; any text of one line.
    - `nodes`, `devices_per_node`: machines, and ranks of each.
    - `device`, `device_kind`: name of the device, and "cuda" or "cpu".
    - `program`: the words of a command that start kumi on a node.
    - `run_file`, `overrides`: arguments of `kumi train`; `run_text` is the content of the run file.
    - `folder`: working directory on the nodes, unless the launcher has another one.
    - `out`: the run folder, `train.out`; relative to the working directory.
    - `on_store`: True if `train.out` is a URL, to which checkpoints are uploaded; `out` is then the local copy.
    - `files`: folder of the launcher's file and of the job's output.
    - `launch`: the section [launch].
    - `data_cache`: folder of tokenised data, `data.cache`, which the nodes share; None if it is inside `out`.
    - `array`: the runs of a job array, each as a job that differs in `name`, `overrides`, `out` and `files`.
    """

    name: str
    nodes: int
    devices_per_node: int
    device: str
    device_kind: str
    program: tuple[str, ...]
    run_file: str
    overrides: tuple[str, ...]
    run_text: str
    folder: str
    out: str
    files: str
    launch: LaunchSection
    data_cache: str | None = None
    on_store: bool = False
    array: tuple[LaunchJob, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """The command of every node."""
        return self.train_command(self.run_file)

    def train_command(self, run_file: str) -> tuple[str, ...]:
        """Return the command of every node where the run file has the path `run_file`."""
        # A path such as -x.toml would be an option.
        path = f"./{run_file}" if run_file.startswith("-") else run_file
        # Keys of [launch] concern the submitting machine, not the nodes.
        overrides = (word for word in self.overrides if not word.lstrip().startswith("launch."))
        return (*self.program, "train", path, *overrides)

    @property
    def time_limit(self) -> int | None:
        """Whole seconds after which the job is ended; None without a limit."""
        return None if self.launch.time_limit is None else int(parse_duration(self.launch.time_limit))

    @property
    def save_seconds(self) -> int:
        """Whole seconds before the end of a job at which the run is asked to save."""
        return int(parse_duration(self.launch.save_time))

    @property
    def memory(self) -> int | None:
        """Bytes of memory of a node; None for all of it."""
        return None if self.launch.memory is None else parse_bytes(self.launch.memory)

    @property
    def uses_gpus(self) -> bool:
        """True if the ranks compute on GPUs."""
        return self.device_kind == "cuda"

    @property
    def has_amd_gpus(self) -> bool:
        """True if the GPUs are AMD's, by the name of the device."""
        return self.uses_gpus and ("AMD" in self.device or "MI3" in self.device)

    @property
    def written_by(self) -> str:
        """The comment that begins every launcher's file."""
        return f"Written by kumi {__version__} for the run {self.name!r}. Edit it as you like."

    @property
    def host_name(self) -> str:
        """The name as a label of host names, as Kubernetes and SkyPilot demand.

        A name that is not such a label gets a digest, so that two runs never share a label.
        """
        label = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        if label == self.name and label[0].isalpha() and len(label) <= _NAME_LENGTH:
            return label
        digest = hashlib.blake2b(self.name.encode(), digest_size=4).hexdigest()
        return f"{'' if label[:1].isalpha() else 'run-'}{label}"[: _NAME_LENGTH - 9].strip("-") + f"-{digest}"


def launch_job(
    config: RunConfig,
    cluster: ClusterSpec,
    *,
    run_file: str,
    run_text: str,
    overrides: Sequence[str],
    program: Sequence[str],
    folder: str,
    files: str,
) -> LaunchJob:
    """Return the job of the run `config` on `cluster`; the other arguments are fields of `LaunchJob`.

    Raise ConfigError if a name or a path has control characters, if the number of devices is a guess, or if the job
    would be asked to save before it has begun.
    """
    section = config.launch
    words = {"name": config.name, "train.out": config.train.out, "run file": run_file, "working directory": folder}
    for what, text in (words | {f"override {number}": word for number, word in enumerate(overrides, 1)}).items():
        if re.search(LINE, text) is None:
            raise ConfigError(f"{what}: {text!r} has a line break or another control character; remove it")
    if config.cluster.source == "auto" and config.cluster.devices_per_node is None:
        raise ConfigError(
            "cluster.devices_per_node is unset and cluster.source='auto' describes this machine, which may differ from "
            "the nodes; set cluster.source to a preset or a TOML file, or cluster.devices_per_node"
        )
    if config.launch.slurm.container is not None and config.train.out.startswith("~"):
        raise ConfigError(
            f"train.out={config.train.out!r} begins with ~, which in the container of launch.slurm.container is a "
            f"folder of the image, so the run would be lost with the container; write the folder's whole path"
        )
    job = LaunchJob(
        name=config.name,
        nodes=cluster.nodes,
        devices_per_node=cluster.devices_per_node,
        device=cluster.device.name,
        device_kind=cluster.device.kind,
        program=tuple(program),
        run_file=run_file,
        overrides=tuple(overrides),
        run_text=run_text,
        folder=folder,
        out=str(local_run_folder(config.train.out)),
        files=files,
        launch=section,
        data_cache=None if config.data.cache is None else os.path.expanduser(config.data.cache),
        on_store=is_url(config.train.out),
    )
    if job.time_limit is not None and job.save_seconds >= job.time_limit:
        raise ConfigError(
            f"launch.save_time='{section.save_time}' is not shorter than launch.time_limit='{section.time_limit}', so "
            f"the job would be asked to stop at its start; raise time_limit, or lower save_time"
        )
    return job


def check_run_folder_outlives_node(job: LaunchJob, mounts: Iterable[str], key: str) -> None:
    """Raise ConfigError unless checkpoints are uploaded to a store, or are written below a folder of `mounts`.

    `mounts`: folders on the nodes that outlive them. `key`: name of the run-file key with the mounts.
    """
    folders = tuple(mounts)
    if not job.on_store and not is_below(job.out, folders):
        raise ConfigError(
            f"train.out={job.out!r} is in no folder of {key} ({', '.join(folders) or 'none'}), so its checkpoints "
            f"would be lost with the node; mount a volume or a bucket there and put train.out below it, or set "
            f"train.out to a URL"
        )


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Return True if `path` is one of `folders` or inside one."""
    return any(Path(path).is_relative_to(folder) for folder in folders)


def placeholder(what: str) -> str:
    """Return a text that a person must replace by `what`, such as IMAGE, before the file can be submitted."""
    return f"REPLACE-WITH-{what}"


def placeholders(text: str) -> list[str]:
    """Return the placeholders that are left in the file `text`."""
    return sorted(set(_PLACEHOLDER.findall(text)))


def check_env_file(path: str, *, required: bool) -> None:
    """Raise ConfigError unless the file of secrets `path` exists and nobody but its owner can use it.

    Without `required`, a missing file is accepted: it may exist on the nodes only.
    """
    file = Path(os.path.expanduser(path))
    try:
        mode = file.stat().st_mode & 0o777
    except OSError as error:
        if required:
            raise ConfigError(
                f"launch.env_file: {file} cannot be used ({error.strerror}); write NAME=value lines to it, then "
                f"chmod 600 {file}"
            ) from None
        return
    if mode & 0o177:
        raise ConfigError(
            f"launch.env_file: {file} has mode {mode:03o}, so others may read the secrets in it; chmod 600 {file}"
        )
