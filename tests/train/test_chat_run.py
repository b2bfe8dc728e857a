"""A run on chats: packed before it starts, trained for epochs with weights of replies, resumed on the same rows."""

from __future__ import annotations

import contextlib

import pytest
from tests.train.conftest import back_to, losses, metrics, run_file

from chat_rows import chat, save_tokenizer, write_rows
from kumi.cli import main
from kumi.data import Source, open_store
from kumi.data.bpe import train as train_tokenizer

EPOCHS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    bpe = train_tokenizer([Source("{stdlib}/json/*.py")], 300, folder / "bpe")
    save_tokenizer(bpe, folder / "tokenizer")
    rows = [chat(number) for number in range(120)]
    for row in rows[::3]:
        row["messages"][2]["weight"] = 0.5
    rows[5]["messages"][1]["content"] = "long " * 200
    write_rows(folder / "chats.jsonl", rows)
    return folder


def chat_run(folder, **changes):
    return run_file(
        folder,
        data__sources=[{"path": "chats.jsonl"}],
        data__tokenizer="tokenizer",
        model__config__max_position_embeddings=512,
        batch={"seq_len": 256, "tokens_per_step": 2048},
        train={"epochs": EPOCHS, "out": "run"},
        **changes,
    )


def test_a_run_trains_on_packed_chats_and_goes_on_where_it_was(folder, capfd):
    with contextlib.chdir(folder):
        assert main(["train", str(chat_run(folder))]) == 0
        output = capfd.readouterr().out
        store = open_store("tokens/tokens")
        (rows,) = store.pack(256, 0).values()
        # The long row has thoughts, so it is two samples.
        assert f"examples in {rows.rows} rows, {rows.filled:.1%} filled; 2 longer than a row left out" in output
        first = losses("run")
        assert len(first) == -(-EPOCHS * rows.rows // 8)
        assert first[len(first)] < first[1]
        assert [entry["eval/loss"] > 0 for entry in metrics("run") if "eval/loss" in entry]
        assert "unigram entropy" in output
        assert "loss_weights" in store.mixture(256, 0).batch(0, 1)
        back_to("run", 2)
        assert main(["train", str(chat_run(folder))]) == 0
        assert losses("run") == first


def test_the_entropy_of_all_tokens_is_not_set_beside_a_loss_on_replies(folder, capfd):
    with contextlib.chdir(folder):
        run = chat_run(folder, objective={"kind": "sft"})
        assert main(["train", str(run), "train.out=replies", "train.epochs=0.2", "optim.warmup_steps=0"]) == 0
        evaluations = [entry for entry in metrics("replies") if "eval/loss" in entry]
        card = (folder / "replies/hf/README.md").read_text()
    assert evaluations
    assert not any("eval/unigram_entropy" in entry for entry in evaluations)
    assert "unigram entropy" not in capfd.readouterr().out + card


def test_comparisons_are_not_trained_as_language(folder, capfd):
    rows = [
        {
            "prompt": [{"role": "user", "content": f"q {number}"}],
            "chosen": [{"role": "assistant", "content": f"good {number}"}],
            "rejected": [{"role": "assistant", "content": f"bad {number}"}],
        }
        for number in range(40)
    ]
    write_rows(folder / "pairs.jsonl", rows)
    run = chat_run(folder, data__cache="pairs")
    with contextlib.chdir(folder):
        assert main(["train", str(run), "data.sources=[{path='pairs.jsonl'}]", "train.out=pairs_run"]) == 2
    error = capfd.readouterr().err
    assert "has rows of kind 'preference', but the objective trains text and chat and" in error
    assert "set objective.kind to 'dpo' or 'orpo'" in error
