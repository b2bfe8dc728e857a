"""Make pairs.jsonl, 120 preferences about training on many GPUs: the answer to a question before a wrong one.

    python examples/chat/make_pairs.py [FOLDER]

A rejected reply answers another question, or says the right answer twice. The file is the same at every run.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from make_chats import FACTS, HERE

PAIRS = 120


def pairs() -> list[dict[str, list[dict[str, str]]]]:
    """Return the rows: a prompt of one message, and a chosen and a rejected reply."""
    draw, questions = random.Random(0), list(FACTS)
    rows = []
    for number in range(PAIRS):
        question = questions[number % len(questions)]
        other = draw.choice([each for each in questions if each != question])
        wrong = FACTS[question] + " " + FACTS[question] if draw.random() < 0.25 else FACTS[other]
        rows.append(
            {
                "prompt": [{"role": "user", "content": question}],
                "chosen": [{"role": "assistant", "content": FACTS[question]}],
                "rejected": [{"role": "assistant", "content": wrong}],
            }
        )
    return rows


if __name__ == "__main__":
    target = (Path(sys.argv[1]) if len(sys.argv) > 1 else HERE) / "pairs.jsonl"
    target.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in pairs()), encoding="utf-8")
