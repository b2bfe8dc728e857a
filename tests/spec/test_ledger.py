"""The ledger's arithmetic. That it describes the modules is tested in tests/parity."""

from published import PUBLISHED

from kumi.spec import families, ledger

SPEC = families.from_hf(PUBLISHED["Llama-3.2-1B"][0])


def test_names_are_unique_and_in_the_order_of_the_forward_pass():
    names = [param.name for param in ledger.params(SPEC)]
    assert len(set(names)) == len(names)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "model.norm.weight"


def test_matrix_flops_are_twice_the_parameters_of_matrices_a_token():
    matrices = sum(p.numel for p in ledger.params(SPEC) if len(p.shape) == 2)
    attention = 4 * 16 * 32 * 64
    # The tied table is used as the head, and costs nothing as the embedding.
    assert ledger.forward_flops(SPEC, tokens=10, seq_len=5) == 10 * (2 * matrices + 5 * attention)
    assert ledger.train_flops(SPEC, tokens=10, seq_len=5) == 3 * ledger.forward_flops(SPEC, tokens=10, seq_len=5)


def test_a_chunk_of_logits_is_bounded_by_memory_and_below_by_speed():
    assert ledger.logit_chunk(8192, "cpu") == 512
    assert ledger.logit_chunk(128256, "cpu") == 128
    assert ledger.logit_chunk(128256, "cuda") == 1046
