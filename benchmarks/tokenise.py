"""Preparation of text against the tokenizer alone, in CPU seconds, and the time of one batch from the loader.

    python benchmarks/tokenise.py [--copies 10] [--rounds 3]

The text is the standard library of this interpreter, `copies` times over, each copy made different. A and B run in
turn: A is `encode_batch_fast` of the same texts on one thread, ids thrown away; B is all of `prepare`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

from kumi.data import Record, Source, expand, load_tokenizer, prepare, read
from kumi.data.bpe import train as train_tokenizer

SOURCE = Source("{stdlib}/**/*.{py,txt}", exclude=("**/site-packages/**",))


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = train_tokenizer([SOURCE], 8192, folder / "tokenizer")
        path = write_copies(folder / "text.jsonl", arguments.copies)
        print(f"{path.stat().st_size / 2**20:.0f} MiB of JSONL, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        for number in range(arguments.rounds):
            alone = encode_alone(path, load_tokenizer(tokens.folder))
            store, cpu, wall = prepare_all(path, tokens, folder / f"out{number}", arguments.workers)
            count = store.train_tokens + store.validation_tokens
            print(
                f"A tokenizer alone {count / alone / 1e3:.0f}k tok per CPU s | B prepare {count / cpu / 1e3:.0f}k "
                f"({alone / cpu:.2f} of A), {count / wall / 1e3:.0f}k tok/s wall"
            )
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        print(f"largest child {peak / 1024:.0f} MiB resident (that is the tokenizer's training or a worker)")
        time_batches(store)


def write_copies(path, copies):
    texts = [item.text for file in expand(SOURCE) for item in read(file) if isinstance(item, Record)]
    with open(path, "w") as out:
        for copy in range(copies):
            out.writelines(json.dumps({"text": f"{copy} {n}\n{text}"}) + "\n" for n, text in enumerate(texts))
    return path


def encode_alone(path, tokens):
    """Return CPU seconds of the tokenizer on all texts, in batches of 256 Ki characters as in `prepare`."""
    spent, batch, size = 0.0, [], 0
    for item in read(path):
        batch.append(item.text)
        size += len(item.text)
        if size >= 1 << 18:
            spent, batch, size = spent + cpu_of_batch(tokens, batch), [], 0
    return spent + cpu_of_batch(tokens, batch)


def cpu_of_batch(tokens, batch):
    begun = time.process_time()
    tokens.backend.encode_batch_fast(batch, add_special_tokens=False)
    return time.process_time() - begun


def prepare_all(path, tokens, out, workers):
    begun, before = time.monotonic(), cpu_seconds()
    store = prepare([Source(str(path))], tokens, out, validation=0.02, workers=workers)
    return store, cpu_seconds() - before, time.monotonic() - begun


def cpu_seconds():
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def time_batches(store):
    for rows, seq_len in ((8, 512), (8, 4096), (256, 2048)):
        mixture = store.mixture(seq_len, 0)
        mixture.batch(0, rows)
        times = []
        for number in range(100 if rows == 8 else 10):
            begun = time.perf_counter()
            mixture.batch(10**9 + number * rows, rows)
            times.append(time.perf_counter() - begun)
        print(f"batch of {rows} x {seq_len}: median {sorted(times)[len(times) // 2] * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
