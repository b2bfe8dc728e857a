"""The files that `kumi plan` writes: page, pictures, timeline, run file, and another trainer's configuration."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from kumi.errors import ConfigError, RefusedError

if TYPE_CHECKING:
    from kumi.config import PlanConfig
    from kumi.plan.report import Report


def write_files(arguments: Namespace, config: PlanConfig, report: Report) -> Iterator[Path]:
    """Write every requested file and yield its path."""
    pictures, run_file = _write_pictures(arguments, report), _write_run_file(arguments, config, report)
    export = _write_export(arguments, config, report)
    yield from chain(pictures, run_file, export, _write_trace(arguments, report))


def check_output_paths(arguments: Namespace) -> None:
    """Raise RefusedError for paths that cannot be written, and for a run file or an export that exists."""
    for name in (arguments.save, _folder(arguments) if arguments.export else None):
        if name is not None and Path(name).exists():
            raise RefusedError(f"{name} exists and is not overwritten; name another path, or remove it")
    for flag in ("html", "trace", "save", "svg"):
        name = getattr(arguments, flag)
        if name and flag == "svg" and Path(name).is_file():
            raise RefusedError(f"plan: --svg {name} is a file; name a folder for the pictures")
        if name and flag != "svg" and Path(name).is_dir():
            raise RefusedError(f"plan: --{flag} {name} is a folder; name a file, such as {Path(name) / f'plan.{flag}'}")
    for flag in ("html", "trace", "save", "svg", "out"):
        name = getattr(arguments, flag)
        above = next((folder for folder in Path(name).absolute().parents if folder.exists()), None) if name else None
        if above is not None and not (above.is_dir() and os.access(above, os.W_OK)):
            raise RefusedError(f"plan: --{flag} {name}: {above} is not a writable folder; name another path")


def _folder(arguments: Namespace) -> str:
    return str(arguments.out or arguments.export)


def _write_pictures(arguments: Namespace, report: Report) -> Iterator[Path]:
    """Write the page and the pictures. They replace existing files."""
    if arguments.html:
        from kumi.report.page import page

        yield _write(Path(arguments.html), page(report))
    if arguments.svg:
        from kumi.report.pictures import pictures

        for name, picture in pictures(report).items():
            yield _write(Path(arguments.svg) / f"{name}.svg", picture)


def _write_trace(arguments: Namespace, report: Report) -> Iterator[Path]:
    """Write the pipeline's timeline. This is the last file, since the plan may have no timeline."""
    if arguments.trace:
        if report.timeline is None and report.best.layout.pp == 1:
            raise ConfigError("plan: --trace shows a pipeline, and the best layout has pp=1; pin layout.pp to see one")
        if report.timeline is None:
            many = report.job.batch.microbatches(report.best.layout)
            raise ConfigError(
                f"plan: --trace shows every microbatch, and {many:,} are too many; lower batch.tokens_per_step"
            )
        from kumi.report.trace import trace

        yield _write(Path(arguments.trace), json.dumps(trace(report.timeline)))


def _write_run_file(arguments: Namespace, config: PlanConfig, report: Report) -> Iterator[Path]:
    """Write the run file with the chosen layout pinned."""
    if arguments.save:
        from kumi.config import dump, pin_layout

        yield _write(Path(arguments.save), dump(pin_layout(config, report.best.layout)))


def _write_export(arguments: Namespace, config: PlanConfig, report: Report) -> Iterator[Path]:
    """Write the configuration of another trainer."""
    if arguments.export:
        from kumi.config.optim_section import choose_optim
        from kumi.config.run_length import run_steps
        from kumi.export import export
        from kumi.export.common import DEFAULT_STEPS

        steps = run_steps(config) or DEFAULT_STEPS
        job = replace(report.job, optim=choose_optim(config.optim, steps))  # the schedule of exactly these steps
        for name, text in export(job, report.best.layout, arguments.export, steps).items():
            yield _write(Path(_folder(arguments)) / name, text)


def _write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file
