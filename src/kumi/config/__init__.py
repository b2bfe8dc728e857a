"""Read TOML run files, check every key, and resolve them to the specs that the planner and the trainer use.

load(path, overrides)       -> RunConfig    a checked run file
load_plan(path, overrides)  -> PlanConfig   the same; [data], [train] and name are optional
load_run_or_plan(...)       -> RunConfig, or PlanConfig of a file without [data] and [train]
job(config)                 -> Job          model, cluster, batch, precision and optimizer
plan_input(config)          -> PlanInput    input of the planner: a Job and the pinned layout fields
pin_layout(config, layout)  -> the same config with every field of the layout pinned
open_run(config)            -> ResolvedRun  input of the trainer: a Job, its layout and estimate
resolve(config, snapshots, stored)          the same, without access to the hub and the run folder
"""

from kumi.config.jobs import PlanInput, job, plan_input
from kumi.config.load import dump, from_dict, json_schema, load, load_plan, load_run_or_plan, plan_from_dict
from kumi.config.pinned_run import pin_layout
from kumi.config.resolve import ResolvedRun, open_run, resolve
from kumi.config.schema import PlanConfig, RunConfig

__all__ = [
    "PlanConfig",
    "PlanInput",
    "ResolvedRun",
    "RunConfig",
    "dump",
    "from_dict",
    "job",
    "json_schema",
    "load",
    "load_plan",
    "load_run_or_plan",
    "open_run",
    "pin_layout",
    "plan_from_dict",
    "plan_input",
    "resolve",
]
