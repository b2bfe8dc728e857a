"""Fetch models and tokenizers from repositories on the Hugging Face hub, and push finished folders to them.

is_id(source)             -> True if `source` has the form `org/name` or `org/name@revision`
split(source)             -> (name, revision)
fetch(source, key)        -> Snapshot: configuration, tokenizer and model card of a repository, at one commit
fetch_weights(snapshot)   -> download its safetensors files to the same folder
fetch_config(source, key) -> path of its config.json
check_push(name, flag)    -> raise ConfigError if a push cannot succeed
push(folder, name)        -> upload `folder`; return the URL of the repository

kumi fetches only configurations, tokenizers, model cards and safetensors files, never code or pickles. huggingface_hub
is a dependency of tokenizers and is imported only when it is used.
"""

from kumi.hub.fetch import SMALL_SUFFIXES, Snapshot, fetch, fetch_config, fetch_weights, is_id, split
from kumi.hub.push import check_push, push
from kumi.hub.recorded_commits import recorded_commit, write_record

__all__ = [
    "SMALL_SUFFIXES",
    "Snapshot",
    "check_push",
    "fetch",
    "fetch_config",
    "fetch_weights",
    "is_id",
    "push",
    "recorded_commit",
    "split",
    "write_record",
]
