"""The verbs that make a model's folder another one, or send it away: `kumi vocab` and `kumi push`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from kumi.errors import OK


def add_vocab(verb: Callable[..., argparse.ArgumentParser], positive: Callable[[str], int]) -> None:
    """The parser of `kumi vocab`; `verb` makes one, `positive` reads a number."""
    parser = verb(
        "vocab", "Add tokens to a model's tokenizer, embeddings and head",
        "kumi vocab extend org/name out --learn 8000 --data texts.jsonl",
    )  # fmt: skip
    parser.add_argument("action", choices=["extend"], help="write a new folder with more tokens")
    parser.add_argument("base", metavar="BASE", help="a Hugging Face folder, a kumi checkpoint, or a hub id")
    parser.add_argument("out", metavar="OUT", help="the Hugging Face folder to write; it must not exist")
    parser.add_argument("--add", action="append", default=[], metavar="FILE", help="add its tokens, one a line")
    parser.add_argument(
        "--special", action="append", default=[], metavar="FILE", help="add its tokens as marks, such as <|user|>"
    )
    parser.add_argument("--learn", type=positive, default=0, metavar="N", help="learn N tokens from --data")
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="PATH", help="texts to learn from, and to measure the tokenizer on"
    )
    parser.add_argument("--text-key", default="text", metavar="KEY", help="the field that holds the text; default text")
    parser.add_argument(
        "--init", choices=["pieces", "weighted", "mean"], default="pieces",
        help="how new rows begin: the mean of the old pieces, weighted by their bytes, or the mean of all; marks: mean",
    )  # fmt: skip
    parser.add_argument(
        "--pad-to-multiple-of", type=positive, default=1, metavar="M", help="make vocab_size a multiple of M"
    )
    parser.add_argument("--verify", action="store_true", help="read the result back and compare what was there before")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(verb=_vocab)


def add_push(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """The parser of `kumi push`; `verb` makes one."""
    parser = verb("push", "Send a verified Hugging Face folder to the hub", "kumi push out org/name")
    parser.add_argument("folder", metavar="FOLDER", help="what kumi train or kumi convert --verify wrote")
    parser.add_argument("repository", metavar="ORG/NAME", help="the repository; it is made where it is not there")
    push_flags(parser)
    parser.set_defaults(verb=_push)


def push_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--public", action="store_true", help="a new repository on the hub can be read by everyone")
    parser.add_argument("--unverified", action="store_true", help="send a folder that was not verified")


def _vocab(arguments: argparse.Namespace) -> int:
    from kumi.convert.vocab import Request, extend, lines

    request = Request(
        arguments.add, arguments.special, arguments.learn, arguments.data, arguments.text_key, arguments.init,
        arguments.pad_to_multiple_of,
    )  # fmt: skip
    report = extend(arguments.base, arguments.out, request, verify=arguments.verify)
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(lines(report)))
    return OK


def _push(arguments: argparse.Namespace) -> int:
    return pushed(arguments.folder, arguments.repository, arguments)


def pushed(folder: str, name: str, arguments: argparse.Namespace) -> int:
    from kumi.convert.publish import publish

    print(publish(folder, name, public=arguments.public, unverified=arguments.unverified))
    return OK
