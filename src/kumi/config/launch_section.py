"""The section [launch] of a run file: where `kumi launch` starts the run, and how the job asks for its machines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kumi.config.section import NotNegative, Positive, Section, Switch, duration, readable
from kumi.units import parse_bytes

# Patterns of a text without control characters, and of the name of an environment variable.
LINE = r"^[^\x00-\x1f\x7f]*$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"

# One line: a text that becomes a line of a script or a word of a command cannot add further lines to it.
Line = Annotated[str, Field(min_length=1, pattern=LINE)]
Lines = tuple[Line, ...]
Duration = Annotated[Line, duration("1s", "3650d")]
Size = Annotated[Line, readable(parse_bytes)]
Variable = Annotated[str, Field(pattern=VARIABLE)]


class SlurmSection(Section):
    """How a Slurm job asks for its machines."""

    partition: Line | None = Field(None, description="Partition, `--partition`.")
    account: Line | None = Field(None, description="Account that is charged, `--account`.")
    qos: Line | None = Field(None, description="Quality of service, `--qos`.")
    extra: Lines = Field((), description="Further options of sbatch; each becomes one #SBATCH line, unchanged.")
    chain: Positive | None = Field(
        None,
        description="Number of jobs that continue the run one after another, for clusters that do not requeue jobs: "
        "an array whose tasks run one at a time.",
    )
    array: tuple[Lines, ...] = Field(
        (),
        description="Runs that differ, as one job array: the `KEY=VALUE` words of each, such as "
        "`[['train.seed=1'], ['train.seed=2']]`. Run n has `-n` behind `name` and `train.out`.",
    )
    container: Line | None = Field(
        None, description="Container image with kumi in it: a file, or a name with registry."
    )
    container_runtime: Literal["pyxis", "apptainer"] = Field(
        "pyxis",
        description="How the container starts: by the plugin pyxis (`srun --container-image`), or by Apptainer.",
    )
    mounts: Lines = Field((), description="Folders that the container sees: HOST or HOST:INSIDE.")


class KubernetesSection(Section):
    """How a job on Kubernetes asks for its machines."""

    image: Line | None = Field(None, description="Container image in which kumi is installed.")
    namespace: Line | None = Field(None, description="Namespace; by default that of kubectl's context.")
    api: Literal["job", "jobset", "trainjob"] = Field(
        "job",
        description="Kind of object: an Indexed Job of Kubernetes itself; a JobSet; or a TrainJob of Kubeflow Trainer.",
    )
    runtime: Line = Field("torch-distributed", description="ClusterTrainingRuntime of a TrainJob.")
    volumes: dict[Line, Line] = Field(
        default_factory=dict, description="Folder in the container -> PersistentVolumeClaim that is mounted there."
    )
    user: NotNegative | None = Field(
        None,
        description="User id of the container's processes, which must be able to write to the volumes; by default "
        "the image's user.",
    )
    group: NotNegative | None = Field(
        None, description="Group id of the container's processes, and of the volumes where their driver can set it."
    )
    secrets: Lines = Field((), description="Secrets whose entries become environment variables.")
    resources: dict[Line, Positive] = Field(
        default_factory=dict,
        description="Further resources of a node, such as 'rdma/ib' or 'vpc.amazonaws.com/efa', and their number.",
    )
    node_selector: dict[Line, Line] = Field(default_factory=dict, description="Labels that the nodes must have.")
    shm: Size | None = Field(
        None, description="Size of /dev/shm, such as '64 GiB'; by default as much as the memory of the container."
    )


class SkypilotSection(Section):
    """How a SkyPilot task asks for its machines."""

    accelerators: Line | None = Field(
        None, description="SkyPilot's name of the device; by default that of the cluster's device."
    )
    infra: Line | None = Field(None, description="Cloud, region or Kubernetes context, such as 'aws/us-east-1'.")
    spot: Switch = Field(False, description="Use spot instances.")
    image: Line | None = Field(None, description="Image of the machines, such as 'docker:org/image'.")
    mounts: dict[Line, Line] = Field(
        default_factory=dict, description="Folder on the machines -> bucket that is mounted there, such as 's3://name'."
    )


class SshSection(Section):
    """How the machines of `hosts` are reached over SSH."""

    options: Lines = Field((), description="Options of ssh, such as '-p 2222' or '-i ~/.ssh/cluster'.")
    folder: Line | None = Field(
        None, description="Working directory on the hosts; by default the one in which `kumi launch` runs."
    )
    port: Annotated[Positive, Field(le=65535)] = Field(29400, description="Port on the first host for all others.")


class LaunchSection(Section):
    """Where and how `kumi launch` starts the run; every key may change when a run resumes."""

    kind: Literal["slurm", "kubernetes", "skypilot", "ssh"] | None = Field(
        None, description="Launcher that `kumi launch RUN.toml`, `status`, `stop` and `logs` use."
    )
    time_limit: Duration | None = Field(None, description="Time after which the job is ended, such as '24h' or '90m'.")
    save_time: Duration = Field(
        "5m", description="Time before the end of a job at which the run is asked to save and stop."
    )
    requeues: NotNegative = Field(
        20, description="Number of times that a job is started again after a time limit, a preemption or a lost node."
    )
    hosts: Lines = Field((), description="Machines for `ssh`, as ssh names them: user@host, one per node.")
    cpus: Positive | None = Field(
        None, description="CPU cores of a node; by default all, where the launcher can ask for all."
    )
    memory: Size | None = Field(None, description="Memory of a node, such as '500 GiB'; by default all, as for `cpus`.")
    env: tuple[Variable, ...] = Field(
        (), description="Names of environment variables that the job gets from the shell that submits it."
    )
    env_file: Line | None = Field(
        None,
        description="File of NAME=value lines that the job reads on its nodes; nobody else may read it (mode 600).",
    )
    setup: Lines = Field(
        (), description="Shell commands that run before kumi, such as 'module load cuda' or 'source venv/bin/activate'."
    )
    slurm: SlurmSection = SlurmSection()
    kubernetes: KubernetesSection = KubernetesSection()
    skypilot: SkypilotSection = SkypilotSection()
    ssh: SshSection = SshSection()
