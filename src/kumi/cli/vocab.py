"""`kumi vocab`: add tokens to a model."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from kumi.cli.arguments import add_verb, positive
from kumi.errors import OK


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(
        verbs,
        "vocab",
        "Add tokens to a model's tokenizer, embeddings and head",
        "kumi vocab extend org/name out --learn 8000 --data texts.jsonl",
    )
    parser.add_argument("action", choices=["extend"], help="write a new folder with more tokens")
    parser.add_argument("base", metavar="BASE", help="a Hugging Face folder, a kumi checkpoint, or a hub id")
    parser.add_argument("out", metavar="OUT", help="the Hugging Face folder to write; it must not exist")
    parser.add_argument("--add", action="append", default=[], metavar="FILE", help="add tokens, one per line")
    parser.add_argument(
        "--special", action="append", default=[], metavar="FILE", help="add special tokens, such as <|user|>"
    )
    parser.add_argument("--learn", type=positive, default=0, metavar="N", help="learn N tokens from --data")
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="PATH", help="texts to learn from, and to measure the tokenizer on"
    )
    parser.add_argument("--text-key", default="text", metavar="KEY", help="the field that holds the text; default text")
    parser.add_argument(
        "--init",
        choices=["pieces", "weighted", "mean"],
        default="pieces",
        help="initial row of a new token. pieces: the mean of the old tokens that spell it; weighted: weighted by "
        "their bytes; mean: the mean of all tokens, which special tokens always get",
    )
    parser.add_argument(
        "--pad-to-multiple-of", type=positive, default=1, metavar="M", help="make vocab_size a multiple of M"
    )
    parser.add_argument("--verify", action="store_true", help="read the result back and compare old tensors")
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Extend the vocabulary. Return the exit code."""
    from kumi.convert.vocab import Request, extend, report_lines

    request = Request(
        arguments.add,
        arguments.special,
        arguments.learn,
        arguments.data,
        arguments.text_key,
        arguments.init,
        arguments.pad_to_multiple_of,
    )
    report = extend(arguments.base, arguments.out, request, verify=arguments.verify)
    if arguments.json:
        arguments.write_json(report)
    else:
        print("\n".join(report_lines(report)))
    return OK
