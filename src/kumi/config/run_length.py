"""The number of steps of a run, and how the run divides them over its sources.

A run file gives the number of steps, or epochs. With epochs, the steps follow from the rows of the prepared data:

    rows of an epoch = sum over sources of rows x data.sources[].epochs (1 by default)
    steps            = train.epochs x rows of an epoch / sequences of a step, rounded up

The last step is filled up with the first rows of the next epoch. Nothing here prepares data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kumi.config.document_lengths import prepared_store
from kumi.config.schema import PlanConfig
from kumi.errors import ConfigError, KumiError

if TYPE_CHECKING:
    from kumi.data import Mixture, Store
    from kumi.data.stored_source import References


def run_steps(config: PlanConfig) -> int | None:
    """Return the number of optimizer steps of `config`; None without [train], or if its data is not prepared."""
    if config.train is None or config.train.steps is not None:
        return None if config.train is None else config.train.steps
    store = prepared_store(config)
    try:
        return None if store is None else steps_of_epochs(config, store)
    except (KumiError, OSError):
        return None  # training reports why


def steps_of_epochs(config: PlanConfig, store: Store) -> int:
    """Return the number of steps in which `config` reads `store` for `train.epochs`."""
    return -(-sequences_of_epochs(config, store) // _sequences_per_step(config))


def sequences_of_epochs(config: PlanConfig, store: Store) -> int:
    """Return the number of sequences in `train.epochs` epochs, at least 1; a part of an epoch is rounded to sequences.

    Raise ConfigError if one of the sources has no rows.
    """
    epochs = None if config.train is None else config.train.epochs
    assert epochs is not None, "the run is given in epochs"
    rows_of_epoch = run_mixture(config, store).round
    return max(1, round(epochs * rows_of_epoch))


def run_mixture(config: PlanConfig, store: Store, references: References | None = None) -> Mixture:
    """Return the training sequences of `config` in `store`, in the shares of its sources; the prompts of a run with
    rollouts.

    `references`: the reference model's log-probs, for an objective that compares with it.
    """
    assert config.data is not None, "a run has data"
    assert config.train is not None, "a run has [train]"
    rollout = config.rollout
    return store.mixture(
        config.batch.seq_len - (0 if rollout is None else rollout.max_new_tokens),
        config.train.seed,
        cross_document=config.data.cross_document,
        by=config.data.shares if rollout is None else "sequences",
        epochs=source_epochs(config),
        form=config.objective.rows,
        references=references,
    )


def source_epochs(config: PlanConfig) -> tuple[float, ...] | None:
    """Return how often an epoch reads each source; None if weights set the shares of sources."""
    assert config.data is not None, "a run has data"
    given = [source.epochs for source in config.data.sources if source.epochs is not None]
    if given:  # then all of them have it
        return tuple(given)
    in_epochs = config.train is not None and config.train.epochs is not None
    return (1.0,) * len(config.data.sources) if in_epochs else None


def unknown_steps() -> ConfigError:
    """Return the error that the steps of a run are not known, because its data is not prepared."""
    return ConfigError("train.epochs: the steps follow from the data, which is not prepared; run kumi data prepare")


def _sequences_per_step(config: PlanConfig) -> int:
    return config.batch.tokens_per_step // config.batch.seq_len
