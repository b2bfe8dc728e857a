"""Evaluate models on tasks: start the ranks of a layout for each model, and collect the results of rank 0."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.config.task_section import TaskSection
from kumi.convert.convert import parse_layout
from kumi.data.tokenizer import Tokenizer
from kumi.data.tokenizer import load as load_tokenizer
from kumi.errors import OK, LayoutError
from kumi.evaluation.evaluated_model import EvaluatedModel, lead
from kumi.evaluation.load_on_mesh import context_length, device_type, load_on_mesh
from kumi.evaluation.model_digest import model_digest
from kumi.evaluation.recorded_scores import RecordedScores
from kumi.evaluation.result_table import plain_results
from kumi.evaluation.resumed_model import ResumedModel
from kumi.evaluation.run_task import encode_prompts, open_task, run_task
from kumi.evaluation.text_model import TextModel
from kumi.files.output import make_folder, write_text
from kumi.inference.load_model import weight_dtype
from kumi.inference.model_files import ModelFiles, find_model, stop_ids
from kumi.inference.prompt_encoder import conversation_encoder
from kumi.launch import local
from kumi.launch.signals import StopFlag, exit_code, install
from kumi.parallel.mesh import Mesh, broadcast_object, build_mesh, close_distributed, init_distributed
from kumi.spec.checks import unsupported_without_training
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec

if TYPE_CHECKING:
    from kumi.evaluation.harness import HarnessTasks

# Seconds that ranks wait for a unit of work: rank 0 may read large files before it sends the first. If rank 0 dies, the
# launcher ends the other ranks.
_PATIENCE_S = 86400.0
RESULTS = "results.json"


@dataclass(frozen=True)
class Evaluation:
    """The tasks, and how models compute them.

    harness: tasks of lm-evaluation-harness; None if there are none.
    out: folder of the results and of the scores so far; None writes neither.
    layout: such as "tp=2"; None for one rank.
    dtype: of weights and activations; None for that of a model's files.
    max_length: tokens that a model reads at most; None for as many as its configuration allows.
    base, checkpoint: as in `kumi.inference.model_files.find_model`.
    """

    tasks: Sequence[TaskSection]
    harness: HarnessTasks | None = None
    out: Path | None = None
    layout: str | None = None
    dtype: str | None = None
    max_length: int | None = None
    base: str | None = None
    checkpoint: str | None = None

    @property
    def has_conversations(self) -> bool:
        """True if a task needs the model's chat template."""
        return any(task.chat for task in self.tasks) or (self.harness is not None and self.harness.chat)


class StoppedError(Exception):
    """A stop signal arrived. The scores so far are recorded."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def evaluate_models(models: Sequence[str], evaluation: Evaluation) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code and the results of `models`, as JSON has them.

    After a failure, these are the results of the models before. Under a launcher such as torchrun, only rank 0 has any.
    """
    results: list[dict[str, Any]] = []
    if evaluation.out is not None:
        make_folder(evaluation.out)
    for model in models:
        code, result = _evaluate(model, evaluation)
        if code != OK:
            return code, results
        if result is not None:
            results.append(result)
    if evaluation.out is not None and results:
        write_text(evaluation.out / RESULTS, json.dumps({"models": results}, indent=2) + "\n")
    return OK, results


def _evaluate(model: str, evaluation: Evaluation) -> tuple[int, dict[str, Any] | None]:
    """Evaluate `model` on the ranks of its layout. Return the exit code, and the results that rank 0 wrote, if any."""
    files = _open(model, evaluation)
    layout = _layout(evaluation, files.spec)
    with tempfile.TemporaryDirectory(prefix="kumi-eval-") as folder:
        result = Path(folder) / RESULTS
        arguments = (model, evaluation, layout, result)
        os.environ.update(local.rank_environment(layout.world_size, os.environ))
        logs = Path(folder) if evaluation.out is None else evaluation.out
        code = local.run_ranks(evaluate_rank, arguments, nproc=layout.world_size, log_dir=logs / "logs")
        return code, json.loads(result.read_text()) if result.exists() else None


def _open(model: str, evaluation: Evaluation) -> ModelFiles:
    return find_model(model, base=evaluation.base, checkpoint=evaluation.checkpoint)


def _open_on_ranks(model: str, evaluation: Evaluation, mesh: Mesh) -> ModelFiles:
    """Open the model that rank 0 chooses: a run that goes on may add a checkpoint between the choices of two ranks."""
    if mesh.rank == 0:
        files = _open(model, evaluation)
        broadcast_object(str(files.folder), mesh)
        return files
    return find_model(broadcast_object("", mesh), base=evaluation.base)


def _layout(evaluation: Evaluation, spec: ModelSpec) -> Layout:
    """Return the layout of the ranks. Raise LayoutError if a model of this `spec` cannot run on it."""
    if evaluation.layout is None:
        return Layout()
    layout = parse_layout(evaluation.layout, spec)
    if problems := unsupported_without_training(spec, layout):
        raise LayoutError(f"--layout {evaluation.layout}: {problems[0]}")
    return layout


def evaluate_rank(model: str, evaluation: Evaluation, layout: Layout, result: Path) -> int:
    """Evaluate `model` on this rank; on rank 0, write the results to `result`. Return the exit code."""
    flag = install()
    mesh = build_mesh(layout, init_distributed(device_type(), timeout_s=_PATIENCE_S))
    files = _open_on_ranks(model, evaluation, mesh)
    dtype = weight_dtype(files, evaluation.dtype)
    length = context_length(files.spec, evaluation.max_length)
    tokenizer = load_tokenizer(files.tokenizer_folder)
    evaluated = EvaluatedModel(load_on_mesh(files, mesh, dtype), mesh, max_length=length, decode_text=tokenizer.decode)
    try:
        results = lead(evaluated, partial(_run_tasks, model, files, tokenizer, dtype, evaluation, flag))
    except StoppedError as stopped:
        close_distributed()
        return exit_code(stopped.signum)
    close_distributed()
    if results is not None:
        result.write_text(json.dumps(results))
    return OK


def _run_tasks(
    name: str,
    files: ModelFiles,
    tokenizer: Tokenizer,
    dtype: str,
    evaluation: Evaluation,
    flag: StopFlag,
    model: EvaluatedModel,
) -> dict[str, Any]:
    """Run all tasks, on rank 0, and return the results of the model."""
    digest = None if evaluation.out is None else model_digest(files)

    def check() -> None:
        if flag.requested is not None:
            raise StoppedError(flag.requested)

    stops = stop_ids(files, tokenizer)
    chat = conversation_encoder(tokenizer, files.chat, stops) if evaluation.has_conversations else None
    results = []
    with _recorded(evaluation, digest, dtype, model.max_length) as recorded:
        for task in evaluation.tasks:
            resumed = ResumedModel(model, recorded, title=f"{name}: {task.name}", check=check)
            encoded = encode_prompts(open_task(task), chat)
            results.append(run_task(encoded, TextModel(resumed, tokenizer, chat, stops)))
        if evaluation.harness is not None:
            from kumi.evaluation.harness import run_harness

            resumed = ResumedModel(model, recorded, title=f"{name}: lm-eval", check=check)
            text_model = TextModel(resumed, tokenizer, chat, stops)
            results += run_harness(evaluation.harness, text_model, f"{name}-{files.tokenizer_folder}")
    return _plain(name, files, dtype, model, digest) | {"tasks": plain_results(results)}


@contextmanager
def _recorded(
    evaluation: Evaluation, digest: str | None, dtype: str, max_length: int
) -> Iterator[RecordedScores | None]:
    """Yield the open file of the model's scores; None without a folder for them."""
    if evaluation.out is None or digest is None:
        yield None
        return
    # Scores depend on the context and, by rounding, on the dtype.
    recorded = RecordedScores(evaluation.out / f"scores-{digest[:16]}-{dtype}-{max_length}.jsonl")
    try:
        yield recorded
    finally:
        recorded.close()


def _plain(name: str, files: ModelFiles, dtype: str, model: EvaluatedModel, digest: str | None) -> dict[str, Any]:
    """Return what results.json says of a model, beside the results of its tasks."""
    return {
        "model": name,
        "folder": str(files.folder),
        "chosen": files.chosen,
        "digest": digest,
        "dtype": dtype,
        "layout": model.mesh.layout.words,
        "max_length": model.max_length,
        "shortened": model.shortened,
    }
