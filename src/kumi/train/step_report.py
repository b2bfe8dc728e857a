"""Turn the tensors of a step into metrics, and stop all ranks if the loss is not finite."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from kumi.errors import DivergedError
from kumi.evaluation.task_result import TaskResult
from kumi.objectives.ppo import ValueLoss
from kumi.parallel.grad_norm import LossScale
from kumi.parallel.run_microbatches import LEAST_IGNORED_SHARE
from kumi.plan.estimates import bytes_as_measured
from kumi.train.callbacks import Listener
from kumi.train.cpu_contention import CpuWait
from kumi.train.critic import CriticStep
from kumi.train.evaluate import Evaluation, means_of
from kumi.train.measured_steps import steps_with_layout
from kumi.train.metrics import Metrics
from kumi.train.process_memory import held_memory, peak_memory
from kumi.train.refined_estimates import RefinedEstimates
from kumi.train.step import StepResult
from kumi.train.step_lines import legend, metric_lines, source_losses, task_lines
from kumi.train.task_evaluation import task_errors, task_values
from kumi.train.train_state import RankState, TrainState


class Reporter:
    """Turns step results into metrics. On CUDA, it waits for the device only at steps that are shown.

    Every rank has a Reporter, because all ranks must stop if the loss is not finite; only rank 0 has `metrics`.
    `memory_before`: the bytes in use before the model was built, which are subtracted from the measured memory.
    """

    def __init__(
        self, rank_state: RankState, state: TrainState, metrics: Metrics | None, memory_before: int, listener: Listener
    ) -> None:
        self._rank_state, self._metrics, self._memory_before = rank_state, metrics, memory_before
        self.listener = listener
        self._tokens = state.tokens
        self._pending: list[StepResult] = []
        self._since = time.perf_counter()
        self._wait = CpuWait()
        run = rank_state.run
        # Rank 0 alone has metrics, and the file ends with the step of the checkpoint.
        refines = metrics is not None and run.config.rollout is not None
        self._estimates = RefinedEstimates(steps_with_layout(run.out, run.layout) if refines else ())

    def legend(self) -> None:
        """Print the lines that explain the lines of steps."""
        run, memory = self._rank_state.run, self._estimated_memory()
        for line in legend(
            on_cpu=self._rank_state.mesh.device.type == "cpu",
            step_s=run.step_seconds,
            memory=memory,
            mfu=model_flops_utilisation(self._rank_state, 1.0) is not None,
            rollouts=run.config.rollout is not None,
        ):
            self.note(line)

    def _estimated_memory(self) -> int:
        """Return the estimated peak memory of this rank in bytes, counted as the measured peak is."""
        run = self._rank_state.run
        return bytes_as_measured(run.estimate.memory[self._rank_state.mesh.index("pp")], run.cluster.device)

    def step(self, result: StepResult) -> None:
        """Add one step; raise DivergedError if a loss or gradient that is read from the device is not finite."""
        self._pending.append(result)
        run = self._rank_state.run
        shown = result.step % run.config.log.every == 0 or result.step in (1, run.steps)
        if self._rank_state.mesh.device.type == "cpu" or shown:
            self.flush()

    def flush(self) -> None:
        """Read the results of all pending steps from the device and record them."""
        if not self._pending:
            return
        losses = [float(result.loss) for result in self._pending]
        now = time.perf_counter()
        step_s = (now - self._since) / len(self._pending)
        run = self._rank_state.run
        busy = self._wait.explain(step_s, run.step_seconds if run.config.rollout is None else None)
        for result, loss in zip(self._pending, losses, strict=True):
            self._check(result, loss)
            self._tokens += result.tokens
            if self._metrics is not None:
                entry = self._entry(result, loss, step_s)
                if run.config.rollout is not None:
                    entry |= self._estimates.refine(entry)
                self._metrics.step(entry, busy)
                self.listener.step(entry)
        self._pending, self._since = [], now

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Record an evaluation after `step` steps; of language modelling, with the tokens' unigram entropy.

        The entropy is that of all tokens, so it says nothing about a loss on replies only.
        """
        if self._metrics is not None:
            objective = self._rank_state.objective
            entropy = self._rank_state.store.unigram_entropy
            is_lm = self._rank_state.run.config.objective.kind == "lm"
            entropy_entry = {"eval/unigram_entropy": entropy} if is_lm else {}
            entry = {
                "step": step,
                **{f"eval/{name}": value for name, value in result.values().items()},
                "eval/tokens": result.tokens,
                **entropy_entry,
            }
            count = result.tokens if objective.unit == "tokens" else round(result.units)
            lines = [
                f"step {step} | validation loss {result.loss:.4f} on {count} held-out {objective.unit}"
                f"{f' (unigram entropy {entropy:.4f})' if is_lm else ''}",
                *(f"on {line}" for line in source_losses(entry)),
                *metric_lines(result.metrics),
            ]
            self._metrics.note("\n  ".join(lines), entry)
            self.listener.evaluation(entry)
        self._since = time.perf_counter()

    def tasks(self, step: int, results: Sequence[TaskResult]) -> None:
        """Record the results of tasks after `step` steps, and the seconds that they took since the last step."""
        if self._metrics is not None:
            seconds = time.perf_counter() - self._since
            values = task_values(results) | task_errors(results)
            entry = {"step": step, **{f"eval/{name}": value for name, value in values.items()}, "time/tasks_s": seconds}
            lines = [f"step {step} | tasks in {seconds:.3g} s", *task_lines(results)]
            self._metrics.note("\n  ".join(lines), entry)
            self.listener.evaluation(entry)
        self._since = time.perf_counter()

    def note(self, text: str) -> None:
        """Print `text` on rank 0."""
        if self._metrics is not None:
            self._metrics.note(text)

    def _check(self, result: StepResult, loss: float) -> None:
        """Raise DivergedError if the loss or a gradient of the step is not finite, but for a skipped float16 update."""
        norm, run = float(result.grad_norm), self._rank_state.run
        if result.scale is not None:
            self._check_scale(result, result.scale)
        self._check_critic(result)
        # A float16 update with an overflowed gradient was skipped; any other non-finite gradient has changed the
        # weights.
        if not math.isfinite(loss) or not (math.isfinite(norm) or run.precision.loss_scaling):
            gradient = f"a gradient is not finite, although the loss is {loss:.4g}"
            self._diverged(
                result,
                gradient if math.isfinite(loss) else f"the loss is {loss}",
                f"with a lower rate: kumi train RUN.toml optim.lr={run.optim.lr / 2:.2g} --allow-change optim.lr",
            )

    def _check_critic(self, result: StepResult) -> None:
        """Raise DivergedError if the loss or a gradient of the critic is not finite, as for the policy."""
        critic, run = result.critic, self._rank_state.run
        if critic is None:
            return
        loss, norm = float(critic.loss), float(critic.grad_norm)
        if not math.isfinite(loss) or not (math.isfinite(norm) or run.precision.loss_scaling):
            self._diverged(
                result,
                f"the critic's loss is {loss:.4g} and its gradient norm {norm:.3g}",
                f"with a lower rate: kumi train RUN.toml critic.lr={run.critic_optim.lr / 2:.2g} --allow-change "
                f"critic.lr",
            )

    def _check_scale(self, result: StepResult, scale: LossScale) -> None:
        """Raise DivergedError if float16 updates keep being skipped, or all updates of the run were skipped."""
        run = self._rank_state.run
        if not scale.hopeless and not (result.step == run.steps == scale.skipped):
            return
        kind = "bf16" if "bfloat16" in run.cluster.device.dtypes else "fp32"
        self._diverged(
            result,
            f"the float16 gradients overflowed in the last {scale.in_a_row} steps, down to a loss scale of "
            f"{scale.scale:g}, so these updates were skipped",
            f"in a format of wider range: kumi train RUN.toml precision.kind={kind} --allow-change precision.kind",
        )

    def _diverged(self, result: StepResult, reason: str, remedy: str) -> NoReturn:
        """Close the metrics and raise DivergedError."""
        if self._metrics is not None:
            self._metrics.close()
        raise DivergedError(
            f"step {result.step}: {reason} (gradient norm {float(result.grad_norm):.3g}, lr {result.lr:.2e}); resume "
            f"from the last checkpoint {remedy}"
        )

    def _entry(self, result: StepResult, loss: float, step_s: float) -> dict[str, Any]:
        """Return the entry of metrics.jsonl for a step that took `step_s` seconds (see `kumi.train.metrics`)."""
        run, experts, scaling, training = self._rank_state.run, {}, {}, {}
        objective = self._rank_state.objective
        metrics = means_of(result.metrics.flatten().tolist(), objective.metrics)
        if result.scale is not None:
            scaling = {"train/skipped_updates": result.scale.skipped, "train/loss_scale": result.scale.scale}
        estimated = run.step_seconds
        if run.config.rollout is not None:  # the source of the rollouts estimates each step by its own lengths
            training = {"time/train_s": max(0.0, step_s - result.data_s)}
            estimated = result.rollouts.get("perf/estimated_step_s")
        if result.experts is not None:
            experts = {
                "train/aux_loss": float(result.experts.aux_loss),
                "train/busiest_expert": float(result.experts.busiest),
            }
        return {
            "step": result.step,
            "tokens": self._tokens,
            "layout": run.layout.words,
            "train/loss": loss,
            "train/grad_norm": float(result.grad_norm),
            "train/lr": result.lr,
            **{f"train/{name}": value for name, value in metrics.items()},
            **result.rollouts,
            **_critic_entry(result.critic),
            **experts,
            **scaling,
            "perf/step_s": step_s,
            "perf/estimated_step_s": estimated,
            "perf/tokens_per_s": (run.batch.tokens_per_step if run.config.rollout is None else result.tokens) / step_s,
            "perf/mfu": model_flops_utilisation(self._rank_state, step_s, result.tokens),
            "time/data_s": result.data_s,
            **training,
            "mem/peak_bytes": peak_memory(self._rank_state.mesh.device) - self._memory_before,
            **{f"mem/{name}_bytes": value for name, value in held_memory(self._rank_state.mesh.device).items()},
            "mem/estimated_bytes": self._estimated_memory(),
        }


def _critic_entry(critic: CriticStep | None) -> dict[str, float]:
    """Return the metrics of an update of the critic; {} without one."""
    if critic is None:
        return {}
    means = means_of(critic.metrics.flatten().tolist(), ValueLoss.metrics)
    return {
        "critic/loss": float(critic.loss),
        "critic/grad_norm": float(critic.grad_norm),
        "critic/lr": critic.lr,
        **{f"critic/{name}": value for name, value in means.items()},
    }


def model_flops_utilisation(rank_state: RankState, step_s: float, trained: int | None = None) -> float | None:
    """Return the model's FLOPs per second over the devices' peak (MFU); None if it is not known.

    `trained`: trained tokens of the step. If many tokens are not trained, the output head computes only the trained
    ones.
    """
    run = rank_state.run
    peak = run.cluster.device.peak_flops(run.precision.compute)
    if peak is None or "device.peak_flops" in run.cluster.assumed or run.config.rollout is not None:
        return None  # steps with rollouts also generate, and have as many rows as their replies need
    is_sparse = trained is not None and trained <= (1 - LEAST_IGNORED_SHARE) * run.batch.tokens_per_step
    return run.job.step_flops(trained if is_sparse else None) / (step_s * peak * run.layout.world_size)
