"""Conversion of a random Llama against a plain copy of its files, transformers, and Megatron-Bridge.

    python benchmarks/convert.py [--gigabytes 2] [--rounds 3] [--folder /scratch] [--json FILE] [--bridge PYTHON]

Each case runs in a new process, in rounds over all cases, with a warm page cache and no pending writes. Times exclude
imports, whose CPU time is shown apart. `copy` is `cp` of the files; `copy, on the disk` also syncs them, as kumi does.
Memory is the peak of resident memory, mapped pages included, above its value before the conversion. `--bridge` is a
Python with megatron-bridge, which runs `convert_bridge.py`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe

HERE = Path(__file__).parent

CUT = {"to": "kumi", "layout": "tp=2,pp=2,dp_shard=2,zero=3"}

# The name of each case, its source and target below the scratch folder, its options for kumi, and its imports.
CASES = {
    "copy": ("copy", "hf", "copy", {}, ""),
    "copy, on the disk": ("copied", "hf", "copy", {}, ""),
    "kumi: Hugging Face to kumi": ("kumi", "hf", "kumi", {"to": "kumi"}, "kumi.convert"),
    "kumi: kumi to Hugging Face": ("kumi", "kumi", "back", {"to": "hf"}, "kumi.convert"),
    "kumi: to 8 ranks, tp=2,pp=2,dp_shard=2": ("kumi", "hf", "cut", CUT, "torch"),
    "kumi: 8 ranks to Hugging Face": ("kumi", "cut", "back", {"to": "hf"}, "torch"),
    "kumi: Hugging Face to Hugging Face": ("kumi", "hf", "back", {"to": "hf"}, "kumi.convert"),
    "kumi: to float32": ("kumi", "hf", "float32", {"to": "hf", "dtype": "float32"}, "kumi.convert.files.casts"),
    "kumi: float32 to bfloat16": (
        "kumi",
        "float32",
        "back",
        {"to": "hf", "dtype": "bfloat16"},
        "kumi.convert.files.casts",
    ),
    "kumi: Hugging Face to Megatron": (
        "kumi",
        "hf",
        "megatron",
        {"to": "megatron"},
        "kumi.convert.megatron.write_megatron",
    ),
    "transformers: from_pretrained, save_pretrained": ("transformers", "hf", "back", {}, "transformers"),
}
BRIDGE = {"Megatron-Bridge: import and export": ("bridge", "hf", "back", {}, "")}


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder")
    parser.add_argument("--json")
    parser.add_argument("--bridge")
    parser.add_argument("--only", help="cases that contain this, the copies, and what they need")
    parser.add_argument("--case", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(run_case(*arguments.case)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        result = measure(Path(name), arguments)
    show(result)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n")


def select_cases(only):
    """Return the cases whose name contains `only`, the copies, and the cases that write their sources."""
    names = [name for name in CASES if not only or only in name or "copy" in name]
    read = {CASES[name][1] for name in names}
    writers = {target: name for name, (_, _, target, _, _) in CASES.items() if target in read}
    return {name: case for name, case in CASES.items() if name in names or name in writers.values()}


def measure(folder, arguments):
    size, largest = make_llama(folder / "hf", arguments.gigabytes * 1e9)
    rows, missing = {}, {}
    for _ in range(arguments.rounds):
        for name, case in (select_cases(arguments.only) | (BRIDGE if arguments.bridge else {})).items():
            if name in missing:
                continue
            try:
                rows.setdefault(name, []).append(run_in_process(folder, name, case, arguments.bridge))
            except subprocess.CalledProcessError as error:
                missing[name] = (error.stderr.strip().splitlines() or ["it failed"])[-1]
    if not arguments.bridge:
        missing["Megatron-Bridge"] = "no Python with megatron-bridge was named with --bridge"
    return {
        "machine": describe(),
        "bytes": size,
        "largest_tensor": largest,
        "rounds": arguments.rounds,
        "rows": rows,
        "missing": missing,
    }


def run_in_process(folder, name, case, bridge):
    """Return seconds, CPU seconds and bytes of memory of one case, in a new process."""
    what, source, target, options, imports = case
    shutil.rmtree(folder / target, ignore_errors=True)
    read_into_page_cache(folder / source)
    subprocess.run(["sync", "-f", str(folder)], check=True)
    paths = [str(folder / source), str(folder / target)]
    if name in BRIDGE:
        command = [bridge, str(HERE / "convert_bridge.py"), *paths]
    else:
        command = [sys.executable, __file__, "--case", what, *paths, json.dumps(options), imports]
    load = os.getloadavg()[0]
    completed = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(completed.stdout.splitlines()[-1]) | {"load": load}


def read_into_page_cache(folder):
    """Read every file into the page cache."""
    buffer = bytearray(2**22)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def make_llama(folder, size):
    """Make a folder with a random Llama in bfloat16; return the bytes of its weights and of its largest tensor."""
    import torch

    from kumi.convert.hf import write_folder
    from kumi.spec import families
    from kumi.spec.ledger import num_params, params

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "hidden_act": "silu",
        "intermediate_size": 5632,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    small = 2 * num_params(families.from_hf(config))
    layer = 2 * num_params(families.from_hf(config | {"num_hidden_layers": 2})) - small
    config["num_hidden_layers"] = max(1, round((size - small) / layer) + 1)
    spec, generator = families.from_hf(config), torch.Generator().manual_seed(0)

    def tensors():
        for param in params(spec):
            # Random fractions with the exponent of 1/128: quicker to draw than normal numbers, and as costly to copy.
            bits = torch.empty(param.shape, dtype=torch.int16).random_(generator=generator)
            value = (bits & -0x7F81 | 0x3C00).view(torch.bfloat16)
            yield param.name, value if len(param.shape) > 1 else torch.ones_like(value)

    write_folder.write_hf_folder(
        folder, spec, tensors(), base_config=config, dtype="bfloat16", tokenizer_folder=None, card=""
    )
    return 2 * num_params(spec), 2 * max(param.numel for param in params(spec))


def run_case(what, source, target, options, imports):
    if what in ("copy", "copied"):
        return copy(Path(source), Path(target), wait=what == "copied")
    importlib.import_module(imports)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(len(os.sched_getaffinity(0)))
    if what == "kumi":
        from kumi.convert import convert

        work = lambda: convert(source, target, verify=False, **json.loads(options))  # noqa: E731
    else:
        import transformers

        def work():
            model = transformers.LlamaForCausalLM.from_pretrained(source, dtype="auto")
            model.save_pretrained(target, max_shard_size="5GB")

    return timed(work)


def timed(work):
    """Run `work()`; return its seconds, CPU seconds and peak growth of resident bytes, and CPU seconds before it."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's peak
    before, cpu, begun = resident("VmRSS"), time.process_time(), time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    return {
        "seconds": seconds,
        "cpu": time.process_time() - cpu,
        "memory": resident("VmHWM") - before,
        "interpreter": before,
        "imports": cpu,
    }


def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def copy(source, target, wait):
    target.mkdir()
    files = [str(path) for path in source.iterdir()]
    begun, before = time.perf_counter(), os.times()
    subprocess.run(["cp", *files, str(target)], check=True)
    if wait:
        subprocess.run(["sync", *(str(path) for path in target.iterdir())], check=True)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": time.perf_counter() - begun, "cpu": cpu, "memory": 0, "interpreter": 0, "imports": 0}


def show(result):
    size, largest = result["bytes"], result["largest_tensor"]
    copies = [median(result["rows"][name], "seconds") for name in ("copy", "copy, on the disk")]
    print(
        f"{size / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB, {result['machine']['cores']} cores, "
        f"{result['rounds']} rounds: medians (best)"
    )
    for name, rows in result["rows"].items():
        middle, best = median(rows, "seconds"), min(row["seconds"] for row in rows)
        cpu, imports, memory = median(rows, "cpu"), median(rows, "imports"), max(row["memory"] for row in rows)
        print(
            f"{name:48s} {middle:6.2f} s ({best:5.2f}) {size / middle / 1e9:5.2f} GB/s, of the copy's speed "
            f"{copies[0] / middle:4.2f}, of that on the disk {copies[1] / middle:4.2f}; CPU {cpu:4.1f} s, "
            f"and {imports:3.1f} s of imports; "
            f"memory +{memory / 1e6:.0f} MB, {memory / largest:.2f} of the largest tensor"
        )
    for name, why in result["missing"].items():
        print(f"{name}: not measured: {why}")


def median(rows, key):
    return statistics.median(row[key] for row in rows)


if __name__ == "__main__":
    main()
