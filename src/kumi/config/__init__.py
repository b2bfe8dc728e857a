"""What a TOML run file may say, and how it becomes the values that the planner and the trainer read.

load(path, overrides)      -> RunConfig   what was written, checked key by key
load_plan(path, overrides) -> PlanConfig  the same, where data and steps may be left out
plan_input(config)         -> PlanInput   what the planner is asked: a Job, and the layout fields that are pinned
job(config)                -> Job         what is trained on what, alone
pinned_to(config, layout)  -> the same config with the layout decided
open_run(config)           -> ResolvedRun what will run: the same job, with the layout decided and everything derived
resolve(config, snapshots, begun)         the same, of what the hub and the run folder were found to hold
"""

from kumi.config.jobs import PlanInput, job, plan_input
from kumi.config.load import dump, from_dict, json_schema, load, load_plan, plan_from_dict
from kumi.config.pinned_run import pinned_to
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
    "open_run",
    "pinned_to",
    "plan_from_dict",
    "plan_input",
    "resolve",
]
