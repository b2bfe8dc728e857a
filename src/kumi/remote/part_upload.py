"""Upload files of any size in parts; on S3 a part that the store already has is not sent again.

An upload to S3 that was interrupted, even by the death of its process, is found by the name of its file. The store
lists the MD5 of each part that it has; a part with the same MD5 as in the local file is not sent again. Other stores
get a file as one stream, which starts anew after a failure. The memory in use is that of a few parts.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from kumi.errors import ConfigError
from kumi.files.untrusted import open_regular
from kumi.remote.remote_store import RemoteStore

# The bytes of a part and the most parts of a file. S3 takes parts of 5 MiB to 5 GiB, at most 10,000 of a file.
PART_BYTES, _MOST_PARTS = 16 * 2**20, 9_000
# Parts that are sent at a time.
PARALLEL = 4

# Called with the bytes of each part that is done.
Progress = Callable[[int], None]


def upload_file(store: RemoteStore, path: Path, name: str, progress: Progress = lambda sent: None) -> int:
    """Upload the file `path` as `name`, which appears once it is complete; return its size in bytes.

    A file that grows meanwhile is uploaded up to the end that it has now. `progress` is called with the size of each
    part that is done, whether it was sent or the store had it. Raise OSError if the file cannot be read, and the errors
    of `kumi.remote.retries.with_retries`.
    """
    handle = open_regular(path)
    try:
        size = os.fstat(handle).st_size
        if size <= PART_BYTES:
            store.write(name, _read(handle, 0, size))
            progress(size)
        elif store.sends_parts:
            _send_parts(store, handle, size, name, progress)
        else:
            store.ask_to_create(name, lambda: _stream(store, handle, size, name))
            progress(size)
    finally:
        os.close(handle)
    return size


def part_bytes(size: int) -> int:
    """Return the bytes of a part of a file of `size` bytes."""
    return max(PART_BYTES, -(-size // _MOST_PARTS))


def discard_uploads(store: RemoteStore, folder: str) -> None:
    """Remove the parts of unfinished uploads below `folder`, which S3 charges for; other stores have none."""
    if store.sends_parts:
        bucket, prefix = _bucket_and_key(store, f"{folder}/")
        for upload in _unfinished(store, bucket, prefix):
            _abort(store, bucket, upload)


def _stream(store: RemoteStore, handle: int, size: int, name: str) -> None:
    """Write the first `size` bytes of the open file `handle` as one stream."""
    with store.new_file(name) as path, store.filesystem.open(path, "wb", block_size=PART_BYTES) as target:
        for start in range(0, size, PART_BYTES):
            target.write(_read(handle, start, min(start + PART_BYTES, size)))


def _send_parts(store: RemoteStore, handle: int, size: int, name: str, progress: Progress) -> None:
    """Upload the first `size` bytes of the open file `handle` to S3 in parts. Raise OSError if the upload is lost."""
    bucket, key = _bucket_and_key(store, name)
    step = part_bytes(size)
    upload_id, present = _open_upload(store, bucket, key, name)
    parts: dict[int, str] = {}

    def send(number: int) -> None:
        start = (number - 1) * step
        data = _read(handle, start, min(start + step, size))
        digest = hashlib.md5(data, usedforsecurity=False)
        tag = present.get(number)
        if tag != digest.hexdigest():
            options = {"ContentMD5": base64.b64encode(digest.digest()).decode(), "Body": data}
            answer = store.ask(
                name, lambda: _call(store, "upload_part", bucket, key, upload_id, PartNumber=number, **options)
            )
            tag = str(answer["ETag"]).strip('"')
        parts[number] = tag
        progress(len(data))

    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="kumi-part") as pool:
        futures: list[Future[None]] = [pool.submit(send, number) for number in range(1, -(-size // step) + 1)]
        done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        for future in done:
            future.result()
    listed = {"Parts": [{"PartNumber": number, "ETag": f'"{parts[number]}"'} for number in sorted(parts)]}
    try:
        store.ask(
            name, lambda: _call(store, "complete_multipart_upload", bucket, key, upload_id, MultipartUpload=listed)
        )
    except FileNotFoundError:  # an attempt whose answer was lost has completed the upload
        complete = store.info(name)
        if complete is None or complete.size != size:
            raise OSError(f"{store.url}/{name}: the store has lost the upload") from None


def _open_upload(store: RemoteStore, bucket: str, key: str, name: str) -> tuple[str, dict[int, str]]:
    """Return the id of an upload of `key`, an unfinished or a new one, and the MD5 of its parts by number."""
    uploads = [upload for upload in _unfinished(store, bucket, key) if upload["Key"] == key]
    uploads.sort(key=lambda upload: str(upload.get("Initiated", "")))
    for upload in uploads[:-1]:
        _abort(store, bucket, upload)
    if uploads:
        present = _parts(store, bucket, key, name, uploads[-1]["UploadId"])
        if present is not None:
            return uploads[-1]["UploadId"], present
    answer = store.ask_to_create(
        name, lambda: store.filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    )
    return answer["UploadId"], {}


def _unfinished(store: RemoteStore, bucket: str, prefix: str) -> list[dict[str, Any]]:
    """Return the unfinished uploads of files whose keys begin with `prefix`; [] if the store does not tell."""
    uploads: list[dict[str, Any]] = []
    marker: dict[str, str] = {}
    try:
        while True:
            options = {"Bucket": bucket, "Prefix": prefix, **marker}
            answer = store.ask("", partial(store.filesystem.call_s3, "list_multipart_uploads", **options))
            uploads += answer.get("Uploads", [])
            if not answer.get("IsTruncated") or not answer.get("NextKeyMarker"):
                return uploads
            marker = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}
    except ConfigError:  # policies often allow writing, but not listing uploads
        return []


def _parts(store: RemoteStore, bucket: str, key: str, name: str, upload_id: str) -> dict[int, str] | None:
    """Return the MD5 of each part of an upload by number; None if the upload has ended, or the store does not tell."""
    parts: dict[int, str] = {}
    marker = 0
    try:
        while True:
            options = {"PartNumberMarker": marker} if marker else {}
            answer = store.ask(name, partial(_call, store, "list_parts", bucket, key, upload_id, **options))
            listed = answer.get("Parts", [])
            parts |= {part["PartNumber"]: str(part["ETag"]).strip('"') for part in listed}
            if not answer.get("IsTruncated") or not listed:
                return parts
            marker = listed[-1]["PartNumber"]
    except (ConfigError, FileNotFoundError):
        return None


def _abort(store: RemoteStore, bucket: str, upload: dict[str, Any]) -> None:
    """Remove an unfinished upload and its parts, if that is allowed."""
    key, upload_id = upload["Key"], upload["UploadId"]
    with suppress(ConfigError, FileNotFoundError):  # aborting is not allowed, or the upload has ended
        store.ask("", partial(_call, store, "abort_multipart_upload", bucket, key, upload_id))


def _call(store: RemoteStore, method: str, bucket: str, key: str, upload_id: str, **options: Any) -> Any:
    return store.filesystem.call_s3(method, Bucket=bucket, Key=key, UploadId=upload_id, **options)


def _bucket_and_key(store: RemoteStore, name: str) -> tuple[str, str]:
    bucket, _, key = store.path(name).partition("/")
    return bucket, key


def _read(handle: int, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of an open file. Raise OSError if it has fewer."""
    data = os.pread(handle, stop - start, start)
    while len(data) < stop - start:
        more = os.pread(handle, stop - start - len(data), start + len(data))
        if not more:
            raise OSError("the file became shorter while it was uploaded")
        data += more
    return data
