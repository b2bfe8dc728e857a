"""GPU kernels beside PyTorch's own operations: kumi's in Triton, and those of installed libraries.

Each operation of `kumi.spec.numerics.KERNELS` has a plain path in PyTorch, and here one module for each other
implementation. A module is imported only if `kumi.nn.numerics` chooses it, because Triton and the libraries need not be
installed. Every implementation computes the same as the plain path up to rounding. kumi's own say how many bytes they
move.
"""
