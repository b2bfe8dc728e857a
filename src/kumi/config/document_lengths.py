"""How far attention reaches in the rows of a run, its sequences of batch.seq_len tokens: by default within documents.

The lengths of the documents come from the first of these that applies:

    documents attend to each other (data.cross_document)     whole rows
    the data is prepared                                     its documents, cut where rows end
    batch.mean_document_tokens                               documents of this mean length
    otherwise                                                whole rows, an assumption

Nothing here prepares data.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kumi.config.schema import PlanConfig
from kumi.errors import KumiError
from kumi.remote.cache_folder import local_run_folder
from kumi.spec.batch import span_of_documents

if TYPE_CHECKING:
    from kumi.data import Store

# The folder of a run's tokenizer and tokenised data, inside `train.out`.
DATA = "data"


def data_folder(config: PlanConfig) -> Path | None:
    """Return the folder of the tokenizer and tokenised data of `config`; None without [data], or if no key names it."""
    if config.data is not None and config.data.cache is not None:
        return Path(os.path.expanduser(config.data.cache))
    if config.data is None or config.train is None:
        return None
    return local_run_folder(config.train.out) / DATA


def document_span(config: PlanConfig) -> float | None:
    """Return the `BatchSpec.document_span` of `config`: the mean over tokens of the length of a token's document.

    Return None if it has to be assumed.
    """
    if config.data is not None and config.data.cross_document:
        return float(config.batch.seq_len)
    prepared, mean = _prepared_span(config), config.batch.mean_document_tokens
    if config.rollout is not None:
        prepared = None  # the prompts are prepared, but rows also have the replies
    if prepared is not None or mean is None:
        return prepared
    return span_of_documents(mean, config.batch.seq_len)


def _prepared_span(config: PlanConfig) -> float | None:
    """Return the span of the documents in the prepared data; None if no prepared data can be read."""
    store = prepared_store(config)
    try:
        return None if store is None else store.document_span(config.batch.seq_len, config.objective.rows)
    except (KumiError, OSError):
        return None  # training reports why


def prepared_store(config: PlanConfig) -> Store | None:
    """Return the prepared data of `config`; None if it cannot be read or has another number of sources."""
    folder = data_folder(config)
    if config.data is None or folder is None or not (folder / "tokens" / "meta.json").is_file():
        return None
    from kumi.data import TOKENS, open_store

    try:
        store = open_store(folder / TOKENS)
    except (KumiError, OSError):
        return None  # training reports why
    return store if len(store.sources) == len(config.data.sources) else None
