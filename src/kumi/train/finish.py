"""The end of a run: export the last checkpoint to a Hugging Face folder, verify and push it, print samples."""

from __future__ import annotations

import math
from itertools import count
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from kumi import hub
from kumi.config import ResolvedRun
from kumi.convert import convert, load_decoder, merge
from kumi.convert.hf.card import CardContents, check_verified, mark_verified
from kumi.convert.hf.passthrough import copy_processor, passthrough_tensors
from kumi.convert.hf.write_folder import write_hf_folder
from kumi.data import Store
from kumi.errors import KumiError, RefusedError
from kumi.nn.decoder import Decoder
from kumi.nn.nf4 import quantize_linears
from kumi.nn.numerics import use_numerics
from kumi.spec.numerics import REFERENCE
from kumi.train.best_checkpoint import ended_early
from kumi.train.export_probe import PROBE_FILE
from kumi.train.export_run import export_dtype, write_run_adapters
from kumi.train.prepare_data import tokenizer_folder
from kumi.train.resume import last_checkpoint
from kumi.train.run_card import run_card
from kumi.train.samples import sample_texts
from kumi.train.train_state import model_origin, passthrough_source

# Largest difference between the logits of export and trained model, relative to the logits' standard deviation. The
# same weights and arithmetic give 0; another number of threads, or weights rounded on export, give rounding errors.
_TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


def finish(run: ResolvedRun, store: Store, *, just_trained: bool) -> None:
    """Export the trained model unless an export of it exists; verify it, push it, and print samples.

    `just_trained`: this launch trained the model, so an existing export is out of date and gets another name.
    """
    folder = run.out / "hf"
    if not run.config.export.enabled:
        return
    if run.cluster.device.kind == "cpu":
        # The export's logits are compared with those of the ranks, so both need the same arithmetic.
        use_numerics(run.numerics or REFERENCE)
    if run.model.lora is not None:
        adapted = _finish_adapters(run, store, just_trained=just_trained)
        _push(run, run.out / "adapter")
        _sample(run, adapted)
        return
    decoder = None if just_trained or not folder.exists() else load_decoder(folder)
    difference, allowed = (math.inf, 0.0) if decoder is None else _difference(decoder, run)
    if decoder is not None and difference <= allowed:
        print(f"export     {folder} exists already and matches the trained model; nothing to do")
    else:
        if folder.exists():
            print(f"export     {folder} was an export of an earlier step; renamed to {_put_aside(folder)}")
        decoder, difference = _export(run, store, folder)
        print(f"export     {folder}: logits within {difference:.1e} of the trained model's")
    _push(run, folder)
    _sample(run, decoder)


def _finish_adapters(run: ResolvedRun, store: Store, *, just_trained: bool) -> Decoder:
    """Export the adapters to `adapter`, verify them, and write the merged model to `hf` if lora.merge asks for it.

    Return the model with unmerged adapters.
    """
    folder, merged, section = run.out / "adapter", run.out / "hf", run.config.lora
    assert section is not None, "a run file with adapters has a section lora"
    for old in (folder, merged) if just_trained else ():
        if old.exists():
            print(f"export     {old} was an export of an earlier step; renamed to {_put_aside(old)}")
    unverified = (
        folder if folder.exists() else _write_adapters(run, store, folder.with_name(folder.name + ".unverified"))
    )
    decoder = merge.unmerged_decoder(merge.open_unmerged(unverified, str(run.source)))
    if run.model.lora is not None and run.model.lora.quantize:
        quantize_linears(decoder, getattr(torch, run.precision.compute))
    difference = _compare(decoder, run, unverified)
    if unverified != folder:
        mark_verified(unverified, f"logits within {difference:.1e} of the trained model's")
    unverified.rename(folder)
    print(f"export     {folder}: logits within {difference:.1e} of the trained model's")
    if section.merge and not merged.exists():
        card = _card_contents(run, store)
        print(f"export     {convert(folder, merged, to='hf', verify=False, base=str(run.source), card=card)}")
    return decoder


def _write_adapters(run: ResolvedRun, store: Store, folder: Path) -> Path:
    """Write the adapters of the last checkpoint to `folder`, in PEFT's format."""
    saved, snapshot = last_checkpoint(run), run.snapshots.get("model.source")
    assert saved is not None, "a finished run has a checkpoint"
    assert run.model.lora is not None, "only a run with adapters has any to write"
    assert run.source is not None, "adapters need the weights of a base model"
    base = str(run.source.resolve()) if snapshot is None else f"{snapshot.name}@{snapshot.commit}"
    write_run_adapters(folder, run.model, saved, base, _card_contents(run, store), replace=True)
    return folder


def _push(run: ResolvedRun, folder: Path) -> None:
    """Push `folder` to the repository of export.push, if set. Raise RefusedError if `folder` changed since its
    verification."""
    export = run.config.export
    if export.push is not None:
        check_verified(folder)
        print(f"pushed     {hub.push(folder, export.push, public=export.public, flag='export.push')}", flush=True)


def _put_aside(folder: Path) -> Path:
    """Rename `folder` to the first free name of folder.1, folder.2 ..., and return it."""
    names = (folder.with_name(f"{folder.name}.{number}") for number in count(1))
    return folder.rename(next(name for name in names if not name.exists()))


def _export(run: ResolvedRun, store: Store, folder: Path) -> tuple[Decoder, float]:
    """Write `folder`, load it back and compare. Return the loaded decoder and the largest difference of logits."""
    saved = last_checkpoint(run)
    assert saved is not None, "a finished run has a checkpoint"
    unverified = folder.with_name(folder.name + ".unverified")
    write_hf_folder(
        unverified,
        run.model,
        ((name.removeprefix("model/"), saved.read(name)) for name in saved.tensors if name.startswith("model/")),
        base_config=run.hf_config,
        dtype=export_dtype(run.config, run.hf_config),
        tokenizer_folder=tokenizer_folder(run),
        passthrough=passthrough_tensors(source, run.model) if (source := passthrough_source(run)) else None,
        card=_card_contents(run, store).card(run.model),
        replace=True,
    )
    if source := passthrough_source(run):
        copy_processor(Path(source), unverified)
    decoder = load_decoder(unverified)
    difference = _compare(decoder, run, unverified)
    mark_verified(unverified, f"logits within {difference:.1e} of the trained model's")
    unverified.rename(folder)
    return decoder, difference


def _compare(decoder: Decoder, run: ResolvedRun, folder: Path) -> float:
    """Return the largest difference of `decoder`'s logits from the trained model's; raise KumiError if too large."""
    difference, allowed = _difference(decoder, run)
    if not difference <= allowed:
        raise KumiError(
            f"{folder}: its logits differ from the trained model's by {difference:.3g}, more than the allowed "
            f"{allowed:.3g}; the checkpoint is intact, and the folder stays for inspection; please report this"
        )
    return difference


def _difference(decoder: Decoder, run: ResolvedRun) -> tuple[float, float]:
    """Return the largest difference of `decoder`'s logits from the export probe, and the largest allowed."""
    try:
        probe = load_file(run.out / PROBE_FILE)
    except (SafetensorError, OSError) as error:
        raise RefusedError(
            f"{run.out / PROBE_FILE} is damaged ({error}); delete it and run the same command again to rewrite it"
        ) from None
    decoder.compute_dtype = getattr(torch, run.precision.compute)
    with torch.no_grad():
        logits = decoder(probe["input_ids"]).float()
    decoder.compute_dtype = torch.float32
    difference = float((logits - probe["logits"]).abs().max())
    tolerance = max(_TOLERANCE[run.precision.compute], _TOLERANCE[export_dtype(run.config, run.hf_config)])
    return difference, tolerance * float(probe["logits"].std())


def _card_contents(run: ResolvedRun, store: Store) -> CardContents:
    """Return the contents of the model card."""
    ended = ended_early(run.out, run.config.checkpoint.best, run.config.train.patience)
    step = run.steps if ended is None else ended
    return run_card(run.config, run.out, step, origin=model_origin(run), precision=run.precision, store=store)


def _sample(run: ResolvedRun, decoder: Decoder) -> None:
    """Print the replies of `decoder` to the prompts of [sample]."""
    if not run.config.sample.prompts:
        return
    for text in sample_texts(decoder, run):
        print(f"sample     {text.prompt!r} -> {text.text!r}")
