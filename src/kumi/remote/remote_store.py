"""A URL as a folder of files: list, read, write and remove them, with retries.

    with open_store("s3://bucket/runs/x") as store:
        store.list_files("checkpoints")      {"checkpoints/step_000100/index.json": RemoteFile(...), ...}

A store is used by one process, from any of its threads. Object stores show a file only when it is complete. On file
systems that show a file while it is written, it is written under another name and then renamed.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kumi.errors import ConfigError
from kumi.remote.addresses import check_url, is_plain_name, join_url
from kumi.remote.retries import T, explain_failure, with_retries

# Seconds without a byte after which a request has failed.
_TIMEOUT_VARIABLE, _TIMEOUT = "KUMI_STORE_TIMEOUT", 60.0
# File systems that show a file while it is being written.
_SHOW_UNFINISHED = {"file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs", "ftp", "arrow_hdfs", "dask", "jlab"}
_UNFINISHED = ".kumi-part"
# Scheme -> what to install for it.
_PACKAGES = {"s3": "kumi[s3]", "s3a": "kumi[s3]"}


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store.

    size: bytes.
    version: changes with the content: an ETag or a time; "" if the store has neither.
    modified: seconds since 1970; None if the store does not tell.
    """

    size: int
    version: str
    modified: float | None


class RemoteStore:
    """The files below one URL; the result of `open_store`."""

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        self.url, self.filesystem, self._root = url, filesystem, root.rstrip("/")
        protocol = filesystem.protocol
        self.protocols = {protocol} if isinstance(protocol, str) else set(protocol)

    @property
    def sends_parts(self) -> bool:
        """True for S3, whose multipart uploads `part_upload` continues."""
        return "s3" in self.protocols

    def path(self, name: str) -> str:
        """Return the path of the file `name` within the file system."""
        return f"{self._root}/{name}" if name else self._root

    def below(self, folder: str) -> RemoteStore:
        """Return the folder `folder` as a store of its own, usable as long as this one is open."""
        return RemoteStore(join_url(self.url, folder), self.filesystem, self.path(folder))

    def ask(self, name: str, action: Callable[[], T]) -> T:
        """Return the result of `action`, a request about the file `name`, with retries."""
        return with_retries(join_url(self.url, name), action)

    def ask_to_create(self, name: str, action: Callable[[], T]) -> T:
        """Return the result of `action`, which creates the file `name`. Raise ConfigError if the bucket is missing."""
        try:
            return self.ask(name, action)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{self.url}: cannot be written ({explain_failure(error)}); create the bucket, or correct the URL"
            ) from None

    def info(self, name: str = "") -> RemoteFile | None:
        """Return size and version of the file `name`; None if there is no such file."""
        try:
            entry = self.ask(name, lambda: self.filesystem.info(self.path(name)))
        except FileNotFoundError:
            return None
        return _remote_file(entry) if entry.get("type") == "file" else None

    def list_files(self, folder: str = "") -> dict[str, RemoteFile]:
        """Return all files below `folder` by their names relative to the URL, sorted; {} if there are none.

        Raise ConfigError for a name that could lead out of a local copy of the folder.
        """
        try:
            entries = self.ask(folder, lambda: self.filesystem.find(self.path(folder), detail=True))
        except FileNotFoundError:
            return {}
        files = {}
        for path, entry in sorted(entries.items()):
            name = path.removeprefix(self._root).lstrip("/")
            if not name or entry.get("type", "file") != "file" or path.endswith((_UNFINISHED, "/")):
                continue
            if not is_plain_name(name):
                raise ConfigError(
                    f"{self.url}: has a file with the name {name!r}, which no local copy of it can have; rename it"
                )
            files[name] = _remote_file(entry)
        return files

    def list_folder(self, folder: str = "") -> list[str]:
        """Return the names of the files and folders directly in `folder`, sorted; [] if there is none."""
        try:
            paths = self.ask(folder, lambda: self.filesystem.ls(self.path(folder), detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {path.rstrip("/").rpartition("/")[2] for path in paths if path.rstrip("/") != self.path(folder)}
        return sorted(name for name in names if is_plain_name(name))

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop` of the file `name`. Raise FileNotFoundError if it is gone."""

        def get() -> bytes:
            data = bytes(self.filesystem.cat_file(self.path(name), start=start, end=stop)) if stop > start else b""
            if len(data) != stop - start:
                raise OSError(f"{len(data)} bytes came, {stop - start} were asked for")
            return data

        return self.ask(name, get)

    def write(self, name: str, data: bytes) -> None:
        """Write `data` as the file `name`, completely or not at all."""
        self.ask_to_create(name, lambda: self._write(name, data))

    def _write(self, name: str, data: bytes) -> None:
        with self.new_file(name) as path:
            self.filesystem.pipe_file(path, data)

    @contextmanager
    def new_file(self, name: str) -> Iterator[str]:
        """Yield the path at which to write the file `name`; at the end of the block it has its name."""
        path = self.path(name)
        if not self.protocols & _SHOW_UNFINISHED:
            yield path
            return
        self.filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        yield path + _UNFINISHED
        if "file" in self.protocols:
            os.replace(path + _UNFINISHED, path)
        else:
            self.filesystem.mv(path + _UNFINISHED, path)

    def remove(self, names: Collection[str]) -> None:
        """Remove the files `names` if they exist, and then their folders if they are empty."""
        for name in names:
            with suppress(FileNotFoundError):
                self.ask(name, lambda name=name: self.filesystem.rm_file(self.path(name)))  # type: ignore[misc]
        folders = {name.rpartition("/")[0] for name in names} if self.protocols & _SHOW_UNFINISHED else set()
        for folder in sorted(folders - {""}, reverse=True):
            with suppress(OSError):
                self.filesystem.rmdir(self.path(folder))


@contextmanager
def open_store(url: str, key: str = "URL") -> Iterator[RemoteStore]:
    """Open the folder or file `url`, the value of `key`; no request is sent yet.

    Raise ConfigError if fsspec has no file system for the scheme, or its package is missing.
    """
    check_url(url, key)
    scheme = url.partition("://")[0].lower()
    with _loop_thread() as loop:
        filesystem = _filesystem(url, scheme, key, loop)
        try:
            yield RemoteStore(url.rstrip("/"), filesystem, filesystem._strip_protocol(url))
        finally:
            creator = getattr(filesystem, "_s3creator", None)
            if creator is not None:
                with suppress(Exception):  # the connections are of no use any more
                    asyncio.run_coroutine_threadsafe(creator.__aexit__(None, None, None), loop).result(5.0)
                filesystem._s3 = None


def _filesystem(url: str, scheme: str, key: str, loop: asyncio.AbstractEventLoop) -> Any:
    """Return fsspec's file system for `scheme`, whose requests run in `loop`; errors as in `open_store`."""
    try:
        import fsspec
        from fsspec.asyn import AsyncFileSystem

        kind = fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        package = _PACKAGES.get(scheme, f"the package of fsspec for {scheme}://")
        raise ConfigError(
            f"{key}: {url} needs a package that is not installed ({error}); pip install {package!r}"
        ) from None
    except ValueError:
        raise ConfigError(f"{key}: {url}: fsspec knows no file system {scheme}://; correct the scheme") from None
    # An instance of its own, without a cache of listings: other machines change the folder.
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if issubclass(kind, AsyncFileSystem):
        options["loop"] = loop
    options |= kind._get_kwargs_from_urls(url)
    if scheme in ("s3", "s3a"):
        options["config_kwargs"] = {
            "connect_timeout": min(10.0, request_timeout()),
            "read_timeout": request_timeout(),
            "retries": {"max_attempts": 1, "mode": "standard"},  # `with_retries` repeats requests
        }
    filesystem = kind(**options)
    if scheme in ("s3", "s3a"):
        filesystem.retries = 1
    return filesystem


def request_timeout() -> float:
    """Return the seconds without a byte after which a request has failed: $KUMI_STORE_TIMEOUT, or 60.

    Raise ConfigError unless the variable is a number above 0.
    """
    text = os.environ.get(_TIMEOUT_VARIABLE)
    try:
        seconds = _TIMEOUT if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{_TIMEOUT_VARIABLE}={text!r} is not a number of seconds; set it to one such as 60")
    return seconds


@contextmanager
def _loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop that runs in a thread. The thread ends with the block, because ranks are forked later."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="kumi-store", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        if not thread.is_alive():
            loop.close()


def _remote_file(entry: Mapping[str, Any]) -> RemoteFile:
    """Return the file in an entry of fsspec's listing; each file system has other keys for version and time."""
    keys = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "updated", "mtime")
    version = next((str(entry[key]) for key in keys if entry.get(key)), "")
    times = (entry.get(key) for key in ("LastModified", "last_modified", "updated", "mtime"))
    modified = next((time for time in times if time is not None), None)
    seconds = modified.timestamp() if isinstance(modified, datetime) else modified
    return RemoteFile(
        int(entry["size"] or 0), version.strip('"'), seconds if isinstance(seconds, float | int) else None
    )
