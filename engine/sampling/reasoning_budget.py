"""Ends an answer's reasoning after a number of tokens, with the text with which the model's template closes reasoning.

Reasoning ends behind the first sentence of the budget's last eighth, at the latest where the budget is used up. The
closing text is forced token by token, which takes no step of its own; what follows is free again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.engine.sampling.constraints import WORD, Constraint, mask_words
from polarlm.engine.sampling.detokenizer import Detokenizer
from polarlm.model_loaders import Model

_LAST_PART = 8  # of the budget, in which a sentence's end is the reasoning's end
_SENTENCE_ENDS = (".", "!", "?", "。", "！", "？", "\n")
_EFFORTS = {"minimal": 256, "low": 1024, "medium": 4096}  # budgets for templates that know no effort; others have none


@dataclass(frozen=True)
class ReasoningEdges:
    """The text that opens reasoning, the text that tells its end, and the texts that close it: the first one, then the
    last one if reasoning opens again. repeats: whether an answer may have several parts of reasoning."""

    open: str
    close: str
    closings: Sequence[str]
    repeats: bool = False

    @classmethod
    def from_template(cls, model: Model, *, calls_tools: bool) -> ReasoningEdges | None:
        """Those of a model's template; None if it knows no reasoning. Raises LoadError."""
        channels, tags = model.template.channels, model.template.tags
        if channels is not None:
            answer = f"{channels.message_separator}{channels.header(channels.final)}"
            first = channels.message_separator if calls_tools else answer  # a call has a header of its own
            return cls(channels.header(channels.reasoning), channels.end, (first, answer), repeats=True)
        return None if tags is None else cls(tags.open, tags.close, (model.template.reasoning_ending,))


def budget_of(model: Model, budget: int, effort: object) -> int:
    """The tokens of reasoning that a request allows; -1 for any number. effort: which stands for a budget where the
    model's template does not know it. Raises LoadError."""
    if budget >= 0 or effort not in _EFFORTS or model.template.has_effort:
        return budget
    return _EFFORTS[str(effort)]


class ReasoningBudget:
    """The constraint of a request whose reasoning has a budget, around another constraint or none."""

    def __init__(
        self, budget: int, edges: ReasoningEdges, model: Model, constraint: Constraint | None, *, is_open: bool
    ) -> None:
        """budget: tokens. is_open: whether the prompt opens the reasoning."""
        tokenizer = model.tokenizer
        control = [token for name, token in tokenizer.control_tokens().items() if name in "".join(edges.closings)]
        control += [token for name, token in tokenizer.control_tokens().items() if name in edges.open]
        self._edges, self._constraint, self._words = edges, constraint, mask_words(model.vocabulary.stop)
        self._left, self._last_part = budget, budget // _LAST_PART  # tokens
        self._closings = [tokenizer.tokenize(text, control=True, continued=True) for text in edges.closings]
        self._detokenizer = Detokenizer(tokenizer, at_start=not is_open, shown_tokens=control)
        self._text = ""  # the answer since the last edge of reasoning
        self._is_open, self._is_over = is_open, False  # whether reasoning is open, and whether none can follow
        self._forced: list[int] = []  # tokens of the closing text that are left
        self._close_if_used_up()

    def allowed(self) -> np.ndarray | None:
        others = None if self._constraint is None else self._constraint.allowed()
        if not self._forced:
            return others
        mask = np.zeros(self._words, np.uint32)
        mask[self._forced[0] // WORD] = 1 << self._forced[0] % WORD
        if others is None or (mask & others).any():
            return mask
        # A character may have to end first, and an answer that must be a call has no other header.
        if len(self._forced) < len(self._closings[0]):
            self._end()
        self._forced.clear()
        return others

    @property
    def finished(self) -> bool:
        return self._constraint is not None and self._constraint.finished

    def accept(self, token: int) -> None:
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._is_over:
            return
        self._text += self._detokenizer.push([token])
        if self._forced:
            self._forced.pop(0)
            if not self._forced:
                self._closings = self._closings[-1:]
                self._end()
        elif self._is_open:
            self._left -= 1
            if self._edges.close in self._text:
                self._end()
            else:
                self._close_if_used_up()
        else:
            self._open_if_begun()

    def _open_if_begun(self) -> None:
        if self._edges.open in self._text:
            self._is_open, self._text = True, self._text.partition(self._edges.open)[2]
            self._close_if_used_up()
        elif not self._edges.repeats:  # reasoning is what the answer begins with
            self._is_over = not self._edges.open.startswith(self._text.lstrip())

    def _close_if_used_up(self) -> None:
        ends = self._left < self._last_part and self._text.endswith(_SENTENCE_ENDS)
        if self._is_open and (self._left <= 0 or ends):
            self._forced, self._left = [*self._closings[0]], 0

    def _end(self) -> None:
        self._is_open, self._text, self._is_over = False, "", not self._edges.repeats
