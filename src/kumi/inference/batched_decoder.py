"""A batched decoder: replies to many prompts, with a cache of keys, values and recurrent states.

Sequences live in slots. Waiting prompts are computed as the documents of one packed row, as in training; then every
forward pass has one token of each active slot. A slot whose reply has ended is filled with the next prompt at once, so
that replies of different lengths do not wait for each other. Active slots are always the first ones: the last active
slot moves into a gap.

Every data-parallel rank answers its own share of the prompts; its tensor-parallel ranks compute together. The noise of
sampling is a function of seed, prompt, sample and position (`kumi.inference.noise`), so replies do not depend on the
layout, the number of slots or the order in which slots are filled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kumi.errors import ModelError
from kumi.inference.conversation_cache import ConversationCache
from kumi.inference.noise import position_key, sequence_key
from kumi.inference.sampling import Sampling, choose_tokens
from kumi.nn.attention.cached_attention import ExtendStep, PackedPrompt, PromptStep, TokenStep
from kumi.nn.decoder import Decoder
from kumi.nn.generation_cache import CachedTokens, GenerationCache
from kumi.nn.packed_products import packed_products
from kumi.parallel.compiled import uncompiled
from kumi.parallel.data_parallel import gathered
from kumi.parallel.mesh import Mesh, all_reduce_max
from kumi.spec.generation_layout import check_generation_layout

# Tokens of prompts in one forward pass. A longer prompt is a pass of its own.
PROMPT_TOKENS = 4096
# Tokens at the end of a reply that are decoded to look for stop strings, in addition to four for each character.
_STOP_CONTEXT = 8


# Called for each new token of a reply, with the index of its prompt, the number of its sample and its ids so far.
OnToken = Callable[[int, int, Sequence[int]], None]


@dataclass(frozen=True)
class Reply:
    """The reply to one prompt.

    - `prompt`: index of the prompt.
    - `sample`: number of the reply among those to the same prompt, from 0.
    - `ids`: token ids, without the stop id that ended the reply.
    - `log_probs`: log-probability of each of `ids` at the temperature (1 if that is 0).
    - `finish`: "stop" for a stop id or string, "length" at `max_new_tokens` or the model's last position.
    - `stop`: the stop id that ended the reply and its log-probability; None for another end.
    """

    prompt: int
    sample: int
    ids: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length"]
    stop: tuple[int, float] | None = None


@dataclass
class _Sequence:
    """A reply in progress.

    - `prompt`, `sample`, `ids`, `log_probs`, `stop`: as in `Reply`, so far.
    - `prompt_ids`: the tokens of the prompt.
    - `key`: the random key of the sequence (`kumi.inference.noise.sequence_key`).
    """

    prompt: int
    sample: int
    prompt_ids: Sequence[int]
    key: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stop: tuple[int, float] | None = None

    @property
    def length(self) -> int:
        """The number of tokens of prompt and reply."""
        return len(self.prompt_ids) + len(self.ids)

    @property
    def tokens(self) -> list[int]:
        """The tokens of prompt and reply."""
        return [*self.prompt_ids, *self.ids]


class BatchedDecoder:
    """Generates with `decoder`.

    `slots`: sequences that are decoded at once, on each data-parallel rank.
    `mesh`: the mesh of `decoder`; None for a model on one device. Raises LayoutError for pp and cp.
    `max_length`: positions of a slot; None for as many as the prompts and `max_new_tokens` need.
    `decode_text`: returns the text of token ids; needed for stop strings.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int = 8,
        mesh: Mesh | None = None,
        max_length: int | None = None,
        decode_text: Callable[[list[int]], str] | None = None,
    ) -> None:
        if mesh is not None:
            check_generation_layout(mesh.layout)
        if decoder.spec.head != "lm":
            raise ModelError("the model has a score head, which rates texts and generates none; give a language model")
        self.decoder, self.mesh, self.max_length, self.decode_text = decoder, mesh, max_length, decode_text
        self.tp = 1 if mesh is None else mesh.layout.tp
        # Passes have a multiple of this many tokens: under sequence parallelism, tp ranks have equal numbers of them.
        self.multiple = self.tp if mesh is not None and mesh.layout.sequence_parallel else 1
        self.slots = max(1, slots)
        self.device = decoder.head_weight.device if mesh is None else mesh.device

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        samples: int | Sequence[Sequence[int]] = 1,
        on_token: OnToken | None = None,
    ) -> Iterator[Reply]:
        """Yield the replies to this data-parallel rank's share of `prompts`, as each one ends.

        `samples`: the number of replies to each prompt, or for each prompt the numbers of the samples to generate.
        `on_token`: see `OnToken`.

        All ranks call this with the same arguments and exhaust the iterator: they compute together. Raises ModelError
        for an empty prompt, for one that leaves no position for a reply, and for stop strings without `decode_text`.
        """
        # Inference mode takes less time for each operator, but weights that are gathered in it cannot be trained later.
        mode = torch.no_grad() if self.mesh is not None else torch.inference_mode()
        replies: Iterator[Reply] = mode(self._replies)(prompts, sampling, samples, on_token)
        return replies

    def _replies(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        samples: int | Sequence[Sequence[int]],
        on_token: OnToken | None,
    ) -> Iterator[Reply]:
        """Yield the replies as `generate` does, which calls this without gradients."""
        limit = self._check(prompts, sampling)
        share = self._share(len(prompts))
        waiting = deque(
            _Sequence(index, sample, prompts[index], sequence_key(sampling.seed, prompts[index], sample))
            for index in share
            for sample in (range(samples) if isinstance(samples, int) else samples[index])
        )
        longest = max((len(prompts[index]) for index in share), default=1)
        capacity = min(limit, longest + sampling.max_new_tokens)
        training = self.decoder.training
        self.decoder.eval()
        context = nullcontext() if self.mesh is None else gathered(self.decoder, self.mesh)
        try:
            with context, packed_products(self.decoder, self.slots), uncompiled(self.decoder):
                yield from _Batch(self, sampling, waiting, limit, capacity, on_token).run()
        finally:
            self.decoder.train(training)

    @torch.no_grad()
    def converse(
        self,
        conversation: ConversationCache,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> Iterator[Reply]:
        """Yield the reply to `prompt`, as `generate` does, on one device.

        Only those tokens of `prompt` are computed that `conversation` lacks. Afterwards `conversation` has the tokens
        of this turn, also if the turn is interrupted.
        """
        assert self.mesh is None, "a conversation is on one device"
        limit = self._check([prompt], sampling)
        sequence = _Sequence(0, 0, prompt, sequence_key(sampling.seed, prompt, 0))
        training = self.decoder.training
        self.decoder.eval()
        try:
            with packed_products(self.decoder, 1):
                yield from _ConversationBatch(self, sampling, sequence, limit, conversation, on_token).run()
        finally:
            self.decoder.train(training)

    def _share(self, count: int) -> range:
        """Return the indices of this data-parallel rank's prompts."""
        if self.mesh is None:
            return range(count)
        layout = self.mesh.layout
        return range(layout.dp_index(self.mesh.rank), count, layout.dp)

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> int:
        """Return the largest number of tokens of a sequence.

        Raise ModelError for a prompt that is empty or leaves no room, and for stop strings without `decode_text`.
        """
        positions = self.decoder.spec.learned_positions or None
        limits = [limit for limit in (positions, self.max_length) if limit is not None]
        limit = min(limits, default=max(map(len, prompts), default=0) + sampling.max_new_tokens)
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise ModelError(
                    f"prompt {index} has no tokens; give at least one, such as the beginning-of-text token"
                )
            if len(prompt) >= limit:
                raise ModelError(
                    f"prompt {index} has {len(prompt)} tokens, which leaves no room for a reply in {limit} positions; "
                    "shorten it"
                )
        if sampling.stop_strings and self.decode_text is None:
            raise ModelError("stop strings need the model's tokenizer; give `decode_text` or stop ids")
        return limit


class _Batch:
    """The slots of one call of `BatchedDecoder.generate`.

    waiting: the sequences that have no slot yet.
    limit: the largest number of tokens of a sequence.
    capacity: the positions of each slot in a new cache.
    cache: the cache to use; None for a new one.
    """

    def __init__(
        self,
        owner: BatchedDecoder,
        sampling: Sampling,
        waiting: deque[_Sequence],
        limit: int,
        capacity: int,
        on_token: OnToken | None,
        cache: GenerationCache | None = None,
    ) -> None:
        self.owner, self.sampling, self.waiting, self.limit = owner, sampling, waiting, limit
        self.on_token = on_token
        decoder = owner.decoder
        slots = min(owner.slots, max(1, len(waiting)))
        slots += -slots % owner.multiple
        self.slots = slots
        self.cache = cache or GenerationCache(
            decoder.spec, slots, capacity, dtype=decoder.compute_dtype, device=owner.device, tp=owner.tp
        )
        self.active: list[_Sequence] = []
        self.padding = decoder.vocabulary.padding(decoder.head_weight)  # columns of the logits that are no tokens
        mesh = owner.mesh
        # Experts are exchanged with ranks that have other prompts: all ranks make the same number of passes.
        self.lockstep = mesh if mesh is not None and mesh.layout.ep > 1 else None
        rotations = [layer.attends.rope for layer in decoder.spec.layers if layer.attends is not None]
        # From this length on, LongRoPE rotates all keys differently: the sequence is computed anew.
        self.switch = next(
            (
                rope.original_max_position_embeddings
                for rope in rotations
                if rope is not None and rope.depends_on_length
            ),
            None,
        )

    def run(self) -> Iterator[Reply]:
        """Yield the replies as they end."""
        while self._any_work():
            if self.waiting and len(self.active) < self.slots:
                yield from self._start_prompts()
            elif self.active:
                yield from self._extend()
            else:
                self._pass_nothing()

    def _any_work(self) -> bool:
        """Return True if this rank has sequences to compute, or any of the ranks that make the same passes has."""
        work = bool(self.waiting or self.active)
        if self.lockstep is None:
            return work
        return bool(all_reduce_max(torch.tensor(float(work), device=self.owner.device), self.lockstep))

    def _pass_nothing(self) -> None:
        """Take part in a forward pass of ranks that still have work, with tokens that belong to no sequence."""
        ids = torch.zeros(1, self.owner.multiple, dtype=torch.long, device=self.owner.device)
        self.owner.decoder(ids, cached=CachedTokens(self.cache, PromptStep(())))

    def _start_prompts(self) -> Iterator[Reply]:
        """Compute waiting prompts in one forward pass, as many as there are free slots, and draw their first tokens."""
        started: list[_Sequence] = []
        prompts: list[PackedPrompt] = []
        ids: list[int] = []
        rows: list[int] = []
        while self.waiting and len(self.active) + len(started) < self.slots:
            following, slot = self.waiting[0], len(self.active) + len(started)
            same = bool(started) and following.tokens == started[-1].tokens  # samples of one prompt share its pass
            if started and not same and len(ids) + following.length > PROMPT_TOKENS:
                break
            started.append(self.waiting.popleft())
            if same:
                last = prompts.pop()
                prompts.append(PackedPrompt(last.start, last.stop, (*last.slots, slot)))
            else:
                prompts.append(PackedPrompt(len(ids), len(ids) + following.length, (slot,)))
                ids += following.tokens
            rows.append(len(prompts) - 1)
        documents = [index for index, prompt in enumerate(prompts) for _ in range(prompt.start, prompt.stop)]
        padding = -len(ids) % self.owner.multiple
        row = self._tensor([ids + [0] * padding])
        document_ids = self._tensor([documents + [len(prompts)] * padding]) if len(prompts) > 1 or padding else None
        last_tokens = self._tensor([prompt.stop - 1 for prompt in prompts])
        logits = self.owner.decoder(
            row,
            document_ids=document_ids,
            head_positions=last_tokens,
            cached=CachedTokens(self.cache, PromptStep(tuple(prompts))),
        )
        self.active += started
        yield from self._draw(logits if len(started) == len(prompts) else logits[self._tensor(rows)], started)

    def _extend(self) -> Iterator[Reply]:
        """Compute the last token of each active sequence in one forward pass, and draw the next ones."""
        for index in self._switching():
            self.waiting.appendleft(self._leave(index))
        if not self.active:
            return
        count, padding = len(self.active), -len(self.active) % self.owner.multiple
        lengths = [sequence.length - 1 for sequence in self.active]
        equal = not padding and min(lengths) == max(lengths)
        ids = self._tensor([sequence.ids[-1] for sequence in self.active] + [0] * padding)
        positions = self._tensor(lengths + [0] * padding)
        logits = self.owner.decoder(
            ids[:, None],
            position_ids=positions[:, None],
            cached=CachedTokens(self.cache, TokenStep(positions, max(lengths), equal)),
        )
        yield from self._draw(logits[:count], list(self.active))

    def _switching(self) -> list[int]:
        """Return the slots of sequences whose next token changes the rotation of all their keys, the last one first."""
        if self.switch is None:
            return []
        return [index for index in reversed(range(len(self.active))) if self.active[index].length == self.switch + 1]

    def _draw(self, logits: Tensor, sequences: list[_Sequence]) -> Iterator[Reply]:
        """Draw the next token of each of `sequences` from `logits` (N, V). Yield the replies that end with it."""
        keys = [position_key(sequence.key, len(sequence.ids)) for sequence in sequences]
        drawn, log_probs = choose_tokens(
            logits, keys, self.sampling, self.owner.decoder.vocabulary, padding=self.padding
        )
        ended = {}
        for sequence, token, log_prob in zip(sequences, drawn.tolist(), log_probs.tolist(), strict=True):
            finish = self._append(sequence, token, log_prob)
            if finish is not None:
                ended[id(sequence)] = finish
        for index in reversed(range(len(self.active))):
            if id(self.active[index]) in ended:
                sequence = self._leave(index)
                finish = ended[id(sequence)]
                yield Reply(sequence.prompt, sequence.sample, sequence.ids, sequence.log_probs, finish, sequence.stop)

    def _append(self, sequence: _Sequence, token: int, log_prob: float) -> Literal["stop", "length"] | None:
        """Add a token to `sequence`. Return why the reply ends with it, or None if it goes on."""
        if token in self.sampling.stop_ids:
            sequence.stop = token, log_prob
            return "stop"
        sequence.ids.append(token)
        sequence.log_probs.append(log_prob)
        if self.on_token is not None:
            self.on_token(sequence.prompt, sequence.sample, sequence.ids)
        if self._has_stop_string(sequence.ids):
            return "stop"
        if len(sequence.ids) >= self.sampling.max_new_tokens or sequence.length >= self.limit:
            return "length"
        return None

    def _has_stop_string(self, ids: list[int]) -> bool:
        """Return True if the end of the reply `ids` has a stop string."""
        if not self.sampling.stop_strings:
            return False
        assert self.owner.decode_text is not None, "`generate` refuses stop strings without it"
        # A token has at least one byte, and a character at most four.
        tail = ids[-(4 * max(map(len, self.sampling.stop_strings)) + _STOP_CONTEXT) :]
        text = self.owner.decode_text(tail)
        return any(stop in text for stop in self.sampling.stop_strings)

    def _leave(self, index: int) -> _Sequence:
        """Take the sequence out of slot `index`, and move the last active one there."""
        last = self.active.pop()
        if index == len(self.active):
            return last
        self.cache.copy(len(self.active), index)
        sequence, self.active[index] = self.active[index], last
        return sequence

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, device=self.owner.device)


class _ConversationBatch(_Batch):
    """One sequence, which starts from the cache of its conversation."""

    def __init__(
        self,
        owner: BatchedDecoder,
        sampling: Sampling,
        sequence: _Sequence,
        limit: int,
        conversation: ConversationCache,
        on_token: OnToken | None,
    ) -> None:
        capacity = min(limit, sequence.length + sampling.max_new_tokens)
        if conversation.cache is not None:
            conversation.cache.grow(capacity)
        super().__init__(owner, sampling, deque([sequence]), limit, capacity, on_token, conversation.cache)
        self.conversation, conversation.cache = conversation, self.cache

    def _start_prompts(self) -> Iterator[Reply]:
        """Compute the tokens of the waiting sequence that the cache lacks, and draw the next one."""
        sequence, conversation = self.waiting.popleft(), self.conversation
        tokens = sequence.tokens
        start, stop = conversation.shared(tokens, self.switch), len(tokens)
        if not sequence.ids:  # only for the prompt: a change of rotations brings a sequence here again
            conversation.computed = stop - start
        conversation.begin_pass(start, stop)
        step = ExtendStep(0, start, stop) if start else PromptStep((PackedPrompt(0, stop, (0,)),))
        logits = self.owner.decoder(
            self._tensor([tokens[start:]]),
            position_ids=self._tensor([list(range(start, stop))]),
            head_positions=self._tensor([stop - start - 1]),
            cached=CachedTokens(self.cache, step),
        )
        self.active.append(sequence)
        yield from self._draw(logits, [sequence])

    def _extend(self) -> Iterator[Reply]:
        length = len(self.conversation.tokens)
        self.conversation.begin_pass(length, length + 1)
        yield from super()._extend()

    def _draw(self, logits: Tensor, sequences: list[_Sequence]) -> Iterator[Reply]:
        self.conversation.end_pass(sequences[0].tokens)
        yield from super()._draw(logits, sequences)
