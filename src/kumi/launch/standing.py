"""Find the rank that an outside launcher gave this process, and the network interface for its peers. No torch here."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kumi.errors import LayoutError

# Launcher, and its variables for rank, world size and local rank. The first launcher with a variable set counts.
# srun's world size is that of the job step, since SLURM_PROCID and SLURM_NTASKS are set in batch scripts, too.
# srun comes last, because it starts mpirun's daemons, and ranks inherit the daemons' SLURM_PROCID.
_RANK_VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
_ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
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


def launched_rank(environ: Mapping[str, str]) -> LaunchedRank | None:
    """Return the rank that an outside launcher gave this process; None without a launcher.

    Raise LayoutError if `environ` sets only some of the variables that a rank needs, or sets invalid values.
    """
    for launcher, rank, size, _ in _RANK_VARIABLES:
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
