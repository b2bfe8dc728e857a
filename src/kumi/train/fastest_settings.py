"""Compare settings of a run file with what they replace, on this machine's GPUs: compiled layers, float8, and
overlapped tensor parallelism (`ASKED` of `kumi.spec.numerics`).

    python -m kumi.train.fastest_settings cuda compile      a record as JSON, from a process of its own, which may crash

A setting is used if loss and gradients are near those without it (`_TOLERANCES`) and a step is faster. Otherwise it is
"off", with a sentence. Compilation is not timed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from kumi.errors import KumiError, LayoutError
from kumi.files.output import write_text
from kumi.files.untrusted import read_object
from kumi.launch.local import run_ranks
from kumi.nn.fastest_kernels import TOLERANCE, Function, distance, timed_rounds, why_not
from kumi.parallel import RankInfo, build, build_mesh, init_distributed, pipeline, unwrap
from kumi.parallel.float8 import require_float8
from kumi.parallel.mesh import Mesh, close_distributed
from kumi.spec import families
from kumi.spec.comm import Comm
from kumi.spec.layout import Layout
from kumi.spec.numerics import ASKED
from kumi.spec.precision import PRECISIONS

# Largest distance of loss and gradients from those without the setting, as a fraction of their norm. Numbers in float8
# have three bits after the first, and gradients go through several products.
_TOLERANCES = {"compile": TOLERANCE, "float8": 0.2, "async_tp": TOLERANCE}
# Setting -> further settings, which are on both in the step with the setting and in the step without.
_BOTH = {"float8": ("compile",)}

# A layer of a model of some billion parameters, and one for tests.
SIZES: dict[str, int] = {"tokens": 4096, "hidden": 2048, "wide": 5632, "heads": 16, "vocabulary": 8192}
TINY: dict[str, int] = {"tokens": 32, "hidden": 32, "wide": 64, "heads": 2, "vocabulary": 64}


def compare_setting(setting: str, device_kind: str, sizes: dict[str, int] = SIZES) -> dict[str, Any]:
    """Return the record of a measurement of `setting`, a key of `ASKED`.

    `numerics`: the choice, as `kumi.spec.numerics.parse_numerics` reads it.
    `seconds`: the seconds of a step with the setting "on" and "off", by setting. After a failure there is a number for
    "off" alone, which stands for no time; it says that the setting need not be measured again.
    `notes`: lines for the terminal.
    `took`: the seconds that the measurement took.

    The record has no seconds and no notes if the setting cannot be used here at all, such as float8 without its
    package: the run then says so itself, with the remedy.
    """
    began = time.perf_counter()
    try:
        if setting == "async_tp":
            seconds, note = _in_ranks(device_kind, sizes)
        else:
            device = torch.device(device_kind, 0) if device_kind != "cpu" else torch.device("cpu")
            seconds, note = _compared(setting, build_mesh(Layout(), RankInfo(0, 1, 0, device)), sizes)
    except LayoutError:
        return {"numerics": "reference", "seconds": {}, "notes": [], "took": time.perf_counter() - began}
    except Exception as error:  # whatever a compiler or a package raises
        first = (str(error).splitlines() or [""])[0][:200]
        seconds, note = {}, f"{setting} fails ({type(error).__name__}: {first}), and is not used"
    return {
        "numerics": f"kernels={setting}:off" if note else "reference",
        "seconds": {setting: seconds or {"off": 1e-9}},
        "notes": [f"{note} ({ASKED[setting]})"] if note else [],
        "took": time.perf_counter() - began,
    }


def _compared(setting: str, mesh: Mesh, sizes: dict[str, int]) -> tuple[dict[str, float], str]:
    """Return the median seconds without and with `setting`, and why it is not used; "" if it is."""
    if setting == "float8":
        require_float8(mesh.device)
    both = _BOTH.get(setting, ())
    plain = _step(mesh, sizes, both)
    expected, seconds_off = plain(), timed_rounds(plain, mesh.device)
    del plain
    changed = _step(mesh, sizes, (*both, setting))
    difference, seconds_on = distance(changed(), expected), timed_rounds(changed, mesh.device)
    note = why_not(setting, difference, seconds_on, seconds_off, _TOLERANCES[setting])
    return {"off": median(seconds_off), "on": median(seconds_on)}, note


def _step(mesh: Mesh, sizes: dict[str, int], settings: tuple[str, ...]) -> Function:
    """Return a function that computes loss and gradients of two layers with `settings`."""
    hf = {
        "model_type": "llama",
        "vocab_size": sizes["vocabulary"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["wide"],
        "num_hidden_layers": 2,
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": max(1, sizes["heads"] // 2),
        "max_position_embeddings": sizes["tokens"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    precision = PRECISIONS["fp8" if "float8" in settings else "bf16"]
    comm = Comm(async_tp="async_tp" in settings)
    model = build(families.from_hf(hf), mesh, precision, weights=0, compile="compile" in settings, comm=comm)
    ids = torch.arange(sizes["tokens"], device=mesh.device)[None] % sizes["vocabulary"]
    weights = torch.full(ids.shape, 1 / sizes["tokens"], device=mesh.device)
    inputs = {"input_ids": ids, "labels": ids, "token_weights": weights}

    def run() -> list[Tensor]:
        loss = pipeline.train_microbatches(model, mesh, [inputs])
        parameters = list(unwrap(model).parameters())
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        return [loss.detach(), *grads]

    return run


def _in_ranks(device_kind: str, sizes: dict[str, int]) -> tuple[dict[str, float], str]:
    """Return the result of `_compared` for overlapped tensor parallelism, on two ranks."""
    with TemporaryDirectory() as folder:
        arguments = (device_kind, sizes, Path(folder) / "result.json")
        code = run_ranks(_compare_rank, arguments, nproc=2, log_dir=Path(folder) / "logs", grace=10.0)
        if code:
            raise KumiError(f"the ranks ended with code {code}")
        result = read_object(Path(folder), "result.json")
        return result["seconds"], result["note"]


def _compare_rank(device_kind: str, sizes: dict[str, int], out: Path) -> None:
    """Measure overlapped tensor parallelism as one of two ranks, and write the result to `out` on rank 0."""
    place = init_distributed(device_kind, timeout_s=60.0)
    seconds, note = _compared("async_tp", build_mesh(Layout(tp=2), place), sizes)
    if place.rank == 0:
        write_text(out, json.dumps({"seconds": seconds, "note": note}))
    close_distributed()


if __name__ == "__main__":
    print(json.dumps(compare_setting(sys.argv[2], sys.argv[1])))
