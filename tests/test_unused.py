"""Every function, class, method and attribute of kumi is used by kumi, or is listed here with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import vulture

SOURCE = Path(__file__).parents[1] / "src" / "kumi"

# Functions with callers that vulture does not see, by caller.
DECORATORS = ["@model_validator", "@field_validator", "@register_flop_formula"]
ALLOWED = {
    "Python calls it": ["__dir__", "__call__", "frame", "seekable", "readinto", "showwarning"],
    "argcomplete reads it": ["completer"],
    "a notebook calls it": ["_repr_html_"],
    "pickle calls it": ["find_class", "persistent_load"],
    "torch.distributed.elastic calls it": ["reify", "root_log_dir"],
    "the tokenizers library reads it": ["post_processor"],
    "PyTorch's fake tensors read it": ["allow_non_fake_inputs"],
    "PyTorch's dispatch modes read it": ["_should_skip_dynamo"],
    "FSDP2 reads it": ["param_dtype"],
    "s3fs reads it": ["_s3", "retries"],
    "lm-evaluation-harness calls it": [
        "eot_token_id",
        "prefix_token_id",
        "tokenizer_name",
        "tok_encode",
        "_loglikelihood_tokens",
        "loglikelihood_rolling",
        "generate_until",
        "disable_tqdm",
    ],
    "a record in a file that kumi writes has it": [
        "mtime",
        "special_tokens_in_text",
        "validation_digest",
        "validation_checksums",
        "leaves_node",
        "train_units",
        "validation_units",
        "validation_trained",
    ],
    "the table of parts of `kumi doctor --gpu` names it": ["rows_of_*"],
    "documented for programs that import kumi": [
        "export_tensors",
        "load_model",
        "is_local_process_zero",
        "is_world_process_zero",
        "on_*",
        "training_loss",
    ],
    "benchmarks/planner_scores.py calls it": ["memory_reading"],
    "benchmarks/planner_intervals.py calls it": ["csv_row"],
    "a list of values, for readers of the fields that have them": ["OP_KINDS"],
    "tests read it": ["longest_rank_seconds", "bytes_moved"],
    "a parameter of a protocol, whose implementations use it": ["condition"],
}


@pytest.fixture(scope="module")
def unused():
    finder = vulture.Vulture(ignore_decorators=DECORATORS)
    finder.scavenge([str(SOURCE)])
    return finder.get_unused_code(min_confidence=60)


def _matches(name, pattern):
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


PATTERNS = [pattern for names in ALLOWED.values() for pattern in names]


def test_everything_is_used_or_says_why_not(unused):
    unlisted = [item for item in unused if not any(_matches(item.name, pattern) for pattern in PATTERNS)]
    assert [f"{item.filename}:{item.first_lineno}: {item.name}" for item in unlisted] == []


def test_no_reason_is_left_over(unused):
    assert [pattern for pattern in PATTERNS if not any(_matches(item.name, pattern) for item in unused)] == []
