"""A server of S3 in a process of its own, and a cache in a temporary folder.

The tests use another server, such as a `radosgw`, where KUMI_TEST_S3_PORT names its port on 127.0.0.1. It must have a
user with the keys in KEYS.
"""

import os
import subprocess
import sys
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
KEYS = {"AWS_ACCESS_KEY_ID": "AKIDTESTING", "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests"}


@pytest.fixture(scope="session")
def s3_port():
    """The port of a server of S3."""
    pytest.importorskip("s3fs", reason=MISSING)
    if port := os.environ.get("KUMI_TEST_S3_PORT"):
        yield int(port)
        return
    pytest.importorskip("moto", reason=MISSING)
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
    from s3fs import S3FileSystem

    name, endpoint = f"bucket-{uuid.uuid4().hex[:8]}", f"http://127.0.0.1:{s3_port}"
    for variable, value in {
        **KEYS,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "KUMI_STORE_TIMEOUT": "20",
    }.items():
        monkeypatch.setenv(variable, value)
    S3FileSystem(endpoint_url=endpoint, skip_instance_cache=True).mkdir(name)
    return f"s3://{name}"
