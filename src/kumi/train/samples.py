"""Sample texts of a run, in answer to the prompts of [sample]: every k steps into a page, and at the end."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from kumi.config import ResolvedRun
from kumi.data import load_tokenizer
from kumi.files.output import make_folder, write_text
from kumi.inference.batched_decoder import BatchedDecoder, Reply
from kumi.inference.sampling import Sampling
from kumi.nn.decoder import Decoder
from kumi.parallel.mesh import Mesh
from kumi.safe_output import fenced
from kumi.train.prepare_data import tokenizer_folder


@dataclass(frozen=True)
class SampleText:
    """A prompt and what the model continues it with. `mean_log_prob`: per token, in nats; None without tokens."""

    prompt: str
    text: str
    finish: str
    tokens: int
    mean_log_prob: float | None


def sample_texts(decoder: Decoder, run: ResolvedRun, mesh: Mesh | None = None) -> list[SampleText]:
    """Return the model's replies to the prompts of [sample], on every rank of `mesh`, which all call this together."""
    section, tokenizer = run.config.sample, load_tokenizer(tokenizer_folder(run))
    limit = decoder.spec.learned_positions
    # A prompt that fills all learned positions keeps its end, and room for one token.
    asked = [ids[-(limit - 1) :] if limit else ids for ids in map(tokenizer.encode, section.prompts)]
    sampling = Sampling(
        max_new_tokens=section.max_new_tokens,
        temperature=section.temperature,
        seed=run.config.train.seed,
        stop_ids=frozenset({tokenizer.eos_id}),
    )
    batch = BatchedDecoder(decoder, slots=len(asked), mesh=mesh)
    replies = _of_all_ranks(list(batch.generate(asked, sampling)), mesh)
    return [
        SampleText(
            section.prompts[reply.prompt],
            tokenizer.decode(reply.ids),
            reply.finish,
            len(reply.ids),
            sum(reply.log_probs) / len(reply.log_probs) if reply.log_probs else None,
        )
        for reply in replies
    ]


def _of_all_ranks(own: list[Reply], mesh: Mesh | None) -> list[Reply]:
    """Return the replies of all data-parallel ranks, by prompt."""
    parts = [own]
    if mesh is not None and not mesh.is_single:
        parts = [[] for _ in range(mesh.rank_info.world_size)]
        dist.all_gather_object(parts, own)
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
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    write_text(part, "\n".join(lines))
    os.replace(part, path)
    return path
