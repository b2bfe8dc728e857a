from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kumi.data import DataPathError, Source, binfile, inspect, open_store, pool, preparation, prepare, shards
from kumi.data.bpe import train as train_tokenizer
from kumi.data.sampled_blocks import sampled_digest
from kumi.errors import ConfigError, DataError, KumiError, RefusedError


@pytest.fixture(autouse=True, scope="module")
def small_units():
    """Units of 32 KiB, so that small inputs are cut as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_MIN_BYTES", 32 << 10)
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, texts, write_jsonl) -> list[Source]:
    """JSONL in one large file, text files and parquet, with copies of one another and with faults in each."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").mkdir()
    path = write_jsonl(folder / "a.jsonl", texts[:200] + texts[:30])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:150], b'{"text": broken\n', b"\n", *lines[150:], b'{"other": 1}\n']))
    for number, text in enumerate(texts[150:250]):
        (folder / f"text/{number:03}.txt").write_text(text)
    (folder / "text/empty.txt").write_text("")
    (folder / "text/latin.txt").write_bytes("ä".encode("latin-1"))
    pq.write_table(pa.table({"body": [*texts[180:260], None, ""]}), folder / "b.parquet", row_group_size=10)
    return [Source(str(path)), Source(str(folder / "text"), 2.0), Source(f"{folder}/*.parquet", text_key="body")]


@pytest.fixture(scope="module")
def stored(corpus, tokens, tmp_path_factory):
    """The corpus, prepared; tests only read it."""
    return prepare(corpus, tokens, tmp_path_factory.mktemp("stored"), validation=0.2, workers=2)


def documents(store, side):
    files = [binfile.open_file(p) for source in store.sources if (p := getattr(source, side))]
    return [tuple(file.document(n).tolist()) for file in files for n in range(file.document_count)]


def contents(folder: Path):
    """Return every file of a store, without the times in files.jsonl."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in ("files.jsonl", ".kumi-data")}


def test_every_record_is_a_document_or_a_fault(stored, texts, tokens):
    counts = [(s.train_documents + s.validation_documents, sum(s.faults.values())) for s in stored.sources]
    assert counts == [(230, 2), (100, 2), (80, 2)]
    assert stored.faults == {"broken-json": 1, "missing-field": 2, "empty": 2, "encoding": 1}
    expected = texts[:200] + texts[:30] + texts[150:250] + texts[180:260]
    decoded = [tokens.decode(ids[:-1]) for side in ("train", "validation") for ids in documents(stored, side)]
    assert sorted(decoded) == sorted(expected)
    assert all(ids[-1] == tokens.eos_id for ids in documents(stored, "train"))


def test_faults_are_listed_with_file_and_line(stored):
    faults = [json.loads(line) for line in (stored.folder / "faults.jsonl").read_text().splitlines()]
    assert [(Path(f["file"]).name, f["line"], f["kind"]) for f in faults] == [
        ("a.jsonl", 151, "broken-json"),
        ("a.jsonl", 233, "missing-field"),
        ("empty.txt", 1, "empty"),
        ("latin.txt", 1, "encoding"),
        ("b.parquet", 81, "missing-field"),
        ("b.parquet", 82, "empty"),
    ]


def test_equal_documents_are_never_on_both_sides(stored):
    train, held_out = documents(stored, "train"), documents(stored, "validation")
    assert len(set(train)) < len(train)  # there are copies, within and across sources
    assert len(set(held_out)) < len(held_out)
    assert not set(train) & set(held_out)
    assert 0.1 < len(held_out) / (len(train) + len(held_out)) < 0.3


def test_the_result_does_not_depend_on_workers_or_on_the_cut(corpus, stored, tokens, tmp_path, monkeypatch):
    prepare(corpus, tokens, tmp_path / "three", validation=0.2, workers=3)
    assert contents(tmp_path / "three") == contents(stored.folder)
    monkeypatch.setattr(shards, "_MIN_BYTES", 1 << 30)
    prepare(corpus, tokens, tmp_path / "whole", validation=0.2, workers=1)
    two, whole = contents(stored.folder), contents(tmp_path / "whole")
    assert without_inputs(two) == without_inputs(whole)


def without_inputs(files):
    """Return `files` without the fingerprint of the sources in meta.json."""
    meta = json.loads(files["meta.json"])
    return {**files, "meta.json": {name: value for name, value in meta.items() if name != "fingerprint"}}


def no_work(*arguments):
    raise AssertionError("work was done again")


def test_a_second_call_does_nothing_and_a_change_is_seen(corpus, tokens, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(corpus[1].path, tmp_path / "text")
    corpus = [corpus[0], replace(corpus[1], path=str(tmp_path / "text")), corpus[2]]
    first = prepare(corpus, tokens, out, validation=0.1, workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "run_jobs", no_work)
        assert prepare(corpus, tokens, out, validation=0.1, workers=2) == first
        assert open_store(out) == first
        heavier = prepare([replace(corpus[0], weight=5.0), *corpus[1:]], tokens, out, validation=0.1)
        assert [source.weight for source in open_store(out).sources] == [5.0, 2.0, 1.0]
        assert heavier.fingerprint == first.fingerprint
    path = Path(corpus[1].path) / "000.txt"
    os.utime(path)
    touched = prepare(corpus, tokens, out, validation=0.1, workers=1)
    assert touched.fingerprint != first.fingerprint
    assert touched.content == first.content
    path.write_text("changed " + path.read_text())
    second = prepare(corpus, tokens, out, validation=0.1, workers=1)
    assert second.content != first.content
    changed = {tokens.decode(ids[:-1]) for side in ("train", "validation") for ids in documents(second, side)}
    assert path.read_text() in changed
    fewer = prepare(corpus[:1], tokens, out, workers=1)
    assert fewer.validation_tokens == 0
    assert len(list(out.glob("*.bin"))) == 1  # those of the other sources are gone


def rewrite(path, content):
    """Write other bytes of the same number with the same time."""
    times = path.stat()
    assert len(content) == times.st_size
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_file_rewritten_with_its_size_and_time_is_seen(tokens, tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    path, out = tmp_path / "text" / "a.txt", tmp_path / "out"
    path.write_text("one one one two three")
    source = Source(str(tmp_path / "text"))
    first, learnt = prepare([source], tokens, out, workers=1), train_tokenizer([source], 270, tmp_path / "bpe")
    rewrite(path, b"two two two one three")
    second = prepare([source], tokens, out, workers=1)
    assert (second.fingerprint, second.content == first.content) == (first.fingerprint, False)
    trained = train_tokenizer([source], 270, tmp_path / "bpe")
    assert trained != learnt
    record = json.loads((tmp_path / "bpe" / "kumi_tokenizer.json").read_text())
    # Stores and tokenizers of earlier versions have no digest of blocks.
    meta = json.loads((out / "meta.json").read_text())
    for name, value in ((out / "meta.json", meta), (tmp_path / "bpe" / "kumi_tokenizer.json", record)):
        name.write_text(json.dumps({key: item for key, item in value.items() if key != "blocks"}))
    with monkeypatch.context() as patch:
        patch.setattr(pool, "run_jobs", no_work)
        patch.setattr("kumi.data.bpe._run", no_work)
        assert prepare([source], tokens, out, workers=1) == second
        assert train_tokenizer([source], 270, tmp_path / "bpe") == trained
    assert json.loads((out / "meta.json").read_text()) == meta
    rewrite(path, b"one two one two three")
    assert prepare([source], tokens, out, workers=1).content != second.content


def test_the_first_middle_and_last_blocks_of_a_file_are_looked_at(tmp_path):
    path, size = tmp_path / "a", 200_000
    path.write_bytes(bytes(size))
    digests = {sampled_digest([path])}
    for changed in (0, size // 2, size - 1):
        path.write_bytes(bytes(changed) + b"x" + bytes(size - changed - 1))
        digests.add(sampled_digest([path]))
    assert len(digests) == 4
    path.write_bytes(bytes(40_000) + b"x" + bytes(size - 40_001))
    assert sampled_digest([path]) in digests  # the limit that the docs name
    assert sampled_digest([tmp_path / "absent"]) == ""


def test_another_tokenizer_never_meets_old_tokens(corpus, tokens, tmp_path):
    prepare(corpus[1:2], tokens, tmp_path / "out", workers=1)
    other = train_tokenizer(corpus[1:2], 300, tmp_path / "other")
    store = prepare(corpus[1:2], other, tmp_path / "out", workers=1)
    assert (store.tokenizer_digest, store.vocab_size) == (other.digest, other.vocab_size)
    assert max(max(ids) for ids in documents(store, "train")) < 300
    with pytest.raises(RefusedError, match="give the tokenizer it was prepared with"):
        inspect(store, tokens)


KILLED = """
import sys
from kumi.data import Source, load_tokenizer, prepare, shards
shards._MIN_BYTES = 32 << 10
prepare([Source(sys.argv[1])], load_tokenizer(sys.argv[2]), sys.argv[3], validation=0.1, workers=2)
"""


def test_a_killed_preparation_goes_on_where_it_was(tokens, texts, tmp_path, write_jsonl, monkeypatch):
    source = Source(str(write_jsonl(tmp_path / "a.jsonl", texts * 2)))
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", KILLED, source.path, str(tokens.folder), str(out)])
    while len(list(out.glob("cache/*/unit.json"))) < 5:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "meta.json").exists()
    jobs = []
    answers = pool.run_jobs
    monkeypatch.setattr(pool, "run_jobs", lambda todo, workers: answers(jobs.extend(todo) or todo, workers))
    prepare([source], tokens, out, validation=0.1, workers=1)
    resumed, jobs[:] = len(jobs), []
    prepare([source], tokens, tmp_path / "fresh", validation=0.1, workers=1)
    assert 0 < resumed <= len(jobs) - 5
    assert contents(out) == contents(tmp_path / "fresh")
    assert not (out / "cache").exists()


def test_a_dead_worker_is_reported_and_what_is_done_is_kept(tokens, texts, tmp_path, write_jsonl, monkeypatch):
    source = Source(str(write_jsonl(tmp_path / "a.jsonl", texts * 2)))
    start, started = pool.JsonWorker, []
    monkeypatch.setattr(pool, "JsonWorker", lambda *a: started.append(start(*a)) or started[-1])
    answers = pool.run_jobs

    def killing(jobs, workers):
        for number, answer in answers(jobs, workers):
            yield number, answer
            os.kill(started[0].pid, signal.SIGKILL)

    monkeypatch.setattr(pool, "run_jobs", killing)
    with pytest.raises(KumiError, match=r"killed by signal 9.*run the same command again") as error:
        prepare([source], tokens, tmp_path / "out", workers=1)
    assert error.value.exit_code == 1
    monkeypatch.setattr(pool, "run_jobs", answers)
    assert prepare([source], tokens, tmp_path / "out", workers=1).documents == 2 * len(texts)


@pytest.mark.parametrize(
    ("source", "place"), [(0, r"a\.jsonl:151: not a JSON"), (2, r"b\.parquet:81: field 'body' is")]
)
def test_the_first_fault_stops_where_asked(corpus, tokens, tmp_path, source, place):
    with pytest.raises(DataError, match=place) as error:
        prepare(corpus[source : source + 1], tokens, tmp_path / "out", on_error="fail", workers=1)
    assert error.value.exit_code == 3
    prepare(corpus[source : source + 1], tokens, tmp_path / "out", workers=1)
    with pytest.raises(DataError, match=place):  # and the same from the finished store
        prepare(corpus[source : source + 1], tokens, tmp_path / "out", on_error="fail", workers=1)


def test_a_fault_in_the_middle_of_a_cut_file_has_its_line_in_the_whole(tokens, texts, tmp_path, write_jsonl):
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    lines = path.read_text().splitlines()
    lines[222] = "broken"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"a\.jsonl:223: "):
        prepare([Source(str(path))], tokens, tmp_path / "out", on_error="fail", workers=2)


def test_token_files_are_a_source(tokens, texts, tmp_path, write_jsonl):
    written = Source(str(write_jsonl(tmp_path / "a.jsonl", texts)))
    text = prepare([written], tokens, tmp_path / "a", validation=0.2, workers=1)
    with binfile.open_writer(tmp_path / "given", np.dtype(np.int32)) as append:
        for number, document in enumerate(texts):
            ids = tokens.encode(document) + [tokens.eos_id] * (number % 2)
            append(np.array(ids, np.int32), np.array([len(ids)]))
    given = Source(str(tmp_path / "given"), format="indexed")
    again = prepare([given], tokens, tmp_path / "b", validation=0.2, workers=1)
    for side in ("train", "validation"):  # the end mark is added once, and the split is that of the text
        assert documents(again, side) == documents(text, side)
    small = train_tokenizer([written], 270, tmp_path / "small")
    with pytest.raises(ConfigError, match=r"outside the 270 of .* another tokenizer"):
        prepare([Source(str(tmp_path / "given.idx"), format="indexed")], small, tmp_path / "c", workers=1)


def test_begin_marks_and_special_tokens_in_text_are_counted(tokens, tmp_path, write_jsonl):
    source = Source(str(write_jsonl(tmp_path / "a.jsonl", ["one <|endoftext|> two", "<|pad|>three"])))
    store = prepare([source], tokens, tmp_path / "out", add_bos=True, workers=1)
    assert all(ids[0] == tokens.bos_id and ids[-1] == tokens.eos_id for ids in documents(store, "train"))
    assert store.sources[0].special_tokens_in_text == 2
    without = replace(tokens, bos_id=None)
    with pytest.raises(
        ConfigError, match=r"names a bos_token .* leave add_bos out, or add bos_token to tokenizer_config"
    ):
        prepare([source], without, tmp_path / "out", add_bos=True)


def test_the_entropy_is_that_of_the_training_tokens(stored):
    counts = np.bincount(np.concatenate([np.array(ids) for ids in documents(stored, "train")]))
    share = counts[counts > 0] / counts.sum()
    assert stored.unigram_entropy == pytest.approx(-(share * np.log(share)).sum(), rel=1e-12)
    assert counts.sum() == stored.train_tokens


def test_inspect_shows_counts_first_documents_and_faults(stored, tokens):
    summary = inspect(stored.folder, documents=2, characters=20)
    first = tokens.decode(documents(stored, "train")[0])
    assert summary["sources"][0]["documents"][0]["text"] == first[:20]
    assert summary["sources"][0]["documents"][0]["last_ids"][-1] == tokens.eos_id
    assert summary["sources"][0]["faults"] == {"broken-json": 1, "missing-field": 1}
    assert summary["first_faults"][0]["line"] == 151
    assert summary["tokenizer"]["added_tokens"] == {"<|endoftext|>": 0, "<|pad|>": 1}
    assert json.loads(json.dumps(inspect(stored))) == inspect(stored, tokens)


def test_what_cannot_be_prepared_is_refused(corpus, tokens, tmp_path, write_jsonl):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with pytest.raises(RefusedError, match="has files that kumi did not prepare"):
        prepare(corpus, tokens, tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]
    for validation in (-0.1, 0.6, float("nan")):
        with pytest.raises(ConfigError, match=r"between 0 and 0\.5"):
            prepare(corpus, tokens, tmp_path / "out", validation=validation)
    with pytest.raises(DataPathError, match="no data source"):
        prepare([], tokens, tmp_path / "out")
    few = Source(str(write_jsonl(tmp_path / "few.jsonl", ["a", "b", "c"])))
    with pytest.raises(ConfigError, match=r"validation=0\.001 of 3 documents holds out none"):
        prepare([few], tokens, tmp_path / "out", validation=0.001, workers=1)
    with pytest.raises(ConfigError, match=r"no usable document \(3 missing-field\)"):
        prepare([replace(few, text_key="body")], tokens, tmp_path / "out", workers=1)


def test_a_full_disk_is_said_and_finished_units_stay(corpus, tokens, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kumi.data.preparation.merge_shards", full)
        with pytest.raises(RefusedError, match="the disk is full; finished units are kept"):
            prepare(corpus[1:2], tokens, tmp_path / "out", workers=1)
    monkeypatch.setattr(pool, "run_jobs", lambda jobs, workers: (no_work() for _ in jobs))
    assert prepare(corpus[1:2], tokens, tmp_path / "out").documents == 100


def test_store_gives_training_and_validation_sequences(stored):
    mixture, sweep = stored.mixture(64, 3), stored.sweep(64)
    part, _, _ = mixture.locate(0, 1024)
    assert np.bincount(part).tolist() == pytest.approx([256, 512, 256], abs=2)
    labels = sweep.batch(0, len(sweep))["labels"]
    held_out = sum(s.validation_documents for s in stored.sources)
    assert np.count_nonzero(labels != -100) == stored.validation_tokens - held_out


@pytest.mark.parametrize("error", [ConfigError, DataPathError, RefusedError])
def test_an_error_of_a_worker_keeps_its_class(error):
    with pytest.raises(error, match="as written") as raised:
        preparation._raise_worker_error({"kind": error.__name__, "error": "as written"}, None)
    assert type(raised.value) is error
