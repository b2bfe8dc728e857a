"""Find where this process stands in a run on several machines, and the network interface for its peers. No torch here.

A process is one rank of an outside launcher (`LaunchedRank`), or the agent of one node, which starts the ranks of that
node (`Standing`), or alone on its machine (None). `find_standing` decides by the first of these that is present:

    1. the command line          kumi train RUN.toml --node 1 --nodes 4 --head HOST:PORT
    2. kumi's variables          KUMI_NODE, KUMI_NODES, KUMI_HEAD
    3. a launcher of ranks       torchrun, Open MPI's mpirun, mpiexec, srun with one task per rank
    4. PyTorch's TrainJob        PET_NODE_RANK, PET_NNODES, PET_MASTER_ADDR, PET_MASTER_PORT
    5. srun, one task a node     SLURM_NODEID, SLURM_STEP_NUM_NODES, SLURM_STEP_NODELIST
    6. SkyPilot                  SKYPILOT_NODE_RANK, SKYPILOT_NUM_NODES, SKYPILOT_NODE_IPS

What 1 and 2 leave open, 4 to 6 or the index of a Kubernetes Indexed Job (JOB_COMPLETION_INDEX) complete.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kumi.errors import ConfigError, LayoutError

# Launcher, and its variables for rank, world size and local rank. The first launcher with a variable set counts.
# srun's world size is that of the job step, since SLURM_PROCID and SLURM_NTASKS are set in batch scripts, too.
# srun comes last, because it starts mpirun's daemons, and ranks inherit the daemons' SLURM_PROCID.
_RANK_VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
_ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")  # torch's names of the address of rank 0
NODE, NODES, HEAD = "KUMI_NODE", "KUMI_NODES", "KUMI_HEAD"
# Ports of heads that nobody chose: below those that the kernel gives to outgoing connections.
_FIRST_PORT, _PORTS = 20_000, 10_000
_SCONTROL_SECONDS = 20.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")  # heads of runs whose nodes are all on one machine
_ROUTES = Path("/proc/net/route")
_ROUTES_6 = Path("/proc/net/ipv6_route")


@dataclass(frozen=True)
class LaunchedRank:
    """A rank that an outside launcher started."""

    rank: int
    world_size: int
    local_rank: int | None  # rank within the machine; None if the launcher does not set it

    def torch_environment(self) -> dict[str, str]:
        """Return these numbers as the variables that torch reads, which are torchrun's."""
        variables = {"RANK": str(self.rank), "WORLD_SIZE": str(self.world_size)}
        return variables if self.local_rank is None else {**variables, "LOCAL_RANK": str(self.local_rank)}


@dataclass(frozen=True)
class HeadAddress:
    """Where the head of a run listens: the host as the nodes reach it, a name or an address, and the port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Standing:
    """Where the agent of one node stands in a run on several nodes. Node 0 has the head and rank 0."""

    node: int
    nodes: int
    head: HeadAddress
    local_ranks: int | None  # ranks of a node, where the source says it
    source: str  # where this is from, in words


def find_standing(
    environ: Mapping[str, str], *, node: int | None = None, nodes: int | None = None, head: str | None = None
) -> Standing | LaunchedRank | None:
    """Return where this process stands (see the module docstring); None for the only process of a run.

    `node`, `nodes` and `head` are those of the command line. Raise ConfigError if the node's place is only half
    described or impossible, and LayoutError if a rank's is.
    """
    parts = [
        _Part("the command line", {"--node": node, "--nodes": nodes, "--head": head}, node, nodes, head),
        _Part("KUMI_NODE, KUMI_NODES and KUMI_HEAD", _present(environ, NODE, NODES, HEAD)).read(NODE, NODES, HEAD),
    ]
    if not any(part.present for part in parts):
        launched = launched_rank(environ)
        if launched is not None:
            return launched
        parts = []
    if all(any(getattr(part, name) is not None for part in parts) for name in ("node", "nodes", "head")):
        return _complete(parts)
    scheduled = next((part for read in _SCHEDULERS if (part := read(environ)) is not None), None)
    index = _present(environ, "JOB_COMPLETION_INDEX")
    if scheduled is None and parts and index:
        scheduled = _Part("a Kubernetes Indexed Job", index).read("JOB_COMPLETION_INDEX")
    parts += [] if scheduled is None else [scheduled]
    return _complete(parts) if parts else None


def refuse_several_nodes(verb: str, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a launcher has started the command `verb`, which works on one machine, on several nodes."""
    standing = find_standing(environ)
    if isinstance(standing, Standing):
        raise ConfigError(
            f"{verb}: it was started on {standing.nodes} nodes ({standing.source}), and each would do all of the work, "
            f"since kumi {verb} works on one machine; start it once (srun --nodes=1 --ntasks=1), or unset the "
            f"variables of the launcher"
        )


@dataclass(frozen=True)
class _Part:
    """What one source says about a node's place. `seen`: the variables or options by which it says so."""

    source: str
    seen: Mapping[str, str | int | None]
    node: int | None = None
    nodes: int | None = None
    head: str | None = None
    local_ranks: int | None = None
    invalid: tuple[str, ...] = field(default=())  # variables whose value is no number

    @property
    def present(self) -> bool:
        """True if the source says anything."""
        return any(value is not None for value in self.seen.values())

    def read(self, node: str, nodes: str | None = None, head: str | None = None) -> _Part:
        """Return this part with the values of the variables `node`, `nodes` and `head` in `seen`."""
        numbers = {name: self.seen.get(name) for name in (node, nodes) if name is not None}
        invalid = tuple(name for name, text in numbers.items() if text is not None and not _is_number(str(text)))
        values = {name: int(text) for name, text in numbers.items() if text is not None and name not in invalid}
        address = self.seen.get(head) if head is not None else None
        return replace(
            self,
            node=values.get(node),
            nodes=None if nodes is None else values.get(nodes),
            head=None if address is None else str(address),
            invalid=invalid,
        )


def _present(environ: Mapping[str, str], *names: str) -> dict[str, str | int | None]:
    return {name: environ[name] for name in names if environ.get(name)}


def _trainjob_part(environ: Mapping[str, str]) -> _Part | None:
    """Read the variables that Kubeflow's TrainJob sets for torchrun; None if it sets no node's number and no count."""
    seen = _present(environ, "PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NPROC_PER_NODE")
    if not {"PET_NODE_RANK", "PET_NNODES"} & set(seen):
        return None
    host, port = seen.get("PET_MASTER_ADDR"), seen.get("PET_MASTER_PORT")
    ranks = str(seen.get("PET_NPROC_PER_NODE", ""))  # a number, or auto, cpu, gpu
    part = _Part("a TrainJob (PET_NODE_RANK)", seen).read("PET_NODE_RANK", "PET_NNODES")
    return replace(
        part,
        head=None if host is None or port is None else _join_address(str(host), str(port)),
        local_ranks=int(ranks) if _is_number(ranks) else None,
    )


def _slurm_part(environ: Mapping[str, str]) -> _Part | None:
    """Read the variables of a step of srun that has several tasks, one on each node; None without such a step.

    A batch script and the shell of `salloc` are outside of such a step. They count as one machine, although they have
    SLURM_NNODES, SLURM_NODEID and SLURM_PROCID, too.
    """
    if not _one_task_a_node(environ):
        return None
    seen = _present(environ, "SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    part = _Part("srun, one task a node", seen).read("SLURM_NODEID", "SLURM_STEP_NUM_NODES")
    job, step, hosts = (environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"))
    if not hosts or not _is_number(job):
        return part
    # All nodes derive the same port; steps of one job, and jobs that share a node, have different ones.
    number = int(job) + 101 * (int(step) if _is_number(step) else 0)
    host = _slurm_address(first_host(hosts))
    return replace(part, head=_join_address(host, str(_FIRST_PORT + number % _PORTS)))


def _one_task_a_node(environ: Mapping[str, str]) -> bool:
    """Return True in a step of srun with several tasks, each on a node of its own."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    return tasks != "1" and tasks == environ.get("SLURM_STEP_NUM_NODES")


def first_host(hosts: str) -> str:
    """Return the first host of Slurm's list, such as gpu007 of "gpu[007-009,12],cpu1"."""
    name = re.split(r",(?![^\[]*\])", hosts)[0]
    while (match := re.search(r"\[([^\]]*)\]", name)) is not None:
        name = name[: match.start()] + re.split("[-,]", match[1])[0] + name[match.end() :]
    return name


def _slurm_address(name: str) -> str:
    """Return `name`, the name of a node; if no name server knows the name, the node's address in Slurm's own table."""
    try:
        socket.getaddrinfo(name, None)
        return name
    except OSError:
        pass
    command = ["scontrol", "--oneliner", "show", "node", name]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return name
    address = re.search(r"\bNodeAddr=(\S+)", shown)
    return name if address is None else address[1]


def _skypilot_part(environ: Mapping[str, str]) -> _Part | None:
    """Read the variables of a SkyPilot task; None if it sets neither a node's number nor the number of nodes."""
    names = ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE")
    seen = _present(environ, *names)
    if not set(names[:2]) & set(seen):
        return None
    part = _Part("SkyPilot", seen).read(*names[:2])
    addresses = str(seen.get("SKYPILOT_NODE_IPS", "")).split()
    port = _FIRST_PORT + zlib.crc32(environ.get("SKYPILOT_TASK_ID", "").encode()) % _PORTS
    gpus = str(seen.get("SKYPILOT_NUM_GPUS_PER_NODE", ""))
    return replace(
        part,
        head=_join_address(addresses[0], str(port)) if addresses else None,
        local_ranks=int(gpus) if _is_number(gpus) and int(gpus) else None,
    )


_SCHEDULERS: tuple[Callable[[Mapping[str, str]], _Part | None], ...] = (_trainjob_part, _slurm_part, _skypilot_part)


def _complete(parts: list[_Part]) -> Standing | None:
    """Return the place that `parts` describe: of each value, the first part that has it counts. None for one node."""
    node = next((part.node for part in parts if part.node is not None), None)
    nodes = next((part.nodes for part in parts if part.nodes is not None), None)
    head = next((part.head for part in parts if part.head is not None), None)
    if any(part.invalid for part in parts):
        names = ", ".join(name for part in parts for name in part.invalid)
        raise _half_set_error(parts, f"{names} is not a number")
    if nodes == 0 or (nodes is not None and node is not None and node >= nodes):
        raise _half_set_error(parts, "nodes are numbered from 0, below the number of nodes")
    if nodes == 1:
        return None
    missing = [
        f"{option} or {variable}"
        for option, variable, value in (("--node", NODE, node), ("--nodes", NODES, nodes), ("--head", HEAD, head))
        if value is None
    ]
    if missing or node is None or nodes is None or head is None:
        raise _half_set_error(parts, f"it lacks {' and '.join(missing)}")
    local_ranks = next((part.local_ranks for part in parts if part.local_ranks is not None), None)
    source = next(part.source for part in parts if part.present)
    return Standing(node, nodes, _parse_address(head, parts), local_ranks, source)


def _half_set_error(parts: list[_Part], reason: str) -> ConfigError:
    """Return the error that `parts` do not describe the place of a node, for the given reason."""
    seen = ", ".join(
        f"{name}={' '.join(str(value).split())}"
        for part in parts
        for name, value in part.seen.items()
        if value is not None
    )
    return ConfigError(
        f"{seen} does not describe the place of this node in the run: {reason}; start `kumi train` on every node with "
        f"--node, --nodes and --head HOST:PORT of node 0, or unset these for a run on this machine alone"
    )


def _join_address(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse_address(text: str, parts: list[_Part]) -> HeadAddress:
    """Return the address HOST:PORT in `text`. `parts`: for the error if it is none."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|([\w.-]+)):(\d{1,5})", text, re.ASCII)
    if match is None or not 0 < int(match[3]) < 65_536:
        raise _half_set_error(parts, f"the head {text!r} is not HOST:PORT, or [ADDRESS]:PORT for IPv6")
    return HeadAddress(match[1] or match[2], int(match[3]))


def launched_rank(environ: Mapping[str, str]) -> LaunchedRank | None:
    """Return the rank that an outside launcher gave this process; None without a launcher of ranks.

    Raise LayoutError if `environ` sets only some of the variables that a rank needs, or sets invalid values.
    """
    if _present(environ, NODE, NODES, HEAD):
        return None
    for launcher, rank, size, _ in _RANK_VARIABLES:
        # `srun --mpi=pmi2` gives its tasks PMI's variables, too.
        srun_numbers = (environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_NUM_TASKS"))
        by_pmi = launcher == "mpiexec" and (environ.get(rank), environ.get(size)) == srun_numbers
        if (launcher == "srun" or by_pmi) and _one_task_a_node(environ):
            continue
        by_torchrun = launcher == "torchrun"
        # With other launchers, a world size of 1 is a single program that starts its own ranks. Their rank variables do
        # not count alone, because SLURM_PROCID is set in batch scripts, too.
        if not ({rank, size} & set(environ) if by_torchrun else environ.get(size, "1") != "1"):
            continue
        numbers = [environ.get(rank, ""), environ.get(size, "")]
        if not all(map(_is_number, numbers)) or int(numbers[0]) >= int(numbers[1]):
            raise _invalid_rank(environ, launcher, (rank, size))
        launched = LaunchedRank(int(numbers[0]), int(numbers[1]), _local_rank(environ, *map(int, numbers)))
        if launched.world_size > 1 and not all(environ.get(name) for name in _ADDRESS_VARIABLES):
            raise _invalid_rank(environ, launcher, (rank, size))
        return launched
    return None


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables of launchers of ranks (3 in the module docstring) and kumi's own (2).

    A process that gets the result as its environment can start ranks of its own.
    """
    launchers = {name for _, *names in _RANK_VARIABLES for name in names}
    placed = {*launchers, *_ADDRESS_VARIABLES, NODE, NODES, HEAD}
    return {name: value for name, value in environ.items() if name not in placed}


def _local_rank(environ: Mapping[str, str], rank: int, size: int) -> int | None:
    """Return the rank within the machine: LOCAL_RANK, or that of any launcher with the same rank and world size."""
    for launcher, rank_name, size_name, name in _RANK_VARIABLES:
        same = (environ.get(rank_name), environ.get(size_name)) == (str(rank), str(size))
        if name in environ and (same or name == "LOCAL_RANK"):
            if not _is_number(environ[name]) or int(environ[name]) >= size:
                raise _invalid_rank(environ, launcher, (rank_name, size_name, name))
            return int(environ[name])
    return 0 if size == 1 else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _invalid_rank(environ: Mapping[str, str], launcher: str, names: tuple[str, ...]) -> LayoutError:
    """Return the error that the variables `names` of `launcher` do not describe a rank."""
    required = (*names, *_ADDRESS_VARIABLES)
    present = ", ".join(f"{name}={environ[name]}" for name in required if name in environ)
    missing = [name for name in required if not environ.get(name)]
    advice = f"set {' and '.join(missing)}, too" if missing else "a rank is a number below the number of ranks"
    return LayoutError(
        f"the environment sets {present}, which does not describe a rank of a launcher ({launcher}): {advice}; start "
        f"the ranks with torchrun, or unset these variables"
    )


def interface_to(host: str, routes: str | None = None, routes_6: str | None = None) -> str | None:
    """Return the network interface by which this machine reaches `host`, a name or an address; None if not known.

    For an address of this machine, return the interface that has it. `routes` and `routes_6` are the kernel's IPv4 and
    IPv6 routing tables, read from /proc by default. A loopback address gives the loopback interface.
    """
    if sys.platform != "linux":
        return None
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, *_, address in answers:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
        if ip.is_loopback:
            return "lo"
        if family == socket.AF_INET:
            interface = _longest_match(ip, _ipv4_routes(_read(_ROUTES) if routes is None else routes))
        else:
            interface = _longest_match(ip, _ipv6_routes(_read(_ROUTES_6) if routes_6 is None else routes_6))
        if interface is not None:
            return interface
    return None


def outward_interface(routes: str | None = None) -> str | None:
    """Return the network interface of the IPv4 default route; None without a default route."""
    return interface_to("0.0.0.1", routes)  # an address in no network, so only a default route matches


def socket_variables(interface: str | None, host: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which gloo and NCCL use `interface`, through which `host` is reached; {} for None.

    A variable that `environ` sets is left out, and so are those of NCCL if the user has chosen gloo's interface. NCCL
    takes names as prefixes unless "=" stands before them, and the first address of an interface of either family.
    """
    if interface is None or "GLOO_SOCKET_IFNAME" in environ:
        return {}
    variables = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    if _has_ipv6_only(host):
        variables["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    return {name: value for name, value in variables.items() if name not in environ}


def _has_ipv6_only(host: str) -> bool:
    """Return True if the name or address `host` has IPv6 addresses alone."""
    try:
        families = {family for family, *_ in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return families == {socket.AF_INET6}


_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _longest_match(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address, routes: list[tuple[_Network, int, str]]
) -> str | None:
    """Return the interface of the route to `ip` with the longest prefix; of several, that with the lowest metric."""
    matches = [(network.prefixlen, -metric, name) for network, metric, name in routes if ip in network]
    return max(matches)[2] if matches else None


def _ipv4_routes(table: str) -> list[tuple[_Network, int, str]]:
    """Parse /proc/net/route into (network, metric, interface). Its numbers are in the machine's byte order."""
    routes: list[tuple[_Network, int, str]] = []
    for line in table.splitlines()[1:]:
        name, destination, _, flags, _, _, metric, mask, *_ = line.split()
        if int(flags, 16) & 1:  # RTF_UP
            address, bits = (int.from_bytes(int(text, 16).to_bytes(4, sys.byteorder)) for text in (destination, mask))
            routes.append((ipaddress.IPv4Network((address, bits.bit_count())), int(metric), name))
    return routes


def _ipv6_routes(table: str) -> list[tuple[_Network, int, str]]:
    """Parse /proc/net/ipv6_route into (network, metric, interface), without the machine's own addresses (on lo)."""
    routes: list[tuple[_Network, int, str]] = []
    for line in table.splitlines():
        destination, length, *_, metric, _, _, _, name = line.split()
        if name != "lo":
            network = ipaddress.IPv6Network((int(destination, 16), int(length, 16)), strict=False)
            routes.append((network, int(metric, 16), name))
    return routes


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
