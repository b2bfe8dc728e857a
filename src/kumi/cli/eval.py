"""`kumi eval`: score models on texts and tasks."""

from __future__ import annotations

import os
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.cli.arguments import add_checkpoint_flag, add_verb, positive
from kumi.errors import OK, ConfigError
from kumi.safe_output import visible

if TYPE_CHECKING:
    from kumi.config.task_section import TaskSection
    from kumi.evaluation.harness import HarnessTasks


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(
        verbs, "eval", "Score models on texts and tasks", "kumi eval runs/quickstart/hf --data held-out.jsonl"
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="a Hugging Face folder or hub id, a checkpoint, a run folder or adapters",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILE",
        help="perplexity and bits per byte of a JSONL or text file",
    )
    parser.add_argument("--text-key", default="text", metavar="KEY", help="column of the text in --data; default: text")
    parser.add_argument("--tasks", action="append", default=[], metavar="FILE.toml", help="a file with [[tasks]]")
    parser.add_argument("--lm-eval", metavar="NAMES", help="tasks of lm-evaluation-harness, separated by commas")
    parser.add_argument("--include-path", metavar="FOLDER", help="with --lm-eval: a folder with further tasks")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="with --lm-eval: examples before each question")
    parser.add_argument("--limit", type=positive, metavar="N", help="with --lm-eval: rows of each task at most")
    parser.add_argument(
        "--apply-chat-template", action="store_true", help="with --lm-eval: render prompts with the chat template"
    )
    parser.add_argument(
        "--trust-task-code",
        action="store_true",
        help="with --lm-eval: run the code of tasks, for folders that you trust",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="keep results and scores there; the same command again goes on with them"
    )
    parser.add_argument("--layout", metavar="TEXT", help="ranks of this machine, such as tp=2,dp_replicate=2")
    parser.add_argument("--dtype", metavar="NAME", help="float32, bfloat16, float16 or float64; default: as stored")
    parser.add_argument(
        "--max-length", type=positive, metavar="N", help="tokens that the model reads at most; default: config.json's"
    )
    parser.add_argument("--base", metavar="FOLDER", help="the base model of adapters, if it has moved")
    add_checkpoint_flag(parser)
    parser.add_argument(
        "--write-card", action="store_true", help="write the results into the model cards of exported folders"
    )
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Evaluate the models and print a table. Return the exit code."""
    from kumi.launch.standing import refuse_several_nodes

    refuse_several_nodes("eval", os.environ)
    tasks, harness = _tasks(arguments), _harness(arguments)
    if not tasks and harness is None:
        raise ConfigError("eval: there is nothing to evaluate; give --data FILE, --tasks FILE.toml or --lm-eval NAMES")
    from kumi.evaluation.run_evaluation import Evaluation, evaluate_models

    evaluation = Evaluation(
        tasks,
        harness,
        None if arguments.out is None else Path(arguments.out),
        arguments.layout,
        arguments.dtype,
        arguments.max_length,
        arguments.base,
        arguments.checkpoint,
    )
    if arguments.write_card:
        from kumi.evaluation.result_card import exported_folder

        for model in arguments.models:  # before hours of evaluation
            exported_folder(model)
    code, results = evaluate_models(arguments.models, evaluation)
    if code != OK or os.environ.get("RANK", "0") != "0":
        return code
    if arguments.write_card:
        _write_cards(results, arguments)
    if arguments.json:
        arguments.write_json({"models": results})
    else:
        _print(results)
    return OK


def _write_cards(results: list[dict[str, Any]], arguments: Namespace) -> None:
    """Write the results of each model into its card."""
    from kumi.evaluation.result_card import exported_folder, write_results
    from kumi.evaluation.result_table import results_from_plain

    for result in results:
        folder = exported_folder(result["model"])
        computed = f"{result['dtype']}, {result['max_length']} tokens"
        write_results(folder, results_from_plain(result["tasks"]), computed, _harness_words(computed, arguments))
        print(f"card       {visible(str(folder / 'README.md'))}")


def _harness_words(computed: str, arguments: Namespace) -> str:
    """Return how tasks of lm-evaluation-harness were computed: also the settings that change their results."""
    words = ["lm-evaluation-harness", computed]
    words += [] if arguments.num_fewshot is None else [f"{arguments.num_fewshot} examples"]
    words += [] if arguments.limit is None else [f"at most {arguments.limit} rows"]
    words += ["chat template"] if arguments.apply_chat_template else []
    return ", ".join(words)


def _tasks(arguments: Namespace) -> list[TaskSection]:
    """Return the tasks of --data and --tasks. Raise ConfigError for a file of no known format, and if two have the same
    name."""
    from kumi.config.task_file import load_tasks, perplexity_task
    from kumi.config.task_section import check_unique

    tasks = [perplexity_task(_name(file), file, arguments.text_key) for file in arguments.data]
    tasks += [task for file in arguments.tasks for task in load_tasks(file)]
    try:
        check_unique(tasks)
    except ValueError as error:
        raise ConfigError(f"eval: {error}, in a file of --tasks") from None
    return tasks


def _harness(arguments: Namespace) -> HarnessTasks | None:
    """Return the tasks of --lm-eval. Raise ConfigError for its flags without it, and unless lm-eval is installed."""
    if arguments.lm_eval is None:
        flags = ("include_path", "num_fewshot", "limit", "apply_chat_template", "trust_task_code")
        for flag in flags:
            if getattr(arguments, flag) not in (None, False):
                name = flag.replace("_", "-")
                raise ConfigError(f"eval: --{name} has no effect without --lm-eval; add it, or remove --{name}")
        return None
    if find_spec("lm_eval") is None:
        raise ConfigError("eval: --lm-eval needs lm-evaluation-harness; install it with pip install 'kumi[eval]'")
    from kumi.evaluation.harness import HarnessTasks

    return HarnessTasks(
        tuple(name for name in arguments.lm_eval.split(",") if name),
        None if arguments.include_path is None else Path(arguments.include_path),
        arguments.num_fewshot,
        arguments.limit,
        arguments.apply_chat_template,
        arguments.trust_task_code,
    )


def _name(file: str) -> str:
    """Return the name of the task for a file of --data: that of the file, without its folder."""
    return "".join(character if character.isalnum() or character in "_.-" else "_" for character in Path(file).name)


def _print(results: list[dict[str, Any]]) -> None:
    """Print the table of results, and notes about the models below it."""
    from kumi.evaluation.result_table import result_table, results_from_plain
    from kumi.report.run_description import make_console

    models = [result["model"] for result in results]
    make_console().print(result_table(models, [results_from_plain(result["tasks"]) for result in results]))
    for result in results:
        if result["chosen"]:
            print(f"{result['model']}: {result['chosen']}")
        if result["shortened"]:
            print(
                f"{result['model']}: {result['shortened']} contexts are longer than {result['max_length']} tokens and "
                "lost their beginning"
            )
