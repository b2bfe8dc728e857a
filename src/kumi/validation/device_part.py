"""Parts of the validation: the device with its versions, and its rates and clocks under load."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from xml.etree import ElementTree

import torch

from kumi.accelerator import is_gpu
from kumi.bench.clock import seconds_of, synchronize
from kumi.config.local_machine import cpu_name
from kumi.doctor.gpu_checks import throttle_reasons
from kumi.doctor.here import read_smi
from kumi.process_limits import usable_cores
from kumi.validation.part import Row, Rows, Setting
from kumi.validation.timed_step import validated_device

# Packages whose versions decide what a GPU computes with.
_PACKAGES = ("triton", "torchao", "bitsandbytes", "flash-attn", "flash-attn-3", "flash-attn-4", "mamba-ssm")
# What a report has of the output of nvidia-smi -q -x, which identifies no machine: our name of a value, and the XML
# paths where one driver or another writes it.
_SMI = {
    "SM clock": ("clocks/sm_clock",),
    "highest SM clock": ("max_clocks/sm_clock",),
    "memory clock": ("clocks/mem_clock",),
    "power": ("gpu_power_readings/instant_power_draw", "gpu_power_readings/power_draw", "power_readings/power_draw"),
    "power limit": ("gpu_power_readings/current_power_limit", "power_readings/power_limit"),
    "temperature": ("temperature/gpu_temp",),
    "compute mode": ("compute_mode",),
    "MIG": ("mig_mode/current_mig",),
    "ECC": ("ecc_mode/current_ecc",),
    "PCIe generation": ("pci/pci_gpu_link_info/pcie_gen/current_link_gen",),
    "PCIe width": ("pci/pci_gpu_link_info/link_widths/current_link_width",),
}
# Side of the multiplied matrices and elements of the copied tensors, on a GPU and in a trial on a CPU.
_SIDE, _TINY_SIDE = 8192, 256
_COPIED, _TINY_COPIED = 2**28, 2**20


def rows_of_device(setting: Setting) -> Rows:
    """Yield the versions, the device, and its rates."""
    device = validated_device(setting)
    yield _fact("python", platform.python_version())
    yield _fact("torch", str(torch.__version__))
    yield from (_fact(name, installed) for name in _PACKAGES if (installed := _version(name)))
    yield _fact("CPU", f"{cpu_name()}, {usable_cores():g} cores")
    if is_gpu(device):
        yield from _gpu(device)
    yield from rows_of_rates(setting)


def _gpu(device: torch.device) -> Iterator[Row]:
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    yield _fact("CUDA", str(torch.version.cuda or "none"))
    yield _fact("ROCm", str(torch.version.hip or "none"))
    yield _fact("cuDNN", str(torch.backends.cudnn.version()))  # type: ignore[no-untyped-call]
    if torch.distributed.is_nccl_available():
        yield _fact("NCCL", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    yield _fact("GPU", properties.name)
    yield _fact("GPUs", torch.cuda.device_count())
    yield _fact("compute capability", f"{properties.major}.{properties.minor}")
    yield _fact("multiprocessors", properties.multi_processor_count)
    yield _fact("memory, GiB", total / 2**30)
    yield _fact("free memory, GiB", free / 2**30)
    yield _fact("driver", _driver())


def rows_of_rates(setting: Setting) -> Rows:
    """Yield the rates of products and copies, and the clocks while the device multiplies."""
    device = validated_device(setting)
    side = _TINY_SIDE if setting.tiny else _SIDE
    for name, dtype, precision in (
        ("bfloat16", torch.bfloat16, "highest"),
        ("float32", torch.float32, "highest"),
        ("float32 as TF32", torch.float32, "high"),
    ):
        if precision == "high" and not is_gpu(device):
            continue
        torch.set_float32_matmul_precision(precision)
        left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        seconds = seconds_of(lambda left=left, right=right: left @ right, device, setting.seconds)  # type: ignore[misc]
        yield {"what": f"product of {side} in {name}", "TFLOP/s": 2 * side**3 / seconds / 1e12}
    source = torch.ones(_TINY_COPIED if setting.tiny else _COPIED, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), device, setting.seconds)
    yield {"what": "copy within the device", "GB/s": 2 * source.nbytes / seconds / 1e9}
    if is_gpu(device):
        host = torch.empty(source.shape, pin_memory=True)
        for name, work in (
            ("copy to the host", lambda: host.copy_(source, non_blocking=True)),
            ("copy from the host", lambda: source.copy_(host, non_blocking=True)),
        ):
            yield {"what": name, "GB/s": source.nbytes / seconds_of(work, device, setting.seconds / 4) / 1e9}
        del source, target, host
        yield from _clocks(device)


def _clocks(device: torch.device) -> Iterator[Row]:
    """Yield what nvidia-smi says of all GPUs while `device` multiplies matrices; nothing without nvidia-smi."""
    left, right = (torch.randn(_SIDE, _SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = seconds_of(lambda: left @ right, device, 0.1)
    for _ in range(int(3.0 / seconds)):
        left @ right
    try:
        text = read_smi()
        gpus = ElementTree.fromstring(text).findall("gpu") if text else []
    except (OSError, ElementTree.ParseError) as error:
        yield {"what": "nvidia-smi", "value": f"no answer ({type(error).__name__})"}
        return
    finally:
        synchronize(device)
    for number, gpu in enumerate(gpus):
        for name, places in _SMI.items():
            value = next((text for place in places if (text := (gpu.findtext(place) or "").strip())), None)
            if value is not None:
                yield {"what": f"GPU {number}: {name} under load", "value": value}
        yield {
            "what": f"GPU {number}: lower clock under load",
            "value": ", ".join(throttle_reasons(gpu)) or "no reason",
        }


def _driver() -> str:
    try:
        return ElementTree.fromstring(read_smi() or "<none/>").findtext("driver_version") or "unknown"
    except (OSError, ElementTree.ParseError):
        return "unknown"


def _fact(what: str, value: str | float) -> Row:
    return {"what": what, "value": value}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
