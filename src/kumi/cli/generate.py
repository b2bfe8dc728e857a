"""`kumi generate`: text from a model, for prompts on the command line, in a file, or in a conversation."""

from __future__ import annotations

import argparse
import os
import sys
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.cli.arguments import add_checkpoint_flag, add_verb, positive
from kumi.errors import OK, ConfigError
from kumi.safe_output import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kumi.inference.generation import Generation
    from kumi.inference.text_generator import TextReply


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(
        verbs,
        "generate",
        "Generate text with a model; without a prompt, chat with it",
        "kumi generate runs/quickstart --prompt 'def main(' --max-new-tokens 24",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face folder or hub id, a run, a checkpoint, or adapters"
    )
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    prompts.add_argument("--prompts", metavar="FILE", help="a prompt on each line (.txt), or rows with prompt (.jsonl)")
    prompts.add_argument("--out", metavar="FILE", help="append a JSON line for each reply; replies in it are kept")
    prompts.add_argument("--system", metavar="TEXT", help="the system message")
    prompts.add_argument("--no-chat-template", action="store_true", help="continue the prompts as plain text")
    drawing = parser.add_argument_group("replies; by default as the model's generation_config.json says, or greedy")
    drawing.add_argument("--max-new-tokens", type=positive, metavar="N", help="the most tokens of a reply; default 256")
    drawing.add_argument("--temperature", type=_number, metavar="T", help="0 takes the most likely token each time")
    drawing.add_argument("--top-k", type=_count, metavar="K", help="draw among the K most likely tokens; 0 for all")
    drawing.add_argument(
        "--top-p", type=_number, metavar="P", help="draw among the most likely tokens up to this share"
    )
    drawing.add_argument(
        "--min-p", type=_number, metavar="P", help="leave out tokens below this share of the likeliest"
    )
    drawing.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws; default 0")
    drawing.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end a reply at this text")
    drawing.add_argument("--num-return-sequences", type=positive, default=1, metavar="N", help="replies to each prompt")
    model = parser.add_argument_group("the model in memory")
    model.add_argument(
        "--batch-size", type=positive, metavar="B", help="sequences at once; default: at most 8 that fit"
    )
    model.add_argument(
        "--dtype", metavar="NAME", help="float32, bfloat16, float16 or float64; default: that of the files"
    )
    model.add_argument("--base", metavar="FOLDER", help="the base model of adapters, if it has moved")
    add_checkpoint_flag(model)
    parser.set_defaults(run_verb=run)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of tokens, or 0, got {text!r}")
    return int(text)


def run(arguments: Namespace) -> int:
    """Generate, or chat. Return the exit code."""
    from kumi.launch.standing import refuse_several_nodes

    refuse_several_nodes("generate", os.environ)
    chats = _check(arguments)
    from kumi.inference.generation import Generation, ModelChoice
    from kumi.inference.generation_settings import Flags, not_applied

    drawn = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    flags = Flags(**{name: getattr(arguments, name) for name in drawn}, stop=tuple(arguments.stop))
    choice = ModelChoice(arguments.model, dtype=arguments.dtype, base=arguments.base, checkpoint=arguments.checkpoint)
    generation = Generation(
        choice,
        flags,
        use_template=not arguments.no_chat_template,
        system=arguments.system,
        batch_size=arguments.batch_size,
    )
    texts = generation.settings.texts
    if texts.chosen:
        _note(f"model      {texts.chosen}")
    if ignored := not_applied(texts.settings):
        _note(f"not applied: {', '.join(ignored)} of generation_config.json")
    if chats:
        return _chat(generation)
    if arguments.prompts is not None:
        return _file(arguments, generation)
    return _prompts(arguments, generation)


def _check(arguments: Namespace) -> bool:
    """Return True if the command chats: without prompts, and in a terminal. Raise ConfigError for flags that exclude
    each other."""
    if arguments.prompts is not None and arguments.prompt:
        raise ConfigError(
            "generate: --prompt and --prompts are both set; put all prompts into the file, or repeat --prompt"
        )
    if (arguments.out is None) != (arguments.prompts is None):
        raise ConfigError("generate: --prompts and --out need each other: a file of prompts, and one for the replies")
    if arguments.prompt or arguments.prompts is not None or not sys.stdin.isatty():
        return False
    if arguments.json or arguments.num_return_sequences > 1:
        raise ConfigError("generate: --json and --num-return-sequences need prompts; add --prompt TEXT")
    return True


def _note(text: str) -> None:
    print(visible(text), file=sys.stderr, flush=True)


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _chat(generation: Generation) -> int:
    """Chat in the terminal. Return the exit code."""
    from kumi.inference.chat_session import chat

    with suppress(ImportError):
        import readline  # noqa: F401  # input() then has a history and edits lines
    chat(generation, input, _show)
    return OK


def _prompts(arguments: Namespace, generation: Generation) -> int:
    """Answer the prompts of the command line, or the one on standard input."""
    prompts = arguments.prompt or [sys.stdin.read()]
    samples = arguments.num_return_sequences
    encoded = generation.settings.encode(prompts)
    generator = generation.generator(encoded, samples=samples)
    streams = len(prompts) == samples == 1 and not arguments.json
    started, replies = time.monotonic(), []
    if streams:
        stream = generation.settings.stream(encoded[0])
        for reply in generator.generate(encoded, on_token=lambda _, __, ids: _show(visible(stream.grow(ids)))):
            _show(f"{visible(stream.grow(reply.ids, ended=True))}\n")
            replies.append(reply)
    else:
        replies = _answers(generation, generator, encoded, samples)
    tokens, seconds = sum(len(reply.ids) for reply in replies), time.monotonic() - started
    if arguments.json:
        arguments.write_json(_content(generation, prompts, encoded, replies, tokens / seconds))
    elif not streams:
        for reply in replies:
            name = f"prompt {reply.prompt + 1}" + (f", sample {reply.sample + 1}" if samples > 1 else "")
            print(f"--- {name}: {reply.finish}, {len(reply.ids)} tokens\n{visible(reply.text)}")
    _note(f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s")
    return OK


def _answers(generation: Generation, generator: Any, encoded: Sequence[list[int]], samples: int) -> list[TextReply]:
    """Return the replies in the order of the prompts, after showing the progress meanwhile."""
    from kumi.inference.token_rate import show_rate

    with show_rate("generating replies", len(encoded) * samples) as rate:
        replies = []
        for reply in generator.generate(encoded, samples=samples, on_token=rate.on_token):
            rate.on_reply()
            replies.append(reply)
    return sorted(replies, key=lambda reply: (reply.prompt, reply.sample))


def _content(
    generation: Generation,
    prompts: Sequence[str],
    encoded: Sequence[list[int]],
    replies: Sequence[TextReply],
    rate: float,
) -> dict[str, Any]:
    """Return the content of --json."""
    sampling = generation.settings.sampling
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    return {
        "model": generation.settings.texts.name,
        "dtype": generation.dtype,
        "settings": {name: getattr(sampling, name) for name in names} | {"stop": list(sampling.stop_strings)},
        "tokens_per_second": rate,
        "replies": [
            {
                "prompt": prompts[reply.prompt],
                "sample": reply.sample,
                "reply": reply.text,
                "finish": reply.finish,
                "prompt_tokens": len(encoded[reply.prompt]),
                "tokens": len(reply.ids),
                "ids": reply.ids,
                "mean_log_prob": reply.mean_log_prob,
            }
            for reply in replies
        ],
    }


def _file(arguments: Namespace, generation: Generation) -> int:
    """Answer the prompts of a file."""
    from kumi.inference.answer_file import answer_file

    result = answer_file(
        generation, Path(arguments.prompts), Path(arguments.out), samples=arguments.num_return_sequences
    )
    if arguments.json:
        arguments.write_json(result)
    else:
        print(
            "{replies} replies in {out}, {earlier} of them from before; {tokens} tokens, {seconds:.1f} s".format(
                **result
            )
        )
    return OK
