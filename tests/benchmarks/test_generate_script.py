"""The benchmark of generation: its model counts, its lengths are those asked for, and plans need no run."""

import json
from pathlib import Path

import generate
import pytest
import torch

from kumi.bench.cluster_toml import write_new
from kumi.inference.batched_decoder import BatchedDecoder
from kumi.inference.sampling import Sampling
from kumi.spec import families
from kumi.spec.ledger import num_params

MACHINE = """devices_per_node = 1

[device]
name = "a core"
kind = "cpu"
memory = "8 GiB"
dtypes = ["float32"]
memory_bandwidth = "20 GB/s"
stream = 0.5
read = { float32 = 0.25 }
matmul = { float32 = 0.9 }
launch = "2.5 us"

[device.peak_flops]
float32 = "100 GFLOP/s"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path: Path = tmp_path_factory.mktemp("generate")
    generate.prepare(path)
    write_new(path / "machine.toml", MACHINE, "machine")
    return path


def test_the_model_has_the_size_of_the_bars():
    assert num_params(families.from_hf(generate.MODEL)) / 1e6 == pytest.approx(8.62, abs=0.01)


def test_replies_have_the_lengths_that_their_prompts_decide(folder):
    torch.set_num_threads(1)
    decoder, lengths = generate.load_decoder(folder), [1, 5, 16]
    prompts = generate.prompts_for(lengths)
    sampling = Sampling(max_new_tokens=20, temperature=0, stop_ids=frozenset({generate.END}))
    replies = {reply.prompt: reply.ids for reply in BatchedDecoder(decoder).generate(prompts, sampling)}
    made = [replies[number] for number in range(len(prompts))]
    generate.check(made, lengths, prompts, "equal")
    with pytest.raises(AssertionError):
        generate.check([[7], *made[1:]], lengths, prompts, "equal")


def test_mixed_replies_are_between_their_bounds():
    lengths = generate.reply_tokens("mixed", 8)
    assert len(lengths) == 48
    assert 16 <= min(lengths) < 40
    assert 230 < max(lengths) <= 256
    assert generate.reply_tokens("equal", 8) == [64] * 16


def test_the_plan_of_a_row(folder):
    file = folder / "machine.toml"
    plan = generate.planned(file, "equal", 8)
    # Keys and values of 128 numbers in 6 layers.
    assert plan["cache_bytes"] == 8 * 128 * 2 * 128 * 6 * 4
    # 63 steps a batch read 26 MB of weights at 5 GB/s, all but the embedding.
    assert plan["seconds"] - plan["prefill_seconds"] > 2 * 63 * 4 * 6.4e6 / 5e9
    assert generate.planned(file, "mixed", 8)["seconds"] > 3 * plan["seconds"]
    # 39 kernels of 10 us.
    assert generate.planned_host(file) == pytest.approx(39 * 10e-6, rel=0.05)


def test_the_page_has_the_committed_figures():
    root = Path(__file__).parents[2]
    committed = json.loads((root / "benchmarks" / "results" / "generate.json").read_text(encoding="utf-8"))
    page = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for row in committed["rows"]:
        assert row["cache_bytes"] == row["planned_cache_bytes"]
        speeds = f"| {row['row']} | {row['kumi']:,.0f} | {row['transformers']:,.0f} | {row['ratio']:.2f} |"
        assert speeds in page
        assert f"| {row['seconds']:.2f} | {row['planned_seconds']:.2f} |" in page
