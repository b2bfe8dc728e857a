"""URLs of files on object stores and remote file systems: `scheme://bucket/path`."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from kumi.errors import ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# Datasets of the Hugging Face hub, which `kumi.hub` fetches.
_HUB = "hf://"
# Parts of the names of query parameters that carry a secret.
_SECRETS = ("sig", "token", "secret", "password", "credential", "accesskey")


def is_url(path: str | Path | None) -> bool:
    """Return True if `path` is a URL of a store, and False for a local path or a dataset of the hub."""
    return isinstance(path, str) and _URL.match(path) is not None and not path.startswith(_HUB)


def check_url(url: str, key: str) -> None:
    """Raise ConfigError if `url`, the value of `key`, names neither a bucket nor a folder, or carries a secret.

    URLs are printed and stored in run folders; the secrets of a store are in the environment or in its own files.
    """
    parts = urlsplit(url)
    if parts.password is not None or (parts.scheme.startswith("s3") and parts.username is not None):
        raise ConfigError(
            f"{key}: a URL of {parts.scheme}:// with a password in it, which kumi would print and store; leave the "
            f"password out, and put it into the environment or the store's own file of credentials"
        )
    names = [name.lower().replace("-", "").replace("_", "") for name, _ in parse_qsl(parts.query)]
    if any(secret in name for name in names for secret in _SECRETS):
        raise ConfigError(
            f"{key}: a signed URL of {parts.scheme}://, whose signature kumi would print and store; leave the "
            f"signature out, and put the credentials into the environment"
        )
    if not parts.netloc and not parts.path.strip("/"):
        raise ConfigError(f"{key}: {url!r} names no bucket or folder; write it as s3://bucket/folder")


def join_url(url: str, name: str) -> str:
    """Return the URL of the file `name` in the folder `url`."""
    return f"{url.rstrip('/')}/{name}" if name else url.rstrip("/")


def url_name(url: str) -> str:
    """Return the last part of `url` as a file name of at most 60 safe characters; "files" if none are left."""
    last = url.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.-]+", "_", last).strip("._")[:60] or "files"


def url_key(url: str) -> str:
    """Return the name of the local copy of `url`: the URL's last part, and ten hex digits of a hash of the full URL."""
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:10]
    return f"{url_name(url)}-{digest}"


def refuse_url(path: str | Path | None, key: str) -> None:
    """Raise ConfigError if `path`, the value of `key`, is a URL, where only a local path can be used."""
    if is_url(path):
        raise ConfigError(
            f"{key}: {path} is a URL, but this must be a file or folder of this machine, because it is read and "
            f"written in place; copy it here, or mount the store, and name the local path"
        )


def is_plain_name(name: str) -> bool:
    """Return True if `name`, a path relative to a folder of a store, cannot lead out of a local copy of the folder."""
    parts = name.split("/")
    return (
        name.isprintable()
        and "\\" not in name
        and all(part not in ("", ".", "..") and len(part.encode()) <= 255 for part in parts)
    )
