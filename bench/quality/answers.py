"""Texts that a model writes with each cache type, judged by full precision.

All types continue the same text, drawing each token from their own distribution at temperature 1 with the same random
numbers, so their texts part where their distributions do. Each reads its own codes of its own tokens: errors may add up
there that a given text would hide. Full precision then reads each text once, and says how far its distributions are
from those that the tokens were drawn from. How likely it finds a text varies by the text more than by the type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from polarlm.bench.quality.divergence import Divergence, add_figures
from polarlm.bench.quality.states import exact_states, forward, score_of
from polarlm.bench.result import Result
from polarlm.engine.model.forward import Transformer
from polarlm.engine.params import SamplingParams
from polarlm.engine.sampling.sample import SamplerInput, resolve, sample
from polarlm.model_loaders.config import GenerationDefaults

OWN = "texts of its own"  # a subject
PROMPT, MOST = 128, 2000  # tokens that are continued, and of the longest text
_PIECE = 20  # tokens that errors are bootstrapped over, instead of windows
_AS_IS = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


class _Writer:
    """A model that continues a prompt, token by token."""

    def __init__(self, model: Transformer, prompt: Sequence[int]) -> None:
        self._model, self._prompt = model, len(prompt)
        self._sequence = model.store.new_sequence()
        self._sampling = resolve(_AS_IS, GenerationDefaults())
        self.ids, self._last = list(prompt), list(prompt)
        self._states: list[np.ndarray] = []  # that each token was drawn from, (E,)

    def add(self, uniform: float) -> None:
        """Draw the next token. uniform: a random number from [0, 1)."""
        model, store = self._model, self._model.store
        one = len(self._last) == 1
        span = store.open_step(self._sequence) if one else store.open(self._sequence, len(self._last))
        hidden = np.array(model.ops.to_host(forward(model, span, self._last)[-1:]))
        self._states.append(hidden[0])
        logits = model.logits(model.ops.to_device(hidden))[0]
        self._last = [sample(logits, SamplerInput(self._sampling, (), uniform, len(logits)))]
        self.ids += self._last

    def divergences(self, reference: Transformer) -> list[Divergence]:
        """The divergence from full precision of `reference`, of pieces of the text, which has a token at least."""
        first = self._prompt - 1
        ids, exact = self.ids[first:], exact_states(reference, self.ids)[first:]
        divergence = score_of(reference, exact, self._model, np.array(self._states), ids).divergence
        return [divergence[start : start + _PIECE] for start in range(0, len(ids) - 1, _PIECE)]

    def close(self) -> None:
        self._model.store.release(self._sequence)


class Answers:
    """The texts of several types, whose models share their weights with `reference`."""

    def __init__(self, reference: Transformer, models: Sequence[Transformer], prompt: Sequence[int]) -> None:
        self._reference = reference
        self._writers = [_Writer(model, prompt) for model in models]

    def write(self, tokens: int) -> Iterator[None]:
        """Let every type write so many tokens, in turn; yields after a token of each."""
        rng = np.random.default_rng(0)
        for _ in range(tokens):
            uniform = rng.random()
            for writer in self._writers:
                writer.add(uniform)
            yield

    def add_to(self, result: Result, names: Sequence[str]) -> None:
        """Add what full precision says of each type's text so far; errors are over pieces of 20 tokens."""
        for writer in self._writers:
            writer.close()
        for name, writer in zip(names, self._writers, strict=True):
            pieces = writer.divergences(self._reference)
            add_figures(result, OWN, name, pieces)
            result.add(OWN, name, "tokens", value=sum(len(piece.kl) for piece in pieces))
