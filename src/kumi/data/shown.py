"""Units of a store as readers see them: decoded text in runs of tokens that are trained, or are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from kumi.data.chat.masked import ROLE_SHIFT, TRAINED
from kumi.data.formats.example import ROLES

Decode = Callable[[Sequence[int]], str]

# (trained, role, turn, control token, weight): consecutive tokens that agree are one run.
_Key = tuple[bool, int, int, bool, float]


def shown_sequence(
    ids: Sequence[int],
    mask: Sequence[int],
    turns: Sequence[int],
    weights: Sequence[float] | None,
    decode: Decode,
    control: frozenset[int],
) -> dict[str, Any]:
    """Return one sequence as plain data: its counts, and its messages with their runs of tokens.

    ids, mask, turns, weights: as in `kumi.data.chat.MaskedSequence`.
    decode: returns the text of ids, control tokens included.
    control: ids of added tokens. Each is a run of its own; a trained one at the end of a message is its stop token.
    """
    rows = list(zip(ids, mask, turns, [1.0] * len(ids) if weights is None else weights, strict=True))
    messages = []
    for turn, group in groupby(rows, key=lambda row: row[2]):
        tokens = list(group)
        runs = list(_runs(tokens, decode, control))
        trained = [run for run in runs if run["trained"]]
        if trained and trained[-1]["control"]:
            trained[-1]["stop"] = True
        messages.append(
            {
                "turn": int(turn),
                "role": _role(tokens),
                "tokens": len(tokens),
                "trained": sum(bool(value & TRAINED) for _, value, _, _ in tokens),
                "runs": runs,
            }
        )
    return {
        "tokens": len(ids),
        "trained": sum(message["trained"] for message in messages),
        "first_ids": [int(token) for token in ids[:5]],
        "last_ids": [int(token) for token in ids[-5:]],
        "messages": messages,
    }


def _role(tokens: Sequence[tuple[int, int, int, float]]) -> str:
    """Return the role of a message's tokens; "" if all of them are text of the template."""
    return ROLES[max((mask >> ROLE_SHIFT for _, mask, _, _ in tokens), default=0)]


def _runs(
    tokens: Sequence[tuple[int, int, int, float]], decode: Decode, control: frozenset[int]
) -> Iterator[dict[str, Any]]:
    def key(token: tuple[int, int, int, float]) -> _Key:
        return bool(token[1] & TRAINED), token[1] >> ROLE_SHIFT, token[2], token[0] in control, float(token[3])

    for (trained, _, _, is_control, weight), group in groupby(tokens, key=key):
        ids = [int(token[0]) for token in group]
        run: dict[str, Any] = {"text": decode(ids), "tokens": len(ids), "trained": trained, "control": is_control}
        yield run if weight == 1 or not trained else {**run, "weight": weight}
