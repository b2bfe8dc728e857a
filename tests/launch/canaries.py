"""Secrets of a run, one of each kind, which it uses on servers of this machine, and the places where they must not be.

hub            HF_TOKEN               the model is private, and the export is pushed to a private repository
tracker        WANDB_API_KEY          a stand-in of wandb reads it
object store   AWS_SECRET_ACCESS_KEY  train.out is on a server of S3
               AWS_SESSION_TOKEN
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.hub import fake_hub

from namespaces import inside_namespace

# Random, so that no other program of this machine has them.
_RANDOM = uuid.uuid4().hex
CANARIES = {
    "HF_TOKEN": f"hf_hub{_RANDOM}",
    "WANDB_API_KEY": f"tracker-{_RANDOM}",
    "AWS_SECRET_ACCESS_KEY": f"store/{_RANDOM}+x=",
    "AWS_SESSION_TOKEN": f"session-{_RANDOM}",
}
# Serves S3 at HOST, and writes all objects to FOLDER once its standard input closes.
_S3_SERVER = """
import sys, urllib.request
from pathlib import Path
from moto.server import ThreadedMotoServer
host, folder = sys.argv[1], Path(sys.argv[2])
server = ThreadedMotoServer(ip_address=host, port=0, verbose=False)
server.start()
url = f"http://{host}:{server.get_host_and_port()[1]}"
urllib.request.urlopen(urllib.request.Request(f"{url}/runs", method="PUT")).close()
print(url, flush=True)
sys.stdin.read()
import boto3
client = boto3.client("s3", endpoint_url=url, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1")
for page in client.get_paginator("list_objects_v2").paginate(Bucket="runs"):
    for item in page.get("Contents", ()):
        file = folder / item["Key"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(client.get_object(Bucket="runs", Key=item["Key"])["Body"].read())
"""
_WANDB = """
import hashlib, os
from pathlib import Path

class Run:
    def log(self, values, step):
        digest = hashlib.sha256(os.environ["WANDB_API_KEY"].encode()).hexdigest()
        with open(Path(os.environ["TRACKED"]), "a") as file:
            print(step, digest, file=file)
        if step == 5:
            raise ConnectionError("401 for the key " + os.environ["WANDB_API_KEY"])

def init(**words):
    return Run()
"""


@dataclass
class Services:
    """What a run uses with its secrets.

    `environment`: variables without secrets by which it reaches them. `keys`: sections of its run file. `hub`: the
    hub. `objects`: folder with the objects of the store, after the block. `tracked`: file of the tracker.
    """

    environment: dict[str, str]
    keys: dict[str, dict[str, object]]
    hub: fake_hub.Hub
    objects: Path
    tracked: Path


@contextmanager
def services(folder: Path, model: Path, host: str = "127.0.0.1", namespace: str | None = None) -> Iterator[Services]:
    """Serve a hub with the private model `model`, and S3, at the address `host`, in a network namespace if given.

    Skip the test without a server of S3.
    """
    for package in ("moto", "s3fs"):
        pytest.importorskip(package, reason="needs a server of S3 (moto, 110 MB): pip install 'kumi[s3-check]'")
    modules, objects, tracked = folder / "modules", folder / "objects", folder / "tracked"
    modules.mkdir()
    objects.mkdir()
    (modules / "wandb.py").write_text(_WANDB)
    before, fake_hub.TOKEN = fake_hub.TOKEN, CANARIES["HF_TOKEN"]
    prefix = [] if namespace is None else ["ip", "netns", "exec", namespace]
    server = subprocess.Popen(
        [*prefix, sys.executable, "-c", _S3_SERVER, host, str(objects)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        with ExitStack() as stack:
            with nullcontext() if namespace is None else inside_namespace(namespace):
                hub = stack.enter_context(fake_hub.serve(host))
            hub.add("org/model", {file.name: file.read_bytes() for file in model.iterdir()}, private=True)
            environment = {
                "HF_ENDPOINT": hub.url,
                "HF_HOME": str(folder / "hub-cache"),
                "HF_HUB_DISABLE_XET": "1",
                "HF_HUB_OFFLINE": "0",
                "KUMI_CACHE": str(folder / "stores"),
                "AWS_ENDPOINT_URL": server.stdout.readline().strip(),
                "AWS_ACCESS_KEY_ID": "AKIDTESTING",
                "AWS_DEFAULT_REGION": "us-east-1",
                "TRACKED": str(tracked),
                "PYTHONPATH": f"{modules}:{Path(__file__).parents[2] / 'src'}",
            }
            keys: dict[str, dict[str, object]] = {
                "model": {"source": "org/model"},
                "log": {"every": 1, "trackers": ["wandb"]},
                "export": {"push": "me/mine"},
            }
            yield Services(environment, keys, hub, objects, tracked)
        server.communicate(timeout=60)
    finally:
        fake_hub.TOKEN = before
        server.kill()
        server.communicate()


def check_used(used: Services, output: str) -> None:
    """Assert that a run used all secrets: it has the hub's model, sent metrics, and is on the store and on the hub.

    `output`: of its node 0.
    """
    assert "wandb: failed, so metrics are no longer sent there: 401 for the key (not shown)" in output
    assert any("/org/model/resolve/" in path for _, path in used.hub.asked)
    assert len(used.tracked.read_text().splitlines()) >= 5
    (folder,) = (path.parent for path in used.objects.rglob("metrics.jsonl"))
    assert (folder / "hf" / "README.md").exists()
    repository = used.hub.repositories["me/mine"]
    pushed = repository.commits[repository.sha("main")]
    assert repository.private
    assert "model.safetensors" in pushed
    assert [path for path, data in pushed.items() if canaries_in(data)] == []


def write_secrets(file: Path) -> None:
    """Write all canaries to `file`, which only its owner can use."""
    file.touch(mode=0o600)
    file.write_text("".join(f"{name}={value}\n" for name, value in CANARIES.items()))


def canaries_in(data: bytes) -> list[str]:
    """Return the names of the secrets whose values are in `data`."""
    return [name for name, value in CANARIES.items() if value.encode() in data]


def files_with_canaries(folder: Path) -> dict[Path, list[str]]:
    """Return the files below `folder`, links not followed, that have canaries, and whose."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {path: names for path in files if (names := canaries_in(path.read_bytes()))}


@contextmanager
def command_lines() -> Iterator[set[bytes]]:
    """Yield a set to which the command line of every process of this machine is added for the duration of the block."""
    lines: set[bytes] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            for name in os.listdir("/proc"):
                if name.isdecimal():
                    try:
                        lines.add(Path(f"/proc/{name}/cmdline").read_bytes())
                    except OSError:
                        continue

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        ended.set()
        thread.join()


def exports(environment: Mapping[str, str]) -> list[str]:
    """Return `environment` as lines of [launch] `setup`."""
    return [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
