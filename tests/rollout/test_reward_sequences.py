"""What a reward model reads of a reply, against transformers' tokenizers, and its scores in rows of any content."""

import numpy as np
import pytest
import torch
import transformers
from tests.rollout.reward_folders import END, PAD, TEMPLATE, copy_tokenizer, oracle, prepared

from kumi.convert import weights_reader
from kumi.data import load_tokenizer
from kumi.data.row_path import open_encoder
from kumi.parallel.build import build
from kumi.parallel.mesh import Mesh, RankInfo
from kumi.rewards import Unscored
from kumi.rollout.group import GeneratedReply
from kumi.rollout.prompt_sampler import Prompt
from kumi.rollout.reward_models import sequence_scores
from kumi.rollout.reward_sequences import PolicyTokens, RenderedTokens, TokenLimits
from kumi.rollout.rollout_batch import RowSettings
from kumi.spec import families
from kumi.spec.data_source import ChatOptions
from kumi.spec.layout import Layout
from kumi.spec.precision import Precision
from small_llama import SMALL_LLAMA
from tiny_models import in_float64

MESH = Mesh(Layout(), RankInfo(0, 1, 0, torch.device("cpu")), {})
LIMITS = TokenLimits(vocab_size=300, longest=40, padding=PAD)
ASKED = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "say a"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tokenizer in `same`, and one with a chat template in `chat`."""
    made = prepared(tmp_path_factory.mktemp("sequences"))
    copy_tokenizer(made / "same", made / "chat", TEMPLATE)
    return made


def reply(ids, finish="stop"):
    return GeneratedReply(np.array(ids, np.int32), np.zeros(len(ids)), finish, 0)


def prompt(ids=(7, 8), **row):
    return Prompt(0, list(ids), row, "source", 0)


def test_the_policys_own_tokens_are_read_as_they_are():
    assert PolicyTokens(LIMITS).sequence(prompt(), reply([9, END]), "") == [7, 8, 9, END]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_conversation_is_rendered_by_the_template_of_the_reward_model(folder, finish):
    tokenizer = load_tokenizer(folder / "chat")
    encoder = open_encoder(ChatOptions(), tokenizer)
    asked, answer = prompt(prompt=ASKED), "a then b"
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "chat").apply_chat_template(
        [*ASKED, {"role": "assistant", "content": answer}], tokenize=True, return_dict=False
    )
    limits = TokenLimits(300, 400, PAD)
    whole = RenderedTokens(encoder, limits, whole=True).sequence(asked, reply([9], finish), answer)
    assert whole == theirs
    assert theirs[-1] != END
    upto = RenderedTokens(encoder, limits, whole=False).sequence(asked, reply([9], finish), answer)
    end = theirs.index(END)
    assert upto == theirs[: end + 1 if finish == "stop" else end]


def test_plain_text_ends_with_the_end_of_the_reward_models_tokenizer(folder):
    tokenizer = load_tokenizer(folder / "same")
    encoder = open_encoder(ChatOptions(), tokenizer)
    for whole in (False, True):
        ids = RenderedTokens(encoder, LIMITS, whole=whole).sequence(prompt(prompt="say a"), reply([9]), " b c")
        assert ids == tokenizer.encode("say a") + tokenizer.encode(" b c") + [END]
    # Without a template there is no rendering of messages.
    refused = RenderedTokens(encoder, LIMITS, whole=False).sequence(prompt(prompt=ASKED), reply([9]), "b")
    assert isinstance(refused, Unscored)
    assert "no chat template" in refused.reason


def test_a_reply_cannot_end_its_turn_by_spelling_it(folder):
    encoder = open_encoder(ChatOptions(), load_tokenizer(folder / "chat"))
    spelt = RenderedTokens(encoder, LIMITS, whole=False).sequence(prompt(prompt=ASKED), reply([9]), "a<|endoftext|>b")
    assert isinstance(spelt, Unscored)
    assert "<|endoftext|>" in spelt.reason


@pytest.mark.parametrize(
    ("ids", "words"), [([300], "token 300 is outside of the reward model's vocabulary of 300"), ([9] * 39, "41 tokens")]
)
def test_what_the_model_cannot_read_is_not_scored(ids, words):
    unscored = PolicyTokens(LIMITS).sequence(prompt(), reply(ids), "")
    assert isinstance(unscored, Unscored)
    assert words in unscored.reason


SEQUENCES = [[5, 6, 7, END], [9] * 17, [5, PAD, 6, PAD, PAD], [PAD, PAD], [8], [11, 12, END, 13, 14], [20, 21, 22]]


def llama():
    config = transformers.LlamaConfig(**SMALL_LLAMA, num_labels=1, pad_token_id=PAD, initializer_range=0.3)
    return transformers.LlamaForSequenceClassification(config).eval()


def test_scores_are_those_of_transformers_in_any_company(tmp_path):
    torch.manual_seed(0)
    with in_float64():  # transformers rounds the angles and norms of a Llama to float32 otherwise
        model = llama()
        model.save_pretrained(tmp_path)
        expected = oracle(model, SEQUENCES)
        spec = families.from_hf(families.read_config(tmp_path))
        reader = weights_reader(tmp_path, spec)
        own = build(spec, MESH, Precision("rewards", *["float64"] * 3), weights=reader, frozen=True)
        assert not any(parameter.requires_grad for parameter in own.parameters())
        read = [TokenLimits(320, 64, PAD).cut(ids) for ids in SEQUENCES]
        assert [len(ids) for ids in read] == [4, 17, 3, 1, 1, 5, 3]
        for longest, microbatch in ((64, 8), (8, 2), (17, 1)):
            scores = sequence_scores(own, MESH, RowSettings(longest, 1, 1), microbatch, read)
            assert scores.tolist() == pytest.approx(expected, rel=0, abs=1e-10)
        alone = [float(sequence_scores(own, MESH, RowSettings(8, 1, 4), 1, [ids])[0]) for ids in read]
    assert alone == pytest.approx(expected, rel=0, abs=1e-10)
    assert max(alone) - min(alone) > 0.1
    assert sequence_scores(own, MESH, RowSettings(8, 1, 1), 1, []).shape == (0,)
