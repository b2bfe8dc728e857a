"""What a TOML run file may say, and how it becomes the values that the planner and the trainer read.

load(path, overrides) -> RunConfig     what was written, checked key by key
resolve(config)       -> Run           what will run: specs, with everything derived
"""

from kumi.config.load import dump, from_dict, json_schema, load
from kumi.config.resolve import Run, resolve
from kumi.config.schema import RunConfig

__all__ = ["Run", "RunConfig", "dump", "from_dict", "json_schema", "load", "resolve"]
