"""An image made by the Dockerfile, for tests: built by Podman from a base that mmdebstrap makes, without a registry."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ("podman", "runc", "mmdebstrap")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None] + ["root"] * (os.geteuid() != 0)
# Making the base takes a minute or two, and it stays the same: it is kept between runs of the tests.
BASE = ROOT / "build" / "image" / "base.tar"
_PACKAGES = "python3,python3-venv,python3-pip"


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile in their order: their names in capitals, and their arguments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name.upper(), words.strip()) for name, _, words in (line.partition(" ") for line in joined.splitlines())]


class NoCpuBuildError(Exception):
    """pip knows no build of PyTorch for CPUs."""


class ContainerImage:
    """The image `kumi:test`, in a storage of Podman's in `folder`; a context manager that builds and removes it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.context = folder, folder / "context"
        # Podman refuses names of more than 50 characters here.
        self._runroot = tempfile.mkdtemp(prefix="kumi-podman-")
        self._podman = ["podman", "--root", str(folder / "graph"), "--runroot", self._runroot]
        self._podman += ["--storage-driver", "overlay", "--cgroup-manager", "cgroupfs", "--runtime", "runc"]

    def __enter__(self) -> ContainerImage:
        make_base()
        (base,) = [words for name, words in self.dockerfile() if name == "ARG" and words.startswith("BASE=")]
        self.podman("import", "--quiet", str(BASE), base.removeprefix("BASE="))
        self._fill_context(base.removeprefix("BASE="))
        secret = self.folder / "pip.conf"
        secret.write_text("[global]\nno-index = true\n# c4n4ry\n")
        words = ["--isolation", "chroot", "--format", "docker", "--secret", f"id=pip,src={secret}"]
        self.podman("build", *words, "--build-arg", "VARIANT=cpu", "--tag", "kumi:test", str(self.context))
        return self

    def __exit__(self, *_: object) -> None:
        self.podman("rm", "--all", "--force", "--time", "0")
        self.podman("rmi", "--all", "--force")
        # Podman mounts this folder on itself, and a mount could not be removed with the test's folder.
        subprocess.run(["umount", "--lazy", str(self.folder / "graph" / "overlay")], capture_output=True)
        shutil.rmtree(self._runroot, ignore_errors=True)

    def dockerfile(self) -> list[tuple[str, str]]:
        return instructions((ROOT / "Dockerfile").read_text())

    def podman(self, *words: str, codes: tuple[int, ...] = (0,)) -> str:
        """Run Podman and return its standard output; its exit code must be one of `codes`."""
        ended = subprocess.run([*self._podman, *words], capture_output=True, text=True, timeout=1800)
        assert ended.returncode in codes, (words, ended.returncode, ended.stdout[-3000:], ended.stderr[-3000:])
        return ended.stdout

    def command(self, *words: str, detached: bool = False) -> list[str]:
        """Return the command that runs a container with the options and words `words`."""
        # Without systemd Podman has no timers for health commands. Limits above this process's own are refused.
        options = ["--network", "host", "--log-driver", "k8s-file", "--no-healthcheck"]
        options += ["--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"]
        return [*self._podman, "run", *options, "--detach" if detached else "--rm", *words]

    def run(self, *words: str, code: int = 0) -> str:
        """Run a container with the options and words `words`; return its output, all of it."""
        command = self.command(*words)
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
        assert ended.returncode == code, (words, ended.returncode, ended.stdout[-3000:])
        return ended.stdout

    def start(self, *words: str) -> str:
        """Start a container and return its id."""
        ended = subprocess.run(self.command(*words, detached=True), capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def end_of(self, container: str) -> tuple[int, str]:
        """Wait for the end of a started container; return its exit code and its output."""
        code = int(self.podman("wait", container))
        command = [*self._podman, "logs", container]
        output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
        return code, output

    def config(self) -> dict:
        """Return the settings that the image gives to containers."""
        return json.loads(self.podman("image", "inspect", "kumi:test"))[0]

    def _fill_context(self, base: str) -> None:
        """Write the Dockerfile, the wheels of kumi and all it needs, and files that must not reach the builder."""
        wheels = self.context / "dist"
        wheels.mkdir(parents=True)
        for name in ("Dockerfile", ".dockerignore"):
            shutil.copyfile(ROOT / name, self.context / name)
        (self.context / "secrets.env").write_text("TOKEN=c4n4ry\n")
        (wheels / "notes.txt").write_text("c4n4ry\n")
        arguments = dict(words.split("=", 1) for name, words in self.dockerfile() if name == "ARG" and "=" in words)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        source = self.folder / "source"  # setuptools writes into the folder from which it builds
        ignored = shutil.ignore_patterns(".*", "build", "dist", "runs", "tests", "benchmarks", "docs", "*.egg-info")
        shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(source)], check=True)
        (kumi,) = wheels.glob("kumi-*.whl")
        version = self.run(base, "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
        download = [*pip, "download", "--python-version", version, "--only-binary", ":all:", "--dest", str(wheels)]
        torch = f"torch=={arguments['TORCH']}+cpu"
        if subprocess.run([*download, "--no-deps", torch], capture_output=True).returncode:
            raise NoCpuBuildError(torch)
        subprocess.run([*download, torch, f"{kumi}[{arguments['EXTRAS']}]"], check=True)


def make_base() -> None:
    """Make the base image's files, a small Debian with Python, with the mirrors of this machine."""
    if BASE.exists():
        return
    BASE.parent.mkdir(parents=True, exist_ok=True)
    part = BASE.with_suffix(".part.tar")
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    debian = [release["VERSION_CODENAME"], str(part)]
    sources = [str(file) for file in sorted(Path("/etc/apt/sources.list.d").glob("debian.sources"))]
    command = ["mmdebstrap", "--quiet", "--variant=apt", f"--include={_PACKAGES}", *debian, *sources]
    subprocess.run(command, check=True)
    part.rename(BASE)
