"""Tokenizers of every kind, trained in a moment, beside tiny models."""

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SYLLABLES = ["ka", "ri", "mo", "tu", "ne", "sol", "par", "ti"]
OLD = [" ".join(a + b + c for b in SYLLABLES for c in SYLLABLES[:4]) + "." for a in SYLLABLES for _ in range(3)]
NEW = [" ".join(f"{a}ß{b} zürich 北京市" for b in ("wald", "berg", "tal")) + "\n" for a in ("ober", "unter", "ka") * 4]
END, PAD = "<end>", "<pad>"


def byte_level(folder, size=300, texts=OLD, **model):
    """A byte-level BPE as GPT-2's; added tokens after the model's, as in Llama 3 and Qwen."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([END, PAD])
    data = json.loads(backend.to_str())
    data["model"] |= model
    return _saved(folder, data)


def sentence_piece(folder, size=120):
    """A BPE as in Llama 2: blanks are letters, words have no other bounds, unknown characters become bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    named = ["<unk>", END, PAD, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=len(named) + size, special_tokens=named, show_progress=False)
    backend.train_from_iterator(OLD, trainer)
    data = json.loads(backend.to_str())
    data["model"] |= {"byte_fallback": True, "fuse_unk": True}
    data["added_tokens"] = [entry for entry in data["added_tokens"] if entry["id"] < 3]
    data["pre_tokenizer"] = None
    data["normalizer"] = json.loads(
        _state(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))
    )
    data["decoder"] = json.loads(
        _state(
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            )
        )
    )
    return _saved(folder, data)


def unigram(folder):
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", END, PAD], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(OLD, trainer)
    return _saved(folder, json.loads(backend.to_str()))


def word_piece(folder):
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=["[UNK]", END, PAD], show_progress=False)
    backend.train_from_iterator(OLD, trainer)
    return _saved(folder, json.loads(backend.to_str()))


def template(folder):
    """Add a post-processor that begins every text with a mark, as Llama's do."""
    path = folder / "tokenizer.json"
    backend = Tokenizer.from_file(str(path))
    number = backend.token_to_id(END)
    backend.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, number)])
    backend.save(str(path))
    return folder


def _state(part):
    return part.__getstate__().decode()


def _saved(folder, data):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False))
    config = {"eos_token": END, "pad_token": PAD, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
