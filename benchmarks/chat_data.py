"""Preparation of conversations: rendering and masking alone, the whole command against the tokenizer alone, and memory.

    python benchmarks/chat_data.py [--json FILE] [--parts render prepare memory] [--sizes 2000 20000 200000]

The template is Qwen3's of the installed TRL, which makes five samples of five replies, because it drops the thoughts of
earlier turns. Texts are drawn from the standard library; the tokenizer of 32,000 ids is trained on it.

- render: conversations a CPU second through rendering, samples and masks, without tokens.
- prepare: CPU seconds of `encode_batch` of the same samples' characters in one process, divided by those of the whole
  `kumi data prepare`, with its start. Both in turn, `rounds` times.
- memory: peak resident memory of `kumi data prepare`'s processes on short conversations, by their number.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from machine import describe
from measure import descendants, peak_of_process

from kumi.data import Record, Source, expand, load_tokenizer, read
from kumi.data.bpe import train as train_tokenizer
from kumi.data.formats import detect
from kumi.data.row_path import RowPath, chat_settings, open_row_path
from kumi.data.tokenizer import Tokenizer
from kumi.spec.data_source import ChatOptions

SOURCE = Source("{stdlib}/**/*.{py,txt}", exclude=("**/site-packages/**",))
VOCABULARY = 32_000
SPECIAL = ("<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Replies, characters of a question, and of a reply.
LONG, SHORT = (5, 400, 1600), (1, 20, 80)
SIZES = (2_000, 20_000, 200_000)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


def corpus() -> str:
    """Return the text of the standard library."""
    return "".join(item.text for file in expand(SOURCE) for item in read(file) if isinstance(item, Record))


def conversations(text: str, count: int, shape: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    """Yield `count` rows of chat, the same at every run."""
    replies, *sizes = shape
    draw = random.Random(0)
    for _ in range(count):
        messages = []
        for _ in range(replies):
            for role, size in zip(("user", "assistant"), sizes, strict=True):
                start = draw.randrange(max(1, len(text) - size))
                messages.append({"role": role, "content": text[start : start + size].strip() or "0"})
        yield {"messages": messages}


def make_model(folder: Path) -> Path:
    """Write a tokenizer with the control tokens of Qwen3, TRL's template and a small model's config to `folder`."""
    import trl
    from tokenizers import AddedToken

    tokens = train_tokenizer([SOURCE], VOCABULARY, folder / "trained")
    backend = tokens.backend
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    model = folder / "model"
    model.mkdir()
    backend.save(str(model / "tokenizer.json"))
    stops = [backend.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>")]
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    files = {
        "chat_template.jinja": template.read_text(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>"}),
        "generation_config.json": json.dumps({"eos_token_id": stops}),
        "config.json": json.dumps(CONFIG | {"vocab_size": backend.get_vocab_size()}),
    }
    for name, content in files.items():
        (model / name).write_text(content)
    return model


def row_path(tokens: Tokenizer, row: Mapping[str, Any]) -> RowPath:
    """Return the functions with which a worker encodes rows such as `row`."""
    fmt = detect([dict(row)], Source("chats.jsonl"))
    settings = chat_settings(ChatOptions(), tokens, {fmt.kind})
    return open_row_path({"format": asdict(fmt), "chat": settings}, tokens)


def render_case(path: RowPath, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return conversations a CPU second through rendering and masking, and the size of their samples."""
    sides = [path.convert(row, "chats.jsonl", n).sides[0] for n, row in enumerate(rows, 1)]
    encoder, samples, characters = path.encoder, 0, 0
    begun = time.process_time()
    for side in sides:
        for sample, _ in encoder.samples(side):
            samples, characters = samples + 1, characters + len(sample.text)
    # Some kernels count CPU time in ticks, and a small case can end within one.
    spent = max(time.process_time() - begun, 1e-3)
    count = len(sides)
    return {
        "conversations_per_cpu_second": count / spent,
        "samples_per_conversation": samples / count,
        "characters_of_samples": characters / count,
    }


def plain_seconds(path: RowPath, tokens: Tokenizer, rows: Sequence[dict[str, Any]]) -> float:
    """Return CPU seconds of the tokenizer on the texts of all samples of `rows`, in batches of 32."""
    texts: list[str] = []
    spent = 0.0
    for n, row in enumerate(rows, 1):
        side = path.convert(row, "chats.jsonl", n).sides[0]
        texts += [sample.text for sample, _ in path.encoder.samples(side)]
        if len(texts) >= 32 or n == len(rows):
            begun = time.process_time()
            tokens.encode_batch(texts)
            spent += time.process_time() - begun
            texts = []
    return spent


@dataclass(frozen=True)
class Spent:
    """CPU and wall seconds of a command, and the peak resident MiB of its first process and of its largest other."""

    cpu: float
    wall: float
    parent_mib: float
    worker_mib: float


def measured(command: Sequence[str], env: Mapping[str, str] | None = None) -> Spent:
    """Run `command` and measure it. Raise SystemExit with its output if it fails."""
    with tempfile.TemporaryFile("w+") as log:
        begun = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=None if env is None else dict(env))
        parent = worker = 0
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            parent = max(parent, peak_of_process(process.pid))
            worker = max([worker, *map(peak_of_process, descendants(process.pid))])
            time.sleep(0.2)
        wall = time.monotonic() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{log.read()[-4000:]}")
    return Spent(usage.ru_utime + usage.ru_stime, wall, parent / 2**20, worker / 2**20)


def run_file(folder: Path, model: Path, source: Path, **data: Any) -> Path:
    """Write a run file for `kumi data prepare` to `folder`; the run's own folder is `folder / "out"`."""
    lines = [
        'name = "prepare"',
        '[model]\ninit = "random"',
        f"source = {json.dumps(str(model))}",
        '[cluster]\nsource = "auto"\ndevices_per_node = 1',
        "[batch]\nseq_len = 2048\ntokens_per_step = 2048",
        f"[train]\nsteps = 1\nout = {json.dumps(str(folder / 'out'))}",
        f"[data]\ntokenizer = {json.dumps(str(model))}",
        f"sources = [{{ path = {json.dumps(str(source))} }}]",
        *(f"{key} = {json.dumps(value)}" for key, value in data.items()),
    ]
    path = folder / "run.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def prepare_command(run: Path) -> list[str]:
    return [sys.executable, "-m", "kumi", "data", "prepare", str(run)]


def prepare_case(folder: Path, model: Path, rows: Iterator[dict[str, Any]]) -> Spent:
    """Return the measurements of `kumi data prepare` on `rows`, in the new folder `folder`."""
    folder.mkdir()
    source = folder / "chats.jsonl"
    with source.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return measured(prepare_command(run_file(folder, model, source, validation=0.0)))


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {key: round(value, 3 if abs(value) < 10 else 1) for key, value in values.items()}


def render_part(text: str, model: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    rows = list(conversations(text, 300, LONG))
    path = row_path(load_tokenizer(model), rows[0])
    results = [render_case(path, rows) for _ in range(arguments.rounds)]
    rates = [result["conversations_per_cpu_second"] for result in results]
    return rounded(results[0] | {"conversations_per_cpu_second": median(rates), "least": min(rates)})


def prepare_part(text: str, model: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    tokens = load_tokenizer(model)
    rows = list(conversations(text, arguments.conversations, LONG))
    path = row_path(tokens, rows[0])
    rounds = []
    for number in range(arguments.rounds):
        plain = plain_seconds(path, tokens, rows)
        spent = prepare_case(folder / f"prepare{number}", model, iter(rows))
        rounds.append(rounded({"plain_cpu": plain, "prepare_cpu": spent.cpu, "speed": plain / spent.cpu}))
        print(rounds[-1], flush=True)
    speeds = [values["speed"] for values in rounds]
    return {"conversations": len(rows), "speed_of_plain": median(speeds), "rounds": rounds}


def memory_part(text: str, model: Path, folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    result = []
    for count in arguments.sizes:
        spent = prepare_case(folder / f"memory{count}", model, conversations(text, count, SHORT))
        result.append({"conversations": count, **rounded(asdict(spent))})
        print(result[-1], flush=True)
    return result


PARTS: dict[str, Callable[[str, Path, Path, argparse.Namespace], Any]] = {
    "render": render_part,
    "prepare": prepare_part,
    "memory": memory_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--json", type=Path, help="write the results here; parts that did not run are left as they are")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, text = make_model(folder), corpus()
        for part in arguments.parts:
            value = PARTS[part](text, model, folder, arguments)
            print(f"{part}, load {os.getloadavg()[0]:.1f}: {json.dumps(value)}", flush=True)
            if arguments.json:
                add_result(arguments.json, part, value)


def add_result(path: Path, part: str, value: Any) -> None:
    """Put the result of a part into the JSON file `path`, with the machine's description and load."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= {"machine": describe(), part: value}
    content.setdefault("load", {})[part] = round(os.getloadavg()[0], 1)
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
