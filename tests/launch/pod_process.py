"""A pod as a process of this machine, as a kubelet runs it: process 1 of its own namespaces of processes, mounts, host
names and networks, with the command, the variables and the volumes of its manifest."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Keys that say on which machine a pod may run, and what it may use there: this machine has no such limits.
_ABOUT_MACHINES = ("image", "resources", "securityContext", "nodeSelector", "affinity")
# Folders that mounts may make in a pod, because they lie on file systems of its own.
_OWN_FOLDERS = ("/run/", "/dev/shm")


@dataclass
class Node:
    """What a pod uses of its machine and cluster.

    - `folder`: of the pods' files.
    - `variables`: the environment of the image.
    - `config_maps`, `secrets`: name -> entries; `claims`: name of a PersistentVolumeClaim -> folder.
    - `hurry`: how much shorter the pauses before another start are than those of Kubernetes.
    """

    folder: Path
    variables: Mapping[str, str]
    config_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    claims: dict[str, Path] = field(default_factory=dict)
    hurry: float = 50.0


class Pod:
    """A pod from the template `manifest` with the name, labels and annotations in `metadata`, which runs at once.

    `hostname`, `address`: in the cluster's network. `network`: the network namespace that has this address.
    """

    def __init__(
        self,
        node: Node,
        manifest: Mapping[str, Any],
        metadata: Mapping[str, Any],
        hostname: str,
        address: str,
        network: str,
    ) -> None:
        only(manifest, "restartPolicy", "terminationGracePeriodSeconds", "subdomain", "containers", "volumes")
        (container,) = manifest["containers"]
        only(container, "name", "command", "args", "env", "envFrom", "volumeMounts")
        assert manifest["restartPolicy"] in ("Never", "OnFailure")
        self._restarts_container = manifest["restartPolicy"] == "OnFailure"
        self.metadata, self.hostname, self.address = metadata, hostname, address
        self.subdomain = manifest.get("subdomain", "")
        self.conditions: set[str] = set()
        self.container = container["name"]
        self.grace = float(manifest.get("terminationGracePeriodSeconds", 30))
        self.ended_at = 0.0
        self.restarts = 0  # of the container
        self._kill_at: float | None = None
        self._restart_at: float | None = None
        self._node = node
        self._folder = node.folder / metadata["name"]
        for name in ("home", "tmp"):
            (self._folder / name).mkdir(parents=True)
        self.log, self._hosts = self._folder / "log", self._folder / "hosts"
        self._hosts.touch()
        environment = self._environment(container, node)
        words = [_expanded(word, environment) for key in ("command", "args") for word in container.get(key, ())]
        setup = ["set -e", *self._mounts(node, manifest, container), f"hostname {hostname}"]
        # The shell below stays outside, and gives 128 and the signal as the exit code, as a container runtime does.
        inside = '(mount -t proc proc /proc && exec "$@"); exit $?'
        script = "\n".join([*setup, f'exec unshare --pid sh -c {shlex.quote(inside)} sh "$@"'])
        apart = ("nsenter", f"--net=/run/netns/{network}", "unshare", "--mount", "--uts", "--ipc")
        self._command, self._environ = [*apart, "sh", "-c", script, "sh", *words], environment
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                self._command,
                cwd=self._folder / "home",
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code of the container, 128 and the signal if one killed it; None while it runs or starts again."""
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self.kill()
        code = self._process.poll()
        if code and self._restarts_container and self._kill_at is None:
            self._restart()
            return None
        if code is not None and not self.ended_at:
            self.ended_at = time.monotonic()
        return code

    def _restart(self) -> None:
        """Start the container again after a pause: 10 s, then twice as long each time, at most 5 minutes."""
        now = time.monotonic()
        if self._restart_at is None:
            self._restart_at = now + min(10.0 * 2**self.restarts, 300.0) / self._node.hurry
        elif now > self._restart_at:
            self.restarts, self._restart_at = self.restarts + 1, None
            self._process = self._start()

    def kill(self) -> None:
        """End all processes of the pod at once, as the kernel does when memory is short: SIGKILL to process 1."""
        self._signal(signal.SIGKILL)

    def end(self) -> None:
        """End the pod and wait for it, when nobody looks at it any more."""
        self.kill()
        self._process.wait()

    def delete(self) -> None:
        """End the pod as its deletion does: SIGTERM to process 1, and SIGKILL once its grace period is over."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self.grace
            self._signal(signal.SIGTERM)

    def know_hosts(self, lines: list[str]) -> None:
        """Let these lines, and those of this pod itself, be its /etc/hosts."""
        text = "\n".join(["127.0.0.1 localhost", "::1 localhost", f"{self.address} {self.hostname}", *lines, ""])
        with open(self._hosts, "r+") as file:  # the same file, which is mounted
            file.write(text)
            file.truncate()

    def _signal(self, signum: int) -> None:
        # Process 1 of the pod is the child with a number of its own in there; it comes after the mounts are made.
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        until = time.monotonic() + 5
        while self._process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError):
                for pid in children.read_text().split():
                    if re.search(r"^NSpid:\t\d+\t1$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
                        os.kill(int(pid), signum)
                        return
            time.sleep(0.01)

    def _environment(self, container: Mapping[str, Any], node: Node) -> dict[str, str]:
        """Return the variables in the order of a kubelet: later ones replace earlier ones, and may name them."""
        variables = {
            **node.variables,
            "HOME": str(self._folder / "home"),
            "TMPDIR": str(self._folder / "tmp"),
            "HOSTNAME": self.hostname,
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_SERVICE_PORT": "443",
        }
        for source in container.get("envFrom", ()):
            only(source, "secretRef")
            variables |= node.secrets[source["secretRef"]["name"]]
        for entry in container.get("env", ()):
            if "value" in entry:
                variables[entry["name"]] = _expanded(entry["value"], variables)
            elif "secretKeyRef" in entry["valueFrom"]:
                secret = entry["valueFrom"]["secretKeyRef"]
                variables[entry["name"]] = node.secrets[secret["name"]][secret["key"]]
            else:
                variables[entry["name"]] = self._field(entry["valueFrom"]["fieldRef"]["fieldPath"])
        return variables

    def _field(self, path: str) -> str:
        match = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
        if match is not None:
            return self.metadata[match[1]][match[2]]
        fields = {f"metadata.{name}": self.metadata[name] for name in ("name", "namespace")}
        return {**fields, "status.podIP": self.address}[path]

    def _mounts(self, node: Node, manifest: Mapping[str, Any], container: Mapping[str, Any]) -> list[str]:
        """Return lines of a shell script that mounts the volumes, and the files of a kubelet's own."""
        volumes = {volume["name"]: volume for volume in manifest.get("volumes", ())}
        lines = ["mount -t tmpfs tmpfs /run", f"mount --bind {shlex.quote(str(self._hosts))} /etc/hosts"]
        for mount in container.get("volumeMounts", ()):
            volume, where = volumes[mount["name"]], mount["mountPath"]
            if where.startswith(_OWN_FOLDERS):
                lines.append(f"mkdir -p {shlex.quote(where)}")
            if "emptyDir" in volume:
                assert volume["emptyDir"]["medium"] == "Memory"
                size = volume["emptyDir"].get("sizeLimit")
                options = f"-o size={size} " if size else ""
                lines.append(f"mount -t tmpfs {options}tmpfs {shlex.quote(where)}")
            elif "configMap" in volume:
                source = self._config_map(node.config_maps[volume["configMap"]["name"]], mount["name"])
                lines += _bind(source, where, "ro")
            else:
                lines += _bind(node.claims[volume["persistentVolumeClaim"]["claimName"]], where, "rw")
        return lines

    def _config_map(self, entries: Mapping[str, str], name: str) -> Path:
        """Write the files of a ConfigMap as a kubelet does: links into a folder that it can replace at once."""
        folder = self._folder / "volumes" / name
        (folder / "..2026").mkdir(parents=True)
        (folder / "..data").symlink_to("..2026")
        for key, text in entries.items():
            (folder / "..2026" / key).write_text(text)
            (folder / key).symlink_to(f"..data/{key}")
        return folder


def _bind(source: Path, where: str, mode: str) -> list[str]:
    place = shlex.quote(where)
    return [f"mount --bind {shlex.quote(str(source))} {place}", f"mount -o remount,bind,{mode} {place}"]


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return `text` with $(NAME) replaced by variables that exist, and $$ by $."""
    return re.sub(r"\$(?:\$|\(([^)]*)\))", lambda match: variables.get(match[1], match[0]) if match[1] else "$", text)


def only(mapping: Mapping[str, Any], *keys: str) -> None:
    """Fail for keys that this file would ignore although Kubernetes does not."""
    unread = set(mapping) - {*keys, *_ABOUT_MACHINES}
    assert not unread, f"{sorted(unread)} would be ignored"
