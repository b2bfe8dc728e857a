"""Preparation of text against the tokenizer alone, in CPU seconds, and the time of one batch from the loader.

    python benchmarks/tokenise.py [--copies 10] [--rounds 3]
    python benchmarks/tokenise.py --megatron FOLDER [--copies 10] [--json FILE]

The text is the standard library of this interpreter, `copies` times over, each copy made different. A and B run in
turn: A is `encode_batch_fast` of the same texts on one thread, ids thrown away; B is all of `prepare`.

With `--megatron`, a checkout of Megatron-LM, whole commands run in turn instead: its `tools/preprocess_data.py` and
`kumi data prepare`, with two workers each and the same tokenizer of 32,000 ids; their files must be equal. The script
imports all of Megatron: where that needs a package which is missing, `--megatron-path` names a folder with a
`sitecustomize.py` that replaces it. With `--fast`, a folder that has the package gigatoken, `preprocess_data_fast.py`
runs too.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from chat_data import CONFIG, SOURCE, VOCABULARY, add_result, measured, prepare_command, rounded, run_file

from kumi.data import Record, Source, expand, load_tokenizer, prepare, read
from kumi.data.bpe import train as train_tokenizer

SCRIPTS = ("preprocess_data.py", "preprocess_data_fast.py")


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--megatron", type=Path, metavar="FOLDER")
    parser.add_argument("--megatron-path", type=Path, nargs="*", default=[], metavar="FOLDER")
    parser.add_argument("--fast", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.megatron:
        compare_megatron(arguments)
        return
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


def compare_megatron(arguments):
    """Run Megatron's scripts and `kumi data prepare` on the same file in turn; print and write time and equality."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = train_tokenizer([SOURCE], VOCABULARY, folder / "tokenizer")
        (tokens.folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": tokens.vocab_size}))
        path = write_copies(folder / "text.jsonl", arguments.copies)
        rounds = [megatron_round(arguments, folder / f"{n}", tokens.folder, path) for n in range(arguments.rounds)]
        size = path.stat().st_size
    result = {"mib_of_jsonl": round(size / 2**20, 1), "rounds": rounds}
    print(f"load {os.getloadavg()[0]:.1f}: {json.dumps(result)}")
    if arguments.json:
        add_result(arguments.json, f"megatron x{arguments.copies}", result)


def megatron_round(arguments, out, tokenizer, path):
    """Return the measurements of each command; "times kumi" are ratios, "equal" is true for the same bytes."""
    out.mkdir()
    ours = measured(prepare_command(run_file(out, tokenizer, path, validation=0.0)))
    [file] = (out / "out").rglob("*_train_text_document.bin")
    result = {"kumi": rounded(asdict(ours))}
    for script in SCRIPTS if arguments.fast else SCRIPTS[:1]:
        prefix = out / script
        spent = run_megatron(arguments, script, tokenizer, path, prefix)
        equal = all(
            filecmp.cmp(f"{prefix}_text_document{end}", file.with_suffix(end), shallow=False)
            for end in (".bin", ".idx")
        )
        ratios = {"cpu_times_kumi": spent.cpu / ours.cpu, "wall_times_kumi": spent.wall / ours.wall}
        result[script] = {**rounded(asdict(spent) | ratios), "equal": equal}
        print(f"{script}: {result[script]}", flush=True)
    return result


def run_megatron(arguments, script, tokenizer, path, prefix):
    options = ["--use-gigatoken"] if script == SCRIPTS[1] else ["--workers", "2"]
    places = [*arguments.megatron_path, arguments.megatron, *([arguments.fast] if script == SCRIPTS[1] else [])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    command = [sys.executable, str(arguments.megatron / "tools" / script), "--input", str(path)]
    command += ["--output-prefix", str(prefix), "--append-eod", "--tokenizer-type", "HuggingFaceTokenizer"]
    return measured([*command, "--tokenizer-model", str(tokenizer), *options], env)


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
