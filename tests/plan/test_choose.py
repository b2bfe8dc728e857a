from dataclasses import replace

import pytest

from kumi.errors import FitError, LayoutError
from kumi.plan.memory.device_memory import rank_memory
from kumi.plan.search.select import select_layout, training_problems, unsupported_by_kumi
from kumi.plan.session import plan
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec, Device, Host, Link
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.lora import Lora
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, Rope
from kumi.spec.optim import Optim
from kumi.spec.peft import with_adapters
from kumi.spec.precision import PRECISIONS
from planned import job_of

LAYER = LayerSpec(Attention(32, 8, 128, Rope(500000.0)), MLP(14336))
LLAMA_8B = ModelSpec("llama", 128256, 4096, (LAYER,) * 32, 1e-5, 8192)
BATCH = BatchSpec(8192, 8192 * 64)


def job(devices, memory_gib):
    cluster = ClusterSpec("test", Device("GPU", "cuda", memory_gib * 2**30), devices)
    return Job(LLAMA_8B, cluster, BATCH, PRECISIONS["bf16"], Optim())


def choose(devices, memory_gib, **pinned):
    return select_layout(job(devices, memory_gib), pinned).layout


def test_plain_data_parallelism_is_chosen_if_it_fits_and_nothing_is_faster():
    best = select_layout(job(8, 288), {})
    layout = best.layout
    assert (layout.dp_replicate, layout.dp_shard, layout.zero) == (8, 1, 0)
    assert best.memory[0].params == 4 * 8_030_261_248


def test_states_are_sharded_if_they_must_be():
    layout = choose(8, 80)
    assert layout.dp_shard > 1
    assert layout.zero > 0


def test_only_trainable_layouts_are_chosen():
    with_links = replace(job(8, 80), cluster=replace(job(8, 80).cluster, links=(Link("slow", 8, 1e9, 1e-5),)))
    layout = select_layout(with_links, {}).layout
    assert (layout.tp, layout.ep, layout.offload) == (1, 1, "none")


HOST = Host(2**41, 50e9, 4e9, 2**43)


def adapted(host, **pinned):
    """Return the plan for adapters on a model that fills two devices; `host` can take offloaded activations."""
    device = Device("GPU", "cuda", 13 * 2**30, ("bfloat16",), (("bfloat16", 3e14),))
    cluster = ClusterSpec("test", device, 2, links=(Link("link", 2, 3e11, 1e-5),), host=host)
    model = with_adapters(LLAMA_8B, Lora())
    return select_layout(Job(model, cluster, BatchSpec(8192, 8192 * 8), PRECISIONS["bf16"], Optim()), pinned)


def test_the_search_offloads_where_that_is_much_faster_than_recomputation():
    without, with_host = adapted(Host()), adapted(HOST)
    assert without.layout.offload == "none" != with_host.layout.offload
    assert with_host.step_seconds < without.step_seconds
    assert adapted(HOST, offload="none").step_seconds == without.step_seconds


def test_offloading_to_drives_must_be_pinned():
    small = Host(2**36, HOST.device_bandwidth, HOST.nvme_bandwidth, HOST.nvme)
    tight = replace(job(2, 24), cluster=replace(job(2, 24).cluster, host=small))
    with pytest.raises(LayoutError, match="offload='states-nvme'"):
        select_layout(tight, {})
    drives = replace(Layout(), offload="optimizer-nvme")
    assert unsupported_by_kumi({})(tight, drives)[0].endswith(
        "writes to drives in every step; pin layout.offload to have it"
    )
    assert unsupported_by_kumi({"offload": "optimizer-nvme"})(tight, drives) == []
    assert select_layout(tight, {"offload": "states-nvme"}).layout.zero == 3, "the search still chooses the rest"


def test_a_layout_whose_hosts_are_too_small_is_not_said_to_lack_device_memory():
    tiny = Host(2**30, HOST.device_bandwidth)
    tight = replace(job(8, 80), cluster=replace(job(8, 80).cluster, host=tiny))
    layout = Layout(dp_shard=8, zero=3, recompute="full", offload="optimizer")
    assert training_problems(tight, layout, memory=False) == []
    assert training_problems(tight, layout, memory=True) == [
        "layout.offload=optimizer needs more than the hosts have, 1 GiB of memory per node and 0 B on drives; "
        "offload less, or use more nodes"
    ]


def test_as_few_layers_as_possible_recompute():
    layout = choose(8, 80, zero=3, dp_shard=8, microbatch=4)
    assert (layout.recompute, layout.recompute_layers) == ("full", 26)


def test_pinned_fields_stay():
    layout = choose(8, 80, zero=3, microbatch=1, recompute="full", dp_replicate=2)
    assert layout == Layout(dp_replicate=2, dp_shard=4, zero=3, microbatch=1, recompute="full")


def test_a_model_that_cannot_fit_is_refused_with_the_smallest_layout():
    with pytest.raises(FitError, match=r"the smallest needs .* per device, and GPU has .* usable; .*use devices of"):
        choose(2, 24)


@pytest.mark.parametrize("front", [True, False])
def test_a_trainer_that_supports_no_layout_that_fits_is_not_said_to_lack_memory(front):
    def only_replicas(job, layout):
        return ("it shards nothing",) if layout.zero else ()

    with pytest.raises(LayoutError, match=r"supports none of the layouts that fit.*it shards nothing"):
        plan(job_of(LLAMA_8B, sequences=8), {"pp": 1, "cp": 1, "tp": 1}, front=front, unsupported=only_replicas)


def test_an_illegal_pin_is_refused_with_its_reason():
    with pytest.raises(LayoutError, match="dp=7 does not divide the 64 sequences"):
        choose(7, 288, pp=1, cp=1)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_more_shards_need_less_memory(zero):
    totals = [rank_memory(job_of(LLAMA_8B), Layout(dp_shard=shards, zero=zero)).total for shards in (2, 4, 8, 64)]
    assert totals == sorted(totals, reverse=True)


def test_more_recomputation_needs_less_memory():
    none, selective, full = (
        rank_memory(job_of(LLAMA_8B), Layout(recompute=how)).activations for how in ("none", "selective", "full")
    )
    assert full < selective < none
