"""How far attention reaches: the documents of prepared data, of the run file, or whole rows."""

from dataclasses import replace

import pytest
from tests.config.test_chosen_numerics import RUN

from kumi.config import load, load_plan
from kumi.config.document_lengths import document_span
from kumi.config.jobs import job
from kumi.data import Source, prepare
from kumi.data.bpe import train as train_tokenizer
from kumi.plan.engines import ENGINES
from kumi.plan.estimate import estimate
from kumi.report import phrases
from kumi.spec.batch import BatchSpec, span_of_documents
from kumi.spec.layout import Layout


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KUMI_NUMERICS", "reference")
    monkeypatch.setattr("kumi.config.local_machine._gpus", list)
    monkeypatch.chdir(tmp_path)


def of(**overrides):
    return load(RUN, {key.replace("__", "."): value for key, value in overrides.items()})


def test_nothing_is_known_of_data_that_is_not_prepared(tmp_path):
    assert document_span(of()) is None
    assert job(of()).attention_len == 32
    assert list(tmp_path.iterdir()) == []


def test_the_run_file_may_say_how_long_documents_are():
    assert document_span(of(batch__mean_document_tokens=8.0)) == span_of_documents(8.0, 32)
    assert document_span(load_plan({"model": RUN["model"], "batch": RUN["batch"]}, ["batch.mean_document_tokens=8.0"]))
    assert document_span(of(batch__mean_document_tokens=8.0, data__cross_document=True)) == 32


def test_prepared_data_say_it_better(tmp_path):
    source = tmp_path / "documents.jsonl"
    source.write_text("".join(f'{{"text": "{"a b c d e f " * (number % 9)}"}}\n' for number in range(1, 60)))
    tokenizer = train_tokenizer([Source(str(source))], 300, tmp_path / "run" / "data" / "tokenizer")
    store = prepare([Source(str(source))], tokenizer, tmp_path / "run" / "data" / "tokens", validation=0.0)
    span = document_span(of(batch__mean_document_tokens=1000.0))
    assert span == store.document_span(32)
    assert 2 < span < 32
    (tmp_path / "run" / "data" / "tokens" / "meta.json").write_text("{")
    assert document_span(of()) is None


@pytest.mark.parametrize("mean", [1.0, 7.5, 32.0, 1e6])
def test_lengths_are_spread_as_if_any_token_could_be_the_last(mean):
    """The mean over positions of the tokens of an exponential document around them, summed in small steps."""
    from math import exp

    places = [(number + 0.5) / 1000 * 32 for number in range(1000)]
    around = [mean * (1 - exp(-x / mean)) + mean * (1 - exp(-(32 - x) / mean)) for x in places]
    assert span_of_documents(mean, 32) == pytest.approx(sum(around) / 1000, rel=1e-4)


def test_estimate_and_mfu_count_attention_within_documents():
    whole = replace(job(of()), batch=BatchSpec(8192, 65536))
    short = replace(whole, batch=BatchSpec(8192, 65536, 512.0))
    slow, fast = (estimate(each, Layout()) for each in (whole, short))
    assert fast.step_seconds < 0.8 * slow.step_seconds
    # Three passes of two products over 65,536 tokens, with queries and values of 32 elements.
    assert slow.model_flops - fast.model_flops == 3 * 2 * 65536 * (32 + 32) * (8192 - 512)
    assert "full attention counted" in phrases.counted_flops(whole)
    assert "within documents, over 512 tokens" in phrases.counted_flops(short)
    assert phrases.assumed_documents(whole)
    assert not phrases.assumed_documents(short)


def test_other_trainers_attend_to_whole_rows():
    other = replace(job(of(batch__mean_document_tokens=4.0)), engine=ENGINES["megatron-lm"])
    assert other.attention_len == 32
    assert not phrases.assumed_documents(other)
