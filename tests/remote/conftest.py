"""A server of S3 in a process of its own, and a cache in a temporary folder."""

import subprocess
import sys
import urllib.request
import uuid

import pytest

SERVER = """
import sys, time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
MISSING = "needs a server of S3 (moto, 110 MB): pip install 'kumi[s3-check]', as `make test-all` does"


@pytest.fixture(scope="session")
def s3_port():
    """The port of a server of S3."""
    pytest.importorskip("moto", reason=MISSING)
    pytest.importorskip("s3fs", reason=MISSING)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    yield int(server.stdout.readline())
    server.kill()
    server.communicate()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the cache, in the environment."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KUMI_CACHE", str(folder))
    return folder


@pytest.fixture
def bucket(s3_port, cache, monkeypatch):
    """The URL of a new bucket, with the environment to reach it."""
    name = f"bucket-{uuid.uuid4().hex[:8]}"
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{s3_port}/{name}", method="PUT")).close()
    for variable, value in {
        "AWS_ACCESS_KEY_ID": "AKIDTESTING",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3_port}",
        "KUMI_STORE_TIMEOUT": "20",
    }.items():
        monkeypatch.setenv(variable, value)
    return f"s3://{name}"
