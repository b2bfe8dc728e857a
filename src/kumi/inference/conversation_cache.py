"""The cache of a conversation between its turns, so that a turn computes only the tokens that are new."""

from __future__ import annotations

from collections.abc import Sequence

from kumi.nn.generation_cache import GenerationCache
from kumi.spec.cache_state import cache_layers


class ConversationCache:
    """A cache of one slot and the tokens that it has, of one decoder whose weights do not change.

    cache: None before the first turn.
    tokens: those that all layers have.
    computed: prompt tokens that the last turn computed, the others were in the cache.
    """

    def __init__(self) -> None:
        self.cache: GenerationCache | None = None
        self.tokens: list[int] = []
        self.computed = 0
        # The number of tokens that a layer has at most: a pass that was interrupted has changed some layers.
        self._written = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the cache."""
        return 0 if self.cache is None else self.cache.nbytes

    def forget(self) -> None:
        """Drop the cache and its tokens."""
        self.cache, self.tokens, self.computed, self._written = None, [], 0, 0

    def shared(self, tokens: Sequence[int], switch: int | None) -> int:
        """Return how many of the first of `tokens` the cache has, so that the others can be computed after them.

        The last one is always computed, for its logits. The result is 0 where a layer cannot go back to the end of the
        common beginning: a recurrent state, or a sliding window that has lost positions.
        switch: the length from which on all keys are rotated differently; None without one.
        """
        if self.cache is None or (switch is not None and (len(self.tokens) > switch) != (len(tokens) > switch)):
            return 0
        pairs = zip(self.tokens, tokens[:-1], strict=False)
        common = next((number for number, (old, new) in enumerate(pairs) if old != new), None)
        if common is None:
            common = min(len(self.tokens), len(tokens) - 1)
        tensors = (tensor for layer in cache_layers(self.cache.spec) for tensor in layer.tensors)
        return common if all(tensor.can_shorten(self._written, common) for tensor in tensors) else 0

    def begin_pass(self, start: int, stop: int) -> None:
        """Note that a pass writes the tokens at positions start to stop: later ones are lost."""
        del self.tokens[start:]
        self._written = stop

    def end_pass(self, tokens: list[int]) -> None:
        """Note that the cache has `tokens`."""
        self.tokens, self._written = tokens, len(tokens)
