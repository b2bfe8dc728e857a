"""`kumi push`: a verified folder to the hub."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from kumi.cli.arguments import add_verb
from kumi.errors import OK


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(verbs, "push", "Send a verified Hugging Face folder to the hub", "kumi push out org/name")
    parser.add_argument("folder", metavar="FOLDER", help="a folder that kumi train or kumi convert --verify wrote")
    parser.add_argument("repository", metavar="ORG/NAME", help="the repository; it is made where it does not exist")
    add_push_flags(parser)
    parser.set_defaults(run_verb=run)


def add_push_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--public", action="store_true", help="a new repository on the hub can be read by everyone")
    parser.add_argument("--unverified", action="store_true", help="send a folder that was not verified")


def run(arguments: Namespace) -> int:
    """Push the folder. Returns the exit code."""
    from kumi.convert.hf.publish import publish

    url = publish(arguments.folder, arguments.repository, public=arguments.public, unverified=arguments.unverified)
    print(url)
    if arguments.json:
        arguments.write_json({"folder": arguments.folder, "repository": arguments.repository, "url": url})
    return OK
