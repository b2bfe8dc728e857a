"""The ledger's arithmetic. That it describes the modules is tested in tests/parity."""

from dataclasses import replace

from published_models import PUBLISHED

from kumi.spec import families, ledger
from kumi.spec.model import MLP

SPEC = families.from_hf(PUBLISHED["Llama-3.2-1B"][0])


def test_names_are_unique_and_in_the_order_of_the_forward_pass():
    names = [param.name for param in ledger.params(SPEC)]
    assert len(set(names)) == len(names)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "model.norm.weight"


def test_matrix_flops_are_twice_the_parameters_of_matrices_a_token():
    matrices = sum(p.numel for p in ledger.params(SPEC) if len(p.shape) == 2)
    attention = 4 * 16 * 32 * 64
    # The tied table has FLOPs as the head, and none as the embedding.
    assert ledger.forward_flops(SPEC, tokens=10, seq_len=5) == 10 * (2 * matrices + 5 * attention)
    assert ledger.train_flops(SPEC, tokens=10, seq_len=5) == 3 * ledger.forward_flops(SPEC, tokens=10, seq_len=5)
    assert ledger.train_flops(SPEC, 10, 5) - ledger.train_flops(SPEC, 10, 5, head_tokens=4) == (
        6 * 6 * SPEC.vocab_size * SPEC.hidden_size
    )


def test_a_chunk_of_logits_is_bounded_by_memory_and_below_by_speed():
    assert ledger.logit_chunk(8192, "cpu") == 512
    assert ledger.logit_chunk(128256, "cpu") == 128
    assert ledger.logit_chunk(128256, "cuda") == 1046


def test_heads_can_be_cut_off_one_by_one():
    attention = next(op for op in ledger.ops(SPEC) if op.kind == "attention")
    assert (attention.source.count, attention.source.unit, attention.heads) == (32, 64, 32)
    key = next(op for op in ledger.ops(SPEC) if op.name.endswith("k_proj"))
    assert key.target.count == 8
    assert attention.kv_size == 2 * 8 * 64


def test_kinds_of_layers():
    narrow, wide = SPEC.layers[0], replace(SPEC.layers[0], mlp=MLP(16384))
    spec = replace(SPEC, layers=(wide, narrow, narrow, wide))
    kinds, index = spec.unique_layers()
    assert kinds == (wide, narrow)
    assert index == (0, 1, 1, 0)
    assert ledger.unique_layer_ops(spec) == (ledger.layer_ops(spec, 0), ledger.layer_ops(spec, 1))


def test_how_far_a_query_sees():
    attention = next(op for op in ledger.ops(SPEC) if op.kind == "attention")
    for window in (None, 1, 5, 8, 20):
        seen = [min(position, window or 8) for position in range(1, 9)]
        assert replace(attention, window=window).reach(8) == sum(seen) / 8
