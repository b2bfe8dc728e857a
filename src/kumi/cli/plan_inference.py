"""`kumi plan --inference`: cache, largest batch and speed of generation."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from kumi.cli.arguments import positive
from kumi.errors import OK, ConfigError

# Tokens of a sequence where none are given.
_CONTEXT = 4096
# Flags about training, or of its report.
_TRAINING_FLAGS = (
    "explain",
    "brief",
    "trainable",
    "html",
    "svg",
    "trace",
    "save",
    "engine",
    "export",
    "tokens",
    "days",
    "calibrate",
)
# Flags that need --inference; those after "prompts" need --prompts, too.
_INFERENCE_FLAGS = ("batch_size", "context", "prompts", "prompt_tokens", "reply_tokens", "reply_p99")


def add_inference_arguments(parser: ArgumentParser) -> None:
    """Declare the flag --inference and those that need it."""
    group = parser.add_argument_group("generation instead of training")
    group.add_argument(
        "--inference", action="store_true", help="plan generation: bytes of the cache, largest batch, tokens a second"
    )
    group.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help="sequences at once, over all devices; default: as many as fit, up to 256 per replica",
    )
    group.add_argument(
        "--context", type=positive, metavar="N", help="tokens of a sequence, prompt and reply; default 4096"
    )
    group.add_argument(
        "--prompts",
        type=positive,
        metavar="N",
        help="time to answer N prompts; a reply that ends makes room for the next prompt",
    )
    group.add_argument(
        "--prompt-tokens", type=positive, metavar="N", help="with --prompts: tokens of each, default 512"
    )
    group.add_argument("--reply-tokens", type=positive, metavar="N", help="with --prompts: mean tokens of the replies")
    group.add_argument(
        "--reply-p99", type=positive, metavar="N", help="with --prompts: 99th percentile of replies; default: all equal"
    )


def refuse_inference_flags(arguments: Namespace) -> None:
    """Raise ConfigError for flags of generation without --inference, and for flags of training with it."""
    for name in _INFERENCE_FLAGS if not arguments.inference else ():
        if getattr(arguments, name) is not None:
            flag = name.replace("_", "-")
            raise ConfigError(f"plan: --{flag} has no effect without --inference; add --inference, or remove --{flag}")
    for name in _TRAINING_FLAGS if arguments.inference else ():
        if getattr(arguments, name):
            raise ConfigError(f"plan: --{name} is about training, which --inference does not plan; remove one of them")
    for name in _INFERENCE_FLAGS[_INFERENCE_FLAGS.index("prompts") + 1 :] if arguments.prompts is None else ():
        if getattr(arguments, name) is not None:
            flag = name.replace("_", "-")
            raise ConfigError(f"plan: --{flag} has no effect without --prompts; add --prompts N, or remove --{flag}")
    if arguments.prompts is not None and arguments.reply_tokens is None:
        raise ConfigError("plan: --prompts needs the mean length of the replies; add --reply-tokens N")


def plan_inference(arguments: Namespace) -> int:
    """Print the estimates of generation by layout. Return the exit code."""
    from kumi.config import plan_input
    from kumi.config.model_plan import load_plan_or_model
    from kumi.plan.inference.inference_estimates import RolloutLengths, estimate_inference
    from kumi.plan.inference.inference_job import inference_job
    from kumi.plan.inference.reply_lengths import reply_lengths
    from kumi.report.inference_table import inference_data, render_inference
    from kumi.report.run_description import print_content

    config, _ = load_plan_or_model(arguments.run, arguments.gpus, arguments.overrides)
    training = plan_input(config).job
    job, lengths = inference_job(training), None
    context = arguments.context or min(_CONTEXT, job.model.max_position_embeddings)
    if arguments.prompts is not None:
        replies = reply_lengths(arguments.prompts, arguments.reply_tokens, arguments.reply_p99)
        prompt = arguments.prompt_tokens or 512
        lengths = RolloutLengths([prompt] * arguments.prompts, replies)
        context = arguments.context or prompt + max(replies)
    if context > job.model.max_position_embeddings:
        raise ConfigError(
            f"plan: sequences of {context:,} tokens are longer than the model's {job.model.max_position_embeddings:,} "
            f"positions; use a shorter --context, --prompt-tokens or --reply-tokens"
        )
    estimates = estimate_inference(job, context, batch=arguments.batch_size, lengths=lengths)[: arguments.top + 1]
    if arguments.json:
        arguments.write_json(inference_data(job, training.model_name, estimates, context))
    else:
        print_content(render_inference(job, training.model_name, estimates, context))
    return OK
