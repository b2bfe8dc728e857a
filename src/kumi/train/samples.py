"""Sample texts of a run, in answer to the prompts of [sample]: in a page every sample.every steps, and at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kumi.config import ResolvedRun
from kumi.data import load_tokenizer
from kumi.data.chat.template import find_template
from kumi.files.output import make_folder, replace_text
from kumi.inference.batched_decoder import BatchedDecoder, Reply
from kumi.inference.prompt_encoder import PromptEncoder
from kumi.inference.prompt_files import read_prompts
from kumi.inference.sampling import Sampling
from kumi.nn.decoder import Decoder
from kumi.parallel.mesh import Mesh, gather_objects
from kumi.safe_output import fenced
from kumi.train.prepare_data import chat_options, tokenizer_folder

# Sequences that a rank decodes at once: their caches are in memory beside the training states.
_SLOTS = 16


@dataclass(frozen=True)
class SampleText:
    """A prompt and the text with which the model continues it.

    `finish`: what ended the text.
    `tokens`: the number of its tokens.
    `mean_log_prob`: per token, in nats; None without tokens.
    """

    prompt: str
    text: str
    finish: str
    tokens: int
    mean_log_prob: float | None


@dataclass(frozen=True)
class SamplePrompts:
    """The prompts of [sample], for people and as token ids, and the ids that end a reply."""

    texts: tuple[str, ...]
    ids: tuple[list[int], ...]
    stop_ids: frozenset[int]


def encode_prompts(run: ResolvedRun) -> SamplePrompts:
    """Return the prompts of [sample], given in the run file or in the file that it names.

    A text is encoded without special tokens, like the documents of training. Messages are rendered with the run's chat
    template, up to the reply. Raise ConfigError or DataError for a file that cannot be read, and for messages if
    there is no template or the template refuses them.
    """
    section, folder = run.config.sample, tokenizer_folder(run)
    tokenizer = load_tokenizer(folder)
    plain = frozenset({tokenizer.eos_id})
    if not isinstance(section.prompts, str):
        return SamplePrompts(section.prompts, tuple(map(tokenizer.encode, section.prompts)), plain)
    path = Path(section.prompts).expanduser()
    rows = read_prompts(path, "sample.prompts")
    texts: list[str] = []
    ids: list[list[int]] = []
    encoder = None
    for row in rows:
        if isinstance(row.prompt, str):
            texts.append(row.prompt)
            ids.append(tokenizer.encode(row.prompt))
            continue
        if encoder is None:
            options = chat_options(run)
            encoder = PromptEncoder(tokenizer, find_template(options, folder), stop_ids=plain, options=options)
        ids.append(encoder.encode(row.prompt, row.columns, f"{path}:{row.line}"))
        texts.append(tokenizer.decode(ids[-1]))
    return SamplePrompts(tuple(texts), tuple(ids), plain if encoder is None else encoder.stop_ids)


def sample_texts(decoder: Decoder, run: ResolvedRun, mesh: Mesh | None = None) -> list[SampleText]:
    """Return the model's replies to the prompts of [sample], on every rank of `mesh`, which all call this together."""
    section, prompts = run.config.sample, encode_prompts(run)
    tokenizer, limit = load_tokenizer(tokenizer_folder(run)), decoder.spec.learned_positions
    # Of a prompt that fills all learned positions, only the end is used, so that one token has room.
    asked = [ids[-(limit - 1) :] if limit else ids for ids in prompts.ids]
    sampling = Sampling(
        max_new_tokens=section.max_new_tokens,
        temperature=section.temperature,
        seed=run.config.train.seed,
        stop_ids=prompts.stop_ids,
    )
    batch = BatchedDecoder(decoder, slots=min(_SLOTS, len(asked)), mesh=mesh)
    replies = _of_all_ranks(list(batch.generate(asked, sampling)), mesh)
    return [
        SampleText(
            prompts.texts[reply.prompt],
            tokenizer.decode(reply.ids),
            reply.finish,
            len(reply.ids),
            sum(reply.log_probs) / len(reply.log_probs) if reply.log_probs else None,
        )
        for reply in replies
    ]


def _of_all_ranks(own: list[Reply], mesh: Mesh | None) -> list[Reply]:
    """Return the replies of all data-parallel ranks, by prompt."""
    parts = [own] if mesh is None else gather_objects(own, mesh)
    by_prompt = {reply.prompt: reply for part in parts for reply in part}
    return [by_prompt[prompt] for prompt in sorted(by_prompt)]


def write_samples(folder: Path, step: int, samples: list[SampleText]) -> Path:
    """Write the page samples/step-N.md of the run folder `folder`, and return its path.

    Prompts and texts are code blocks, in which characters that a page or a terminal would obey are escaped.
    """
    lines = [f"# Samples after step {step}", ""]
    for number, sample in enumerate(samples, 1):
        mean = "" if sample.mean_log_prob is None else f", {sample.mean_log_prob:.3f} nats a token"
        lines += [f"## Prompt {number}", "", fenced(sample.prompt), ""]
        lines += [f"Reply ({sample.tokens} tokens, ended by {sample.finish}{mean}):", "", fenced(sample.text), ""]
    path = folder / "samples" / f"step-{step}.md"
    make_folder(path.parent)
    replace_text(path, "\n".join(lines))
    return path
