import json
import re
import socket
import time
import tomllib
from pathlib import Path

import pytest

from kumi.config import from_dict, job, plan_from_dict, resolve
from kumi.config.cluster_source import cluster_spec
from kumi.config.job_sections import ClusterSection, ModelSection
from kumi.config.jobs import choose_precision
from kumi.config.model_source import model_folder, read_hf_config
from kumi.config.pinned_run import pin_layout
from kumi.errors import ConfigError, ModelError
from kumi.hub import reach
from kumi.spec.cluster import Device
from kumi.spec.optim_states import OPTIM_KINDS
from kumi.spec.precision import PRECISIONS

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"


def test_auto_precision_is_what_the_device_is_fast_in():
    assert choose_precision("auto", Device("a", "cpu", 1, ("float32", "bfloat16"))).compute == "bfloat16"
    assert choose_precision("auto", Device("a", "cpu", 1)).compute == "float32"
    assert choose_precision("auto", cluster_spec(ClusterSection(source="v100-32gb")).device).compute == "float16"
    assert choose_precision("auto", cluster_spec(ClusterSection(source="a100-sxm-40gb")).device).compute == "bfloat16"
    assert choose_precision("fp16", Device("a", "cpu", 1)).loss_scaling


def test_models_are_folders_or_hub_ids(tmp_path, monkeypatch):
    import huggingface_hub

    assert model_folder(str(tmp_path), "model.source") == tmp_path
    with pytest.raises(ConfigError, match="is neither a folder nor a hub id"):
        model_folder("not/a/model", "model.source")
    with pytest.raises(ConfigError, match=r"`kumi train` the run file with train.out='runs/format' first, or name a"):
        model_folder("runs/format/hf", "model.source")

    def offline(*words, **options):
        raise OSError("offline")

    monkeypatch.setattr(reach, "unreachable_reason", lambda: "")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        ConfigError,
        match=r"'org/model' is not a folder, and fetching it from the hub failed \(offline\); name a folder",
    ):
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


def test_a_model_is_also_a_config_json_by_any_name(tmp_path):
    file = tmp_path / "tiny.json"
    file.write_text('{"model_type": "llama"}')
    assert read_hf_config(ModelSection(source=str(file))) == {"model_type": "llama"}
    assert model_folder(str(file), "model.source") == tmp_path


def test_of_a_model_on_the_hub_a_plan_fetches_the_config_alone(tmp_path, monkeypatch):
    import huggingface_hub

    def fetched(name, file, *, revision, local_files_only):
        assert (name, file, revision, local_files_only) == ("org/model", "config.json", None, False)
        (tmp_path / file).write_text('{"model_type": "qwen3"}')
        return str(tmp_path / file)

    monkeypatch.setattr(reach, "unreachable_reason", lambda: "")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetched)
    assert read_hf_config(ModelSection(source="org/model")) == {"model_type": "qwen3"}


def test_a_hub_out_of_reach_is_not_waited_for(monkeypatch):
    from huggingface_hub import constants

    def no_network(host, *words, **options):
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    asked, slept = [], []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(time, "sleep", slept.append)
    message = r"'org/no-such-model' is not a folder, and fetching it from the hub failed \(.*not known\); name a folder"
    with pytest.raises(ConfigError, match=message):
        read_hf_config(ModelSection(source="org/no-such-model"))
    assert set(asked) == {"huggingface.co"}
    assert slept == [], "as the client does between its tries"


def test_the_plan_and_the_run_are_of_one_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a reader's own run of the quickstart has data, and so the lengths of its documents
    written = tomllib.loads(QUICKSTART.read_text())
    run, planned = (
        resolve(from_dict(written)),
        {key: written[key] for key in ("model", "cluster", "batch") if key in written},
    )
    planned_job = job(plan_from_dict(planned))
    assert (planned_job.model, planned_job.cluster, planned_job.batch) == (run.model, run.cluster, run.batch)
    assert planned_job.precision == run.precision
    assert job(from_dict(written)).optim == run.optim


def test_an_inline_config_is_taken_as_it_is():
    config = {"model_type": "llama"}
    assert read_hf_config(ModelSection(config=config, init="random"), None) == json.loads(json.dumps(config))


def quickstart(**sections):
    written = tomllib.loads(QUICKSTART.read_text())
    return from_dict(written | {name: written.get(name, {}) | section for name, section in sections.items()})


def test_stages_are_divided_as_the_run_file_says():
    run = resolve(quickstart(cluster={"devices_per_node": 2}, layout={"pp": 2, "stage_layers": [1, 5]}))
    assert (run.layout.stage_layers, run.layout.schedule, run.layout.stages) == ((1, 5), "1f1b", 1)
    # The chosen layout is read back.
    assert resolve(pin_layout(run.config, run.layout)).layout == run.layout


@pytest.mark.parametrize("kind", ["fp8", "bf16-pure"])
def test_what_can_only_be_planned_is_described_and_not_trained(kind):
    config, choice = quickstart(precision={"kind": kind}), f"precision.kind='{kind}'"
    assert job(config).precision.kind == kind
    with pytest.raises(ConfigError, match=rf"{re.escape(choice)} .*set precision.kind"):
        resolve(config)


def test_words_of_the_run_file_are_those_of_the_specs():
    with pytest.raises(ConfigError, match=r"layout\.schedule: must be '1f1b', .* or 'dualpipe', got 'zbv'$"):
        quickstart(layout={"schedule": "zbv"})
    for kind in OPTIM_KINDS:
        assert job(quickstart(optim={"kind": kind})).optim.kind == kind
    for kind in PRECISIONS:
        assert job(quickstart(precision={"kind": kind})).precision == PRECISIONS[kind]
