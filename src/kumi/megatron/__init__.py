"""Megatron's words for what kumi describes, which exports and conversions read. Imports neither torch nor plans.

`names`: the tensors of its checkpoints; `model` and `layout`: fields of Megatron-Core's TransformerConfig; `args`: the
arguments of Megatron-LM; `checkpoint`: the files of a checkpoint.
"""
