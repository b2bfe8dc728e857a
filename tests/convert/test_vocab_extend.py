"""Extending the vocabulary of a model's folder adds rows and tokens, and changes nothing else."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from vocabularies import END, NEW, OLD, byte_level, sentence_piece, template, unigram, word_piece

from kumi import load_decoder
from kumi.cli import main
from kumi.convert import convert
from kumi.convert.hf.card import check_verified
from kumi.convert.hf.origin import card_header
from kumi.convert.open_model import open_source
from kumi.convert.vocab import Request, extend
from kumi.data import load_tokenizer
from kumi.errors import ConfigError, KumiError, ModelError, RefusedError
from tiny_models import build_reference
from weights import read_tensors

TABLES = {"model.embed_tokens.weight", "lm_head.weight"}
ROWS = 309  # of the models; the tokenizer has 302


@pytest.fixture
def base(tmp_path):
    """`base(case, dtype, tokenizer, rows)`: a folder with a model of `rows` rows and a tokenizer of fewer tokens."""

    def make(case="llama", dtype=torch.float32, tokenizer=byte_level, rows=ROWS):
        folder = tmp_path / "base"
        model = build_reference(case)
        model.resize_token_embeddings(rows, mean_resizing=False)
        for table in {model.get_input_embeddings(), model.get_output_embeddings()}:
            torch.nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(1))
        model.to(dtype).save_pretrained(folder, max_shard_size="30KB")
        tokenizer(folder)
        return folder

    return make


@pytest.fixture
def files(tmp_path):
    """`files(name=text)` writes files; their paths."""

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
        return [str(tmp_path / name) for name in texts]

    return write


def tensors(folder):
    return dict(read_tensors(folder))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("case", "dtype"), [("llama", torch.bfloat16), ("llama-tied", torch.float32), ("mixtral-window", torch.float32)]
)
def test_old_rows_and_all_other_tensors_keep_their_bits(case, dtype, base, files, tmp_path):
    folder = base(case, dtype)
    add, special, data = files(add="zap\nhello world\n", special="<|user|>\n", data=json.dumps({"text": "".join(NEW)}))
    (tmp_path / "data").rename(tmp_path / "data.jsonl")
    report = extend(folder, tmp_path / "out", Request([add], [special], 20, [f"{data}.jsonl"]), verify=True)
    assert report["tokens"] == {"before": 302, "after": 325}
    assert report["vocab_size"] == {"before": ROWS, "after": 325}
    assert report["rows"] == {"in_place_of_padding": 7, "appended": 16, "padding": 0}
    old, new = tensors(folder), tensors(tmp_path / "out")
    assert old.keys() == new.keys()
    for name, tensor in new.items():
        assert tensor.dtype == old[name].dtype
        rows = 302 if name in TABLES else len(tensor)
        assert torch.equal(bits(tensor[:rows]), bits(old[name][:rows])), name
    check_verified(tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == json.loads((folder / "config.json").read_text()) | {"vocab_size": 325}
    same = (folder / "generation_config.json").read_bytes()
    assert json.loads((tmp_path / "out/generation_config.json").read_bytes()) == json.loads(same)


@pytest.mark.parametrize("init", ["pieces", "weighted", "mean"])
@pytest.mark.parametrize("tokenizer", [byte_level, sentence_piece])
def test_new_rows_are_sums_of_old_ones(init, tokenizer, base, files, tmp_path):
    folder = base(tokenizer=tokenizer, rows=500)
    loaded = load_tokenizer(folder)
    add, special = files(add="karimo tusol\n", special="<|x|>\n")
    report = extend(folder, tmp_path / "out", Request([add], [special], init=init))
    old, new = tensors(folder), tensors(tmp_path / "out")
    ids = loaded.encode("karimo tusol")
    assert len(ids) > 2
    spelled = [loaded.backend.id_to_token(one) for one in ids]
    sizes = torch.tensor([float(len(one)) for one in spelled])
    shares = {"pieces": torch.full((len(ids),), 1 / len(ids)), "weighted": sizes / sizes.sum()}.get(init)
    for name in TABLES:
        mean = old[name][: loaded.vocab_size].mean(0)
        expected = mean if shares is None else (shares[:, None] * old[name][ids]).sum(0)
        torch.testing.assert_close(new[name][loaded.vocab_size], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(new[name][loaded.vocab_size + 1], mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(new[name][loaded.vocab_size + 2 :], old[name][loaded.vocab_size + 2 :]), "padding stays"
    entry = report["added"][0]
    assert (entry["id"], entry["text"], entry["kind"]) == (loaded.vocab_size, "karimo tusol", "added")
    assert entry["made_of"] == ([] if shares is None else spelled)
    assert report["vocab_size"]["after"] == 500


def test_the_tokenizer_knows_the_new_tokens_everywhere_and_the_old_ones_as_before(base, files, tmp_path):
    folder = template(base())
    add, special, data = files(add="zap\n北京\n", special="<|user|>\n", **{"new.txt": "".join(NEW)})
    extend(folder, tmp_path / "out", Request([add], [special], 20, [data]))
    before, after = (transformers.AutoTokenizer.from_pretrained(one) for one in (folder, tmp_path / "out"))
    assert [len(before), len(after)] == [302, 325]
    for text in OLD:
        assert after.encode(text) == before.encode(text)
    ids = after.encode("kari<|user|> zap!北京 ü", add_special_tokens=False)
    assert {322, 323, 324} < set(ids)
    assert after.decode(ids, skip_special_tokens=True) == "kari zap!北京 ü"
    assert after.encode("zap")[0] == before.convert_tokens_to_ids(END) == 300
    assert {after.convert_ids_to_tokens(one): one for one in range(302)} == before.get_vocab()
    ours = load_tokenizer(tmp_path / "out")
    assert (ours.vocab_size, ours.eos_id) == (325, 300)
    assert ours.encode("zap") == [322]


@pytest.mark.parametrize("tokenizer", [unigram, word_piece])
def test_tokens_are_added_to_tokenizers_of_every_kind(tokenizer, base, files, tmp_path):
    folder = base(tokenizer=tokenizer, rows=200)
    old = load_tokenizer(folder)
    add, special = files(add="zap\nzip\n", special="<|x|>\n")
    extend(folder, tmp_path / "out", Request([add], [special]))
    new = load_tokenizer(tmp_path / "out")
    assert new.vocab_size == old.vocab_size + 3
    assert [new.encode(text) for text in OLD] == [old.encode(text) for text in OLD]
    assert new.encode("zap") == [old.vocab_size]
    assert new.encode("<|x|>") == [old.vocab_size + 2]


def test_files_that_list_added_tokens_have_them_and_old_vocabularies_are_left_out(base, files, tmp_path):
    folder = base()
    config = {"eos_token": END, "added_tokens_decoder": {"300": {"content": END}}, "extra_special_tokens": ["<pad>"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("")
    (folder / "chat_template.jinja").write_text("{{ 1 }}")
    add, special = files(add="zap\n", special="<|x|>\n")
    report = extend(folder, tmp_path / "out", Request([add], [special]))
    written = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert written["added_tokens_decoder"].keys() == {"300", "302", "303"}
    assert written["added_tokens_decoder"]["303"]["special"] is True
    assert written["extra_special_tokens"] == ["<pad>", "<|x|>"]
    assert report["files_left_out"] == ["vocab.json", "merges.txt"]
    assert (tmp_path / "out/chat_template.jinja").exists()
    assert not (tmp_path / "out/vocab.json").exists()


@pytest.mark.parametrize(("multiple", "size", "padding"), [(1, ROWS, 6), (8, 312, 9), (64, 320, 17)])
def test_the_table_is_padded_as_asked(multiple, size, padding, base, files, tmp_path):
    folder = base()
    (add,) = files(add="zap\n")
    report = extend(folder, tmp_path / "out", Request([add], multiple=multiple))
    assert report["rows"] == {"in_place_of_padding": 1, "appended": 0, "padding": padding}
    new = tensors(tmp_path / "out")
    assert {name: len(new[name]) for name in TABLES} == dict.fromkeys(TABLES, size)
    assert load_decoder(tmp_path / "out")(torch.zeros((1, 3), dtype=torch.int64)).shape == (1, 3, size)
    for name in TABLES:
        mean = tensors(folder)[name][:302].mean(0)
        torch.testing.assert_close(new[name][ROWS:], mean.expand(size - ROWS, -1), rtol=1e-5, atol=1e-6)


def test_old_logits_are_the_same_and_so_is_what_is_made_twice(base, files, tmp_path):
    folder = base(rows=302)
    add, special = files(add="zap\nzip zap\n", special="<|x|>\n")
    for name in ("one", "two"):
        extend(folder, tmp_path / name, Request([add], [special]))
    ids = torch.arange(40)[None] * 7
    before, after = load_decoder(folder)(ids), load_decoder(tmp_path / "one")(ids)
    torch.testing.assert_close(after[..., :302], before, rtol=0, atol=1e-5)
    contents = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert {**contents[0], "README.md": b""} == {**contents[1], "README.md": b""}


def test_a_checkpoint_of_kumi_is_extended_too(base, files, tmp_path):
    folder = base()
    convert(folder, tmp_path / "native", to="kumi")
    (add,) = files(add="zap\n")
    extend(folder, tmp_path / "out", Request([add]))
    extend(tmp_path / "native", tmp_path / "again", Request([add]))
    first, two = tensors(tmp_path / "out"), tensors(tmp_path / "again")
    assert first.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in first.items())


def test_the_command_reports_in_words_and_as_data(base, files, tmp_path, capsys):
    folder = base()
    (folder / "README.md").write_text("---\nlicense: mit\nbase_model: org/ancestor\n---\n")
    add, data = files(add="zap\n", **{"new.txt": "".join(NEW)})
    words = ["vocab", "extend", str(folder), str(tmp_path / "out"), "--add", add, "--learn", "12", "--data", data]
    assert main([*words, "--pad-to-multiple-of", "16", "--verify"]) == 0
    output = capsys.readouterr().out
    assert "tokens     302 -> 315; vocab_size 309 -> 320" in output
    assert "rows       7 in place of padding, 6 appended, 5 of padding" in output
    assert "and 5 more; --json lists them" in output
    assert main([*words[:3], str(tmp_path / "again"), *words[4:], "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["added"]) == 13
    assert printed["fertility"]["after"]["bytes_per_token"] > printed["fertility"]["before"]["bytes_per_token"]
    card = (tmp_path / "out/README.md").read_text()
    assert "| vocabulary | 302 tokens and 13 new ones: 12 learnt, 1 added |" in card
    assert "| verified | against the base: every tensor, and the row of every old token, equal bit for bit |" in card
    header = card_header(tmp_path / "out")
    assert (header["base_model"], header["base_model_relation"], header["license"]) == (
        "org/ancestor",
        "finetune",
        "mit",
    )


@pytest.mark.parametrize("case", ["gpt2", "gemma3-sees", "nemotron-h"])
def test_tables_by_other_names_and_inside_of_other_models(case, base, files, tmp_path):
    folder = base(case)
    (add,) = files(add="".join(f"zap{number}\n" for number in range(9)))
    extend(folder, tmp_path / "out", Request([add]), verify=True)
    assert open_source(tmp_path / "out").spec.vocab_size == 311
    old, new = tensors(folder), tensors(tmp_path / "out")
    changed = [name for name, tensor in new.items() if tensor.shape != old[name].shape]
    assert {tuple(new[name].shape) for name in changed} == {(311, 32)}
    assert all(torch.equal(tensor, old[name]) for name, tensor in new.items() if name not in changed)
    seen, unseen = (
        json.loads((folder / "config.json").read_text()),
        json.loads((tmp_path / "out/config.json").read_text()),
    )
    for config in (seen, unseen):
        config.get("text_config", config).pop("vocab_size")
    assert seen == unseen


def test_tables_that_are_only_copied_and_ids_with_a_meaning_are_refused(base, files, tmp_path):
    folder = base("deepseek-v3")
    names = [f"zap{number}\n" for number in range(9)]
    few, some, many = files(few=names[0], some="".join(names[:5]), many="".join(names))
    ahead = "model.layers.2.embed_tokens.weight"
    save_file({ahead: torch.zeros(ROWS, 32)}, folder / "ahead.safetensors", {"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][ahead] = "ahead.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"layers\.2\.embed_tokens\.weight' \(309, 32\) unchanged.*at most 7"):
        extend(folder, tmp_path / "out", Request([many]))
    extend(folder, tmp_path / "out", Request([few]), verify=True)
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": 304}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"pad_token_id=304 is an id without a token.*at most 2"):
        extend(folder, tmp_path / "again", Request([some]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zap\nka\n", r":2: 'ka' is already token \d+ of .*; leave it out"),
        (" ka", r":1: ' ka' is already token \d+ of"),
        ("<end>\n", ":1: '<end>' is already token 300 of"),
        ("zap\nzip\nzap\n", r":3: 'zap' is already named at .*:1; name it once"),
        ("zap\n\nzip\n", ":2: '' is empty or blank"),
        ("  \n", ":1: '  ' is empty or blank"),
        ("za\tp\n", r":1: 'za\\tp' has the control or unassigned character U\+0009"),
        ("za\x00p\n", r"U\+0000"),
        ("", "holds no tokens; write one per line"),
        (b"\xffzap\n", "byte 0 is not UTF-8"),
        ("x" * 1001, "the token has 1001 characters"),
        ("zürich\n", "would decode 'zürich' as 'z.rich'"),
    ],
)
def test_tokens_that_cannot_be_added_are_named(text, words, base, files, tmp_path):
    folder = base()
    (add,) = files(add=text)
    with pytest.raises(ConfigError, match=words):
        extend(folder, tmp_path / "out", Request([add]))
    assert not (tmp_path / "out").exists()


def test_what_else_is_refused(base, files, tmp_path):
    folder = base()
    add, empty = files(add="zap\n", **{"empty.txt": "a b c"})
    for request, words in (
        (Request(), "nothing to add; name a file with --add or --special, or give --learn N and --data"),
        (Request(learn=5), "--learn 5: there are no texts to learn from"),
        (Request([add], init="zeros"), "--init zeros: must be one of pieces, weighted, mean"),
        (Request([str(tmp_path / "none")]), r"none: cannot be read \(No such file"),
        (Request(learn=5, data=[empty]), "--learn 5: .* has no pair of tokens that occurs twice"),
    ):
        with pytest.raises(ConfigError, match=words):
            extend(folder, tmp_path / "out", request)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    with pytest.raises(RefusedError, match="exists and is not empty"):
        extend(folder, tmp_path / "full", Request([add]))
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    byte_level(folder, size + 30, [*OLD, *NEW, "".join(NEW), Path(__file__).read_text()])
    with pytest.raises(ModelError, match="the model only 309 rows; they belong to different models"):
        extend(folder, tmp_path / "out", Request([add]))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"extends a tokenizer\.json, but there is none; make one with transformers"):
        extend(folder, tmp_path / "out", Request([add]))
    (folder / "tokenizer.model").write_text("")
    with pytest.raises(ConfigError, match=r"there is a SentencePiece model \(tokenizer\.model\) alone"):
        extend(folder, tmp_path / "out", Request([add]))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a readable tokenizer"):
        extend(folder, tmp_path / "out", Request([add]))
    assert not (tmp_path / "out").exists()


def test_verification_finds_an_old_row_that_changed(base, files, tmp_path, monkeypatch):
    from kumi.convert.vocab import rows

    folder, (add,) = base(), files(add="zap\n")
    read_rows = rows._read_rows

    def broken(reader, name, start, out, place, fresh, mean):
        read_rows(reader, name, start, out, place, fresh, mean)
        if start[0] <= 17 < start[0] + len(out):
            out[17 - start[0], 0] += 1e-3

    monkeypatch.setattr(rows, "_read_rows", broken)
    with pytest.raises(KumiError, match=r"'model\.embed_tokens\.weight' differs from"):
        extend(folder, tmp_path / "out", Request([add]), verify=True)
    assert open_source(tmp_path / "out").spec.vocab_size == ROWS
    with pytest.raises(RefusedError, match="has no record of a verification"):
        check_verified(tmp_path / "out")
