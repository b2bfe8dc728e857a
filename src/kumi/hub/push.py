"""Push a finished folder to a repository on the hub."""

from __future__ import annotations

import re
from pathlib import Path

from kumi.errors import CommunicationError, ConfigError, RefusedError
from kumi.files.untrusted import inside
from kumi.hub import reach

# Files of an earlier push to delete: readers would load them instead of, or together with, the new ones.
_STALE = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")


def check_push(name: str, flag: str) -> None:
    """Raise ConfigError if a push to the repository `name`, the value of `flag`, cannot succeed.

    The network is not tested: it may become available before the folder is finished.
    """
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise ConfigError(f"{flag}: {name!r} is not a repository name; write it as organisation/name")
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{flag} {name}: HF_HUB_OFFLINE forbids a push; unset it, or leave the push out")
    if get_token() is None:
        raise ConfigError(f"{flag} {name}: a push needs a hub token; run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, name: str, *, public: bool = False, flag: str = "--push") -> str:
    """Upload the files of `folder` as a new commit of the repository `name`; return the repository's URL.

    A new repository is private unless `public`. Files that the repository already has are not uploaded again, so an
    interrupted push continues where it stopped. Raise CommunicationError when the upload fails. The folder is never
    changed.
    """
    check_push(name, flag)
    for file in sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink()):
        inside(file.parent, file.name, RefusedError)  # a link out of the folder would publish another file
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = str(api.create_repo(name, private=not public, exist_ok=True))
        _check_private(bool(api.repo_info(name).private), name, public, flag)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message=f"Upload {folder.name} with kumi",
            delete_patterns=list(_STALE),
            ignore_patterns=[".*"],
        )
    except RefusedError:
        raise
    except Exception as error:  # the hub client raises many unrelated classes
        raise CommunicationError(
            f"{flag} {name}: the upload of {folder} to the hub failed ({reach.explain_hub_error(error, name, None)}); "
            f"the folder is complete, push it later with `kumi push {folder} {name}`"
        ) from None
    return url


def _check_private(private: bool, name: str, public: bool, flag: str) -> None:
    """Raise RefusedError if the repository is public and the user did not ask for that."""
    if not private and not public:
        raise RefusedError(
            f"{flag} {name}: the repository exists and is public; confirm with --public (in a run file: "
            f"export.public=true), or name another one"
        )
