import os

import pytest

from kumi.config.cluster import cluster_spec, presets, read_device, read_network, read_node
from kumi.config.schema import ClusterSection
from kumi.errors import ConfigError

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
    found = cluster(devices_per_node=2)
    assert found.devices == 2
    assert 0 < found.device.memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_whole_cluster(name):
    found = cluster(source=name, nodes=2)
    assert found.devices == 2 * found.devices_per_node
    assert found.device.peak_flops("float16") > found.device.peak_flops("float32")
    assert found.device.peak_flops("float64") is None
    assert found.links[-1].span == found.devices
    assert [link.bandwidth for link in found.links] == sorted((link.bandwidth for link in found.links), reverse=True)


def parts():
    yield from ((f"device {name}", read_device(name)) for name in presets("devices"))
    yield from ((f"network {name}", read_network(name)) for name in presets("networks"))
    for name in presets():
        node = read_node(name)
        yield from ((f"node {name}, {link.name}", link) for link in node.links)
        yield f"node {name}, host", node.host


@pytest.mark.parametrize(("name", "part"), [pytest.param(*part, id=part[0]) for part in parts()])
def test_every_figure_says_where_it_came_from(name, part):
    figures = set(part.model_dump(exclude_none=True)) - {"sources", "name", "kind", "dtypes", "span", "per"}
    assert set(part.sourced()) == figures


def test_a_cluster_that_is_not_there_is_refused_with_what_is():
    assert "'h100' is no preset and no TOML file; use 'auto', a100-pcie-80gb, " in refusal(source="h100")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("foo = 1\ndevices_per_node = 0\n", "device: required, and not set; "),
        ("devices_per_node = 0" + DEVICE, "devices_per_node: 0 is wrong, it should be greater than 0"),
        ("devices_per_node = ", "cannot be read as TOML"),
        ("devices_per_node = 1\nlnks = []" + DEVICE, "lnks: unknown key; did you mean 'links'?"),
        ("devices_per_node = 1" + DEVICE.replace("80 GiB", "lots"), "device.memory: 'lots' is not a quantity"),
        ("devices_per_node = 1" + DEVICE + 'stram = 0.5', "device.stram: unknown key; did you mean 'stream'?"),
        ("devices_per_node = 1" + DEVICE + 'launch = 5', "device.launch: '5' is not a quantity; write a number and"),
        ("devices_per_node = 1" + DEVICE + 'sources = {streem = "x"}', "'streem' is no figure of this table; did you"),
        ('devices_per_node = 1\ndevice = "h10"', "device: 'h10' is no preset and no TOML file; use a100-"),
    ],
)  # fmt: skip
def test_a_cluster_file_that_is_wrong_is_refused_in_one_line(text, error, written):
    source = written(text)
    found = refusal(source=source)
    assert source in found
    assert error in found
