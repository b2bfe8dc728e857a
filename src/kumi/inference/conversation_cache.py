"""The cache of a conversation between its turns, so that a turn computes only the tokens that are new."""

from __future__ import annotations

from collections.abc import Sequence

from kumi.nn.generation_cache import GenerationCache
from kumi.spec.cache_state import cache_layers


class ConversationCache:
    """A cache with one slot, for a decoder whose weights do not change, and the tokens in the cache.

    cache: None before the first turn.
    tokens: the tokens that the caches of all layers have.
    computed: the number of prompt tokens that the last turn computed; the others were in the cache.
    """

    def __init__(self) -> None:
        self.cache: GenerationCache | None = None
        self.tokens: list[int] = []
        self.computed = 0
        # The largest number of tokens that a layer has; after an interrupted pass, some layers have more than others.
        self._written = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the cache."""
        return 0 if self.cache is None else self.cache.nbytes

    def forget(self) -> None:
        """Drop the cache and its tokens."""
        self.cache, self.tokens, self.computed, self._written = None, [], 0, 0

    def shared(self, tokens: Sequence[int], switch: int | None) -> int:
        """Return how many tokens at the beginning of `tokens` the cache has, so that only the rest must be computed.

        The last token is always computed, for its logits. The result is 0 where a layer cannot go back to the end of
        the common beginning: a recurrent state, or a sliding window that has lost positions.
        switch: the length from which on all keys are rotated differently; None if there is no such length.
        """
        if self.cache is None or (switch is not None and (len(self.tokens) > switch) != (len(tokens) > switch)):
            return 0
        pairs = zip(self.tokens, tokens[:-1], strict=False)
        common = next((index for index, (old, new) in enumerate(pairs) if old != new), None)
        if common is None:
            common = min(len(self.tokens), len(tokens) - 1)
        tensors = (tensor for layer in cache_layers(self.cache.spec) for tensor in layer.tensors)
        return common if all(tensor.can_shorten(self._written, common) for tensor in tensors) else 0

    def begin_pass(self, start: int, stop: int) -> None:
        """Note that a pass writes the positions start .. stop - 1: older tokens from `start` on are lost."""
        del self.tokens[start:]
        self._written = stop

    def end_pass(self, tokens: list[int]) -> None:
        """Note that the cache has `tokens`."""
        self.tokens, self._written = tokens, len(tokens)
