"""A finished folder to a repository on the hub."""

from __future__ import annotations

import re
from pathlib import Path

from kumi.errors import CommunicationError, ConfigError, RefusedError
from kumi.files.untrusted import inside
from kumi.hub import reach

# Left in the repository by an earlier push, these would be read instead of, or beside, what is pushed now.
_STALE = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")


def check_push(name: str, flag: str) -> None:
    """Nothing, when a push to the repository `name`, the value of `flag`, can be tried; ConfigError otherwise.

    The network is not asked: it may be there only by the time that the folder is finished.
    """
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise ConfigError(f"{flag}: {name!r} is no name of a repository; write it as organisation/name")
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{flag} {name}: HF_HUB_OFFLINE forbids it; unset that, or leave the push out")
    if get_token() is None:
        raise ConfigError(f"{flag} {name}: the hub needs to know you; run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, name: str, *, public: bool = False, flag: str = "--push") -> str:
    """The address of the repository `name`, once it holds the files of `folder` as its newest commit.

    A new repository is private unless `public`. Files that are there already are not sent again, so a push that was
    interrupted goes on where it stopped. CommunicationError when the hub does not take it; the folder is not touched.
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
    except Exception as error:  # the hub client raises many kinds, all of which mean the same here
        raise CommunicationError(
            f"{flag} {name}: the hub did not take {folder} ({reach.meaning(error, name, None)}); the folder is "
            f"complete, send it later with `kumi push {folder} {name}`"
        ) from None
    return url


def _check_private(private: bool, name: str, public: bool, flag: str) -> None:
    if not private and not public:
        raise RefusedError(
            f"{flag} {name}: the repository is there already, and public; say so with --public (in a "
            f"run file: export.public=true), or name another one"
        )
