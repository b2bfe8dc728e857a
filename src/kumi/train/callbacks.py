"""Callbacks during training, with the names and arguments of transformers' TrainerCallback.

on_train_begin, on_step_end, on_log(logs=...), on_evaluate(metrics=...), on_save, on_train_end: each is called on rank 0
as `callback.on_x(config, state, control, **kwargs)`. A callback ends the run by `control.should_training_stop = True`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kumi.config.run_length import run_steps

if TYPE_CHECKING:
    from kumi.config import RunConfig


@dataclass
class TrainerState:
    """The progress of the run."""

    global_step: int = 0
    max_steps: int = 0  # 0 before training if it follows from data that is not prepared
    num_input_tokens_seen: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl entries written since this launch
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True


@dataclass
class TrainerControl:
    """Requests of callbacks to the trainer."""

    should_training_stop: bool = False  # save a checkpoint and end the run after the current step


class TrainerCallback:
    """Base class of callbacks: every event does nothing until a subclass overrides it."""

    def on_train_begin(self, args: RunConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called once, before the first step; `state.global_step` is above 0 if the run resumes."""

    def on_step_end(self, args: RunConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called for each step, once its metrics are read from the device; on a GPU, this is done every `log.every`
        steps."""

    def on_log(
        self, args: RunConfig, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """Called after `on_step_end` with `logs`, the step's entry of metrics.jsonl."""

    def on_evaluate(
        self, args: RunConfig, state: TrainerState, control: TrainerControl, metrics: dict[str, Any], **kwargs: Any
    ) -> None:
        """Called after an evaluation on held-out data with `metrics`: eval/loss, eval/tokens, the objective's metrics,
        and eval/loss/<source> for each of several sources; and after an evaluation of tasks, with
        eval/<task>/<metric>."""

    def on_save(self, args: RunConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called when a save begins; an asynchronous save is complete before the next one begins."""

    def on_train_end(self, args: RunConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called once, after the last step, or after the step at which the run was stopped."""


class Listener(Protocol):
    """Receives the events of the training loop on rank 0 (see `Callbacks`), and can stop the loop through `control`."""

    @property
    def control(self) -> TrainerControl: ...

    def begin(self, step: int, tokens: int) -> None: ...

    def step(self, entry: dict[str, Any]) -> None: ...

    def evaluation(self, entry: dict[str, Any]) -> None: ...

    def saving(self) -> None: ...

    def end(self) -> None: ...


class Callbacks:
    """A listener that calls callbacks. The callbacks share one state and one control."""

    def __init__(self, config: RunConfig, callbacks: Sequence[TrainerCallback]) -> None:
        self.state = TrainerState(max_steps=run_steps(config) or 0)
        self.control = TrainerControl()
        self._config, self._callbacks = config, tuple(callbacks)

    def fire(self, event: str, **kwargs: Any) -> None:
        """Call the method `event` of every callback that has one, in order."""
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self._config, self.state, self.control, **kwargs)

    def begin(self, step: int, tokens: int) -> None:
        """Report that training begins, after `step` steps on `tokens` tokens."""
        self.state.max_steps = run_steps(self._config) or 0  # it may follow from the data, which is prepared now
        self.state.global_step, self.state.num_input_tokens_seen = step, tokens
        self.fire("on_train_begin")

    def step(self, entry: dict[str, Any]) -> None:
        """Report a step. `entry`: its line of metrics.jsonl."""
        self.state.global_step, self.state.num_input_tokens_seen = entry["step"], entry["tokens"]
        self.state.log_history.append(entry)
        self.fire("on_step_end")
        self.fire("on_log", logs=entry)

    def evaluation(self, entry: dict[str, Any]) -> None:
        """Report an evaluation. `entry`: its line of metrics.jsonl."""
        self.state.log_history.append(entry)
        self.fire("on_evaluate", metrics=entry)

    def saving(self) -> None:
        """Report that the save of a checkpoint begins."""
        self.fire("on_save")

    def end(self) -> None:
        """Report that training has ended, at the last step or earlier."""
        self.fire("on_train_end")
