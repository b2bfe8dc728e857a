"""Stores: list, read, write, upload and download, on a file system and a server of S3, also through failures."""

import os
import random

import pytest
from tests.remote.faulty_proxy import FAULTS, FaultyProxy

from kumi.errors import CommunicationError, ConfigError, RefusedError
from kumi.remote import cache_folder, part_download, part_upload, retries
from kumi.remote.addresses import check_url, is_plain_name, is_url, join_url, refuse_url, url_key
from kumi.remote.cache_folder import FILES, RUNS, copy_of, make_room, making, mark_uploaded
from kumi.remote.fetched_files import fetch_folder
from kumi.remote.part_download import download_file
from kumi.remote.part_upload import part_bytes, upload_file
from kumi.remote.remote_store import open_store
from kumi.remote.retries import ATTEMPTS, with_retries

MIB = 2**20


@pytest.fixture
def place(tmp_path, cache):
    """The URL of an empty folder of a file system that fsspec reaches."""
    (tmp_path / "store").mkdir()
    return f"file://{tmp_path}/store"


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of 5 MiB, the smallest that S3 takes."""
    monkeypatch.setattr(part_upload, "PART_BYTES", 5 * MIB)
    monkeypatch.setattr(part_download, "PART_BYTES", 5 * MIB)


@pytest.fixture
def quick_retries(monkeypatch):
    monkeypatch.setattr(retries, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(retries, "_LONGEST_PAUSE", 0.1)


def content(size, seed=0):
    return random.Random(seed).randbytes(size)


def test_urls_are_told_from_paths_and_hub_datasets():
    assert is_url("s3://bucket/x") and is_url("gs://b") and is_url("file:///tmp")  # noqa: PT018
    assert not any(map(is_url, ["runs/x", "/runs/x", "org/name", "hf://datasets/a/b", "C:/x", None]))
    assert join_url("s3://b/x/", "y/z") == "s3://b/x/y/z"
    assert url_key("s3://b/runs/x") == url_key("s3://b/runs/x/")
    assert url_key("s3://b/runs/x") != url_key("s3://c/runs/x")
    assert url_key("s3://b/runs/x").startswith("x-")


@pytest.mark.parametrize(
    "url",
    [
        "sftp://me:swordfish@host/x",
        "s3://swordfish@bucket/x",
        "https://host/x?X-Amz-Signature=swordfish",
        "https://host/x?sig=swordfish",
    ],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url):
    with pytest.raises(ConfigError, match=r"train\.out: a ") as raised:
        check_url(url, "train.out")
    assert "swordfish" not in str(raised.value)


def test_a_folder_of_this_machine_is_asked_for_where_no_url_can_be_used():
    refuse_url("folder", "data.cache")
    with pytest.raises(ConfigError, match=r"data.cache: s3://b/x is a URL, but this must be a file or folder of this"):
        refuse_url("s3://b/x", "data.cache")


def test_names_of_a_store_stay_inside_their_folder():
    assert is_plain_name("checkpoints/step_000001/index.json")
    assert not any(map(is_plain_name, ["../x", "a/../x", "/x", "a//b", "", "a\nb", "a\\b", "a/."]))


def test_a_file_system_without_its_package_is_named(cache):
    with pytest.raises(ConfigError, match="needs a package that is not installed"), open_store("gs://bucket/x"):
        pass
    with pytest.raises(ConfigError, match="fsspec knows no file system nosuch://"), open_store("nosuch://bucket/x"):
        pass


def _check_store(url, tmp_path):
    with open_store(url) as store:
        assert store.list_files() == {}
        assert store.list_folder() == []
        assert store.info("a.txt") is None
        store.write("a.txt", b"hello")
        store.write("folder/b.txt", b"")
        assert list(store.list_files()) == ["a.txt", "folder/b.txt"]
        assert store.list_folder() == ["a.txt", "folder"]
        assert store.info("a.txt").size == 5
        assert store.info("folder") is None
        assert store.read("a.txt", 1, 3) == b"el"
        with pytest.raises(FileNotFoundError):
            store.read("none", 0, 1)
        data = content(12 * MIB)
        (tmp_path / "big").write_bytes(data)
        sent = []
        assert upload_file(store, tmp_path / "big", "big", sent.append) == len(data)
        assert sum(sent) == len(data)
        download_file(store, "big", store.info("big"), tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == data
        store.remove(["a.txt", "folder/b.txt", "none"])
        assert list(store.list_files()) == ["big"]


def test_a_file_system(place, tmp_path, small_parts):
    _check_store(place, tmp_path)


def test_a_server_of_s3(bucket, tmp_path, small_parts):
    _check_store(f"{bucket}/folder", tmp_path)


def test_the_whole_bucket(bucket, tmp_path, small_parts):
    _check_store(bucket, tmp_path)


def test_parts_are_few_enough_for_s3():
    assert part_bytes(1) == 16 * MIB
    for size in (10**9, 10**12, 5 * 10**12):
        assert -(-size // part_bytes(size)) <= 10_000
        assert part_bytes(size) <= 5 * 2**30


def test_parts_that_the_store_has_are_not_sent_again(
    bucket, s3_port, tmp_path, monkeypatch, small_parts, quick_retries
):
    data = content(22 * MIB)
    (tmp_path / "big").write_bytes(data)
    proxy = FaultyProxy(s3_port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setattr(part_upload, "PARALLEL", 1)
    # The process dies, as far as the store can tell, when it sends the fourth part.
    proxy.choose = lambda number, method, path: "500" if method == "PUT" and "partNumber=4" in path else None
    with (
        pytest.raises(CommunicationError, match=r"/big: the store failed 6 times in a row"),
        open_store(bucket) as store,
    ):
        upload_file(store, tmp_path / "big", "big")
    proxy.choose, before = (lambda number, method, path: None), len(proxy.requests)
    with open_store(bucket) as store:
        assert store.list_files() == {}
        upload_file(store, tmp_path / "big", "big")
        assert store.read("big", 0, len(data)) == data
    sent = sorted(path for method, path in proxy.requests[before:] if method == "PUT")
    assert any("partNumber=4" in path for path in sent)
    assert not any(f"partNumber={number}&" in path for path in sent for number in (1, 2, 3))
    proxy.stop()


def test_parts_of_another_content_are_sent_again(bucket, tmp_path, monkeypatch, small_parts, quick_retries, s3_port):
    proxy = FaultyProxy(s3_port, lambda number, method, path: "500" if "partNumber=3" in path else None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    (tmp_path / "big").write_bytes(content(12 * MIB, seed=1))
    with pytest.raises(CommunicationError), open_store(bucket) as store:
        upload_file(store, tmp_path / "big", "big")
    proxy.choose, data = (lambda number, method, path: None), content(12 * MIB, seed=2)
    (tmp_path / "big").write_bytes(data)
    with open_store(bucket) as store:
        upload_file(store, tmp_path / "big", "big")
        assert store.read("big", 0, len(data)) == data
    proxy.stop()


@pytest.mark.parametrize("seed", [0, 1])
def test_twenty_failures_are_survived(seed, bucket, s3_port, tmp_path, monkeypatch, small_parts, quick_retries):
    """Twenty of the requests of an upload and a download fail in all ways; both files are equal."""
    draw = random.Random(seed)
    kinds = [fault for fault in FAULTS for _ in range(4)][:20]
    draw.shuffle(kinds)

    def choose(number, method, path):
        return kinds.pop() if kinds and draw.random() < 0.5 else None

    proxy = FaultyProxy(s3_port, choose)
    proxy.silence = 1.5
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("KUMI_STORE_TIMEOUT", "1")
    monkeypatch.setattr(retries, "ATTEMPTS", 12)
    data = content(32 * MIB)
    (tmp_path / "big").write_bytes(data)
    with open_store(bucket) as store:
        round_number = 0
        while kinds or round_number == 0:
            name, round_number = f"big{round_number}", round_number + 1
            upload_file(store, tmp_path / "big", name)
            download_file(store, name, store.info(name), tmp_path / name)
            assert (tmp_path / name).read_bytes() == data
    assert len(proxy.injected) == 20
    proxy.stop()


def test_a_download_goes_on_where_it_stopped(bucket, s3_port, tmp_path, monkeypatch, small_parts, quick_retries):
    data = content(22 * MIB)
    (tmp_path / "big").write_bytes(data)
    with open_store(bucket) as store:
        upload_file(store, tmp_path / "big", "big")
    late = f"bytes={20 * MIB}-"
    proxy = FaultyProxy(s3_port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setattr(part_download, "PARALLEL", 1)
    with open_store(bucket) as store:
        file, read = store.info("big"), store.read

        def failing(name, start, stop):
            if start >= 10 * MIB:
                raise CommunicationError("cut")
            return read(name, start, stop)

        monkeypatch.setattr(store, "read", failing)
        with pytest.raises(CommunicationError, match="cut"):
            download_file(store, "big", file, tmp_path / "again")
        assert not (tmp_path / "again").exists()
        assert (tmp_path / "again.part").stat().st_size == 10 * MIB
        monkeypatch.setattr(store, "read", read)
        before = len([path for method, path in proxy.requests if method == "GET"])
        download_file(store, "big", file, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == data, late
    assert len([path for method, path in proxy.requests if method == "GET"]) - before == 3
    assert not (tmp_path / "again.part").exists()
    proxy.stop()


def test_a_file_that_changes_while_it_is_downloaded_is_refused(place, tmp_path, small_parts):
    with open_store(place) as store:
        store.write("x", content(6 * MIB))
        file = store.info("x")
        store.write("x", content(6 * MIB, seed=1))
        os.utime(tmp_path / "store" / "x", (1, 1))
        with pytest.raises(CommunicationError, match="was replaced or removed while it was downloaded"):
            download_file(store, "x", file, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_lasting_failures_are_not_repeated():
    calls = []

    def refuse():
        calls.append(1)
        raise PermissionError("Access Denied")

    with pytest.raises(ConfigError, match=r"s3://b/x: the store refuses access: Access Denied; check the credentials"):
        with_retries("s3://b/x", refuse)
    assert len(calls) == 1


def test_passing_failures_are_repeated_a_few_times():
    calls, pauses = [], []

    def fail():
        calls.append(1)
        raise TimeoutError("too slow")

    with pytest.raises(CommunicationError, match=rf"the store failed {ATTEMPTS} times in a row \(too slow\)"):
        with_retries("s3://b/x", fail, pauses.append)
    assert len(calls) == ATTEMPTS
    assert len(pauses) == ATTEMPTS - 1
    assert sum(pauses) < 15


def test_a_bucket_that_does_not_exist_is_named(bucket, quick_retries):
    with open_store(f"{bucket}-none/x") as store, pytest.raises(ConfigError, match="create the bucket, or correct"):
        store.write("a", b"x")


def test_missing_credentials_are_named(bucket, monkeypatch, quick_retries, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with open_store(bucket) as store, pytest.raises(ConfigError, match="there are no credentials; set AWS_ACCESS_KEY"):
        store.write("a", b"x")


@pytest.fixture(params=["file", "s3"])
def either(request):
    return request.getfixturevalue({"file": "place", "s3": "bucket"}[request.param])


def test_files_are_fetched_once(either, monkeypatch):
    with open_store(either) as store:
        store.write("model/config.json", b"{}")
        store.write("model/weights", b"1234")
    folder = fetch_folder(f"{either}/model", "model.source", lambda name: name.endswith(".json"))
    assert sorted(os.listdir(folder)) == ["config.json"]
    assert fetch_folder(f"{either}/model", "model.source") == folder
    assert (folder / "weights").read_bytes() == b"1234"
    fetched = []
    monkeypatch.setattr("kumi.remote.fetched_files.download_file", lambda store, name, *rest: fetched.append(name))
    fetch_folder(f"{either}/model", "model.source")
    assert fetched == []


def test_what_the_store_replaced_or_removed_is_fetched_again_or_removed(either):
    with open_store(either) as store:
        store.write("data/a", b"old")
        store.write("data/b", b"old")
        folder = fetch_folder(f"{either}/data", "data source")
        store.write("data/a", b"newer")
        store.remove(["data/b"])
    assert fetch_folder(f"{either}/data", "data source") == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": b"newer"}


def test_the_cache_stays_within_its_limit(place, monkeypatch):
    with open_store(place) as store:
        for name in "abc":
            store.write(f"{name}/file", content(2 * MIB))
    monkeypatch.setenv("KUMI_CACHE_LIMIT", "5MB")
    for name in "ab":
        fetch_folder(f"{place}/{name}", "key")
        os.utime(copy_of(FILES, f"{place}/{name}") / ".used", (ord(name), ord(name)))
    with pytest.raises(RefusedError, match=r"the cache has .* that are in use, its limit is .*KUMI_CACHE_LIMIT"):
        fetch_folder(f"{place}/c", "key")
    for lock in cache_folder._in_use.values():  # as if other processes had fetched them, and ended
        lock.close()
    cache_folder._in_use.clear()
    fetch_folder(f"{place}/c", "key")
    assert not copy_of(FILES, f"{place}/a").exists(), "it was not used for longest"
    assert copy_of(FILES, f"{place}/b").exists()


def test_a_run_that_is_not_uploaded_stays_in_the_cache(place, monkeypatch):
    monkeypatch.setenv("KUMI_CACHE_LIMIT", "5MB")
    for name, uploaded in (("done", True), ("open", False)):
        copy = copy_of(RUNS, f"{place}/{name}")
        with making(copy):
            (copy / "file").write_bytes(content(2 * MIB))
            mark_uploaded(copy, uploaded=uploaded)
    for lock in cache_folder._in_use.values():
        lock.close()
    cache_folder._in_use.clear()
    make_room(2 * MIB, "the files")
    assert not copy_of(RUNS, f"{place}/done").exists()
    assert copy_of(RUNS, f"{place}/open").exists()
    with pytest.raises(RefusedError):
        make_room(4 * MIB, "the files")
    assert copy_of(RUNS, f"{place}/open").exists()


def test_a_wrong_limit_or_timeout_is_named(place, monkeypatch):
    monkeypatch.setenv("KUMI_CACHE_LIMIT", "much")
    with pytest.raises(ConfigError, match="KUMI_CACHE_LIMIT: 'much' is not a quantity"):
        make_room(1, "the files")
    monkeypatch.setenv("KUMI_STORE_TIMEOUT", "soon")
    from kumi.remote.remote_store import request_timeout

    with pytest.raises(ConfigError, match="KUMI_STORE_TIMEOUT='soon' is not a number of seconds"):
        request_timeout()


def test_a_store_that_does_not_list_uploads_gets_a_new_one(bucket, tmp_path, monkeypatch, small_parts):
    """Policies often allow to write parts, but not to list the uploads of a bucket."""
    data = content(12 * MIB)
    (tmp_path / "big").write_bytes(data)
    with open_store(bucket) as store:
        call = store.filesystem.call_s3

        def refusing(method, **options):
            if method == "list_multipart_uploads":
                raise PermissionError("Access Denied")
            return call(method, **options)

        monkeypatch.setattr(store.filesystem, "call_s3", refusing)
        upload_file(store, tmp_path / "big", "big")
        assert store.read("big", 0, len(data)) == data
