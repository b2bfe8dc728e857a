"""The hub: a model's or a tokenizer's files from a repository, and finished folders to one.

is_id(source)            -> whether `source` is written as `org/name` or `org/name@revision`
split(source)            -> its name and its revision
fetch(source, key)       -> Snapshot: everything of a repository but its weights, at one commit
fetch_weights(snapshot)  -> its safetensors files, into the same folder
fetch_config(source, key)-> its config.json alone
check_push(name, flag)   -> nothing, where a push can be tried
push(folder, name)       -> the address of the repository that holds `folder` now

huggingface_hub comes with tokenizers; it is imported only where it is used. No code is ever fetched or run, and no
pickled file: configurations, tokenizers, model cards and safetensors are all that kumi takes from a repository.
"""

from kumi.hub.fetch import Snapshot, fetch, fetch_config, fetch_weights, is_id, split
from kumi.hub.push import check_push, push
from kumi.hub.record import recorded, write_record

__all__ = [
    "Snapshot",
    "check_push",
    "fetch",
    "fetch_config",
    "fetch_weights",
    "is_id",
    "push",
    "recorded",
    "split",
    "write_record",
]
