"""Slurm: the batch script of a run, and sbatch, squeue, scontrol and scancel.

The script stays alive while `srun` runs one `kumi train` on each node:

    sbatch ─ job.sbatch ─ srun ─┬─ kumi train (node 0) ─ ranks
       │         │              └─ kumi train (node 1) ─ ranks
    USR1 before the time limit ──> stop file ──> the nodes save and end with 75 ──> scontrol requeue

This module is a `kumi.launch.cluster_launchers.ClusterLauncher`.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from kumi.errors import ConfigError
from kumi.launch.cluster_command import run_cluster_command
from kumi.launch.launch_job import HOPELESS_CODES, RESUMABLE_CODES, LaunchJob, check_env_file
from kumi.launch.launch_record import JobState, LaunchRecord
from kumi.launch.secrets_script import read_secrets
from kumi.launch.stop_file import STOP_FILE

name = "slurm"
shares_files = True
file_name = "job.sbatch"

# Variables of the submitting shell that every job gets; kumi and its libraries are found by them.
_BASE_VARIABLES = ("HOME", "USER", "LANG", "PATH", "LD_LIBRARY_PATH", "MODULEPATH", "VIRTUAL_ENV")
# Options of sbatch that ask for GPUs. If launch.slurm.extra has one of them, kumi writes no such option.
_GPU_OPTIONS = ("--gres", "--gpus", "-G")
# Names of variables whose values are secrets, such as HF_TOKEN, WANDB_API_KEY or AWS_SECRET_ACCESS_KEY.
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD)(_|$)", re.IGNORECASE)
# Options of sbatch that set the CPUs of a node.
_CPU_OPTIONS = ("--exclusive", "--cpus-per-task", "-c", "--cpus-per-gpu")


def text(job: LaunchJob) -> str:
    """Return the batch script of `job`."""
    return f"#!/bin/bash\n# {job.written_by}\n{_options(job)}\n{_script(job)}"


def check(job: LaunchJob, *, submit: bool) -> None:
    """Raise ConfigError if `job` has contradictory arrays, an output that Slurm cannot name, or unusable secrets."""
    if "\\" in job.files:
        raise ConfigError(
            f"{job.files} has a backslash, and Slurm then replaces no %j in the name of its output; name another "
            f"folder with --out, or another train.out"
        )
    slurm = job.launch.slurm
    if any(re.match(r"--array|-a(\d|$)", word) for option in slurm.extra for word in option.split()):
        raise ConfigError(
            "launch.slurm.extra has --array, whose tasks would all write to one run folder; list the overrides of each "
            "run in launch.slurm.array, or continue one run in several jobs with launch.slurm.chain"
        )
    if slurm.array and slurm.chain is not None:
        raise ConfigError(
            "launch.slurm.array and launch.slurm.chain both need Slurm's job array, and a job has only one; leave out "
            "one of them"
        )
    secret = [variable for variable in job.launch.env if _SECRET.search(variable)]
    if secret:
        raise ConfigError(
            f"launch.env names {', '.join(secret)}, and Slurm would store the value on its controller; write a line "
            f"NAME=value to a file of mode 600, and name that with launch.env_file"
        )
    if job.launch.env_file is not None:
        check_env_file(job.launch.env_file, required=submit)
    missing = [variable for variable in job.launch.env if variable not in os.environ]
    if submit and missing:
        raise ConfigError(
            f"launch.env names {', '.join(missing)}, which this shell does not set; export it, or put it into the file "
            f"of launch.env_file"
        )


def submit_command(file: str) -> tuple[str, ...]:
    """Return the command that submits the script `file`."""
    return ("sbatch", "--parsable", file)


def submit(job: LaunchJob, file: Path) -> str:
    """Submit the script `file` and return the id of the Slurm job."""
    answer = run_cluster_command(submit_command(str(file)))
    return answer.strip().partition(";")[0]  # "id;cluster" on a federation


def state(record: LaunchRecord) -> JobState:
    """Return the state of the job as Slurm tells it; "unknown" once Slurm has forgotten the job."""
    answer = run_cluster_command(("scontrol", "--oneliner", "show", "job", record.id), may_fail=True)
    jobs = [_fields(line) for line in answer.splitlines() if line.startswith("JobId=")]
    if not jobs:
        return JobState("unknown", f"Slurm no longer lists job {record.id}; see its output in {record.output_folder}")
    shown = next((job for job in jobs if job.get("JobState") in ("RUNNING", "COMPLETING")), jobs[0])
    detail = [f"restarted {shown['Restarts']} times"] if shown.get("Restarts", "0") != "0" else []
    if shown.get("JobState") == "RUNNING":
        detail.append(
            f"on {shown.get('NodeList', '?')} for {shown.get('RunTime', '?')} of {shown.get('TimeLimit', '?')}"
        )
    elif shown.get("JobState") == "PENDING":
        detail.append(f"waits: {shown.get('Reason', '?')}, starts {shown.get('StartTime', '?')}")
    else:
        detail.append(f"exit code {shown.get('ExitCode', '?').partition(':')[0]}")
    return JobState(shown.get("JobState", "unknown").lower(), ", ".join(detail))


def stop(record: LaunchRecord, out: Path, *, now: bool) -> str:
    """Ask the job to save and stop, or end it `now`; return a sentence about it."""
    if now:
        run_cluster_command(("scancel", record.id))
        return f"Slurm job {record.id} is cancelled; the last checkpoint stays"
    # A job that has not begun has nothing to save; neither have the tasks of a chain that wait for the running one.
    run_cluster_command(("scancel", "--state=PENDING", record.id), may_fail=True)
    if state(record).word != "running":
        return f"Slurm job {record.id} is not running; it will not start again"
    # Without this the script would requeue the job, as it does at a time limit.
    run_cluster_command(("scontrol", "update", f"JobId={record.id}", "Requeue=0"), may_fail=True)
    return f"Slurm job {record.id} saves after its current step and ends"


def log_command(record: LaunchRecord, lines: int, *, follow: bool) -> tuple[str, ...]:
    """Return the command that shows the last `lines` of the job's output."""
    folder = record.output_folder
    outputs = [*folder.glob(f"slurm-{record.id}.out"), *folder.glob(f"slurm-{record.id}_*.out")]  # the latter: a chain
    outputs.sort(key=lambda file: file.stat().st_mtime)
    if not outputs:
        raise ConfigError(f"Slurm job {record.id} has no output yet in {folder}; see kumi status")
    return ("tail", "-n", str(lines), *(("--follow",) if follow else ()), "--", str(outputs[-1]))


def _fields(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", line))


def _options(job: LaunchJob) -> str:
    """Return the #SBATCH lines."""
    launch, slurm = job.launch, job.launch.slurm
    given = [option.strip() for option in slurm.extra]
    output = f"{job.files.replace('%', '%%')}/slurm-{'%A_%a' if slurm.chain or job.array else '%j'}.out"
    lines = [
        _option("job-name", job.name),
        _option("nodes", job.nodes),
        _option("ntasks-per-node", 1, "one kumi train a node, which starts the ranks of its devices"),
    ]
    if job.uses_gpus and not _has_option(given, _GPU_OPTIONS):
        lines.append(_option("gpus-per-node", job.devices_per_node))
    elif not job.uses_gpus:
        lines.append(
            f"# No GPUs: the cluster's device is {_comment(job.device)}. Set cluster.source if the nodes have some.\n"
        )
    if launch.cpus is not None:
        lines.append(_option("cpus-per-task", launch.cpus))
    elif not _has_option(given, _CPU_OPTIONS):
        lines.append("#SBATCH --exclusive                     # all CPUs of the nodes: else a task gets a single one\n")
    if job.memory is not None:
        lines.append(_option("mem", f"{-(-job.memory // 2**20)}M"))
    elif not _has_option(given, ("--mem", "--mem-per-cpu", "--mem-per-gpu")):
        lines.append(_option("mem", 0, "all memory of the nodes"))
    if job.time_limit is not None:
        lines.append(_option("time", _slurm_time(job.time_limit)))
    lines += [
        _option(key, value)
        for key, value in (("partition", slurm.partition), ("account", slurm.account), ("qos", slurm.qos))
        if value is not None
    ]
    if job.array:
        lines.append(_option("array", f"0-{len(job.array) - 1}", "a task for each run"))
    lines += [
        _option("signal", f"B:USR1@{job.save_seconds}", "to this script only; Slurm may send it 60 s early"),
        "#SBATCH --no-kill                       # the job outlives a lost node, so that the others can save\n",
        "#SBATCH --requeue\n" if slurm.chain is None else _option("array", f"1-{slurm.chain}%1", "one after another"),
        _option("open-mode", "append", "a requeued job goes on in the same file"),
        "# sbatch does not make this folder.\n",
        _option("output", output),
        "# By name, and without secrets: Slurm stores these values on its controller.\n",
        _option("export", ",".join(dict.fromkeys((*_BASE_VARIABLES, *launch.env)))),
        *(f"#SBATCH {option}\n" for option in slurm.extra),
    ]
    return "".join(lines)


def _has_option(given: list[str], names: tuple[str, ...]) -> bool:
    return any(option.startswith(name) for option in given for name in names)


def _option(key: str, value: str | int, why: str = "") -> str:
    line = f"#SBATCH --{key}={_quoted(str(value))}"
    return f"{line:<40}# {why}\n" if why else f"{line}\n"


def _quoted(value: str) -> str:
    """Return `value` as sbatch reads it from a #SBATCH line: in double quotes, with backslashes before special ones."""
    if re.fullmatch(r"[\w.,:%/@=+-]+", value, re.ASCII):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _comment(value: str) -> str:
    return value if value.isprintable() else ascii(value)


def _slurm_time(seconds: int) -> str:
    """Return `seconds` as D-HH:MM:SS."""
    days, rest = divmod(seconds, 86400)
    return f"{days}-{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"


# This task of a job array; the number of the array alone would mean all of its tasks.
_TASK = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"

# Parts of the script: the address of node 0, the wait for srun, and the end of a job of a chain.
_HEAD = """
# Node 0 is the first of the job. Its name may resolve on the nodes only by Slurm's own table.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
getent hosts "$head" > /dev/null || head=$(scontrol -o show node "$head" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
export KUMI_HEAD=$head:$((20000 + SLURM_JOB_ID % 10000)) KUMI_NODES=$SLURM_JOB_NUM_NODES
"""

_WAIT = """
job=$!
# A signal that the trap handles ends `wait`, not srun.
wait "$job"; code=$?
while [ "$code" -gt 128 ] && kill -0 "$job" 2> /dev/null; do wait "$job"; code=$?; done
echo "kumi: exit code $code after ${SLURM_RESTART_COUNT:-0} restarts, $(date '+%F %T')"
"""


def _script(job: LaunchJob) -> str:
    """Return the commands of the script."""
    launch, slurm = job.launch, job.launch.slurm
    parts = [
        f"cd -- {shlex.quote(job.folder)} || exit 2\n",
        _array(job) if job.array else f"out={shlex.quote(job.out)}\n",
        'mkdir -p -- "$out" || exit 2\n',
        f'rm -f -- "$out/{STOP_FILE}"                 # of an earlier job\n',
        f"trap 'echo USR1 > \"$out/{STOP_FILE}\"' USR1   # not exit, which would end the nodes before they save\n",
    ]
    if launch.env_file is not None:
        parts.append(read_secrets(launch.env_file))
    if launch.setup:
        parts.append("\n" + "".join(f"{line}\n" for line in launch.setup))
    parts += [_HEAD, _step(job), _WAIT]
    job_id = _TASK if job.array else "$SLURM_JOB_ID"
    parts.append(_requeue(job_id, launch.requeues) if slurm.chain is None else _CHAIN)
    return "".join(parts) + 'exit "$code"\n'


def _step(job: LaunchJob) -> str:
    """Return the command that runs `kumi train` on every node by srun, in a container if the run file names one."""
    launch, slurm = job.launch, job.launch.slurm
    words = [
        "srun",
        # By default, srun may end the other nodes while they save, and exports only the variables of #SBATCH --export.
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--export=ALL",
        "--cpu-bind=none",
    ]
    words += [f"--cpus-per-task={launch.cpus}"] if launch.cpus is not None else []
    pyxis: list[str] = []
    command = '"${command[@]}"' if job.array else shlex.join(job.command)
    if slurm.container is not None and slurm.container_runtime == "pyxis":
        pyxis = [f"--container-image={slurm.container}", f"--container-workdir={job.folder}"]
        pyxis += [f"--container-mounts={','.join(slurm.mounts)}"] if slurm.mounts else []
    elif slurm.container is not None:
        command = f"{shlex.join(_apptainer(job, slurm.container))} {command}"
    return (
        "\n# --kill-on-bad-exit=0 --wait=0: a node that ends does not end the others, which may be saving.\n"
        "# --export=ALL: also the variables that this script sets. --cpu-bind=none: the ranks share all CPUs.\n"
        f"{shlex.join(words)} \\\n"
        + (f"    {shlex.join(pyxis)} \\\n" if pyxis else "")
        + "    bash -c 'export KUMI_NODE=$SLURM_PROCID; exec \"$@\"' kumi-node \\\n"
        + f"    {command} &"
    )


def _apptainer(job: LaunchJob, image: str) -> tuple[str, ...]:
    """Return the words before a command that Apptainer runs in a container of `image`."""
    gpus = ("--rocm" if job.has_amd_gpus else "--nv",) if job.uses_gpus else ()
    mounts = ("--bind", ",".join(job.launch.slurm.mounts)) if job.launch.slurm.mounts else ()
    return ("apptainer", "exec", *gpus, "--pwd", job.folder, *mounts, image)


def _array(job: LaunchJob) -> str:
    """Return the lines that choose the run of this task: its folder, its command, and its name for squeue."""
    cases = [
        f"{number})\n    name={shlex.quote(run.name)}\n    out={shlex.quote(run.out)}\n"
        f"    command=({shlex.join(run.command)}) ;;\n"
        for number, run in enumerate(job.array)
    ]
    return (
        "# Each task of the array is a run of its own.\n"
        f"case $SLURM_ARRAY_TASK_ID in\n{''.join(cases)}esac\n"
        f'scontrol update "JobId={_TASK}" "JobName=$name"\n'
    )


def _requeue(job_id: str, times: int) -> str:
    """Return the lines that start the job with the id `job_id`, a word of bash, again at most `times` times."""
    codes = " | ".join(map(str, RESUMABLE_CODES))
    return (
        f"# {RESUMABLE_CODES[0]}: a node was lost. 75: saved before the time limit. 143: saved because of preemption.\n"
        "# Slurm holds a requeued job for about two minutes: scontrol update JobId=... StartTime=now\n"
        f"case $code in\n{codes})\n"
        f'    [ "${{SLURM_RESTART_COUNT:-0}}" -lt {times} ] && scontrol requeue "{job_id}" ;;\nesac\n'
    )


_CHAIN = f"""# The next job of the chain continues the run, unless it is done or would end in the same way.
case $code in
0 | {" | ".join(map(str, HOPELESS_CODES))})
    scancel --state=PENDING "$SLURM_ARRAY_JOB_ID" ;;
esac
"""
