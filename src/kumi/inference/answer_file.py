"""Answer the prompts of a file into another file; the same command, run again, goes on where it stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kumi.inference.generation import Generation
from kumi.inference.prompt_files import open_replies, prompt_digest, read_prompts, reply_record
from kumi.inference.token_rate import show_rate


def answer_file(generation: Generation, prompts: Path, out: Path, *, samples: int = 1) -> dict[str, Any]:
    """Generate `samples` replies to each prompt of the file `prompts`, and append them to the file `out`.

    A prompt with all replies in `out` is left out; of the other prompts, only the missing replies are appended. Each
    reply is a line of JSON, written as it ends. Return the numbers of replies in all, of those that were in `out`
    before (`earlier`) and of new tokens, as plain data. Raise RefusedError if `out` has replies of other settings, of
    another model or to other prompts; ConfigError or DataError for prompts that cannot be read.
    """
    rows = read_prompts(prompts)
    encoded = [generation.settings.encode_row(row.prompt, row.columns, f"{prompts}:{row.line}") for row in rows]
    digests = [prompt_digest(ids) for ids in encoded]
    started, tokens = time.monotonic(), 0
    with open_replies(out, generation.digest()) as file:
        answered = [
            [file.has(row.line, sample, digest) for sample in range(samples)]
            for row, digest in zip(rows, digests, strict=True)
        ]
        missing = [index for index, done in enumerate(answered) if not all(done)]
        if missing:
            open_prompts = [encoded[index] for index in missing]
            generator = generation.generator(open_prompts, samples=samples)
            with show_rate("generating replies", len(missing) * samples) as rate:
                for reply in generator.generate(open_prompts, samples=samples, on_token=rate.on_token):
                    rate.on_reply()
                    tokens += len(reply.ids)
                    index = missing[reply.prompt]
                    if not answered[index][reply.sample]:
                        file.append(reply_record(rows[index], encoded[index], reply))
    return {
        "out": str(out),
        "replies": len(rows) * samples,
        "earlier": sum(map(sum, answered)),
        "tokens": tokens,
        "seconds": time.monotonic() - started,
    }
