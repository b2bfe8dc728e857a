"""Steps of GRPO on one CPU core: kumi and TRL with transformers' generation, from the same weights and prompts.

    python benchmarks/rollout_step.py [--steps 10] [--repeats 2] [--json FILE]

Both train the Llama of 8.6 M parameters of generate.py, in float32 with AdamW and one thread. A step draws 8 replies of
64 tokens to a prompt of 64 tokens at temperature 1, scores them by a function, and makes one update. Programs
alternate, each in a process of its own. A figure is the median CPU seconds of a step, those of processes that score
replies included; the first steps are not counted.

- beta 0: no reference model. As the batch has one update, neither program computes old log-probs.
- beta 0.04: the k3 divergence from a reference model, a second model of the same size.
- two updates: without a reference, a batch of two prompts and two updates. TRL computes old log-probs for both, kumi
  for the second one. The figure is that of a batch, of two steps.

The parts: rollout, old log-probs, log-probs of the reference, scoring; update is the rest of the step, with logging.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import machine
from generate import MODEL, VOCAB

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
os.environ |= {"PYTHONWARNINGS": "ignore", "OMP_WAIT_POLICY": "PASSIVE"}

PROMPT, REPLY, GROUP, BETA, LR, WARM = 64, 64, 8, 0.04, 1e-6, 3
CASES = ("beta 0", f"beta {BETA}", "two updates")
PROGRAMS = ("kumi", "trl")
PARTS = ("rollout", "old", "reference", "scoring")
# The bar: CPU seconds of kumi over those of TRL.
BAR = 0.6
REWARD = '''
def letters(prompt, reply, row):
    """The share of the reply's characters that are lowercase letters."""
    return sum(char.islower() for char in reply) / max(1, len(reply))
'''


def prepare(work: Path) -> None:
    """Write the tokenizer, the model with random weights, the prompts and the reward."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kumi.data import Source, expand, load_tokenizer
    from kumi.data.bpe import train as train_tokenizer

    source = Source("{stdlib}/**/*.py", exclude=("**/site-packages/**", "**/test/**"))
    made = train_tokenizer([source], VOCAB - 8, work / "tokenizer")
    tokens = load_tokenizer(made.folder)
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**MODEL | ends)).save_pretrained(work / "model")
    draw = random.Random(0)
    files = sorted(Path(file) for file in expand(source))
    text = "".join(path.read_text(errors="ignore") for path in draw.sample(files, 60))
    ids = tokens.backend.encode(text, add_special_tokens=False).ids
    prompts: list[dict[str, str]] = []
    while len(prompts) < 64:
        start = draw.randrange(len(ids) - PROMPT)
        prompt = str(tokens.decode(ids[start : start + PROMPT]))
        if len(tokens.backend.encode(prompt, add_special_tokens=False).ids) == PROMPT:
            prompts.append({"prompt": prompt})
    (work / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (work / "reward.py").write_text(REWARD)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the processes that it has started."""
    children = 0
    for child in (pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()):
        for file in Path(f"/proc/{child}/task").glob("*/schedstat"):
            children += int(file.read_text().split()[0])
    return time.process_time() + children / 1e9


class Clock:
    """The CPU seconds of steps and of their parts."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._end = cpu_seconds()

    def part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, whose seconds are those of the part `name`."""

        def timed(*arguments: Any, **options: Any) -> Any:
            before = cpu_seconds()
            result = function(*arguments, **options)
            self._parts[name] += cpu_seconds() - before
            return result

        return timed

    def step(self) -> None:
        """End a step."""
        now = cpu_seconds()
        seconds = now - self._end
        self.steps.append({**self._parts, "update": seconds - sum(self._parts.values()), "step": seconds})
        self._parts, self._end = dict.fromkeys(PARTS, 0.0), now


def run_file(work: Path, case: str, steps: int) -> Path:
    """Write the run file of `case`."""
    import tomli_w

    updates = 2 if case == "two updates" else 1
    reference = {"kl": "k3", "beta": BETA} if case == CASES[1] else {}
    sections = {
        "name": "grpo",
        "model": {"source": str(work / "model"), "init": "pretrained"},
        "cluster": {"devices_per_node": 1},
        "objective": {"kind": "grpo", "correction": "none", **reference},
        "batch": {"seq_len": PROMPT + REPLY, "tokens_per_step": GROUP * (PROMPT + REPLY)},
        "rollout": {"prompts": updates, "updates": updates, "group_size": GROUP, "max_new_tokens": REPLY},
        "rewards": [{"kind": "function", "name": "letters", "file": f"{work / 'reward.py'}:letters"}],
        "data": {
            "sources": [{"path": str(work / "prompts.jsonl")}],
            "tokenizer": str(work / "tokenizer"),
            "validation": 0.0,
        },
        "optim": {"lr": LR, "schedule": "constant", "grad_clip": 1.0, "weight_decay": 0.0},
        "precision": {"kind": "fp32"},
        "layout": {"microbatch": GROUP, "recompute": "none"},
        "train": {"steps": steps * updates, "out": str(work / "run")},
        "checkpoint": {"asynchronous": False},
        "export": {"enabled": False},
        "log": {"every": 1},
    }
    file = work / "run.toml"
    file.write_text(tomli_w.dumps(sections))
    return file


def kumi_row(work: Path, case: str, steps: int) -> dict[str, Any]:
    """Train with kumi's own loop in this process."""
    import contextlib
    import io

    import kumi.train.open_rollouts as rollouts
    from kumi.config import load, open_run
    from kumi.config.resolve import with_prepared_data
    from kumi.rollout.collect_groups import GroupCollector
    from kumi.train.callbacks import Callbacks
    from kumi.train.loop import train_rank
    from kumi.train.measure_numerics import with_measured_numerics
    from kumi.train.prepare_data import prepare_data

    clock, lengths = Clock(), list[float]()
    trainer = rollouts.Trainer

    def clocked_trainer(old: Any, reference: Any, *rest: Any) -> Any:
        timed = None if reference is None else clock.part("reference", reference)
        return trainer(clock.part("old", old), timed, *rest)

    rollouts.Trainer = clocked_trainer  # type: ignore[misc, assignment]
    GroupCollector._generate = clock.part("rollout", GroupCollector._generate)  # type: ignore[method-assign]
    GroupCollector._score = clock.part("scoring", GroupCollector._score)  # type: ignore[method-assign]
    updates = 2 if case == "two updates" else 1

    class Listener(Callbacks):
        def step(self, entry: dict[str, Any]) -> None:
            if "rollout/length" in entry:
                lengths.append(entry["rollout/length"])
            if entry["step"] % updates == 0:
                clock.step()

    run = with_measured_numerics(open_run(load(run_file(work, case, steps))))
    with contextlib.redirect_stdout(io.StringIO()):
        store = prepare_data(run)
        run = with_prepared_data(run)
        train_rank(run, store, Listener(run.config, ()))
    return {"steps": clock.steps, "length": median(lengths), "numerics": str(run.numerics)}


def trl_row(work: Path, case: str, steps: int) -> dict[str, Any]:
    """Train with TRL in this process."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    clock, lengths = Clock(), list[float]()
    updates = 2 if case == "two updates" else 1

    class ClockedTrainer(GRPOTrainer):  # type: ignore[misc]
        _collects = False

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            self._collects = True
            result = super()._generate_and_score_completions(inputs)
            self._collects = False
            return result

        def _get_per_token_logps_and_entropies(self, model: Any, *arguments: Any, **options: Any) -> Any:
            compute = super()._get_per_token_logps_and_entropies
            if self._collects:
                compute = clock.part("reference" if model is self.ref_model else "old", compute)
            return compute(model, *arguments, **options)

        def _generate(self, prompts: Any) -> Any:
            result = clock.part("rollout", super()._generate)(prompts)
            lengths.append(sum(map(len, result[1])) / len(result[1]))
            return result

        def _calculate_rewards(self, *arguments: Any) -> Any:
            return clock.part("scoring", super()._calculate_rewards)(*arguments)

    class Listener(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % updates == 0:
                clock.step()

    def letters(completions: list[str], **_: Any) -> list[float]:
        return [sum(char.islower() for char in reply) / max(1, len(reply)) for reply in completions]

    tokens = PreTrainedTokenizerFast(tokenizer_file=str(work / "tokenizer" / "tokenizer.json"))
    tokens.pad_token = tokens.eos_token = tokens.convert_ids_to_tokens(0)
    config = GRPOConfig(
        output_dir=str(work / "trl"),
        report_to=[],
        use_cpu=True,
        bf16=False,
        max_steps=steps * updates,
        logging_steps=1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        save_strategy="no",
        dataloader_pin_memory=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        steps_per_generation=updates,
        max_completion_length=REPLY,
        temperature=1.0,
        loss_type="grpo",
        beta=BETA if case == CASES[1] else 0.0,
    )
    trainer = ClockedTrainer(
        AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32),
        reward_funcs=letters,
        args=config,
        train_dataset=Dataset.from_json(str(work / "prompts.jsonl"), cache_dir=str(work / "datasets")),
        processing_class=tokens,
        callbacks=[Listener()],
    )
    trainer.train()
    return {"steps": clock.steps, "length": median(lengths)}


def run_row(program: str, case: str, steps: int, work: Path) -> dict[str, Any]:
    """Run `program` in a process of its own, and return the median of each part over its steps."""
    subprocess.run(["rm", "-rf", str(work / "run")], check=True)
    command = [sys.executable, __file__, "--row", program, case, "--work", str(work), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"{program} {case}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    counted = result.pop("steps")[WARM:]
    return {name: median(step[name] for step in counted) for name in counted[0]} | result | {"counted": len(counted)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        program, case = arguments.row
        measure = {"kumi": kumi_row, "trl": trl_row}[program]
        print("RESULT " + json.dumps(measure(arguments.work, case, arguments.steps)))
        return
    runs: dict[str, list[dict[str, Any]]] = {}
    columns = (*PARTS, "update", "step")
    print(f"{'CPU ms of a step':24}" + "".join(f"{name:>10}" for name in columns))
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for _ in range(arguments.repeats):
            for case in arguments.cases:
                for program in PROGRAMS:
                    result = run_row(program, case, arguments.steps, Path(folder))
                    runs.setdefault(f"{program} {case}", []).append(result)
                    figures = "".join(f"{1e3 * result[name]:10.1f}" for name in columns)
                    print(f"{program + ' ' + case:24}{figures}   replies of {result['length']:g} tokens", flush=True)
    ratios = {
        case: [
            round(own["step"] / theirs["step"], 3)
            for own, theirs in zip(runs[f"kumi {case}"], runs[f"trl {case}"], strict=True)
        ]
        for case in arguments.cases
    }
    for case, values in ratios.items():
        print(f"{case}: {median(values):.2f} of TRL's CPU seconds ({', '.join(map(str, values))}); the bar is {BAR}")
    if arguments.json is not None:
        content = {"machine": machine.describe(), "ratios": ratios, "runs": runs}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
