"""Hostile versions of a good file, the same ones every time: `mutants(kind, good, count)`.

A mutant is the bytes of a file, or a `Special`: something that is no file of its own (a link out of the folder, a pipe,
a device, a folder) or one too large to write out.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Special:
    """Something other than a file with given bytes: `kind` is link, pipe, device, folder or sparse."""

    kind: str


Mutant = bytes | Special
SPECIALS = [Special(kind) for kind in ("link", "pipe", "device", "folder", "sparse")]
_SEAL = re.compile(rb',\n"crc32": "[0-9a-f]{8}"}\n$')

# Replacements of values.
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**53,
    2**62,
    2**63,
    10**30,
    1e308,
    -1e308,
    5e-324,
    "",
    "x" * 100_000,
    "../secret.json",
    "/etc/passwd",
    "\x1b[31m",
    "\u202e",
    "a\nb",
    "",
    [],
    {},
    [[]],
    ["x"],
    [["x"]],
    {"a": {"b": []}},
    [None],
    [2**62],
    "import os; os.system('touch owned')",
    "__import__('os').system('touch owned')",
    "(a+)+$",
    [1] * 10_000,
]
WORDS = [
    b"../secret.json",
    b"/etc/passwd",
    b"\\ud800",
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b"{}",
    b"[]",
    b"9" * 50,
    b"2",
    b"18446744073709551615",
    b"true",
    b"\xff",
    b"\0",
    b"F16",
    b'"',
    b"[[[[",
    b"}",
    b"e308",
]

NUMBERS = [b"NaN", b"-Infinity", b"1e999", b"9" * 500]
RECORDS = [
    b'{"text": "a", "text": "b"}\n',
    b'{"text": 1}\n',
    b"[" * 100_000 + b"\n",
    b'{"text": "\\ud800"}\n',
    b"\xff\xfe\n",
    b'{"text": null}\n',
    b"null\n",
    b'{"text": ""}\n',
    b'{"text": NaN}\n',
    b"\0" * 1000 + b"\n",
    b'{"text": "a"',
    b"{}\n",
    b'{"text": ' + b"9" * 5000 + b"}\n",
    b'{"text": ["' + b"x" * 100_000 + b'"]}\n',
]

ODD = [
    b"[]",
    b'"x"',
    b"-1",
    b"0",
    b"nan",
    b"inf",
    b"1e308",
    b"9223372036854775807",
    b"true",
    b"{}",
    b"[[1]]",
    b"9" * 60,
    b"1979-05-27",
    b'"\\u202e"',
    b"{a={a={a=1}}}",
    b"[" * 100,
]


def mutants(kind: str, good: bytes, count: int) -> Iterator[Mutant]:
    """Yield `count` hostile versions of `good`, a file of `kind`."""
    for number in range(count):
        rng = random.Random(f"{kind} {number}")
        if number < len(SPECIALS):
            yield SPECIALS[number]
        else:
            yield _MAKERS.get(kind, _json)(good, rng, number)


def _json(good: bytes, rng: random.Random, number: int) -> bytes:
    """A JSON text that is broken in its grammar, or says something else."""
    seal = _SEAL.search(good)
    text = good[: seal.start()] + b"}" if seal else good
    text = _broken(text, rng) if number % 5 < 3 else _other_values(text, rng)
    if not seal or rng.random() < 0.2:
        return text
    text = text.rstrip()[:-1]
    return text + b',\n"crc32": "%08x"}\n' % zlib.crc32(text)


def _broken(text: bytes, rng: random.Random) -> bytes:
    """A text that no strict reader takes."""
    keys = list(re.finditer(rb'"[^"\\]*"\s*:', text))
    place = rng.choice(keys).start() if keys else 0
    nested = rng.choice([b"[", b'{"a":'])
    return rng.choice(
        [
            lambda: text[: rng.randrange(len(text))],
            lambda: text[:place] + _again(text, place) + text[place:],
            lambda: text[:place] + b'"more": ' + rng.choice(NUMBERS) + b", " + text[place:],
            lambda: text[:place] + b'"more": ' + nested * rng.choice([70, 5000, 200_000]),
            lambda: text[:place] + b'"more": "\\ud800", ' + text[place:],
            lambda: text[:place] + b'"more": ' + b"[" * 80 + b"]" * 80 + b", " + text[place:],
            lambda: b"\xff\xfe" + text,
            lambda: text.decode().encode("utf-16"),
            lambda: b"[" + text + b"]",
            lambda: text + text,
            lambda: text[:place] + bytes([rng.choice(b"\0\x01\x80\xff,:")]) + text[place:],
            lambda: b"[" + b"0," * 20_000_000 + b"0]" if rng.random() < 0.05 else b"null",
            lambda: rng.randbytes(200),
            lambda: b"",
        ]
    )()


def _again(text: bytes, place: int) -> bytes:
    key = re.match(rb'"[^"\\]*"\s*:', text[place:])
    return key[0] + b" 1, " if key else b'"a": 1, "a": 2, '


def _other_values(text: bytes, rng: random.Random) -> bytes:
    """Return the object with one to three values, or keys, replaced."""
    data = json.loads(text)
    for _ in range(rng.choice([1, 1, 2, 3])):
        path = rng.choice(list(_paths(data)) or [()])
        if not path:
            return json.dumps(copy.deepcopy(rng.choice(VALUES))).encode()
        *parents, last = path
        inner = data
        for key in parents:
            inner = inner[key]
        if isinstance(inner, dict) and rng.random() < 0.15:
            inner[rng.choice(["x" * 3000, "../secret.json", "", "\x1b[0m"])] = inner.pop(last)
        elif rng.random() < 0.1:
            del inner[last]
        else:
            inner[last] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(data).encode()


def _paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in data if isinstance(data, dict) else range(min(len(data), 20)) if isinstance(data, list) else ():
        yield (*path, key)
        yield from _paths(data[key], (*path, key))


def _binary(good: bytes, rng: random.Random, number: int) -> bytes:
    """Bytes changed, cut out, doubled, or replaced."""
    place = rng.randrange(len(good))
    early = rng.randrange(min(len(good), 64))
    return rng.choice(
        [
            lambda: good[:place],
            lambda: good[:early] + rng.randbytes(rng.choice([1, 4, 8])) + good[early + 8 :],
            lambda: (
                good[:early] + rng.choice([b"\xff" * 8, b"\0" * 8, (2**62).to_bytes(8, "little")]) + good[early + 8 :]
            ),
            lambda: good + rng.randbytes(16),
            lambda: good[:place] + good[place + rng.randrange(1, 40) :],
            lambda: good[:place] + good[max(0, place - 40) :],
            lambda: rng.randbytes(300),
            lambda: b"",
        ]
    )()


def _safetensors(good: bytes, rng: random.Random, number: int) -> bytes:
    """A header that is broken or lies, with its right length, or a damaged file."""
    length = int.from_bytes(good[:8], "little")
    header, data = good[8 : 8 + length].rstrip(), good[8 + length :]
    if number % 4 == 0:
        return _binary(good, rng, number)
    header = _json(header, rng, number)
    return len(header).to_bytes(8, "little") + header + data


def _pickle(good: bytes, rng: random.Random, number: int) -> bytes:
    """A damaged pickle, or one that names forbidden objects, or an archive of one."""
    names = [rb"cos\nsystem\n", rb"cbuiltins\neval\n", rb"cposix\nsystem\n", rb"ctorch\nload\n", rb"cshutil\nrmtree\n"]
    if number % 4 == 1:
        call = rng.choice(names).replace(rb"\n", b"\n") + b"(S'touch owned'\ntR."
        return _archive(call) if good[:2] == b"PK" else b"\x80\x02" + call
    if number % 4 == 2 and good[:2] != b"PK":
        words = list(re.finditer(rb"torch[\w.]*|[A-Z]\w{5,}", good))
        word = rng.choice(words)
        other = rng.choice([b"os", b"system", b"posix", b"builtins", b"eval", b"numpy"])
        return good[: word.start()] + other.ljust(len(word[0]), b"x")[: len(word[0])] + good[word.end() :]
    start = good.find(b"\x80\x02") if good[:2] == b"PK" else 0
    end = good.find(b"PK\x07\x08", start) if start else len(good)
    return good[:start] + _binary(good[start:end], rng, number) + good[end:]


def _archive(pickled: bytes) -> bytes:
    import io
    import zipfile

    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("x/data.pkl", pickled)
    return file.getvalue()


def _toml(good: bytes, rng: random.Random, number: int) -> bytes:
    """A TOML text that is broken, or says something else."""
    lines = good.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    line, odd = (
        lines[place],
        rng.choice(
            [
                b"[]",
                b'"x"',
                b"-1",
                b"0",
                b"nan",
                b"inf",
                b"1e308",
                b"9223372036854775807",
                b"true",
                b"{}",
                b"[[1]]",
                b"9" * 60,
                b"1979-05-27",
                b'"\\u202e"',
                b"{a={a={a=1}}}",
                b"[" * 100,
            ]
        ),
    )
    values = [b for b in range(len(lines)) if b"=" in lines[b]]
    return rng.choice(
        [
            lambda: b"".join(lines[:place]) + line[: len(line) // 2],
            lambda: good + line,
            lambda: good + b"\n" + b"a." * 50_000 + b"b = 1\n",
            lambda: good + b"\nx = " + b"[" * 100_000,
            lambda: good + b"\n[more]\nx = 1\n",
            lambda: good.replace(b"=", b"", 1),
            lambda: b"\xff" + good,
            lambda: b"#" * 2_000_000,
            lambda: _set(lines, rng.choice(values), odd),
            lambda: _set(lines, rng.choice(values), odd),
            lambda: _set(lines, rng.choice(values), odd),
        ]
    )()


def _set(lines: list[bytes], place: int, value: bytes) -> bytes:
    return b"".join([*lines[:place], lines[place].partition(b"=")[0] + b"= " + value + b"\n", *lines[place + 1 :]])


def _records(good: bytes, rng: random.Random, number: int) -> bytes:
    lines = good.splitlines(keepends=True)
    lines[rng.randrange(len(lines))] = rng.choice(RECORDS)
    return b"".join(lines)


def _text(good: bytes, rng: random.Random, number: int) -> bytes:
    place = rng.randrange(len(good))
    return rng.choice(
        [
            lambda: good[:place] + rng.choice([b"\xff", b"\xed\xa0\x80", b"\xc3"]) + good[place + 1 :],
            lambda: good.decode().encode("utf-16"),
            lambda: b" " * rng.choice([0, 1, 10_000_000]),
            lambda: good[:place] + bytes(range(128)) + good[place:],
            lambda: rng.randbytes(1000),
        ]
    )()


def _compressed(pack: Callable[[bytes], bytes]) -> Callable[[bytes, random.Random, int], bytes]:
    def make(good: bytes, rng: random.Random, number: int) -> bytes:
        if number % 40 == 7:  # a bomb: 200 MB of spaces, or of one record
            return pack(rng.choice([b" ", b"\0"]) * 200_000_000)
        if number % 2:
            return _binary(good, rng, number)
        return pack(_records(b'{"text": "a b"}\n' * 5, rng, number))

    return make


def _zstd(data: bytes) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdCompressor(level=1).compress(data))


_MAKERS: dict[str, Callable[[bytes, random.Random, int], bytes]] = {
    "weights": _safetensors,
    "adapter weights": _safetensors,
    "torch .bin": _pickle,
    "pytorch_model.bin": _pickle,
    "megatron metadata": _pickle,
    "store .idx": _binary,
    "store .bin": _binary,
    "run file": _toml,
    "cluster file": _toml,
    "jsonl": _records,
    "txt": _text,
    "parquet": _binary,
    "jsonl.zst": _compressed(_zstd),
    "jsonl.gz": _compressed(lambda data: gzip.compress(data, 1, mtime=0)),
}
