"""`kumi status`: the state of a launched run."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from kumi.cli.arguments import add_run_file, add_verb
from kumi.errors import OK


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(verbs, "status", "Show the state of a launched run", "kumi status run.toml")
    add_run_file(parser)
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Print the job's state and the run's progress. Return the exit code."""
    from kumi.config import load
    from kumi.launch.cluster_launchers import submitted_job
    from kumi.train.run_summary import train_output

    config = load(arguments.run, arguments.overrides)
    launcher, record = submitted_job(config)
    state = launcher.state(record)
    output = train_output(config)
    step = output.metrics.get("step", 0)  # the last step in metrics.jsonl, which may be after the last checkpoint
    if arguments.json:
        progress = {"step": step, "saved_step": output.global_step, "max_steps": output.max_steps}
        described = {"kind": record.kind, "id": record.id, "state": state.word, "detail": state.detail}
        arguments.write_json({**described, "submitted": record.submitted, **progress})
        return OK
    print(f"job        {record.kind} {record.id}, submitted {record.submitted}")
    print(f"state      {state.word}{f': {state.detail}' if state.detail else ''}")
    if output.metrics or launcher.shares_files:
        print(f"progress   step {step} of {output.max_steps or '?'}, saved at step {output.global_step}")
    else:
        print(f"progress   not visible here: {output.output_dir} is on the cluster; see kumi logs")
    return OK
