import json
import os

import pytest

from kumi.config.cluster import cluster_spec, presets
from kumi.config.resolve import choose_optim, choose_precision, model_folder, read_hf_config
from kumi.config.schema import ClusterSection, ModelSection, OptimSection
from kumi.errors import ConfigError, ModelError
from kumi.spec.cluster import Device


def test_this_machine_is_described_without_torch():
    found = cluster_spec(ClusterSection(devices_per_node=2))
    assert found.devices == 2
    assert 0 < found.device.memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_and_names_its_source(name):
    found = cluster_spec(ClusterSection(source=name, nodes=2))
    assert found.devices == 2 * found.devices_per_node
    assert found.device.peak_flops("bfloat16") > found.device.peak_flops("float32")
    assert found.device.peak_flops("float64") is None


def test_a_cluster_that_is_not_there_is_refused_with_what_is():
    with pytest.raises(ConfigError, match="'h100' is no preset and no TOML file; use 'auto', a100-sxm-80gb"):
        cluster_spec(ClusterSection(source="h100"))


def test_a_cluster_file_is_read_strictly(tmp_path):
    (tmp_path / "mine.toml").write_text('source = "x"\ndevices_per_node = 1\nextra = 2\n')
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        cluster_spec(ClusterSection(source=str(tmp_path / "mine.toml")))


def test_auto_precision_is_what_the_device_is_fast_in():
    assert choose_precision("auto", Device("a", "cpu", 1, ("float32", "bfloat16"))).compute == "bfloat16"
    assert choose_precision("auto", Device("a", "cpu", 1)).compute == "float32"
    assert choose_precision("fp16", Device("a", "cpu", 1)).loss_scaling


def test_schedules_that_do_not_fit_the_run_are_refused():
    assert choose_optim(OptimSection(schedule="wsd"), 100).decay_steps == 10
    with pytest.raises(ConfigError, match=r"warmup_steps=8 and the decay over 5 steps do not fit into train\.steps=10"):
        choose_optim(OptimSection(schedule="wsd", warmup_steps=8, decay_steps=5), 10)


def test_models_are_folders_or_hub_ids(tmp_path, monkeypatch):
    import huggingface_hub

    assert model_folder(str(tmp_path), "model.source") == tmp_path
    with pytest.raises(ConfigError, match="is no folder and no hub id"):
        model_folder("not/a/model", "model.source")

    def offline(*words, **options):
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match="'org/model' is no folder, and the hub did not give it: offline"):
        model_folder("org/model", "model.source")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path))
    assert model_folder("org/model", "model.source") == tmp_path


@pytest.mark.parametrize(
    ("content", "sentence"), [(None, "has no config.json"), ("{", "not valid JSON"), ("[]", "holds a list")]
)
def test_a_config_json_that_is_none_is_refused(tmp_path, content, sentence):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=sentence):
        read_hf_config(ModelSection(source=str(tmp_path)), tmp_path)


def test_an_inline_config_is_taken_as_it_is():
    config = {"model_type": "llama"}
    assert read_hf_config(ModelSection(config=config, init="random"), None) == json.loads(json.dumps(config))
