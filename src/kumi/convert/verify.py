"""Verify a converted model against its source: names, shapes, dtypes, every bit, and the logits of fixed prompts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kumi.convert.files.stream import num_threads
from kumi.convert.hf.passthrough import check_passthrough
from kumi.convert.open_model import Source
from kumi.errors import ModelError
from kumi.nn.decoder import Decoder
from kumi.process_limits import free_memory
from kumi.progress import show_progress
from kumi.spec import families
from kumi.spec.ledger import num_params, tensors
from kumi.spec.op import Param
from kumi.spec.precision import ITEMSIZE
from kumi.units import format_bytes

# Allowed difference between the float32 logits of two implementations, relative to the largest logit if it exceeds 1.
_TOLERANCE = 1e-3

# Memory of a float32 decoder and its activations for three short prompts, relative to its weights.
_MEMORY_FACTOR = 1.2


@dataclass(frozen=True)
class Verdict:
    """The number of identical tensors, and the result of comparing logits, in words."""

    tensors: int
    logits: str

    def __str__(self) -> str:
        return f"all {self.tensors} tensors equal, bit by bit; {self.logits}"


def verify(source: Source, written: Source) -> Verdict:
    """Compare the model `written` with its `source`.

    Tensors are compared bit for bit, a few rows at a time, after those of `source` are cast to the written dtype.
    Logits are compared if the model fits in free memory. Raise ModelError naming the first tensor that differs, or the
    difference of the logits.
    """
    params = tensors(source.spec)
    total, done = sum(param.numel * ITEMSIZE[written.dtypes[param.name]] for param in params), 0
    with show_progress(f"verifying {written.folder}", total) as update, ThreadPoolExecutor(num_threads()) as pool:
        try:
            for param in pool.map(lambda param: _compare(source, written, param), params):
                done += param.numel * ITEMSIZE[written.dtypes[param.name]]
                update(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    check_passthrough(written.passthrough, source.passthrough, written.folder)
    return Verdict(len(params) + len(source.passthrough), _compare_logits(source, written))


def _compare(source: Source, written: Source, param: Param) -> Param:
    """Raise ModelError if the tensor `param` differs; return `param`."""
    expected, actual = source.reader, written.reader
    row, rows, rest = 0, param.shape[0], param.shape[1:]
    while row < rows:
        end = min(rows, max(expected.block_end(param.name, row), actual.block_end(param.name, row)))
        start, shape = (row, *(0,) * len(rest)), (end - row, *rest)
        block = actual.read(param.name, start, shape)
        if not _bits(block).equal(_bits(expected.read(param.name, start, shape).to(block.dtype))):
            raise ModelError(f"{written.folder}: {param.name!r} differs from {source.folder}; the disk may be failing")
        row = end
    return param


def _compare_logits(source: Source, written: Source) -> str:
    """Compare the logits that kumi computes for `written` with a reference; return the result in words.

    The reference is the logits of transformers if it can load one of the folders, else those of kumi for `source`.
    Raise ModelError if they differ.
    """
    needed, free = int(4 * num_params(source.spec) * _MEMORY_FACTOR), free_memory()
    if free is not None and needed > free:
        return (
            f"logits not compared: in float32 they need {format_bytes(needed)} of memory, and {format_bytes(free)} are "
            f"free"
        )
    prompts = sample_prompts(source.spec.vocab_size, min(16, source.spec.max_position_embeddings))
    ours = _logits(written, prompts, written)
    theirs, reference = _reference_logits(source, written, prompts)
    difference, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    if not difference <= _TOLERANCE * max(1.0, largest):
        raise ModelError(
            f"{written.folder}: its logits by kumi differ from {reference} by {difference:g} (largest logit "
            f"{largest:g}), although all tensors are equal; please report this model"
        )
    return f"largest logit difference {difference:g} from {reference}"


def _reference_logits(source: Source, written: Source, prompts: Tensor) -> tuple[Tensor, str]:
    """Return reference logits (3, S, V), or scores (3, 1), and a name for their origin."""
    candidates = [written, source] if source.dtypes == written.dtypes else [written]
    folder = next((candidate.folder for candidate in candidates if _is_plain(candidate.folder)), None)
    if folder is None or importlib.util.find_spec("transformers") is None:
        why = "there is no plain Hugging Face folder" if folder is None else "transformers is not installed"
        return _logits(source, prompts, written), f"those of {source.folder.name} by kumi ({why})"
    import transformers

    name = str((families.read_config(folder).get("architectures") or ["?"])[0])
    architecture_class = getattr(transformers, name, None)
    if architecture_class is None:
        why = f"transformers {transformers.__version__} has no {name}"
        return _logits(source, prompts, written), f"those of {source.folder.name} by kumi ({why})"
    return _transformers_logits(architecture_class, folder, prompts), f"transformers {transformers.__version__}'s"


def _is_plain(folder: Path) -> bool:
    """True if `folder` is a Hugging Face folder with unquantized weights; others need special devices and packages."""
    return (folder / "config.json").exists() and not families.read_config(folder).get("quantization_config")


@torch.no_grad()
def _transformers_logits(model_class: Any, folder: Path, prompts: Tensor) -> Tensor:
    """Return the logits (3, S, V) of the model in `folder`, by transformers' `model_class`, in float32.

    For a reward model these are the scores (3, 1) of the prompts.
    """
    with _quiet():
        try:
            # transformers' own reader understands how files spell infinity. model_type must be the class's own, since
            # transformers maps the names of experts by it.
            config, _ = model_class.config_class.get_config_dict(folder, local_files_only=True)
            config = model_class.config_class.from_dict(config | {"model_type": model_class.config_class.model_type})
            options: dict[str, Any] = {"config": config, "dtype": torch.float32, "local_files_only": True}
            if getattr(config.get_text_config(), "attn_logit_softcapping", None):
                options["attn_implementation"] = "eager"  # version 5.17 takes PyTorch's, which has no softcap
            model = model_class.from_pretrained(folder, **options).eval()
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"{folder}: transformers does not load it as {model_class.__name__}: {reason}") from error
        if families.from_hf(families.read_config(folder)).head == "score":
            # Without a padding token, the class takes the last token, of one sequence at a time.
            model.config.get_text_config().pad_token_id = None
            logits = torch.cat([model(prompt[None]).logits for prompt in prompts])
        else:
            logits = model(prompts).logits
    result: Tensor = logits.float()
    return result


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and warnings."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def sample_prompts(vocab_size: int, length: int) -> Tensor:
    """Return three fixed prompts of random token ids (3, S)."""
    return torch.randint(0, vocab_size, (3, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _logits(source: Source, prompts: Tensor, written: Source) -> Tensor:
    """Return the logits (3, S, V) of `source` in float32, its weights rounded to the dtypes of `written`.

    For a reward model these are the scores (3, 1) of the prompts, those of their last tokens.
    """
    decoder = Decoder(source.spec)
    for name, tensor in decoder.state_dict().items():
        tensor.copy_(source.read(name).to(getattr(torch, written.dtypes[name])))
    logits: Tensor = decoder(prompts)
    return logits[:, -1:] if source.spec.head == "score" else logits


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor`: unlike values, NaN bits compare equal."""
    return tensor.contiguous().view(torch.uint8)
