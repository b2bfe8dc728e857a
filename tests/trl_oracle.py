"""The trainers of TRL 1.16 as oracles: losses of batches, without its training loop.

All private names of TRL that tests use are in this file. Rows are plain text, and the tokenizer adds BOS by its
post-processor, where TRL's stable trainers and kumi put it; TRL's ORPO and CPO add the same BOS by themselves.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch
import transformers
from datasets import Dataset, disable_progress_bars
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import trl
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

TRAINERS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "kto": (trl.KTOTrainer, trl.KTOConfig),
    "reward": (trl.RewardTrainer, trl.RewardConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
    "cpo": (CPOTrainer, CPOConfig),
}
REFERENCED = ("dpo", "kto")
TEXT = "hello world what is the weather in Paris today sunny no"
# Large, or the differences that tests look for drown in the rounding of nearly equal logits.
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def make_tokenizer(bos=True):
    """Return a byte-level BPE tokenizer, which begins every text with BOS if `bos`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([TEXT] * 4, BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<bos>", "<eos>", "<pad>")])
    if bos:
        special = [("<bos>", backend.token_to_id("<bos>"))]
        backend.post_processor = processors.TemplateProcessing("<bos> $A", "<bos> $A $B", special)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


def save_models(folder: Path) -> None:
    """Save a tiny Llama as "policy", a perturbed copy as "reference" and one with a score head as "reward", each with
    the tokenizer."""
    tokenizer = make_tokenizer()
    config = transformers.LlamaConfig(
        **SIZES,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = transformers.LlamaForCausalLM(config)
        scores = transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(**{**config.to_dict(), "num_labels": 1})
        )
        reference = copy.deepcopy(policy)
        for parameter in reference.parameters():
            parameter.data += 0.03 * torch.randn_like(parameter)
    for name, model in (("policy", policy), ("reference", reference), ("reward", scores)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def make_trainer(kind, folder: Path, rows, batch_size=None, **options):
    """Return TRL's trainer of `kind` over `rows`, with the models of `folder` (see `save_models`)."""
    disable_progress_bars()
    trainer, config = TRAINERS[kind]
    auto = transformers.AutoModelForSequenceClassification if kind == "reward" else transformers.AutoModelForCausalLM
    extra = {"ref_model": auto.from_pretrained(folder / "reference")} if kind in REFERENCED else {}
    args = config(
        output_dir=str(folder / "unused"),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        per_device_train_batch_size=batch_size or len(rows),
        **{"max_length": None if kind not in ("orpo", "cpo") else 256, **options},
    )
    return trainer(
        model=auto.from_pretrained(folder / ("reward" if kind == "reward" else "policy")),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "policy"),
        **extra,
    )


def make_policy_trainer(kind, folder: Path, **options):
    """Return TRL's trainer of `kind`, "grpo" or "rloo", of the policy of `folder` (see `save_models`).

    It has no rows and no rewards of its own: give its batches to `policy_loss`.
    """
    disable_progress_bars()
    trainer, config = {"grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig)}[kind]
    args = config(
        output_dir=str(folder / "unused"),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        **options,
    )
    return trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder / "policy"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "hello"}] * 8),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "policy"),
    )


def policy_loss(trainer, prompts, replies, mask, **columns):
    """Return the loss of a trainer of `make_policy_trainer`, with a graph: no text is generated.

    `prompts` (B, P) and `replies` (B, C): token ids. `mask` (B, C): 1 for the tokens of each reply. `columns`: its
    tensors "advantages" (B,), "old_per_token_logps" (B, C) and "ref_per_token_logps", or "old_logps" (B,) for RLOO.
    """
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    batch = {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": replies}
    batch |= {"completion_mask": mask, "num_items_in_batch": mask.sum(), **columns}
    return trainer._compute_loss(trainer.model, batch)


def collate(trainer, numbers=None):
    """Return the batch of the rows `numbers` of the trainer's data, by default of all."""
    numbers = range(len(trainer.train_dataset)) if numbers is None else numbers
    return trainer.data_collator([trainer.train_dataset[number] for number in numbers])


def compute_loss(trainer, batch):
    """Return the trainer's loss of `batch`, with a graph."""
    return trainer.compute_loss(trainer.model, dict(batch))


def metric(trainer, name):
    """Return the last value of a metric that the trainer logs."""
    return trainer._metrics["train" if trainer.model.training else "eval"][name][-1]


def sequences(batch):
    """Return the sequences of a collated batch, each (ids, whether a token is trained); None for a score."""
    if "chosen_labels" in batch:  # ORPO and CPO
        sides = [(batch[f"{side}_input_ids"], batch[f"{side}_labels"] != -100) for side in ("chosen", "rejected")]
        present = [batch[f"{side}_attention_mask"] for side in ("chosen", "rejected")]
        rows = [row for side, real in zip(sides, present) for row in zip(*side, real)]
    else:
        ids = batch["input_ids"]
        trained = (
            batch["labels"] != -100 if "labels" in batch else batch.get("completion_mask", torch.full_like(ids, 2))
        )
        rows = list(zip(ids, trained, batch["attention_mask"]))
    return [(ids[real == 1].tolist(), trained[real == 1].int().tolist()) for ids, trained, real in rows]


def use_policy_as_reference(trainer):
    """Give the trainer's reference the weights of its policy."""
    trainer.ref_model.load_state_dict(trainer.model.state_dict())


@torch.no_grad()
def log_probs(model, ids, trained):
    """Return transformers' log-probs of the `trained` tokens of one sequence, float64."""
    logits = model(torch.tensor([ids])).logits[0, :-1].double()
    labels, mask = torch.tensor(ids[1:]), torch.tensor(trained[1:]) > 0
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0][mask]
