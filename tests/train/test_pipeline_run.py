import contextlib
import json

import pytest
import torch
from tests.train.conftest import back_to, losses, metrics, run_file

from kumi.cli import main
from kumi.storage import checkpoint


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_pipeline_goes_on_with_what_one_process_began_and_says_what_it_did(small, tmp_path, tied):
    """From data to export: the same losses and weights, the trace, and the evaluation."""
    folder = small.copy(tmp_path)
    changes = {"model__config__tie_word_embeddings": True} if tied else {}
    if tied:
        with contextlib.chdir(folder):
            assert main(["train", str(run_file(folder, train__out="alone", **changes))]) == 0
    else:
        back_to(folder / "run", 2)
    layout = {"pp": 2, "schedule": "zb-h1", "microbatch": 1}
    file = run_file(folder, cluster__devices_per_node=2, layout=layout, train__trace_step=4, **changes)
    with contextlib.chdir(folder):
        assert main(["train", str(file), *([] if not tied else ["train.out=tied"])]) == 0
    alone, out = (folder / "alone", folder / "tied") if tied else (small.folder / "run", folder / "run")
    assert losses(out) == pytest.approx(losses(alone), rel=1e-4)
    evaluated = [[entry["eval/loss"] for entry in metrics(one) if "eval/loss" in entry] for one in (out, alone)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-4)
    piped, two = (checkpoint.open(root / "checkpoints" / "step_000006") for root in (out, alone))
    assert set(piped.tensors) == set(two.tensors)
    for name in piped.tensors:
        if name.startswith("model/"):
            torch.testing.assert_close(piped.read(name), two.read(name), rtol=1e-2, atol=1e-4)
    traced = json.loads((out / "pipeline-step-4.json").read_text())["traceEvents"]
    done = [event["name"] for event in traced if event["ph"] == "X" and event["pid"] == 1]
    assert done[:3] == ["F0", "I0", "F1"]
    assert len(done) == 3 * 8
    assert "<svg" in (out / "pipeline-step-4.svg").read_text()
    assert (out / "hf" / "model.safetensors").exists()
