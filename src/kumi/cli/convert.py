"""`kumi convert`: convert a model to another format."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from kumi.cli.arguments import add_checkpoint_flag, add_verb, positive
from kumi.cli.push import add_push_flags
from kumi.errors import OK, ConfigError
from kumi.remote.addresses import is_url
from kumi.safe_output import visible


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(
        verbs, "convert", "Convert weights, streaming", "kumi convert runs/quickstart out --checkpoint best"
    )
    parser.add_argument(
        "source", metavar="SRC", help="a run, a folder of Hugging Face, kumi or Megatron, a URL of one, or a hub id"
    )
    parser.add_argument(
        "target", metavar="DST", help="the folder, its URL, or the .gguf file, to write; it must not exist"
    )
    parser.add_argument(
        "--to",
        choices=["hf", "adapter", "kumi", "megatron", "gguf"],
        help="the format to write; default: hf, or adapter (PEFT's) for a run that trains adapters",
    )
    add_checkpoint_flag(parser)
    parser.add_argument("--critic", action="store_true", help="write the critic of a run (PPO) instead of its model")
    parser.add_argument("--config", metavar="FILE", help="the config.json of a Megatron checkpoint that has none")
    parser.add_argument("--base", metavar="FOLDER", help="the base model of adapters to merge, if it has moved")
    parser.add_argument(
        "--llama-cpp", metavar="FOLDER", help="with --to gguf: a copy of llama.cpp, whose converter writes the file"
    )
    parser.add_argument("--outtype", metavar="NAME", help="with --to gguf: auto (default), f32, f16, bf16 or q8_0")
    parser.add_argument("--megatron-local", action="store_true", help="for Megatron-Core without TransformerEngine")
    parser.add_argument(
        "--megatron-vocab", type=positive, default=1, metavar="N", help="pad Megatron's vocabulary to a multiple of N"
    )
    parser.add_argument("--verify", action="store_true", help="load the result and compare tensors and logits")
    parser.add_argument("--dtype", metavar="NAME", help="write weights as float32, bfloat16 or float16; default: as is")
    parser.add_argument(
        "--layout", metavar="TEXT", help="with --to kumi: shard tensors for this layout, such as tp=2,pp=2"
    )
    parser.add_argument("--push", metavar="ORG/NAME", help="with --to hf: verify the folder and push it to the hub")
    add_push_flags(parser)
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Convert, and push with --push. Return the exit code."""
    _check_push(arguments)
    if arguments.to == "gguf" or arguments.llama_cpp is not None or arguments.outtype is not None:
        return _gguf(arguments)
    from kumi.convert.hf.publish import publish

    to, chosen, message = _convert(arguments)
    for line in (*([f"model      {chosen}"] if chosen else []), message):
        print(visible(line))
    result: dict[str, Any] = {
        "source": arguments.source,
        "chosen": chosen,
        "target": arguments.target,
        "to": to,
        "verified": _verifies(arguments),
        "message": message,
        "url": None,
    }
    if to in ("hf", "adapter") and not is_url(arguments.target):
        from kumi.convert.handover.serving import serving_lines, serving_of_folder

        servings = serving_of_folder(Path(arguments.target))
        print(serving_lines(servings))
        result["engines"] = [serving.as_dict() for serving in servings]
    if arguments.push is not None:
        result["url"] = publish(
            arguments.target, arguments.push, public=arguments.public, unverified=arguments.unverified
        )
        print(result["url"])
    if arguments.json:
        arguments.write_json(result)
    return OK


def _convert(arguments: Namespace) -> tuple[str, str, str]:
    """Convert the source. Return the format, the words for the checkpoint chosen in a run, and the result in words."""
    from kumi.convert.run_checkpoint import is_run_folder, model_of

    source = _folder(arguments)
    verify, options = _verifies(arguments), {"dtype": arguments.dtype, "layout": arguments.layout}
    options |= {"megatron": _megatron(arguments), "base": arguments.base, "critic": arguments.critic}
    if is_run_folder(source):
        if arguments.config is not None:
            raise ConfigError(f"--config {arguments.config}: only Megatron checkpoints need one; leave it out")
        from kumi.train.export_run import export_run

        exported = export_run(
            source, arguments.target, to=arguments.to, checkpoint=arguments.checkpoint, verify=verify, **options
        )
        return exported.to, exported.chosen, exported.message
    if arguments.checkpoint is not None:
        model_of(source, arguments.checkpoint)  # raises ConfigError: only the folder of a run has checkpoints to choose
    if arguments.to == "adapter":
        raise ConfigError(f"--to adapter: {source} is not the folder of a run; name a run that trains adapters")
    from kumi.convert import convert

    to = arguments.to or "hf"
    return to, "", convert(arguments.source, arguments.target, to=to, verify=verify, config=arguments.config, **options)


def _folder(arguments: Namespace) -> Path:
    """Return the local folder of the source, which is fetched if it is a URL; a hub id is returned as a path."""
    from kumi.convert.hf.publish import model_folder_of

    if is_url(arguments.source):
        return model_folder_of(arguments.source, "convert", arguments.checkpoint)
    return Path(arguments.source).expanduser()


def _verifies(arguments: Namespace) -> bool:
    """Return True if the result is verified: with --verify, or before a push."""
    return arguments.verify or (arguments.push is not None and not arguments.unverified)


def _gguf(arguments: Namespace) -> int:
    """Write a GGUF file. Return the exit code."""
    others = {"--verify": arguments.verify, "--dtype": arguments.dtype, "--layout": arguments.layout}
    others |= {"--config": arguments.config, "--megatron-local": arguments.megatron_local}
    others["--critic"] = arguments.critic
    if given := [flag for flag, value in others.items() if value]:
        raise ConfigError(f"convert: {given[0]} has no effect with --to gguf; remove it")
    if arguments.to != "gguf" or arguments.llama_cpp is None:
        raise ConfigError(
            "convert: --to gguf and --llama-cpp FOLDER need each other: llama.cpp's own converter writes the file; "
            "name a copy of llama.cpp"
        )
    from kumi.remote.addresses import refuse_url

    refuse_url(arguments.target, "convert: --to gguf")

    from kumi.convert.handover.gguf_file import OUTTYPES, convert_to_gguf

    outtype = arguments.outtype or "auto"
    if outtype not in OUTTYPES:
        raise ConfigError(f"convert: --outtype {outtype} is unknown; use {', '.join(OUTTYPES[:-1])} or {OUTTYPES[-1]}")
    from kumi.convert.run_checkpoint import is_run_folder, model_of

    source, chosen, folder = arguments.source, "", _folder(arguments)
    if is_run_folder(folder) or arguments.checkpoint is not None:
        model = model_of(folder, arguments.checkpoint)
        source, chosen = str(model.folder), model.words
        print(f"model      {chosen}")
    message = convert_to_gguf(
        source, Path(arguments.target), Path(arguments.llama_cpp), outtype=outtype, base=arguments.base
    )
    print(message)
    if arguments.json:
        result = {"source": arguments.source, "chosen": chosen, "target": arguments.target, "to": "gguf"}
        arguments.write_json({**result, "verified": False, "message": message, "url": None})
    return OK


def _check_push(arguments: Namespace) -> None:
    """Raise ConfigError for flags of --push without it, and for a push that cannot succeed."""
    if arguments.push is None:
        if arguments.public or arguments.unverified:
            raise ConfigError(
                "convert: --public and --unverified have no effect without --push; add it, or remove them"
            )
        return
    if arguments.to not in (None, "hf", "adapter"):
        raise ConfigError(f"convert: --push needs a Hugging Face folder, not --to {arguments.to}; use --to hf")
    from kumi.hub import check_push
    from kumi.remote.addresses import refuse_url

    refuse_url(arguments.target, "convert: --push")
    check_push(arguments.push, "--push")


def _megatron(arguments: Namespace) -> Any:
    """Return the options of the Megatron that loads the result; None if the flags do not set any."""
    if not arguments.megatron_local and arguments.megatron_vocab == 1:
        return None
    from kumi.convert.megatron.write_megatron import MegatronOptions

    return MegatronOptions(arguments.megatron_local, arguments.megatron_vocab)
