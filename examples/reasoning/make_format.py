"""Make format.jsonl, 3000 replies that have the right format and mostly the wrong answer, for examples/format.toml.

    pip install 'kumi[reasoning]'
    python examples/reasoning/make_format.py [FILE]

The questions are those of the data source in examples/reasoning.toml. A reply is one of the question's two numbers, or
one more than it, so that nothing in the replies tells which of these answers the question.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tomllib
from pathlib import Path

from kumi.data.gym_source import gym_file

HERE = Path(__file__).parent


def main(file: Path) -> None:
    """Write the rows to `file`."""
    settings = tomllib.loads((HERE.parent / "reasoning.toml").read_text())
    [source] = settings["data"]["sources"]
    questions = [json.loads(line)["prompt"] for line in gym_file(source["path"]).read_text().splitlines()]
    draw = random.Random(0)
    with file.open("w") as lines:
        for question in questions:
            answer = draw.choice([int(number) for number in re.findall(r"\d+", question)]) + draw.choice([0, 1])
            lines.write(json.dumps({"prompt": question, "completion": f" Answer: {answer}"}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "format.jsonl")
