"""`kumi push`: push a verified folder to the hub."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from kumi.cli.arguments import add_verb
from kumi.errors import OK


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(verbs, "push", "Push a verified Hugging Face folder to the hub", "kumi push out org/name")
    parser.add_argument("folder", metavar="FOLDER", help="a folder that kumi train or kumi convert --verify wrote")
    parser.add_argument("repository", metavar="ORG/NAME", help="the repository; created if it does not exist")
    add_push_flags(parser)
    parser.set_defaults(run_verb=run)


def add_push_flags(parser: ArgumentParser) -> None:
    """Declare the flags of a push."""
    parser.add_argument("--public", action="store_true", help="make a new repository public")
    parser.add_argument("--unverified", action="store_true", help="push a folder that was not verified")


def run(arguments: Namespace) -> int:
    """Push the folder. Return the exit code."""
    from kumi.convert.hf.publish import publish

    url = publish(arguments.folder, arguments.repository, public=arguments.public, unverified=arguments.unverified)
    print(url)
    if arguments.json:
        arguments.write_json({"folder": arguments.folder, "repository": arguments.repository, "url": url})
    return OK
