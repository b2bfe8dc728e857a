"""SSH servers on addresses of this machine, which stand for hosts."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from mini_slurm import MiniSlurm, free_ports

SERVER = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
_CONFIGURATION = """Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PidFile {folder}/{host}.pid
ListenAddress {host}
LogLevel {level}
"""


@contextmanager
def ssh_servers(
    folder: Path,
    hosts: Sequence[str] = HOSTS,
    *,
    level: str = "INFO",
    lines: Sequence[str] = (),
    prefixes: Sequence[Sequence[str]] = (),
    client: Sequence[str] = (),
) -> Iterator[list[str]]:
    """Serve SSH on `hosts` and yield the options with which ssh reaches them; skip the test without a server.

    Each writes its log, of sshd's `level`, to HOST.log in `folder`. `lines`: further lines of its configuration.
    `prefixes`, `client`: words before the command of each server and of ssh, such as those that enter a namespace.
    """
    if SERVER is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs an SSH server (apt-get install openssh-server): sshd or ssh-keygen is missing here")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # privilege separation of Debian's server
    (port,) = free_ports(1)
    options = [f"-p {port}", f"-i {folder}/user", f"-l {pwd.getpwuid(os.getuid()).pw_name}"]
    options += ["-o StrictHostKeyChecking=no", "-o UserKnownHostsFile=/dev/null", "-o LogLevel=ERROR"]
    words = [word for option in options for word in option.split()]
    before = list(prefixes) or [()] * len(hosts)
    processes = []

    def all_answer() -> bool:
        commands = [[*client, "ssh", *words, host, "true"] for host in hosts]
        return all(subprocess.run(command, capture_output=True).returncode == 0 for command in commands)

    try:
        for prefix, host in zip(before, hosts):
            configuration = _CONFIGURATION.format(port=port, folder=folder, host=host, level=level)
            (folder / host).write_text(configuration + "".join(f"{line}\n" for line in lines))
            command = [*prefix, SERVER, "-D", "-f", folder / host, "-E", folder / f"{host}.log"]
            processes.append(subprocess.Popen(command))
        MiniSlurm.wait_for(all_answer)
        yield options
    finally:
        for process in processes:
            process.terminate()
            process.wait()
