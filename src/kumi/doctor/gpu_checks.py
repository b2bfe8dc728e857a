"""Checks of GPUs by `nvidia-smi -q -x`: number, ECC errors, throttling, NVLink. Fields that are missing in its output
are skipped.

nvidia-smi runs while the GPUs compute (`device speed`), since an idle GPU is not throttled.
"""

from __future__ import annotations

import re
import subprocess
from xml.etree import ElementTree

from kumi.config.cluster_source import cluster_spec
from kumi.config.job_sections import ClusterSection
from kumi.config.numerics import read_cached_numerics, this_gpu
from kumi.doctor.finding import Reading
from kumi.doctor.here import Here
from kumi.spec.numerics import kernels_text

_NO_SMI = "no nvidia-smi on this machine"
_LINK_SECONDS = 10.0
# nvidia-smi's reasons for a lower clock that mean trouble, and our words for them. A reason is the end of an XML tag
# that begins with clocks_event_reason_, or with clocks_throttle_reason_ in older drivers.
_TROUBLE = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "too hot",
    "hw_power_brake_slowdown": "power brake",
    "sw_thermal_slowdown": "too hot",
}
# A power cap is usual at full load, so it is only a warning.
_NOTABLE = {"sw_power_cap": "power cap"}


def gpu_count(here: Here) -> Reading:
    """Return the number of GPUs that nvidia-smi lists, and the number that the run uses on this machine."""
    gpus = _gpus(here)
    if not gpus:
        return Reading(absent=_absent(here))
    needed = here.devices.per_node if here.devices.kind == "cuda" else 0
    return Reading(len(gpus), need=needed)


def gpu_memory_errors(here: Here) -> Reading:
    """Return the uncorrectable ECC errors and failed row remappings of all GPUs."""
    gpus = _gpus(here)
    if not gpus:
        return Reading(absent=_absent(here))
    problems: list[str] = []
    warnings: list[str] = []
    counted = 0
    for number, gpu in gpus:
        errors = [_integer(tag.text) for tag in gpu.iterfind("ecc_errors/volatile/*") if "uncorrectable" in tag.tag]
        errors += [_integer(tag.text) for tag in gpu.iterfind("ecc_errors/volatile/double_bit/total")]
        counts = [count for count in errors if count is not None]
        counted += bool(counts)
        if sum(counts):
            problems.append(f"GPU {number} has {sum(counts)} uncorrectable ECC errors")
        if _text(gpu, "remapped_rows/remapped_row_failure") == "Yes":
            problems.append(f"GPU {number} has failed to remap a row of its memory")
        if _text(gpu, "remapped_rows/remapped_row_pending") == "Yes":
            warnings.append(f"GPU {number} waits for a reset to remap a row of its memory")
    shown = f"no uncorrectable error on {len(gpus)} GPUs" if counted else "the GPUs have no ECC, or it is off"
    return Reading(shown, problems=tuple(problems), warnings=tuple(warnings))


def gpu_throttling(here: Here) -> Reading:
    """Return the reasons for lower clocks under load."""
    gpus = _gpus(here)
    if not gpus:
        return Reading(absent=_absent(here))
    problems: list[str] = []
    warnings: list[str] = []
    for number, gpu in gpus:
        reasons = throttle_reasons(gpu)
        for words, sentences in ((_TROUBLE, problems), (_NOTABLE, warnings)):
            named = sorted({words[reason] for reason in reasons if reason in words})
            if named:
                heat = _text(gpu, "temperature/gpu_temp")
                sentences.append(f"GPU {number} is throttled: {', '.join(named)}{f' ({heat})' if heat else ''}")
    reported = {_text(gpu, "temperature/gpu_temp") for _, gpu in gpus}
    temperatures = ", ".join(sorted(filter(None, reported))) or "temperature not reported"
    return Reading(f"none ({temperatures})", problems=tuple(problems), warnings=tuple(warnings))


def chosen_kernels(here: Here) -> Reading:
    """Return what was chosen by measurement on this machine's GPU: kernels, the kind of attention, and settings."""
    if here.devices.kind == "cpu":
        return Reading(absent="kernels are chosen on GPUs")
    measured = read_cached_numerics(this_gpu(cluster_spec(ClusterSection(source="auto")).device.name))
    if measured is None:
        return Reading("measured at the first start of a run")
    return Reading(f"{kernels_text(measured.numerics.kernels)}; measured: {', '.join(measured.seconds)}")


def throttle_reasons(gpu: ElementTree.Element) -> list[str]:
    """Return the reasons for which the driver lowers the clocks of `gpu` now, by its own names."""
    return [
        re.sub(r"^clocks_(event|throttle)_reason_", "", tag.tag)
        for group in ("clocks_event_reasons", "clocks_throttle_reasons")
        for tag in gpu.iterfind(f"{group}/*")
        if (tag.text or "").strip() == "Active"
    ]


def nvlinks(here: Here) -> Reading:
    """Return the number of active NVLinks of the GPUs. A GPU with fewer links than another one is a problem."""
    gpus = _gpus(here)
    if not gpus:
        return Reading(absent=_absent(here))
    try:
        ended = subprocess.run(
            ["nvidia-smi", "nvlink", "--status"], capture_output=True, text=True, timeout=_LINK_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Reading(absent=f"nvidia-smi nvlink failed ({type(error).__name__})")
    active = active_links(ended.stdout) if ended.returncode == 0 else {}
    if not any(active.values()):
        return Reading("the GPUs have no NVLink")
    most = max(active.values())
    problems = [
        f"GPU {gpu} has {count} active NVLinks, and others {most}" for gpu, count in active.items() if count < most
    ]
    return Reading(f"{most} links per GPU", problems=tuple(problems))


def active_links(status: str) -> dict[str, int]:
    """Return the number of active links by GPU in the output of `nvidia-smi nvlink --status`."""
    active: dict[str, int] = {}
    gpu = ""
    for line in status.splitlines():
        if named := re.match(r"\s*GPU (\d+):", line):
            gpu = named[1]
            active.setdefault(gpu, 0)
        elif gpu and re.match(r"\s*Link \d+:\s*[\d.]+ *GB/s", line):
            active[gpu] += 1
    return active


def _gpus(here: Here) -> list[tuple[int, ElementTree.Element]]:
    """Return the GPUs of the machine with their numbers. Raise OSError if nvidia-smi fails or prints no XML."""
    if not here.smi:
        return []
    try:
        root = ElementTree.fromstring(here.smi)
    except ElementTree.ParseError as error:
        raise OSError(f"nvidia-smi printed no valid XML ({error})") from error
    return list(enumerate(root.findall("gpu")))


def _absent(here: Here) -> str:
    return "nvidia-smi lists no GPU" if here.smi else _NO_SMI


def _text(gpu: ElementTree.Element, path: str) -> str:
    return (gpu.findtext(path) or "").strip()


def _integer(text: str | None) -> int | None:
    """Return the number in a field; None if it says N/A or anything else."""
    return int(text) if text is not None and text.strip().isdecimal() else None
