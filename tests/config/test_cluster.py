import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest

from kumi.config import local_machine
from kumi.config.cluster_source import cluster_spec
from kumi.config.hardware import hardware_page
from kumi.config.job_sections import ClusterSection
from kumi.config.presets import preset_names, read_device, read_link, read_network, read_node
from kumi.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "hardware.md"

DEVICE = """
[device]
name = "GPU"
kind = "cuda"
memory = "80 GiB"
dtypes = ["bfloat16"]
"""


def cluster(**section):
    return cluster_spec(ClusterSection(**section))


def refusal(**section):
    with pytest.raises(ConfigError) as caught:
        cluster(**section)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def written(tmp_path):
    def write(text):
        file = tmp_path / "cluster.toml"
        file.write_text(text)
        return str(file)

    return write


def test_this_machine_is_described_without_torch():
    resolved = cluster(devices_per_node=2)
    assert resolved.devices == 2
    assert 0 < resolved.device.memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_whole_cluster(name):
    resolved = cluster(source=name, nodes=2)
    assert resolved.devices == 2 * resolved.devices_per_node
    assert resolved.device.peak_flops("float16") > resolved.device.peak_flops("float32")
    assert resolved.device.peak_flops("float64") is None
    assert resolved.links[-1].span == resolved.devices
    assert [link.bandwidth for link in resolved.links] == sorted(
        (link.bandwidth for link in resolved.links), reverse=True
    )


def parts():
    yield from ((f"device {name}", read_device(name)) for name in preset_names("devices"))
    yield from ((f"link {name}", read_link(name)) for name in preset_names("links"))
    yield from ((f"network {name}", read_network(name)) for name in preset_names("networks"))
    yield from ((f"host of {name}", read_node(name).host) for name in preset_names())


@pytest.mark.parametrize(("name", "part"), [pytest.param(*part, id=part[0]) for part in parts()])
def test_every_figure_says_where_it_came_from(name, part):
    figures = set(part.model_dump(exclude_none=True)) - {"sources", "name", "kind", "dtypes", "span", "per"}
    assert set(part.sourced()) == figures


def test_a_cluster_that_is_not_there_is_refused_with_what_is():
    assert (
        "'h100' is neither a preset nor a TOML file; did you mean 'h100-sxm'? use 'auto', a100-pcie-80gb, "
        in refusal(source="h100")
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("foo = 1\ndevices_per_node = 0\n", "device: required, but not set; "),
        ("devices_per_node = 0" + DEVICE, "devices_per_node: must be greater than 0, got 0"),
        ("devices_per_node = ", "cannot be read as TOML"),
        ("devices_per_node = 1\nlnks = []" + DEVICE, "lnks: unknown key; did you mean 'links'?"),
        ("devices_per_node = 1" + DEVICE.replace("80 GiB", "lots"), "device.memory: 'lots' is not a quantity"),
        ("devices_per_node = 1" + DEVICE + "stram = 0.5", "device.stram: unknown key; did you mean 'stream'?"),
        ("devices_per_node = 1" + DEVICE + "launch = 5", "device.launch: '5' is not a duration; write a number and"),
        ("devices_per_node = 1" + DEVICE + 'sources = {streem = "x"}', "'streem' is not a figure of this table; did"),
        ('devices_per_node = 1\ndevice = "h10"', "device: 'h10' is neither a preset nor a TOML file; use a100-"),
    ],
)
def test_a_cluster_file_that_is_wrong_is_refused_in_one_line(text, error, written):
    source = written(text)
    message = refusal(source=source)
    assert source in message
    assert error in message


def spans(**section):
    return [link.span for link in cluster(**section).links]


def test_links_join_as_many_devices_as_there_are():
    assert spans(source="h100-sxm") == [8]
    assert spans(source="h100-sxm", nodes=4) == [8, 32]
    assert spans(source="h100-sxm", nodes=4, devices_per_node=2) == [2, 8]
    assert spans(source="h100-sxm", nodes=4, devices_per_node=1) == [4]
    assert spans(source="h100-sxm", devices_per_node=1) == []
    assert spans(source="h100-sxm", nodes=8, sites=2, site_link="internet") == [8, 32, 64]
    assert spans(source="h100-sxm", nodes=2, sites=2, site_link="internet") == [8, 16]


@pytest.mark.parametrize(
    ("nodes", "expected"), [(1, [4]), (16, [64]), (18, [72]), (36, [72, 144]), (64, [64, 256]), (19, [4, 76])]
)
def test_a_domain_of_several_nodes_is_as_large_as_deals_the_nodes_evenly(nodes, expected):
    assert spans(source="gb200-nvl72", nodes=nodes) == expected


def test_links_of_one_name_are_told_apart():
    """Two sites may be joined by what joins their nodes."""
    links = cluster(source="h100-sxm", nodes=4, sites=2, site_link="ib-ndr").links
    assert len({link.name for link in links}) == 3
    assert links[2].name == f"{links[1].name}, over 32 devices"


def bandwidths(**section):
    return [round(link.bandwidth / 1e9, 3) for link in cluster(**section).links]


def test_what_a_node_or_a_site_shares_is_divided_among_its_devices():
    assert bandwidths(source="h100-sxm", nodes=2) == [450, 50]
    assert bandwidths(source="abci-a", nodes=2) == [300, 12.5]
    assert bandwidths(source="abci-a", nodes=2, devices_per_node=4) == [300, 25]
    assert bandwidths(source="abci-a", nodes=2, devices_per_node=1) == [25], "its way to the host, not four cards"
    assert bandwidths(source="h100-sxm", nodes=2, network="100gbe") == [450, 1.562]
    assert bandwidths(source="h100-sxm", nodes=8, sites=2, site_link="optical-100g") == [450, 50, 0.391]


def test_a_run_file_says_what_machines_cost_and_draw():
    assert (cluster(source="l4").device.price, cluster(source="l4").device.watts) == (0, 72)
    device = cluster(source="l4", price_per_hour=0.8, watts=150.0).device
    assert (device.price, device.watts) == (0.8, 150)


def test_a_cluster_knows_what_was_assumed_of_it():
    assumed = cluster(source="h100-sxm", nodes=2, network="100gbe").assumed
    assert "device.launch" in assumed
    assert "device.matmul" not in assumed
    assert "100 Gb/s Ethernet, shared by a node: latency" in assumed
    assert not any("InfiniBand" in name for name in assumed)


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"devices_per_node": 9}, "cluster.devices_per_node=9: h100-sxm has 8 devices per node; use at most 8"),
        ({"nodes": 3, "sites": 2}, "cluster.sites=2 does not divide cluster.nodes=3, and all sites have equally"),
        ({"nodes": 2, "sites": 2}, "cluster.sites=2, but cluster.site_link is not set; set it to"),
        ({"site_link": "internet"}, "cluster.site_link='internet' connects sites, but cluster.sites is 1; set"),
        ({"nodes": 2, "network": "internet"}, "connects sites, not nodes; set cluster.site_link to it, and"),
        ({"nodes": 2, "network": "ib"}, "cluster.network: 'ib' is neither a preset nor a TOML file; use 100gbe, "),
        ({"nodes": 2, "network": "ib-nrd"}, "'ib-nrd' is neither a preset nor a TOML file; did you mean 'ib-ndr'?"),
    ],
)
def test_machines_that_cannot_be_put_together_are_refused(section, error):
    assert error in refusal(source="h100-sxm", **section)


def test_fewer_ranks_than_a_cpu_s_file_was_measured_with_are_refused(written):
    file = written("devices_per_node = 4\n" + DEVICE.replace("cuda", "cpu") + 'peak_flops = {bfloat16 = "1 TFLOP/s"}')
    message = refusal(source=file, devices_per_node=1)
    assert "cluster.devices_per_node=1: " in message
    assert (
        "describes 4 ranks that share a CPU, and fewer ranks would each have a larger share of it; measure" in message
    )
    assert cluster(source=file).devices == cluster(source=file, devices_per_node=4).devices == 4


def test_links_of_a_file_are_refused_where_they_leave_devices_out(written):
    link = '[[links]]\nname = "x"\nspan = {}\nbandwidth = "1 GB/s"\nlatency = "1 us"\nefficiency = 1.0\n'
    file = "devices_per_node = 4\n" + DEVICE
    assert "the outermost link spans 2 devices, but a node has 4" in refusal(source=written(file + link.format(2)))
    assert "a span of 6 is not a multiple of devices_per_node=4" in refusal(source=written(file + link.format(6)))
    assert "spans [4, 4] do not increase" in refusal(source=written(file + link.format(4) * 2))
    message = refusal(source=written(file + link.format(4)), nodes=2)
    assert "names no network between its nodes; set it to 100gbe, " in message
    assert "internet" not in message, "it connects sites"
    assert spans(source=written(file + link.format(4)), nodes=2, network="ib-hdr") == [4, 8]


def smi(monkeypatch, *gpus, visible=None):
    """Have nvidia-smi list `gpus`, (name, MiB, compute capability) or with "Enabled" behind where MIG divides one."""
    fields = ("index", "uuid", "name", "memory.total", "compute_cap", "mig.mode.current")
    rows = [(str(index), f"GPU-{index + 10}ab-0", *gpu, "Disabled") for index, gpu in enumerate(gpus)]

    def run(command, **options):
        assert command[0] == "nvidia-smi"
        (asked,) = (word.removeprefix("--query-gpu=") for word in command if word.startswith("--query-gpu="))
        lines = [", ".join(row[fields.index(field)] for field in asked.split(",")) for row in rows]
        return subprocess.CompletedProcess(command, 0, "".join(f"{line}\n" for line in lines), "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_a_gpu_is_recognised_by_the_driver_s_name_and_keeps_its_own_memory(monkeypatch):
    smi(monkeypatch, *[("NVIDIA H200", "143771", "9.0")] * 4)
    resolved, preset = cluster(), cluster(source="h200-sxm")
    assert resolved.device == dataclasses.replace(preset.device, memory=143771 * 2**20)
    assert resolved.devices_per_node == 4
    assert resolved.links == (dataclasses.replace(preset.links[0], span=4),)
    assert "NVLink 4 with NVSwitch: bandwidth" in resolved.assumed, "nobody looked at this node's links"


def test_of_an_unknown_gpu_nothing_is_guessed(monkeypatch):
    smi(monkeypatch, *[("NVIDIA X1", "1000", "7.0")] * 2)
    resolved = cluster(nodes=2)
    assert (resolved.device.peak, resolved.device.memory_bandwidth, resolved.links) == ((), 0, ())
    assert resolved.device.dtypes == ("float32", "float16")
    assert resolved.devices == 4


@pytest.mark.parametrize(
    ("visible", "mebibytes"),
    [
        (None, [1000, 2000, 3000, 4000]),
        ("2,3", [3000, 4000]),
        (" 3, 1", [4000, 2000]),
        ("GPU-12ab,GPU-10ab-0", [3000, 1000]),
        ("1,-1,2", [2000]),
        ("2,9,1", [3000]),  # as CUDA, which stops at a number that is none
        ("GPU-1,0", []),  # the beginning of four
        ("", []),
    ],
)
def test_the_gpus_are_those_that_cuda_visible_devices_names(monkeypatch, visible, mebibytes):
    smi(monkeypatch, *[("NVIDIA X1", str(1000 * number), "9.0") for number in (1, 2, 3, 4)], visible=visible)
    assert [gpu.memory for gpu in local_machine._gpus()] == [2**20 * each for each in mebibytes]


@pytest.mark.parametrize("visible", [None, "0", "MIG-ab12", "MIG-GPU-10ab-0/1/0"])
def test_parts_of_a_gpu_are_not_described_as_the_whole(monkeypatch, visible):
    smi(monkeypatch, ("NVIDIA H200", "143771", "9.0", "Enabled"), visible=visible)
    assert "is partitioned by MIG" in refusal()


def test_of_a_cpu_speeds_are_assumed_and_said_to_be():
    single, two = cluster(), cluster(devices_per_node=2, nodes=2)
    assert single.device.peak_flops("float32") == pytest.approx(2 * two.device.peak_flops("float32"))
    assert {"device.peak_flops", "device.memory_bandwidth"} <= set(single.assumed)
    assert [link.span for link in two.links] == [2, 4]


def test_the_page_on_hardware_is_up_to_date():
    assert PAGE.read_text() == hardware_page()


def test_the_file_that_the_page_shows_is_one(written):
    block = next(block for block in re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.S) if "[network]" in block)
    resolved = cluster(source=written(block), nodes=2)
    assert resolved.links[1].name == "our RoCE"
    assert resolved.host.nvme == 30 * 10**12
