"""Open damaged copies of model folders; print the outcomes and the files outside of them that were opened.

python mutate.py HUGGING_FACE_FOLDER KUMI_CHECKPOINT COUNT
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import traceback
import zlib
from pathlib import Path

from kumi.convert.open_model import open_source
from kumi.errors import KumiError

WORDS = [
    b"../secret.safetensors",
    b"/etc/passwd",
    b"..",
    b"",
    b"\\ud800",
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"NaN",
    b"{}",
    b"[]",
    b"18446744073709551616",
    b"9" * 400,
    b"0",
    b"1",
    b"2",
    b"4611686018427387904",
    b"F16",
    b"I64",
    b"F32",
]


def main(hugging_face: Path, native: Path, count: int) -> None:
    rng = random.Random(0)
    read_all(hugging_face)
    read_all(native)
    outside: list[str] = []
    folders = tuple(os.path.realpath(folder) + os.sep for folder in (hugging_face, native))

    def note(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith(folders) and "site-packages" not in path and not path.endswith((".py", ".pyc")):
                outside.append(path)

    sys.addaudithook(note)
    report: dict = {"refused": 0, "accepted": 0, "other errors": []}
    for number in range(count):
        folder = hugging_face if number % 3 else native
        file = rng.choice(
            [
                path
                for path in sorted(folder.iterdir())
                if path.suffix in (".safetensors", ".json")
                and path.name not in ("config.json", "generation_config.json")
            ]
        )
        good = file.read_bytes()
        file.write_bytes(mutated(good, rng))
        try:
            read_all(folder)
            report["accepted"] += 1
        except KumiError as error:
            report["refused"] += 1
            if "\n" in str(error):
                report["other errors"].append(str(error))
        except Exception:
            report["other errors"].append(traceback.format_exc()[-600:])
        finally:
            file.write_bytes(good)
    print(json.dumps(report | {"outside": sorted(set(outside)), "other errors": report["other errors"][:3]}))


def read_all(folder: Path) -> None:
    for _ in open_source(folder).tensors():
        pass


def mutated(good: bytes, rng: random.Random) -> bytes:
    """Return `good` with a few bytes changed, cut, doubled or respelled, mostly under a new checksum."""
    seal = re.search(rb',\n"crc32": "[0-9a-f]{8}"}\n$', good)
    text = good[: seal.start()] if seal else good
    end = 8 + int.from_bytes(good[:8], "little") if good[8:9] == b"{" else len(text)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        text = change(text, min(end, len(text)), rng)
    if not seal or rng.random() < 0.1:
        return text
    return text + b',\n"crc32": "%08x"}\n' % zlib.crc32(text)


def change(text: bytes, end: int, rng: random.Random) -> bytes:
    place = rng.randrange(max(1, end))
    kind = rng.randrange(7)
    if kind == 0:
        return text[:place] + bytes([rng.randrange(256)]) + text[place + 1 :]
    if kind == 1:
        return text[: rng.randrange(len(text) + 1)]
    if kind == 2:
        return text[:place] + text[place + rng.randrange(1, 40) :]
    if kind == 3:
        length = rng.randrange(1, 60)
        return text[:place] + text[place : place + length] * 2 + text[place + length :]
    # Replace a number or a string; the header's length stays right, so that readers get as far as the content.
    words = list(re.finditer(rb"\d+" if kind in (4, 5) else rb'"[^"]*"', text[8:end]))
    if not words:
        return text
    word = rng.choice(words)
    new = rng.choice(WORDS)
    if kind == 6 and rng.random() < 0.8:
        new = b'"' + new + b'"'
    changed = text[: 8 + word.start()] + new + text[8 + word.end() :]
    if text[8:9] == b"{":
        length = int.from_bytes(text[:8], "little") + len(new) - (word.end() - word.start())
        changed = max(0, length).to_bytes(8, "little") + changed[8:]
    return changed


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
