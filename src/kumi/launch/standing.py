"""The place of this process among the ranks that a launcher started, and the network they meet on. No torch here."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kumi.errors import LayoutError

# Launcher, and its variables for the rank, the number of ranks, and the rank within the machine. The first whose rank
# or size is set counts. srun's size is that of the step: a batch script has SLURM_PROCID and SLURM_NTASKS, too.
# srun comes last: it starts mpirun's daemons, whose place in their own step the ranks inherit.
RANK_VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
MEETING_POINT = ("MASTER_ADDR", "MASTER_PORT")
_ROUTES = Path("/proc/net/route")
_ROUTES_6 = Path("/proc/net/ipv6_route")


@dataclass(frozen=True)
class Standing:
    """One rank of several. `local_rank` counts within the machine; None where the launcher does not tell."""

    rank: int
    world_size: int
    local_rank: int | None

    def environment(self) -> dict[str, str]:
        """The variables in which torch looks for the same, by torchrun's names."""
        found = {"RANK": str(self.rank), "WORLD_SIZE": str(self.world_size)}
        return found if self.local_rank is None else {**found, "LOCAL_RANK": str(self.local_rank)}


def standing(environ: Mapping[str, str]) -> Standing | None:
    """The rank that a launcher started this process as; None when none did.

    Raises LayoutError when `environ` sets only some of the variables that a rank needs, or sets them to nonsense.
    """
    for launcher, rank, size, _ in RANK_VARIABLES:
        ours = launcher == "torchrun"
        # Other launchers also start single programs, which start ranks of their own. PROCID is set in batch scripts.
        if not ({rank, size} & set(environ) if ours else environ.get(size, "1") != "1"):
            continue
        numbers = [environ.get(rank, ""), environ.get(size, "")]
        if not all(map(_is_number, numbers)) or int(numbers[0]) >= int(numbers[1]):
            raise _half_set(environ, launcher, (rank, size))
        found = Standing(int(numbers[0]), int(numbers[1]), _local_rank(environ, *map(int, numbers)))
        if found.world_size > 1 and not all(environ.get(name) for name in MEETING_POINT):
            raise _half_set(environ, launcher, (rank, size))
        return found
    return None


def _local_rank(environ: Mapping[str, str], rank: int, size: int) -> int | None:
    """The rank within the machine: LOCAL_RANK, or what a launcher says that counts the ranks in the same way."""
    for launcher, rank_name, size_name, name in RANK_VARIABLES:
        same = (environ.get(rank_name), environ.get(size_name)) == (str(rank), str(size))
        if name in environ and (same or name == "LOCAL_RANK"):
            if not _is_number(environ[name]) or int(environ[name]) >= size:
                raise _half_set(environ, launcher, (rank_name, size_name, name))
            return int(environ[name])
    return 0 if size == 1 else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _half_set(environ: Mapping[str, str], launcher: str, names: tuple[str, ...]) -> LayoutError:
    wanted = (*names, *MEETING_POINT)
    seen = ", ".join(f"{name}={environ[name]}" for name in wanted if name in environ)
    missing = [name for name in wanted if not environ.get(name)]
    advice = f"set {' and '.join(missing)}, too" if missing else "a rank is a number below the number of ranks"
    return LayoutError(
        f"the environment sets {seen}, which is no rank of a launcher ({launcher}): {advice}; start the ranks with "
        f"torchrun, or unset these variables"
    )


def interface_to(host: str, routes: str | None = None, routes_6: str | None = None) -> str | None:
    """The network interface by which this machine reaches `host`, a name or an address; None where that is not known.

    For an address of this machine itself it is the interface by which the others reach it. `routes` and `routes_6` are
    the kernel's tables, read from /proc by default. A loopback address gives the loopback interface.
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
            found = _longest(ip, _ipv4_routes(_read(_ROUTES) if routes is None else routes))
        else:
            found = _longest(ip, _ipv6_routes(_read(_ROUTES_6) if routes_6 is None else routes_6))
        if found is not None:
            return found
    return None


def outward_interface(routes: str | None = None) -> str | None:
    """The network interface of the default route over IPv4; None where there is none."""
    return interface_to("0.0.0.1", routes)  # an address that no network has, so that only a default route matches


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _longest(ip: ipaddress.IPv4Address | ipaddress.IPv6Address, routes: list[tuple[Network, int, str]]) -> str | None:
    """The interface of the most exact route to `ip`, of the lowest metric among equals."""
    fitting = [(network.prefixlen, -metric, name) for network, metric, name in routes if ip in network]
    return max(fitting)[2] if fitting else None


def _ipv4_routes(table: str) -> list[tuple[Network, int, str]]:
    """Networks, metrics and interfaces of /proc/net/route, whose numbers are in the machine's byte order."""
    routes: list[tuple[Network, int, str]] = []
    for line in table.splitlines()[1:]:
        name, destination, _, flags, _, _, metric, mask, *_ = line.split()
        if int(flags, 16) & 1:  # RTF_UP
            address, bits = (int.from_bytes(int(text, 16).to_bytes(4, sys.byteorder)) for text in (destination, mask))
            routes.append((ipaddress.IPv4Network((address, bits.bit_count())), int(metric), name))
    return routes


def _ipv6_routes(table: str) -> list[tuple[Network, int, str]]:
    """Networks, metrics and interfaces of /proc/net/ipv6_route, without the machine's own addresses, which go by lo."""
    routes: list[tuple[Network, int, str]] = []
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
