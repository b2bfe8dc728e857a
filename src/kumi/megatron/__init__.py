"""Models and layouts in the terms of Megatron, for exports and conversions. The package imports no torch.

`tensor_names`: the tensors of checkpoints. `model_fields`, `layout_fields`: fields of Megatron-Core's
TransformerConfig. `args`: arguments of Megatron-LM. `checkpoint_files`: the files of a checkpoint.
"""
