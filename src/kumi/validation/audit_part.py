"""Parts of the validation: operations for which the host waits, and a profile of two steps."""

from __future__ import annotations

import json
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from kumi.accelerator import is_gpu
from kumi.validation.fitting_case import SHARE, StepCase, fitted, free_bytes, tiny
from kumi.validation.model_shapes import LLAMA_1B, QWEN_30B_A3B
from kumi.validation.part import Row, Rows, Setting
from kumi.validation.shareable import frames_in
from kumi.validation.timed_step import fresh, prepared, validated_device

# Operators whose result the host waits for.
WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "_unique2", "masked_select", "equal")
_LONGEST_KERNELS = 20
_GAP_SECONDS = 50e-6


class CountWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators of `WAITING` on tensors of a `device`, by the place in kumi that calls them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in WAITING and any(isinstance(x, Tensor) and x.device.type == self.device.type for x in args):
            self.places[f"{name} at {_place()}"] += 1
        return func(*args, **(kwargs or {}))


def rows_of_waits(setting: Setting) -> Rows:
    """Yield the operations of a step for which the host waits, for whole rows, packed rows, and routed experts."""
    device = validated_device(setting)
    for name, case in (
        ("whole rows", StepCase(LLAMA_1B, layers=4, seq_len=4096)),
        ("8 documents a row", StepCase(LLAMA_1B, layers=4, seq_len=4096, documents=8)),
        ("experts", StepCase(QWEN_30B_A3B, layers=2, seq_len=4096)),
    ):
        sized = tiny(case) if setting.tiny else fitted(case, SHARE * free_bytes(device))
        if sized is None:
            yield {"rows": name, "waits": None, "where": "no size fits the free memory"}
            continue
        with fresh(device):
            step = prepared(sized, device)
            step(), step()
            with CountWaits(device) as counter, _device_waits(device) as told:
                step()
        yield {"rows": name, "waits": sum(counter.places.values()), "waits that the driver reports": sum(told.values())}
        for place, count in (counter.places + told).most_common():
            yield {"rows": name, "waits": count, "where": place}


@contextmanager
def _device_waits(device: torch.device) -> Iterator[Counter[str]]:
    """A context that counts the waits that PyTorch's CUDA allocator and streams report, by place."""
    places: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        # PyTorch says once that this mode is a prototype.
        if "synchroniz" in str(message) and "prototype" not in str(message):
            places[f"a synchronising call at {_place()}"] += 1

    if not is_gpu(device):
        yield places
        return
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _place() -> str:
    """Return the innermost place of kumi outside of this package, or PyTorch's."""
    places = frames_in("".join(traceback.format_stack()), most=100)
    own = [at for at in places if at.startswith("kumi.") and not at.startswith("kumi.validation.")]
    return (own or places or ["a place outside of kumi and torch"])[-1]


def rows_of_profile(setting: Setting) -> Rows:
    """Yield where the time of two steps goes, and the longest kernels."""
    device = validated_device(setting)
    case = StepCase(LLAMA_1B, layers=8)
    sized = tiny(case) if setting.tiny else fitted(case, SHARE * free_bytes(device))
    if sized is None:
        yield {"what": "no size fits the free memory"}
        return
    with fresh(device), TemporaryDirectory() as folder:
        step = prepared(sized, device)
        step(), step().item()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu(device) else [])]
        with profile(activities=activities) as profiler:
            began = time.perf_counter()
            step(), step().item()
            seconds = time.perf_counter() - began
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_bytes())["traceEvents"]
    yield {"what": f"two steps, {sized.sizes}", "ms": 1e3 * seconds}
    # On a CPU its operators stand for the kernels.
    kernels = [event for event in events if event.get("cat") == ("kernel" if is_gpu(device) else "cpu_op")]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    yield from _times(kernels, copies, seconds)
    yield from _longest(kernels)


def _times(kernels: Sequence[dict[str, Any]], copies: Sequence[dict[str, Any]], seconds: float) -> Iterator[Row]:
    """Yield the launches, the busy time, the gaps between kernels, and the bytes of copies by direction."""
    spans = sorted((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in kernels)
    busy, gaps, end = 0.0, [], None
    for begin, stop in spans:
        if end is not None and begin - end > _GAP_SECONDS:
            gaps.append(begin - end)
        busy += max(0.0, stop - max(begin, begin if end is None else end))
        end = stop if end is None else max(end, stop)
    yield {"what": "kernels launched", "count": len(kernels)}
    yield {"what": "time in kernels", "ms": 1e3 * busy, "share, %": 100 * busy / seconds}
    yield {"what": "gaps of more than 50 us between kernels", "ms": 1e3 * sum(gaps), "count": len(gaps)}
    totals: Counter[str] = Counter()
    for event in copies:
        totals[str(event["name"])] += int(event.get("args", {}).get("bytes", 0))
    for name, size in totals.most_common(6):
        yield {"what": f"bytes of {name}", "count": size}


def _longest(kernels: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Yield the kernels that take most of the time, by name."""
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in kernels:
        times[event["name"]] += event["dur"]
        counts[event["name"]] += 1
    for name, microseconds in times.most_common(_LONGEST_KERNELS):
        yield {"what": name[:80], "ms": microseconds / 1e3, "count": counts[name]}
