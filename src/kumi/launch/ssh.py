"""SSH: a script that starts `kumi train` on every host and keeps their standard input open.

    launch.sh ─┬─ ssh a ─ kumi train --end-with-stdin (node 0)
               └─ ssh b ─ kumi train --end-with-stdin (node 1)

When the script ends, for whatever reason, the standard inputs close, and the nodes save and end. This module is a
`kumi.launch.cluster_launchers.ClusterLauncher`.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
from pathlib import Path

from kumi.errors import ConfigError
from kumi.files.output import open_append
from kumi.files.untrusted import read_regular
from kumi.launch.launch_job import LaunchJob, placeholder
from kumi.launch.launch_record import JobState, LaunchRecord
from kumi.launch.secrets_script import path_word, read_secrets

name = "ssh"
shares_files = False
file_name = "launch.sh"

# File with the output of the script and of all hosts.
_OUTPUT = "launch.out"
# Most bytes of that file that are read.
_OUTPUT_BYTES = 2**30
# The line with which the script reports its end.
_ENDED = re.compile(r"^kumi: exit code (\d+) after", re.M)

_SCRIPT = """#!/bin/bash
# {written_by}
# It starts the run on all hosts and stays until they end. Stop it, and the nodes save and end.{note}
{hosts}
options=({options})
head=$(ssh -G "${{options[@]}}" -- "${{hosts[0]}}" | sed -n 's/^hostname //p')
case $head in *:*) head="[$head]" ;; esac   # an IPv6 address

# The commands of a host. Their standard input stays open as long as this script lives.
node() {{
{node}
}}

# ssh hands one text to a shell of the host.
quoted() {{ printf "'%s'" "${{1//\\'/\\'\\\\\\'\\'}}"; }}

# A pipe with this script as its only writer: its end, however it comes, closes the hosts' standard input.
pipe=$(mktemp -d) && mkfifo "$pipe/stdin" && exec 9<> "$pipe/stdin" || exit 2
stopping=
trap 'stopping=1; exec 9>&-' INT TERM HUP

for ((attempt = 0; ; attempt++)); do
    jobs=()
    for ((i = 0; i < ${{#hosts[@]}}; i++)); do
        place="KUMI_HEAD=$(quoted "$head:{port}") KUMI_NODES=${{#hosts[@]}} KUMI_NODE=$i"
        command="$(declare -f node); export $place; node"
        # Without -t: a terminal would end with the connection before the nodes have saved.
        ssh -T -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4 "${{options[@]}}" \\
            -- "${{hosts[i]}}" "bash -c $(quoted "$command")" \\
            < "$pipe/stdin" > >(sed -u "s/^/node $i  /" 9>&-) 2>&1 9>&- &
        jobs+=($!)
    done
    code=0
    for job in "${{jobs[@]}}"; do
        wait "$job"; ended=$?
        # A signal that the trap handles ends `wait`, not ssh.
        while [ "$ended" -gt 128 ] && kill -0 "$job" 2> /dev/null; do wait "$job"; ended=$?; done
        [ "$ended" = 255 ] && ended=7   # ssh itself failed: a lost node
        [ "$ended" -gt "$code" ] && code=$ended
    done
    echo "kumi: exit code $code after $attempt restarts, $(date '+%F %T')"
    # 7: a node was lost. Its run goes on from the last checkpoint.
    [ "$code" = 7 ] && [ -z "$stopping" ] && [ "$attempt" -lt {requeues} ] || break
    sleep 5
done
rm -rf -- "$pipe"
exit "$code"
"""


def text(job: LaunchJob) -> str:
    """Return the script of `job`."""
    launch = job.launch
    hosts = [shlex.quote(host) for host in launch.hosts] or [placeholder("HOSTS")]
    missing = "" if launch.hosts else "   # one a node, as ssh names them: launch.hosts"
    options = [word for option in launch.ssh.options for word in shlex.split(option)]
    return _SCRIPT.format(
        written_by=job.written_by,
        note="\n# It has no time limit: launch.time_limit has no effect." if launch.time_limit else "",
        hosts=f"hosts=({' '.join(hosts)}){missing}",
        options=" ".join(path_word(word) for word in options),
        node="\n".join(_node(job)),
        port=launch.ssh.port,
        requeues=launch.requeues,
    )


def check(job: LaunchJob, *, submit: bool) -> None:
    """Raise ConfigError if launch.hosts or launch.ssh.options are unusable, or if launch.env would be visible."""
    launch = job.launch
    if launch.hosts and len(launch.hosts) != job.nodes:
        raise ConfigError(
            f"launch.hosts has {len(launch.hosts)} hosts, but cluster.nodes={job.nodes}; name one host a node"
        )
    dashed = [host for host in launch.hosts if host.startswith("-")]
    if dashed:
        raise ConfigError(f"launch.hosts: {dashed[0]!r} begins with a dash, which ssh reads as an option; rename it")
    for option in launch.ssh.options:
        try:
            shlex.split(option)
        except ValueError as error:
            raise ConfigError(
                f"launch.ssh.options: {option!r} cannot be split into words like a shell command ({error}); correct it"
            ) from None
    if launch.env:
        raise ConfigError(
            "launch.env: ssh would show the values on its command line; put them into a file on the hosts and name it "
            "with launch.env_file"
        )


def submit_command(file: str) -> tuple[str, ...]:
    """Return the command that starts the script `file`."""
    return ("bash", file)


def submit(job: LaunchJob, file: Path) -> str:
    """Start the script `file` in the background, in a session of its own, and return its process id."""
    command = submit_command(str(file))
    with open_append(file.parent / _OUTPUT) as output:
        redirections = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
            (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
        ]
        return str(os.posix_spawnp(command[0], command, os.environ, file_actions=redirections, setsid=True))


def state(record: LaunchRecord) -> JobState:
    """Return running while the script is alive on this machine, else completed or ended, with its exit code."""
    if _is_alive(record):
        return JobState("running", f"process {record.id} on this machine")
    ends = _ENDED.findall(_output(record))
    if not ends:
        return JobState("unknown", "the script does not run on this machine, and its output has no exit code")
    return JobState("completed" if ends[-1] == "0" else "ended", f"exit code {ends[-1]}")


def stop(record: LaunchRecord, out: Path, *, now: bool) -> str:
    """Close the standard input of the hosts, or cut their connections `now`; they save and end by themselves."""
    if not _is_alive(record):
        return f"process {record.id} does not run on this machine; nothing is stopped"
    if now:
        os.killpg(int(record.id), signal.SIGKILL)
        return f"process {record.id} and its connections are killed; the hosts notice it and end"
    os.kill(int(record.id), signal.SIGTERM)
    return f"process {record.id} lets its hosts save and end; see kumi logs"


def log_command(record: LaunchRecord, lines: int, *, follow: bool) -> tuple[str, ...]:
    """Return the command that shows the last `lines` of the output of all hosts."""
    return ("tail", "-n", str(lines), *(("--follow",) if follow else ()), "--", str(record.folder / _OUTPUT))


def _is_alive(record: LaunchRecord) -> bool:
    """Return True if the process of `record` runs and is the script, not a later process of the same number."""
    process = Path("/proc") / record.id
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    # A process that has just been started has no command line yet; neither has a dead one (state Z).
    return state != "Z" and (words == [b""] or os.fsencode(record.folder / file_name) in words)


def _output(record: LaunchRecord) -> str:
    """Return the output of the script; "" if there is none, or if it is too long."""
    try:
        return read_regular(record.folder / _OUTPUT, _OUTPUT_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def _node(job: LaunchJob) -> list[str]:
    """Return the commands of a host, indented."""
    launch = job.launch
    lines = [f"cd -- {path_word(launch.ssh.folder or job.folder)} || exit 2"]
    lines += [] if launch.env_file is None else read_secrets(launch.env_file).strip().splitlines()
    # The nodes end when their standard input ends, because an ssh client that is killed leaves its command running.
    lines += [*launch.setup, f"exec {shlex.join(job.command)} --end-with-stdin"]
    return [f"    {line}" if line else "" for line in lines]
