"""What a run will read of its data, as plain data and as lines for the terminal."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kumi.units import format_count

if TYPE_CHECKING:
    from kumi.config import ResolvedRun
    from kumi.data import Store


def describe_reading(run: ResolvedRun, store: Store) -> dict[str, Any]:
    """Return the sequences that `run` reads of each source in `store` in all its steps, and how the last step is
    filled up."""
    from kumi.config.run_length import run_mixture, run_steps, sequences_of_epochs
    from kumi.data.reading import source_readings

    epochs, steps = run.config.train.epochs, run_steps(run.config)
    assert steps is not None, "the data is prepared"
    mixture, total = run_mixture(run.config, store), steps * run.batch.sequences
    if run.config.rollout is not None:
        total = -(-steps // run.config.rollout.steps) * run.config.rollout.prompts
    return {
        "steps": steps,
        "epochs": epochs,
        "sequences": total,
        "filled_up": 0 if epochs is None else total - sequences_of_epochs(run.config, store),
        "by": mixture.by if run.config.rollout is None else "prompts",
        "sources": [asdict(source) for source in source_readings(mixture, store.train_names, total)],
    }


def reading_lines(reading: dict[str, Any]) -> list[str]:
    """Return the lines that show `reading`, a result of `describe_reading`: one for each source, and one on
    the last step of a run in epochs."""
    word = reading["by"]
    # A unit is a document, an example or a prompt.
    counted = "tokens" if word == "tokens" else "units"
    lines = [
        f"{format_count(source[counted])} {word} ({100 * source['share']:.3g} %): {_epochs(source['epochs'])} of "
        f"{source['name']}"
        for source in reading["sources"]
    ]
    if reading["epochs"] is not None:
        many = reading["filled_up"]
        lines.append(
            f"{_epochs(reading['epochs'])} are {reading['steps']:,} steps; "
            + (f"the last one is filled up with {many:,} sequences of the next epoch" if many else "the last is full")
        )
    return lines


def _epochs(number: float) -> str:
    """Format a number of epochs, with one decimal from 1 on and with two digits below."""
    text = f"{number:.2g}" if number < 1 else f"{number:.1f}".removesuffix(".0")
    return f"{text} epoch{'' if text == '1' else 's'}"
