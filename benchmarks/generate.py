"""Generation on one CPU core: kumi's engine and transformers' `generate`, with the same weights and tokens.

    python benchmarks/generate.py [--repeats 2] [--machine FILE.toml] [--json FILE]

Every row is a process of its own with one thread, in turn: a Llama of 8.6 M parameters in float32, prompts of 64
tokens, a batch of 8 or 32. A figure is the tokens of the replies over the CPU seconds in which they were made.

- equal: replies of 64 tokens.
- mixed: replies of 16 to 256 tokens. A batch of transformers takes as long as its longest reply; kumi refills slots.
- sampled: replies of 64 tokens, drawn at temperature 1; the other rows are greedy.

The model counts: its most likely next token is the id of the last one plus one, and the last id of the vocabulary
ends a reply, so that a prompt decides the length of its reply, and every row checks its replies. Time does not depend
on the values of weights.

The bytes of kumi's cache are those of its tensors, beside `kumi.spec.cache_state`; the time is beside that of
`kumi.plan.inference`, for this machine as `kumi bench --ranks 1` measured it (--machine; it is measured first if not
given). That measures by wall clock: on a machine with other load its figures, and the estimate, are too slow. "host"
is the time of a layer whose tensors are so small that only the host's work counts, beside the planned one.
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
from pathlib import Path
from typing import Any

import machine

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "ignore"}

VOCAB, PROMPT, EQUAL, MIXED = 8192, 64, 64, (16, 256)
END = VOCAB - 1
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
}
KINDS, BATCHES = ("equal", "mixed", "sampled"), (8, 32)
PROGRAMS = ("kumi", "transformers")
# Layers of two models whose tensors are so small that their steps take the time of the host alone.
HOST_LAYERS = (2, 10)
HOST_MODEL = MODEL | {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 256, "head_dim": 8, "eos_token_id": 255}
# The bars: tokens a CPU second of kumi over those of transformers.
BARS = {"equal": 1.25, "mixed": 2.0}


def prepare(folder: Path) -> None:
    """Write the model: layers add nothing, and the head finds the id after that of the embedding."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        table = torch.nn.functional.normalize(torch.randn(VOCAB, MODEL["hidden_size"]))
        model.model.embed_tokens.weight.copy_(table)
        model.lm_head.weight.copy_(table.roll(1, 0))
    model.save_pretrained(folder)


def reply_tokens(kind: str, batch: int) -> list[int]:
    """Return the tokens of each reply: two batches of equal ones, or six of mixed ones."""
    if kind != "mixed":
        return [EQUAL] * (2 * batch)
    draw = random.Random(0)
    return [draw.randint(*MIXED) for _ in range(6 * batch)]


def prompts_for(lengths: list[int]) -> list[list[int]]:
    """Return prompts of `PROMPT` tokens whose greedy replies have these lengths before the id that ends them."""
    draw = random.Random(1)
    return [[*(draw.randrange(3, END) for _ in range(PROMPT - 1)), END - 1 - length] for length in lengths]


def kumi_row(folder: Path, kind: str, batch: int) -> dict[str, Any]:
    """Generate with kumi's engine in this process."""
    import torch

    import kumi.inference.batched_decoder as engine_module
    from kumi.inference.batched_decoder import BatchedDecoder
    from kumi.inference.sampling import Sampling
    from kumi.nn.generation_cache import GenerationCache

    torch.set_num_threads(1)
    sizes: list[int] = []

    class MeasuredCache(GenerationCache):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            tensors = (tensor for layer in self.layers if layer is not None for tensor in layer.tensors)
            sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))

    engine_module.GenerationCache = MeasuredCache  # type: ignore[misc]
    decoder = load_decoder(folder)
    lengths = reply_tokens(kind, batch)
    prompts, engine = prompts_for(lengths), BatchedDecoder(decoder, slots=batch)

    def replies(count: int, most: int) -> list[list[int]]:
        greedy = kind != "sampled"
        stop = frozenset({END} if greedy else ())
        sampling = Sampling(max_new_tokens=most, temperature=0.0 if greedy else 1.0, stop_ids=stop)
        made = {reply.prompt: reply.ids for reply in engine.generate(prompts[:count], sampling)}
        return [made[index] for index in range(count)]

    replies(batch, 4)
    before = time.process_time()
    made = replies(len(prompts), MIXED[1] if kind == "mixed" else EQUAL)
    seconds = time.process_time() - before
    check(made, lengths, prompts, kind)
    return {"seconds": seconds, "tokens": sum(lengths), "cache_bytes": sizes[-1]}


def load_decoder(folder: Path) -> Any:
    """Return kumi's decoder with the weights of `folder`."""
    import torch
    from safetensors.torch import load_file

    from kumi.nn.decoder import Decoder
    from kumi.spec import families

    decoder = Decoder(families.from_hf(json.loads((folder / "config.json").read_text())), dtype=torch.float32)
    decoder.load_state_dict(load_file(folder / "model.safetensors"))
    return decoder.eval().requires_grad_(False)


def host_row(_: Path, kind: str, batch: int) -> dict[str, Any]:
    """Measure the CPU seconds of a layer of a decode step, and of the rest of it, where tensors are tiny."""
    import torch

    from kumi.inference.batched_decoder import BatchedDecoder
    from kumi.inference.sampling import Sampling
    from kumi.nn.decoder import Decoder
    from kumi.spec import families

    torch.set_num_threads(1)
    count, seconds = 64, {}
    for layers in HOST_LAYERS:
        torch.manual_seed(0)
        decoder = Decoder(families.from_hf(HOST_MODEL | {"num_hidden_layers": layers}), dtype=torch.float32)
        for parameter in decoder.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        engine, sampling = BatchedDecoder(decoder, slots=batch), Sampling(max_new_tokens=count, temperature=0.0)
        times = []
        for _ in range(5):
            before = time.process_time()
            assert len(list(engine.generate([[5, 5]] * batch, sampling))) == batch
            times.append((time.process_time() - before) / (count - 1))
        seconds[layers] = min(times[1:])
    few, many = HOST_LAYERS
    layer = (seconds[many] - seconds[few]) / (many - few)
    return {"seconds": layer, "tokens": 1, "step": seconds[few] - few * layer, "kind": kind}


def transformers_row(folder: Path, kind: str, batch: int) -> dict[str, Any]:
    """Generate with transformers, a batch at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lengths = reply_tokens(kind, batch)
    prompts = prompts_for(lengths)
    greedy = kind != "sampled"

    @torch.no_grad()
    def replies(rows: list[list[int]], most: int) -> list[list[int]]:
        # At temperature 1 without filters, and without an end: as many tokens in both programs.
        options = {"do_sample": not greedy, "top_k": 0, "top_p": 1.0, "eos_token_id": END} if not greedy else {}
        options |= {} if greedy else {"min_new_tokens": most}
        ids = torch.tensor(rows)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, pad_token_id=0, **options)
        return [row[: row.index(END)] if END in row else row for row in out[:, PROMPT:].tolist()]

    replies(prompts[:batch], 4)
    most = MIXED[1] if kind == "mixed" else EQUAL
    before = time.process_time()
    made = [reply for first in range(0, len(prompts), batch) for reply in replies(prompts[first : first + batch], most)]
    seconds = time.process_time() - before
    check(made, lengths, prompts, kind)
    return {"seconds": seconds, "tokens": sum(lengths)}


def check(made: list[list[int]], lengths: list[int], prompts: list[list[int]], kind: str) -> None:
    """Raise AssertionError unless every reply has its length and, if greedy, counts."""
    assert [len(reply) for reply in made] == lengths
    for reply, prompt in zip(made, prompts, strict=True):
        assert kind == "sampled" or reply == list(range(prompt[-1] + 1, prompt[-1] + 1 + len(reply)))


def planned(cluster_file: Path, kind: str, batch: int) -> dict[str, float]:
    """Return the planned bytes of the cache, and the estimated seconds of the row on the machine of `cluster_file`."""
    from kumi.config.cluster_source import cluster_spec
    from kumi.config.job_sections import ClusterSection
    from kumi.plan.inference.inference_job import InferenceJob
    from kumi.plan.inference.rollout_time import rollout_time
    from kumi.spec import families
    from kumi.spec.cache_state import cache_bytes
    from kumi.spec.layout import Layout

    model, lengths = families.from_hf(MODEL), reply_tokens(kind, batch)
    cluster = cluster_spec(ClusterSection(source=str(cluster_file)))
    job = InferenceJob(model, cluster, "float32")
    time_of = rollout_time(job, Layout(), batch, [PROMPT] * len(lengths), lengths)
    most = MIXED[1] if kind == "mixed" else EQUAL
    return {
        "cache_bytes": cache_bytes(model, batch, PROMPT + most, "float32"),
        "seconds": time_of.seconds,
        "prefill_seconds": time_of.prefill,
    }


def planned_host(cluster_file: Path) -> float:
    """Return the estimate of `host_row`: seconds of the host for a layer."""
    import numpy as np

    from kumi.config.cluster_source import cluster_spec
    from kumi.config.job_sections import ClusterSection
    from kumi.plan.inference.decode_step import decode_step
    from kumi.plan.inference.inference_job import InferenceJob
    from kumi.spec import families
    from kumi.spec.layout import Layout

    cluster = cluster_spec(ClusterSection(source=str(cluster_file)))
    few, many = (
        decode_step(
            InferenceJob(families.from_hf(HOST_MODEL | {"num_hidden_layers": layers}), cluster, "float32"),
            Layout(),
            np.asarray(1),
            np.asarray(1),
        )
        for layers in HOST_LAYERS
    )
    return float(many.host - few.host) / (HOST_LAYERS[1] - HOST_LAYERS[0])


def measure_machine(folder: Path) -> Path:
    """Return a cluster file of one rank of this machine, measured now."""
    file = folder / "machine.toml"
    command = [sys.executable, "-m", "kumi", "bench", "--ranks", "1", "--quick", "--out", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return file


def run_row(program: str, kind: str, batch: int, folder: Path) -> dict[str, Any]:
    """Run one row in a process of its own."""
    command = [sys.executable, __file__, "--row", program, kind, str(batch), "--work", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"{program} {kind} {batch}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def summary(results: dict[str, list[dict[str, Any]]], plans: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return, by kind and batch, both speeds (the best of all repeats), their ratio, and plan beside measurement."""
    rows = []
    for key, plan in plans.items():
        kumi, other = results[f"kumi {key}"], results[f"transformers {key}"]
        speeds = [max(item["tokens"] / item["seconds"] for item in items) for items in (kumi, other)]
        seconds = min(item["seconds"] for item in kumi)
        rows.append(
            {
                "row": key,
                "kumi": round(speeds[0], 1),
                "transformers": round(speeds[1], 1),
                "ratio": round(speeds[0] / speeds[1], 3),
                "cache_bytes": kumi[0]["cache_bytes"],
                "planned_cache_bytes": plan["cache_bytes"],
                "seconds": round(seconds, 3),
                "planned_seconds": round(plan["seconds"], 3),
                "planned_ratio": round(plan["seconds"] / seconds, 3),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--machine", type=Path, help="cluster file of `kumi bench --ranks 1`")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        program, kind, batch = arguments.row
        measure = {"kumi": kumi_row, "transformers": transformers_row, "host": host_row}[program]
        print("RESULT " + json.dumps(measure(arguments.work, kind, int(batch))))
        return
    keys = [(kind, batch) for kind in KINDS for batch in BATCHES]
    results: dict[str, list[dict[str, Any]]] = {f"{name} {kind} {n}": [] for kind, n in keys for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        cluster_file = arguments.machine or measure_machine(folder)
        plans = {f"{kind} {batch}": planned(cluster_file, kind, batch) for kind, batch in keys}
        for _ in range(arguments.repeats):
            for kind, batch in keys:
                for program in PROGRAMS:
                    result = run_row(program, kind, batch, folder)
                    results[f"{program} {kind} {batch}"].append(result)
                    speed = result["tokens"] / result["seconds"]
                    print(f"{program:12} {kind:7} {batch:3} {speed:7.0f} tokens a CPU second", flush=True)
        host = run_row("host", "layer", 1, folder) | {"planned_seconds": planned_host(cluster_file)}
        text = cluster_file.read_text()
    rows = summary(results, plans)
    for row in rows:
        print(
            f"{row['row']:10} {row['ratio']:.2f}x of transformers; cache {row['cache_bytes']:,} bytes, planned "
            f"{row['planned_cache_bytes']:,}; {row['seconds']:.2f} s, planned {row['planned_seconds']:.2f} s"
        )
    print(f"host: {1e6 * host['seconds']:.0f} us a layer, planned {1e6 * host['planned_seconds']:.0f} us")
    if arguments.json is not None:
        content = {"machine": machine.describe(), "cluster_file": text, "rows": rows, "host": host, "runs": results}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
