"""Whether a written model is the one it was made from: names, shapes, dtypes, every bit, and the logits of prompts."""

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

from kumi.convert.carried import check_equal
from kumi.convert.source import Source
from kumi.convert.stream import threads
from kumi.errors import ModelError
from kumi.nn.decoder import Decoder
from kumi.progress import showing
from kumi.spec import families
from kumi.spec.ledger import num_params, tensors
from kumi.spec.op import Param
from kumi.spec.precision import ITEMSIZE
from kumi.units import format_bytes

# Largest share of the largest logit by which float32 logits of two implementations may differ.
TOLERANCE = 1e-3

# A decoder in float32 with its activations for three short prompts takes this much more than its weights.
_ROOM = 1.2


@dataclass(frozen=True)
class Verdict:
    """How many tensors were found equal, and in words what came of the logits."""

    tensors: int
    logits: str

    def __str__(self) -> str:
        return f"all {self.tensors} tensors equal, bit by bit; {self.logits}"


def verify(source: Source, written: Source) -> Verdict:
    """What was compared; ModelError naming the first tensor of `written` that is not what `source` has, cast to the
    dtype it was written in, or the logits where they differ.

    Tensors are compared a few rows at a time; logits only where the model fits the memory that is free.
    """
    params = tensors(source.spec)
    total, done = sum(param.numel * ITEMSIZE[written.dtypes[param.name]] for param in params), 0
    with showing(f"verifying {written.folder}", total) as update, ThreadPoolExecutor(threads()) as pool:
        try:
            for param in pool.map(lambda param: _compare(source, written, param), params):
                done += param.numel * ITEMSIZE[written.dtypes[param.name]]
                update(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    check_equal(written.carried, source.carried, written.folder)
    return Verdict(len(params) + len(source.carried), _logits_agree(source, written))


def _compare(source: Source, written: Source, param: Param) -> Param:
    one, other = source.reader, written.reader
    row, rows, rest = 0, param.shape[0], param.shape[1:]
    while row < rows:
        end = min(rows, max(one.cut(param.name, row), other.cut(param.name, row)))
        start, shape = (row, *(0,) * len(rest)), (end - row, *rest)
        found = other.read(param.name, start, shape)
        if not _bits(found).equal(_bits(one.read(param.name, start, shape).to(found.dtype))):
            raise ModelError(f"{written.folder}: {param.name!r} differs from {source.folder}; the disk may be failing")
        row = end
    return param


def _logits_agree(source: Source, written: Source) -> str:
    """In words, how near the logits of `written` by kumi are to others: transformers' where it can load one of the two
    folders, else those of `source`."""
    needed, free = int(4 * num_params(source.spec) * _ROOM), free_memory()
    if free is not None and needed > free:
        return (
            f"logits not compared: in float32 they need {format_bytes(needed)} of memory, {format_bytes(free)} are free"
        )
    prompts = sample_prompts(source.spec.vocab_size, min(16, source.spec.max_position_embeddings))
    ours = _logits(written, prompts, written)
    theirs, whose = _other_logits(source, written, prompts)
    difference, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    if not difference <= TOLERANCE * max(1.0, largest):
        raise ModelError(
            f"{written.folder}: its logits by kumi differ from {whose} by {difference:g}, of at most "
            f"{largest:g}; all tensors are equal: please report this model"
        )
    return f"largest logit difference {difference:g} from {whose}"


def _other_logits(source: Source, written: Source, prompts: Tensor) -> tuple[Tensor, str]:
    same = [written, source] if source.dtypes == written.dtypes else [written]
    folder = next((one.folder for one in same if _is_plain(one.folder)), None)
    if folder is None or importlib.util.find_spec("transformers") is None:
        why = "there is no plain Hugging Face folder" if folder is None else "transformers is not installed"
        return _logits(source, prompts, written), f"those of {source.folder.name} by kumi ({why})"
    import transformers

    name = str((families.read_config(folder).get("architectures") or ["?"])[0])
    kind = getattr(transformers, name, None)
    if kind is None:
        why = f"transformers {transformers.__version__} has no {name}"
        return _logits(source, prompts, written), f"those of {source.folder.name} by kumi ({why})"
    return _transformers_logits(kind, folder, prompts), f"transformers {transformers.__version__}'s"


def _is_plain(folder: Path) -> bool:
    """Whether `folder` is a Hugging Face folder whose weights are not quantised: others want devices and packages."""
    return (folder / "config.json").exists() and not families.read_config(folder).get("quantization_config")


@torch.no_grad()
def _transformers_logits(kind: Any, folder: Path, prompts: Tensor) -> Tensor:
    """The logits (3, S, V) of the model in `folder`, by transformers' class `kind`, in float32."""
    with _quiet():
        try:
            # By the type that transformers knows the class by: it names experts after that.
            # Read by its own reader, for which files spell infinity.
            config, _ = kind.config_class.get_config_dict(folder, local_files_only=True)
            config = kind.config_class.from_dict(config | {"model_type": kind.config_class.model_type})
            model = kind.from_pretrained(folder, config=config, dtype=torch.float32, local_files_only=True).eval()
        except (OSError, ValueError, RuntimeError) as error:
            said = " ".join(str(error).split())
            raise ModelError(f"{folder}: transformers does not load it as {kind.__name__}: {said}") from error
        logits: Tensor = model(prompts).logits
    return logits.float()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers' bars and remarks out of the user's sight."""
    from transformers.utils import logging as said

    logging: Any = said
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
    """Three fixed rows of token ids (3, S)."""
    return torch.randint(0, vocab_size, (3, length), generator=torch.Generator().manual_seed(0))


def free_memory() -> int | None:
    """Bytes that this machine can still give out; None where it does not say."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    lines = (line.split() for line in path.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), None)


@torch.no_grad()
def _logits(source: Source, prompts: Tensor, written: Source) -> Tensor:
    """The logits (3, S, V) of `source` in float32, its weights rounded as in `written`."""
    decoder = Decoder(source.spec)
    for name, tensor in decoder.state_dict().items():
        tensor.copy_(source.read(name).to(getattr(torch, written.dtypes[name])))
    logits: Tensor = decoder(prompts)
    return logits


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of `tensor`: equal bits are equal even where a value is not a number."""
    return tensor.contiguous().view(torch.uint8)
