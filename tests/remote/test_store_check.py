"""`kumi doctor` of a run whose train.out is a URL: the store can be used from here, and the cache has room."""

from __future__ import annotations

import json

import pytest
from tests.doctor.nodes import write_run
from tests.remote.faulty_proxy import FaultyProxy

from kumi.cli import main
from kumi.doctor.device_workers import DeviceWorkers
from kumi.doctor.here import Devices, Here, RunNeeds
from kumi.doctor.meeting import Meeting, Seat
from kumi.doctor.store_checks import store_access
from kumi.remote import retries
from kumi.remote.cache_folder import local_run_folder
from kumi.remote.remote_store import open_store


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch):
    monkeypatch.setattr(retries, "_LONGEST_PAUSE", 0.01)


def reading(url):
    """What the check of the store at `url` measures on this machine."""
    needs = RunNeeds(local_run_folder(url), 0, {}, url=url)
    return store_access(Here(Meeting(Seat()), DeviceWorkers({}), Devices("cpu", 1), {}, needs))


def test_a_run_on_a_store_is_checked_by_the_command(tmp_path, cache, monkeypatch, capsys):
    url = f"file://{tmp_path}/store/run"
    file = write_run(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUMI_CACHE_LIMIT", "1KB")
    assert main(["doctor", str(file), f"train.out={url}", "--json"]) == 2
    findings = {line["name"]: line for line in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["object store"]["verdict"] == "ok"
    assert findings["object store"]["value"].startswith("written, read and removed a file in ")
    assert findings["shared folder"]["value"] == "writable"
    assert (findings["free disk"]["verdict"], findings["free disk"]["value"]) == ("fail", "1000 B")
    assert "KUMI_CACHE_LIMIT" in findings["free disk"]["remedy"]
    assert not list((tmp_path / "store").rglob("*.doctor*/*"))
    assert not cache.exists()  # the check removes the folders that it makes


def test_a_folder_is_no_store(tmp_path):
    needs = RunNeeds(tmp_path, 0, {})
    here = Here(Meeting(Seat()), DeviceWorkers({}), Devices("cpu", 1), {}, needs)
    assert store_access(here).absent == "train.out is a folder"


def test_a_store_that_cannot_be_written(tmp_path, cache):
    (tmp_path / "file").write_text("no folder")
    (problem,) = reading(f"file://{tmp_path}/file/run").problems
    assert problem.startswith(f"no file can be written: file://{tmp_path}/file/run")
    (problem,) = reading("nope://x/y").problems
    assert "nope" in problem


def test_a_bucket_is_left_as_it_was(bucket):
    assert reading(f"{bucket}/runs/x").value.startswith("written, read and removed a file in ")
    with open_store(bucket) as store:
        assert store.list_files() == {}


def test_a_bucket_that_does_not_exist(bucket):
    (problem,) = reading(f"{bucket}-other/runs/x").problems
    assert problem.startswith("no file can be written: ")
    assert "create the bucket, or correct the URL" in problem


@pytest.mark.parametrize(
    ("methods", "doing"), [(("PUT",), "written"), (("GET",), "read"), (("DELETE", "POST"), "removed")]
)
def test_what_the_store_refuses_is_named(bucket, s3_port, monkeypatch, methods, doing):
    proxy = FaultyProxy(s3_port, lambda number, method, path: "500" if method in methods else None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    (problem,) = reading(f"{bucket}/runs/x").problems
    assert problem.startswith(f"no file can be {doing}: {bucket}/runs/x/.doctor/0-")
    proxy.stop()
