"""TRL's trainers as an oracle: their collated batches and their losses. All private names of TRL are in this file."""

from __future__ import annotations

import copy
import os
import warnings

import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import trl
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

SENTENCE = "hello world what is the weather in Paris today"


def tokenizer() -> PreTrainedTokenizerFast:
    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    byte_level.train_from_iterator([SENTENCE] * 4, trainer)
    byte_level.add_special_tokens([AddedToken(text, normalized=False) for text in ("<bos>", "<eos>", "<pad>")])
    return PreTrainedTokenizerFast(tokenizer_object=byte_level, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")


TOKENS = tokenizer()


def model(seed: int, *, scores: bool = False) -> torch.nn.Module:
    """Return a small Llama whose weights are large enough that no difference drowns."""
    torch.manual_seed(seed)
    special = {f"{name}_token_id": getattr(TOKENS, f"{name}_token_id") for name in ("pad", "eos", "bos")}
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        **special,
    )
    if scores:
        config.num_labels = 1
        return LlamaForSequenceClassification(config)
    return LlamaForCausalLM(config)


def near(policy: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Return a copy of `policy` with slightly other weights."""
    torch.manual_seed(seed)
    other = copy.deepcopy(policy)
    for parameter in other.parameters():
        parameter.data.add_(0.03 * torch.randn_like(parameter))
    return other


def trainer(kind: str, policy, rows, folder, reference=None, **options):
    """Return TRL's trainer of `kind` for `rows`, one batch, and the function of its loss."""
    quiet = {"output_dir": str(folder), "report_to": [], "use_cpu": True, "bf16": False}
    quiet |= {"gradient_checkpointing": False, "per_device_train_batch_size": len(rows), "max_length": None}
    classes = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
        "orpo": (ORPOTrainer, ORPOConfig),
        "cpo": (CPOTrainer, CPOConfig),
    }
    make, config = classes[kind]
    if kind in ("orpo", "cpo"):
        del quiet["max_length"]
    given = {} if reference is None else {"ref_model": copy.deepcopy(reference)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = make(
            model=copy.deepcopy(policy),
            args=config(**quiet, **options),
            train_dataset=Dataset.from_list(rows),
            processing_class=TOKENS,
            **given,
        )
    made.model.eval()  # no dropout is set; TRL's metrics need no gradient mode
    batch = made.data_collator([made.train_dataset[number] for number in range(len(rows))])
    if kind in ("orpo", "cpo"):
        return made, batch, lambda: made.get_batch_loss_metrics(made.model, batch)[0]
    return made, batch, lambda: made.compute_loss(made.model, dict(batch))
