"""llama.cpp generates the tokens that kumi generates, from the GGUF file of kumi's export."""

import numpy as np
import pytest
import torch
from llama_cpp import LlamaCpp, converter, library
from tiny_exports import exported, model_folder

from kumi.convert.handover.gguf_file import write_gguf
from kumi.convert.load_weights import load_decoder
from kumi.inference.batched_decoder import BatchedDecoder
from kumi.inference.sampling import Sampling

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("case", "tokenizer"),
    [
        ("llama", "bpe"),
        ("qwen2", "bpe"),
        ("qwen3", "bpe"),
        ("gemma", "sentencepiece"),
        ("mixtral", "sentencepiece"),
        ("phi3", "sentencepiece"),
        ("olmo2", "bpe"),
    ],
)
def test_greedy_tokens_are_those_of_kumi(tmp_path, case, tokenizer):
    home = converter()
    library()
    folder = exported(model_folder(tmp_path / "saved", case, tokenizer), tmp_path / "hf")
    write_gguf(folder, tmp_path / "model.gguf", home, "f32")
    decoder, other = load_decoder(folder), LlamaCpp(tmp_path / "model.gguf")
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(1, decoder.spec.vocab_size, (length,), generator=generator).tolist() for length in (3, 9)]
    replies = BatchedDecoder(decoder).generate(prompts, Sampling(max_new_tokens=16, temperature=0))
    assert {reply.prompt: reply.ids for reply in replies} == {
        number: other.greedy(prompt, 16) for number, prompt in enumerate(prompts)
    }
    with torch.no_grad():
        ours = decoder(torch.tensor([prompts[1]]))[0].numpy()
    theirs = other.logits(prompts[1])
    # Both compute in float32, in another order; some of llama.cpp's kernels round activations to 16 bits.
    assert np.abs(theirs - ours).max() <= 2e-2 * ours.std()
