"""Checks of GPUs, with an nvidia-smi that prints what drivers of different ages print."""

from __future__ import annotations

import os

import pytest

from kumi.doctor.check_table import CHECKS
from kumi.doctor.device_workers import DeviceWorkers
from kumi.doctor.finding import Fleet, judge, take_reading
from kumi.doctor.gpu_checks import active_links
from kumi.doctor.here import Devices, Here
from kumi.doctor.meeting import Meeting, Seat

NEW = """<gpu id="0000:{number}">
<product_name>NVIDIA H100 80GB HBM3</product_name>
<clocks_event_reasons>
  <clocks_event_reason_gpu_idle>Not Active</clocks_event_reason_gpu_idle>
  <clocks_event_reason_sw_power_cap>{cap}</clocks_event_reason_sw_power_cap>
  <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
  <clocks_event_reason_hw_thermal_slowdown>{hot}</clocks_event_reason_hw_thermal_slowdown>
</clocks_event_reasons>
<ecc_errors>
  <volatile>
    <sram_correctable>3</sram_correctable>
    <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
    <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
    <dram_uncorrectable>{errors}</dram_uncorrectable>
  </volatile>
  <aggregate><dram_uncorrectable>77</dram_uncorrectable></aggregate>
</ecc_errors>
<remapped_rows>
  <remapped_row_pending>{pending}</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
</remapped_rows>
<temperature><gpu_temp>61 C</gpu_temp></temperature>
</gpu>"""
OLD = """<gpu id="0000:{number}">
<clocks_throttle_reasons>
  <clocks_throttle_reason_hw_thermal_slowdown>{hot}</clocks_throttle_reason_hw_thermal_slowdown>
</clocks_throttle_reasons>
<ecc_errors>
  <volatile>
    <single_bit><total>9</total></single_bit>
    <double_bit><device_memory>{errors}</device_memory><total>{errors}</total></double_bit>
  </volatile>
</ecc_errors>
</gpu>"""
SOUND = {"hot": "Not Active", "cap": "Not Active", "errors": "0", "pending": "No"}
LINKS = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)
\t Link 0: 26.562 GB/s
\t Link 1: {second}
"""


@pytest.fixture
def findings(tmp_path, monkeypatch):
    """A function: texts of two GPUs and of their links -> the findings of the checks of GPUs, by name."""

    def examine(gpus, links="", code=0):
        header = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        (tmp_path / "smi.xml").write_text(f"{header}{''.join(gpus)}</nvidia_smi_log>")
        (tmp_path / "links.txt").write_text(links)
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\ncd {tmp_path}\nif [ "$1" = nvlink ]; then cat links.txt; else cat smi.xml; fi\nexit {code}\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        here = Here(Meeting(Seat()), DeviceWorkers({}), Devices("cuda", 2, per_node=2), os.environ)
        named = ("GPUs", "GPU memory errors", "GPU throttling", "NVLink")
        checks = [check for check in CHECKS if check.name in named]
        return {check.name: judge(check, {0: take_reading(check, here)}, Fleet("node", {0: "a"})) for check in checks}

    return examine


@pytest.mark.parametrize("text", [NEW, OLD], ids=["new-driver", "old-driver"])
def test_sound_gpus(findings, text):
    lines = findings([text.format(number=number, **SOUND) for number in range(2)], LINKS.format(second="26.562 GB/s"))
    assert {name: finding.verdict for name, finding in lines.items()} == dict.fromkeys(lines, "ok")
    assert lines["GPUs"].value == "2"
    assert lines["NVLink"].value == "2 links per GPU"
    assert lines["GPU memory errors"].value == "no uncorrectable error on 2 GPUs"


@pytest.mark.parametrize("text", [NEW, OLD], ids=["new-driver", "old-driver"])
@pytest.mark.parametrize(
    ("fault", "name", "words"),
    [
        ({"errors": "2"}, "GPU memory errors", "GPU 1 has 2 uncorrectable ECC errors"),
        ({"hot": "Active"}, "GPU throttling", "GPU 1 is throttled: too hot"),
    ],
)
def test_a_faulty_gpu_is_named(findings, text, fault, name, words):
    lines = findings([text.format(number=0, **SOUND), text.format(number=1, **SOUND | fault)])
    assert (lines[name].verdict, lines[name].value.startswith(words)) == ("fail", True), lines[name]
    assert lines[name].remedy


@pytest.mark.parametrize(
    ("fault", "name"), [({"cap": "Active"}, "GPU throttling"), ({"pending": "Yes"}, "GPU memory errors")]
)
def test_what_a_run_survives_is_a_warning(findings, fault, name):
    lines = findings([NEW.format(number=0, **SOUND | fault), NEW.format(number=1, **SOUND)])
    assert lines[name].verdict == "warn"
    assert "GPU 0" in lines[name].value


def test_missing_gpus_and_links(findings):
    lines = findings([NEW.format(number=0, **SOUND)], LINKS.format(second="<inactive>"))
    assert (lines["GPUs"].verdict, lines["GPUs"].value, lines["GPUs"].limit) == ("fail", "1", "at least 2")
    assert lines["NVLink"].value == "GPU 1 has 1 active NVLinks, and others 2"
    assert lines["NVLink"].verdict == "fail"


@pytest.mark.parametrize("text", ["<gpu/>", NEW.format(number=0, hot="N/A", cap="", errors="N/A", pending="N/A")])
def test_fields_that_the_driver_does_not_fill(findings, text):
    lines = findings([text, text])
    assert {name: finding.verdict for name, finding in lines.items()} == dict.fromkeys(lines, "ok")


def test_an_nvidia_smi_that_fails(findings):
    lines = findings([NEW.format(number=0, **SOUND)], code=9)
    assert lines["GPUs"].verdict == "fail"
    assert "nvidia-smi ended with code 9" in lines["GPUs"].value


def test_links_of_no_gpu():
    assert active_links("No devices were lines\n") == {}
