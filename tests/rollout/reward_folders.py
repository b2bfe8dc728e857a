"""Reward models for tests, made by transformers in float64, with the tokenizer of the runs or another one."""

import contextlib
import json

import torch
import transformers
from tests.rollout.conftest import rollout_file, write_data

from kumi.cli import main

# Ids of kumi's trained tokenizers.
END, PAD = 0, 1
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def prepared(folder):
    """Return `folder` with the data of the runs, their store in `tokens`, and their tokenizer in `same`."""
    write_data(folder)
    path = rollout_file(folder)
    with contextlib.chdir(folder):
        assert main(["data", "prepare", str(path)]) == 0
    [tokenizer] = {file.parent for file in (folder / "tokens").rglob("tokenizer.json")}
    copy_tokenizer(tokenizer, folder / "same")
    return folder


def copy_tokenizer(source, target, template=None):
    """Copy the tokenizer in the folder `source`, with a chat template if one is given."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    if template is not None:
        (target / "chat_template.jinja").write_text(template)


def write_byte_tokenizer(source, target):
    """Write the tokenizer of the folder `source` without its merges, so that every byte is a token."""
    copy_tokenizer(source, target)
    content = json.loads((target / "tokenizer.json").read_text())
    content["model"]["merges"] = []
    (target / "tokenizer.json").write_text(json.dumps(content))


def make_reward_model(folder, tokenizer, *, seed=0, **changes):
    """Write a GPT-2 of random weights with a score head, and the tokenizer of the folder `tokenizer`; return the model.

    transformers computes it in float64 throughout, where it rounds the norms and angles of others to float32.
    """
    sizes = {"vocab_size": 320, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 96, "initializer_range": 0.3}
    ids = {"num_labels": 1, "pad_token_id": PAD, "bos_token_id": END, "eos_token_id": END}
    torch.manual_seed(seed)
    model = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**{**sizes, **ids, **changes}))
    model = model.double().eval()
    model.save_pretrained(folder)
    copy_tokenizer(tokenizer, folder)
    return model


@torch.no_grad()
def oracle(model, sequences):
    """Return the scores of token sequences by transformers, in one batch that is padded on the right."""
    longest = max(map(len, sequences))
    pad = model.config.pad_token_id
    ids = torch.tensor([[*ids, *[pad] * (longest - len(ids))] for ids in sequences])
    seen = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences])
    return model(ids, attention_mask=seen).logits[:, 0].tolist()


def edit_config(folder, **changes):
    """Change keys of config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
