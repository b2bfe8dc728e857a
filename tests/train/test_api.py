"""The Python API: the same results as the command line, as often as one likes, in any process."""

import contextlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.train.conftest import losses, run_file

import kumi
from kumi.errors import ConfigError, DataError, ModelError

ROOT = Path(__file__).parents[2]


class Recorder(kumi.TrainerCallback):
    """A callback that stores the events in order; it stops or fails after a given step."""

    def __init__(self, stop=None, fail=None):
        self.events, self.stop, self.fail = [], stop, fail

    def _keep(self, name, state):
        self.events.append((name, state.global_step))

    def on_train_begin(self, args, state, control, **kwargs):
        self._keep("begin", state)
        assert state.max_steps == args.train.steps

    def on_step_end(self, args, state, control, **kwargs):
        self._keep("step", state)
        assert state.log_history[-1]["step"] == state.global_step
        if state.global_step == self.fail:
            raise ZeroDivisionError("in a callback")
        if state.global_step == self.stop:
            control.should_training_stop = True

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self._keep("evaluate", state)
        assert metrics["eval/tokens"] > 0

    def on_save(self, args, state, control, **kwargs):
        self._keep("save", state)

    def on_train_end(self, args, state, control, **kwargs):
        self._keep("end", state)
        control.should_training_stop = True  # too late to stop anything


def test_every_name_is_exported_and_none_is_a_package():
    assert set(kumi.__all__) == {*kumi._MODULES, "__version__"} <= set(dir(kumi))
    program = """
import pkgutil, importlib, kumi
first = {name: getattr(kumi, name) for name in kumi.__all__}
for module in pkgutil.walk_packages(kumi.__path__, "kumi."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in ("lm_eval", "triton", "mamba_ssm"):  # extras, and what GPUs have
                raise
assert all(getattr(kumi, name) is value for name, value in first.items())
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_planning_needs_no_torch_and_gives_the_same_twice():
    program = """
import sys, kumi
run = "examples/plan/llama-3-8b.toml"
assert kumi.plan_run(run).as_dict()
run = "examples/quickstart.toml"
assert kumi.plan_run(run).as_dict() == kumi.plan_run(run).as_dict()
assert kumi.describe_run(run) == kumi.describe_run(run)
report = kumi.plan_run("examples/models/llama-3-8b", gpus="16xh100-sxm", tokens=300e9)
assert report.job.cluster.devices == 16 and report.training is not None
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_a_plan_shows_itself_in_a_notebook():
    report = kumi.plan_run(ROOT / "examples" / "quickstart.toml", ["cluster.devices_per_node=1"])
    assert "llama on 1 x" in repr(report)
    assert report._repr_html_().startswith("<iframe srcdoc=") and "</iframe>" in report._repr_html_()  # noqa: PT018


def test_a_mapping_is_a_run_file(tmp_path):
    import tomllib

    file = run_file(tmp_path)
    sections = tomllib.loads(file.read_text())
    changed = kumi.describe_run(sections, {"train.steps": 9, "optim.warmup_steps": 1})
    assert changed == kumi.describe_run(file, ["train.steps=9", "optim.warmup_steps=1"])
    assert changed["batch"]["steps"] == 9
    assert sections["train"]["steps"] == 6  # the caller's mapping is left as it was
    with pytest.raises(ConfigError, match=r"train\.stepz"):
        kumi.describe_run(sections, {"train.stepz": 9})


def test_training_is_stopped_resumed_and_the_same_as_the_command_line_s(small, tmp_path, capfd):
    from transformers import PrinterCallback  # takes seconds

    folder = small.copy(tmp_path)
    with contextlib.chdir(folder):
        stopping, going_on = Recorder(stop=2), Recorder()
        run = {"train.out": "other", "cluster.devices_per_node": 2}
        stopped = kumi.train_run("run.toml", run, callbacks=[stopping, PrinterCallback()])
        assert stopped.stopped
        assert 2 <= stopped.global_step < 6
        assert stopped.model_dir is None
        assert stopping.events[-2:] == [("save", stopped.global_step), ("end", stopped.global_step)]
        alone = run | {"cluster.devices_per_node": 1}
        done = kumi.train_run("run.toml", alone, callbacks=[going_on], verbose=False)
        assert going_on.events[0] == ("begin", stopped.global_step)
        assert going_on.events[-3:] == [("evaluate", 6), ("save", 6), ("end", 6)]
        assert (done.global_step, done.stopped, done.model_dir) == (6, False, Path("other/hf"))
        assert done.training_loss == pytest.approx(sum(losses(folder / "other").values()) / 6)
        assert losses(folder / "other") == pytest.approx(losses(folder / "run"), abs=1e-4)
    output = capfd.readouterr().out
    assert "step 1/6" in output  # of the first call, and of transformers' callback
    assert "{'step': 1," in output
    assert "step 6/6" not in output


def test_what_a_callback_raises_comes_out_after_a_save(small, tmp_path):
    folder = small.copy(tmp_path)
    with contextlib.chdir(folder), pytest.raises(ZeroDivisionError, match="in a callback"):
        kumi.train_run("run.toml", {"train.out": "other"}, callbacks=[Recorder(fail=1)], verbose=False)
    assert any((folder / "other" / "checkpoints").glob("step_*/meta.json"))


def test_an_error_of_the_run_is_raised_as_it_is(small, tmp_path):
    folder = small.copy(tmp_path)
    with (folder / "documents.jsonl").open("a") as file:
        file.write("no JSON\n")
    with contextlib.chdir(folder), pytest.raises(DataError, match=r"documents\.jsonl"):
        kumi.train_run("run.toml", {"train.out": "other", "data.cache": "new", "data.on_error": "fail"}, verbose=False)


def test_a_model_is_read_from_wherever_a_run_leaves_it(small):
    out, ids = small.folder / "run", torch.tensor([[1, 2, 3]])
    logits = kumi.load_decoder(out / "hf")(ids)
    for source in (out, out / "checkpoints" / "step_000006"):
        assert torch.equal(kumi.load_decoder(source)(ids), logits)
        assert kumi.tokenizer(source).encode("the model") == kumi.tokenizer(out / "hf").encode("the model")
    assert not torch.equal(kumi.load_decoder(out / "checkpoints" / "step_000002")(ids), logits)
    with pytest.raises(ConfigError, match="base"):
        kumi.load_decoder(out / "hf", base=out)
    with pytest.raises(ConfigError, match="neither a folder below"):
        kumi.load_decoder(out / "hff")
    with pytest.raises(ModelError, match="neither"):
        kumi.load_decoder(small.folder)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_adapters_are_read_beside_their_base(small, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base, ids = small.folder / "run" / "hf", torch.tensor([[1, 2, 3]])
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"]))
    torch.nn.init.normal_(
        adapted.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight")
    )
    adapted.save_pretrained(tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    ours = kumi.load_decoder(tmp_path / "adapter", base=base)
    assert torch.allclose(ours(ids), theirs(ids).logits, atol=1e-5)
    assert not torch.allclose(ours(ids), kumi.load_decoder(base)(ids), atol=1e-2)
    assert kumi.tokenizer(tmp_path / "adapter").vocab_size == kumi.tokenizer(base).vocab_size


def test_the_documented_program_runs(small, tmp_path, capfd):
    folder = small.copy(tmp_path)
    with contextlib.chdir(folder):
        runpy.run_path(str(ROOT / "examples" / "python_api.py"))
    assert "torch.Size([1, " in capfd.readouterr().out
