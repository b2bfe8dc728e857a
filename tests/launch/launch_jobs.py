"""Jobs of `kumi launch` for tests, and the stored files of all launchers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kumi.config.launch_section import LaunchSection
from kumi.launch.launch_job import LaunchJob

GPU_JOB = LaunchJob(
    name="qwen3-8b-chat",
    nodes=4,
    devices_per_node=8,
    device="NVIDIA H100 80GB HBM3",
    device_kind="cuda",
    program=("/home/u/venv/bin/python", "-m", "kumi"),
    run_file="run.toml",
    overrides=("optim.lr=2e-5",),
    run_text='name = "qwen3-8b-chat"\n\n[batch]\nseq_len = 4096\n',
    folder="/home/u/work",
    out="runs/chat",
    files="/home/u/work/runs/chat/launch",
    launch=LaunchSection(time_limit="24h"),
)


def job_with(launch: dict[str, Any] | None = None, **fields: Any) -> LaunchJob:
    """Return GPU_JOB with other fields, and with the section [launch] `launch`."""
    section = GPU_JOB.launch if launch is None else LaunchSection.model_validate(launch)
    return replace(GPU_JOB, launch=section, **fields)


def in_container(launch: dict[str, Any] | None = None) -> LaunchJob:
    """Return GPU_JOB where the nodes have another Python and other folders than this machine."""
    return job_with(launch, program=("kumi",), out="/runs/chat")


IN_CONTAINER = in_container()
# Names and paths that a shell, an option's parser or a reader of YAML could take for something else.
HOSTILE = {
    "spaces": "my run  x",
    "quotes": "it's \"so\" 'x",
    "substitution": "$(touch pwned) `touch pwned` ${HOME}",
    "dashes": "--wrap=touch pwned",
    "comment": "a # b",
    "percent": "50%j %x",
    "script": "'; touch pwned; '",
    "unicode": "模型 é",
}
GOLDEN = Path(__file__).parent / "golden"
# By file of `golden`: the launcher, and the job whose file it is.
TEXTS = {
    "gpus.sbatch": ("slurm", job_with({"time_limit": "24h", "slurm": {"partition": "gpu", "account": "a b"}})),
    "container.sbatch": (
        "slurm",
        job_with(
            {
                "env": ["WANDB_PROJECT"],
                "env_file": "/home/u/.secrets.env",
                "setup": ["module load cuda/12.8", "export NCCL_DEBUG=WARN"],
                "slurm": {
                    "container": "docker://org/kumi:1",
                    "mounts": ["/scratch", "/data:/data:ro"],
                    "chain": 7,
                    "extra": ["--gres=gpu:h100:8", "--exclusive --reservation=r1", "--comment='a # b'"],
                },
            },
            program=("kumi",),
        ),
    ),
    "apptainer.sbatch": (
        "slurm",
        job_with(
            {
                "slurm": {
                    "container": "/images/kumi 1.sif",
                    "container_runtime": "apptainer",
                    "mounts": ["/scratch", "/data:/data:ro"],
                }
            },
            program=("kumi",),
        ),
    ),
    "array.sbatch": (
        "slurm",
        job_with(
            {"time_limit": "1d", "slurm": {"partition": "gpu"}},
            array=tuple(
                job_with(
                    name=f"it's {run}", out=f"runs/it's {run}", overrides=(f"train.seed={run}", f'name="it\'s {run}"')
                )
                for run in range(3)
            ),
        ),
    ),
    "job.yaml": ("kubernetes", IN_CONTAINER),
    "job-rdma.yaml": (
        "kubernetes",
        replace(
            IN_CONTAINER,
            launch=LaunchSection.model_validate(
                {
                    "cpus": 96,
                    "memory": "1600 GiB",
                    "time_limit": "7d",
                    "setup": ["ulimit -l unlimited"],
                    "kubernetes": {
                        "image": "registry/kumi:1",
                        "namespace": "research",
                        "volumes": {"/shared": "kumi-shared", "/data": "corpora"},
                        "user": 10001,
                        "group": 2000,
                        "secrets": ["hub-tokens"],
                        "resources": {"vpc.amazonaws.com/efa": 32, "hugepages-2Mi": 5120},
                        "node_selector": {"gpu": "h100", "topology.kubernetes.io/zone": "a"},
                        "shm": "64 GiB",
                    },
                }
            ),
        ),
    ),
    "jobset.yaml": ("kubernetes", in_container({"kubernetes": {"api": "jobset", "image": "registry/kumi:1"}})),
    "trainjob.yaml": (
        "kubernetes",
        in_container(
            {
                "time_limit": "2d",
                "kubernetes": {
                    "api": "trainjob",
                    "image": "registry/kumi:1",
                    "volumes": {"/shared": "kumi-shared"},
                    "user": 0,
                },
            }
        ),
    ),
    "task.yaml": (
        "skypilot",
        in_container(
            {
                "cpus": 32,
                "memory": "200 GiB",
                "env": ["HF_TOKEN"],
                "setup": ["source ~/venv/bin/activate"],
                "skypilot": {"infra": "aws", "spot": True, "mounts": {"/runs": "s3://bucket/runs", "/data": "corpora"}},
            }
        ),
    ),
    "launch.sh": (
        "ssh",
        in_container(
            {
                "hosts": ["gpu0", "user@gpu1", "10.0.0.3", "gpu3"],
                "env_file": "~/.secrets.env",
                "setup": ["source venv/bin/activate"],
                "ssh": {"options": ["-p 2222", "-i ~/.ssh/cluster"], "folder": "/shared/work"},
            }
        ),
    ),
}


if __name__ == "__main__":  # write the files of `golden`
    from kumi.launch.cluster_launchers import CLUSTER_LAUNCHERS

    for file, (kind, job) in TEXTS.items():
        (GOLDEN / file).write_text(CLUSTER_LAUNCHERS[kind].text(job))
