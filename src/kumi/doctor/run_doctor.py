"""`kumi doctor`, and the same checks before a run starts: find this process's place among the nodes
and its devices, examine, decide."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

from kumi.config import RunConfig
from kumi.config.cluster_source import cluster_spec
from kumi.config.job_sections import ClusterSection
from kumi.doctor.check_table import CHECKS
from kumi.doctor.device_workers import DeviceWorkers
from kumi.doctor.examine import ARRIVAL_SECONDS, Examination, examine, local_findings
from kumi.doctor.finding import Finding
from kumi.doctor.here import Devices, Here, RunNeeds, run_needs
from kumi.doctor.meeting import Meeting, Seat
from kumi.errors import CommunicationError, ConfigError
from kumi.launch.early_failure import OtherNodeFailedError, telling_others_of_errors
from kumi.launch.local import rank_environment
from kumi.launch.standing import (
    LOOPBACK,
    LaunchedRank,
    Standing,
    find_standing,
    interface_to,
    outward_interface,
    socket_variables,
)
from kumi.spec.cluster import ClusterSpec
from kumi.spec.job import Job

# Checks of a run on one machine: they take no time, and each explains an error that is hard to understand.
_ON_ONE_MACHINE = ("shared memory", "open files", "network variables")
# Ranks of one job may start this far apart; see kumi.launch.rendezvous.
_RUN_ARRIVAL_SECONDS = 600.0
# Time to reach torchrun's store, and to read a value that another rank writes there.
_STORE_SECONDS = 60.0
_count = itertools.count()  # numbers the examinations of this process, equally on all ranks


def doctor(
    config: RunConfig | None,
    *,
    nodes: bool = False,
    node: int | None = None,
    head: str | None = None,
    wait: float = ARRIVAL_SECONDS,
) -> Examination:
    """Examine this machine, or with `nodes` all nodes of the run of `config`; each of them calls this.

    `node` and `head` (HOST:PORT) tell the place of this node; without them, the environment does, as for `kumi train`.
    Raise ConfigError if `nodes` is set, the run has several nodes, and neither tells the place.
    """
    if config is None:
        cluster, needs = cluster_spec(ClusterSection(source="auto")), None
    else:
        cluster, needs = run_needs(config)
    standing = _standing(cluster, node, head) if nodes else None
    return _examine(cluster, needs, standing, wait)


def _standing(cluster: ClusterSpec, node: int | None, head: str | None) -> Standing | LaunchedRank | None:
    """Return the place of this process among the nodes. Raise ConfigError if nothing tells it."""
    by_hand = node is not None or head is not None
    standing = find_standing(os.environ, node=node, nodes=cluster.nodes if by_hand else None, head=head)
    if standing is None and cluster.nodes > 1:
        raise ConfigError(
            f"doctor: --nodes, but neither the environment nor --node and --head tell which of the {cluster.nodes} "
            f"nodes this is; start the command on every node by the launcher (`srun kumi doctor RUN.toml --nodes`), or "
            f"give --node N --head HOST:PORT"
        )
    return standing


def check_before_training(config: RunConfig, standing: Standing | LaunchedRank | None, job: Job | None = None) -> None:
    """Examine the nodes of a run before it starts, or this machine if it is the only one; print warnings.

    `job`: the job of `config`, if the caller has it already. Raise ConfigError with the findings that keep the run from
    starting. Do nothing if the run file sets train.doctor = false.
    """
    if not config.train.doctor:
        return
    cluster, needs = run_needs(config, job)
    if standing is None or (isinstance(standing, LaunchedRank) and cluster.nodes == 1):
        _report(_check_machine(cluster), show=standing is None or standing.rank == 0)
        return
    examination = _examine(cluster, needs, standing, _RUN_ARRIVAL_SECONDS)
    with telling_others_of_errors(None if examination.met else standing):
        _report(examination.findings, show=examination.shown_here)
    if examination.shown_here:
        passed = sum(finding.verdict == "ok" for finding in examination.findings)
        nouns = f"{examination.seat.nodes} {examination.seat.noun}s"
        print(f"doctor     {passed} checks of {nouns} passed in {examination.seconds:.0f} s", flush=True)


def _report(findings: Sequence[Finding], *, show: bool) -> None:
    """Print warnings, and raise ConfigError if a finding keeps the run from starting."""
    harmless = {check.name for check in CHECKS if not check.stops_run}
    failed = [finding for finding in findings if finding.verdict == "fail" and finding.name not in harmless]
    for finding in findings:
        if finding.verdict in ("warn", "fail") and finding not in failed and show:
            print(f"doctor     {finding.name}: {finding.value}; {finding.remedy}", flush=True)
    if failed:
        sentences = "; ".join(f"{finding.name}: {finding.value} ({finding.remedy})" for finding in failed)
        raise ConfigError(
            f"doctor: {sentences}; `kumi doctor` shows all checks, and train.doctor=false leaves them out"
        )


def _check_machine(cluster: ClusterSpec) -> list[Finding]:
    """Return the findings of the quick checks of this machine; none for a run of one rank."""
    if cluster.devices_per_node == 1:
        return []
    devices = Devices(cluster.device.kind, cluster.devices_per_node, per_node=cluster.devices_per_node)
    here = Here(Meeting(Seat()), DeviceWorkers({}), devices, os.environ)
    return local_findings(here, [check for check in CHECKS if check.name in _ON_ONE_MACHINE])


def _examine(
    cluster: ClusterSpec, needs: RunNeeds | None, standing: Standing | LaunchedRank | None, wait: float
) -> Examination:
    """Examine the nodes, among which `standing` is the place of this process; only this machine if it is None.

    Raise the KumiError of a node that failed before it could take part.
    """
    per_node, kind = cluster.devices_per_node, cluster.device.kind
    devices = Devices(kind, per_node, per_node=per_node)
    if isinstance(standing, LaunchedRank):
        devices = Devices(kind, 1, first=standing.local_rank or 0, per_node=per_node)
    seat = _seat(standing)
    try:
        return examine(seat, devices, needs, os.environ, wait=wait, worker_environ=_worker_environ(seat, per_node))
    except OtherNodeFailedError as other:
        raise other.error(seat.node) from None


def _seat(standing: Standing | LaunchedRank | None) -> Seat:
    if standing is None:
        return Seat()
    if isinstance(standing, Standing):
        return Seat(standing.node, standing.nodes, standing.head.host, standing.head.port)
    if standing.world_size == 1:
        return Seat(noun="rank")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port = _port_by_store(standing, host, port)
    return Seat(standing.rank, standing.world_size, host, port, noun="rank")


def _port_by_store(launched: LaunchedRank, host: str, port: int) -> int:
    """Return a free port of rank 0's machine, which rank 0 announces in torchrun's store at `host`:`port`."""
    from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=_STORE_SECONDS)
    try:
        agent_store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        prefix = f"kumi-doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_count)}"
        store = PrefixStore(prefix, agent_store)
        if launched.rank == 0:
            with socket.create_server(("", 0)) as free:
                store.set("port", str(free.getsockname()[1]))
        return int(store.get("port"))
    except DistError as error:
        raise CommunicationError(
            f"rank {launched.rank} cannot reach torchrun's store at {host}:{port} ({error}); check that this machine "
            f"can reach the address, or start the run with train.doctor=false"
        ) from error


def _worker_environ(seat: Seat, per_node: int) -> Mapping[str, str]:
    """Return the variables of the devices' processes: those of ranks, with the interface that leads to the head."""
    environ = {**rank_environment(per_node, os.environ, nodes=seat.nodes), **os.environ}
    if seat.nodes == 1:
        return environ
    interface = interface_to(seat.host)
    if interface == "lo" and seat.host not in LOOPBACK:
        interface = outward_interface()  # the head's own name may lead to its loopback interface
    return environ | socket_variables(interface, seat.host, os.environ)
