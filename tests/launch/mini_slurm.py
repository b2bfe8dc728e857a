"""A real Slurm of several nodes on one machine, for tests: no systemd, no munge, all files in one folder."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "salloc", "srun", "scontrol", "squeue", "scancel", "sinfo")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None]

GRACE_SECONDS = 60  # of a preempted job
KILL_WAIT_SECONDS = 30  # of a cancelled job, between SIGTERM and SIGKILL: the usual time

CONFIGURATION = """ClusterName=mini
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/completed-jobs.txt
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MessageTimeout=20
SlurmdTimeout=30
InactiveLimit=0
KillWait={kill_wait}
MinJobAge=300
UnkillableStepTimeout=10
ReturnToService=2
JobRequeue=1
PropagateResourceLimits=NONE
"""


class MiniSlurm:
    """`nodes` nodes named n0, n1, ... with `cpus` invented CPUs each; a context manager that starts and ends them.

    Jobs of the partition `urgent` preempt those of `main`, the default, which have GRACE_SECONDS to end. A job that is
    cancelled has KILL_WAIT_SECONDS. `options`: further lines of slurm.conf.
    """

    def __init__(self, folder: Path, nodes: int = 3, cpus: int = 4, options: str = "") -> None:
        self.folder, self.nodes, self.cpus, self.options = folder, nodes, cpus, options
        self.conf = folder / "slurm.conf"

    def __enter__(self) -> MiniSlurm:
        try:
            self._start()
        except BaseException:
            self._kill()
            raise
        return self

    def _start(self) -> None:
        for name in ("state", "log", "run", *(f"spool/n{node}" for node in range(self.nodes))):
            (self.folder / name).mkdir(parents=True)
        controller, *ports = free_ports(self.nodes + 1)
        user = pwd.getpwuid(os.getuid()).pw_name
        places = {"controller": controller, "user": user, "folder": self.folder}
        lines = [CONFIGURATION.format(**places, kill_wait=KILL_WAIT_SECONDS), self.options]
        lines += [
            f"NodeName=n{node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} RealMemory=4000\n"
            for node, port in enumerate(ports)
        ]
        usual = f"Nodes=n[0-{self.nodes - 1}] MaxTime=INFINITE State=UP"
        lines.append(f"PartitionName=main {usual} Default=YES PriorityTier=1 GraceTime={GRACE_SECONDS}\n")
        lines.append(f"PartitionName=urgent {usual} PriorityTier=10\n")
        self.conf.write_text("".join(lines))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        self.run("slurmctld", "-c", "-f", str(self.conf))
        for node in range(self.nodes):
            self.run("slurmd", "-N", f"n{node}", "-f", str(self.conf))
        self.wait_for(lambda: len(set(self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split())) == self.nodes)

    def __exit__(self, *_: object) -> None:
        try:
            self.run("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name)
            self.wait_for(lambda: not self.run("squeue", "-h").strip())
        finally:
            self._kill()

    def _kill(self) -> None:
        """End the daemons. Their pid files go before they do."""
        pids = [int(file.read_text()) for file in (self.folder / "run").glob("*.pid")]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        self.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def run(self, *command: str) -> str:
        ended = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert ended.returncode == 0, (command, ended.stderr)
        return ended.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of the job `number`, by `scontrol show job`."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, number: str, *states: str) -> dict[str, str]:
        """Wait until the job `number` has one of `states`; return its fields."""
        return self.wait_for(lambda: fields if (fields := self.job(number))["JobState"] in states else None)

    @staticmethod
    def wait_for(condition, seconds: float = 90.0):
        """Wait until `condition()` is true and return its value."""
        until = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < until, "it did not happen in time"
            time.sleep(0.1)
        return value


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for listener in sockets:
        listener.bind(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports
