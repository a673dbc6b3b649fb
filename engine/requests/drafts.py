"""Drafted tokens: guesses at the next tokens of a request, which one step verifies together.

A step computes the rows of the newest token and of the drafted ones, and each row draws the token after it as if all
drafted tokens before it were right. As long as what is drawn is what was drafted, the next row counts as well. The
answer is that of steps of one token: every row attends to what it would attend to there, and has the same draw.

Whether a draft pays is a matter of two numbers. A step of more rows takes longer: `StepSeconds` has measured how long.
And of a draft of d tokens, if each is right with probability p once those before it were, p + p² + … + p^d are right
on average. `Drafts` estimates p from what was accepted, and drafts the number of tokens that makes the most tokens a
second of the whole step, or none; then it tries the shortest draft again now and then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

from polarlm.engine.config import EngineConfig, SamplingParams
from polarlm.engine.errors import EngineError
from polarlm.engine.limits import DRAFT_ROWS
from polarlm.engine.model.forward import Transformer
from polarlm.engine.requests.draft_model import ModelDrafter

NONE, DRAFT_MODEL = "none", "draft-simple"

_RECENT = 5  # steps of the same rows, over which the median is taken
_FIRST = 2  # steps of new rows that are compiled or recorded, and not counted
_STALE = 512  # steps after which a median counts no longer: contexts grow, and requests end
_ROW = 0.15  # what a row more adds to a step that was never measured, in steps of no row
_DECAY = 0.8  # of what was accepted, from one verified draft to the next
_MARGIN = 1.02  # how much faster a step with a draft must be
_PAUSES = 8, 64  # tokens: the first pause of a drafter that does not pay, and the longest


class Drafter(Protocol):
    """Guesses the next tokens of one request. Called with all of its ids so far, which only grow."""

    def draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow `ids`."""

    def is_ready(self, ids: Sequence[int]) -> bool:
        """Whether there may be a draft after the token that follows `ids`; a step does not begin before it then."""

    def release(self) -> None:
        """Give up what the drafter holds besides memory of its own: the request ends, or waits."""


class PromptLookup:
    """Drafts what came after the last place where the newest `size` tokens stood before, in the prompt or the answer.

    The index has the place after every run of `size` tokens, so that a new token costs the same however long the
    sequence is. A draft that reaches the end of the sequence continues with itself, as a repetition would.
    """

    def __init__(self, size: int, vocabulary: int, ids: Sequence[int] = ()) -> None:
        """vocabulary: the number of ids. ids: the prompt, whose reading takes a loop over it."""
        self._size, self._vocabulary = size, vocabulary
        self._modulus = vocabulary**size
        self._read = 0  # ids in the index
        self._run = 0  # the newest ids, as digits of one number
        self._places: dict[int, int] = {}  # a run of ids → the place after it
        self._found: int | None = None  # the place after the last run that equals the newest ids
        self.read(ids)

    def read(self, ids: Sequence[int]) -> None:
        """Take the new ones of `ids` into the index."""
        run, places, found = self._run, self._places, self._found
        for place in range(self._read, len(ids)):
            run = (run * self._vocabulary + ids[place]) % self._modulus
            if place + 1 >= self._size:
                found = places.get(run)
                places[run] = place + 1
        self._read, self._run, self._found = len(ids), run, found

    def draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
        self.read(ids)
        if self._found is None:
            return ()
        given = ids[self._found : self._found + most]
        while len(given) < most:
            given = [*given, *given][:most]
        return given

    def is_ready(self, ids: Sequence[int]) -> bool:
        """Whether the newest ids stood somewhere before: otherwise a repetition begins with the next one at best."""
        self.read(ids)
        return self._found is not None

    def release(self) -> None:
        pass


class StepSeconds:
    """How long steps take, by their number of rows: the median of the last ones.

    Of rows that were not measured lately, it is a guess from the two that are closest in number.
    """

    def __init__(self) -> None:
        self._count = 0
        self._first: dict[int, int] = {}  # rows → steps so far, of those that are not counted
        self._recent: dict[int, deque[float]] = {}
        self._known: dict[int, tuple[float, int]] = {}  # rows → the median, and the number of the last step

    def record(self, rows: int, seconds: float) -> None:
        """Record a step of that many rows, of all requests together."""
        self._count += 1
        if (first := self._first.get(rows, 0)) < _FIRST:
            self._first[rows] = first + 1
            return
        recent = self._recent.setdefault(rows, deque(maxlen=_RECENT))
        recent.append(seconds)
        self._known[rows] = median(recent), self._count

    def __call__(self, rows: int) -> float:
        """Seconds of a step of `rows` rows; if none was measured, in steps of no row."""
        known = self._lately(rows)
        if known is not None:
            return known
        measured = [other for other in self._known if self._lately(other) is not None]
        if not measured:
            return 1 + _ROW * rows
        closest, *others = sorted(measured, key=lambda other: abs(other - rows))[:2]
        seconds = self._known[closest][0]
        row = (seconds - self._known[others[0]][0]) / (closest - others[0]) if others else 0.0
        usual = seconds * _ROW / (1 + _ROW * closest)  # also where noise says that more rows take less
        return seconds + (rows - closest) * max(row, usual)

    def _lately(self, rows: int) -> float | None:
        seconds, number = self._known.get(rows, (0.0, -_STALE))
        return seconds if self._count - number < _STALE else None


class Batch:
    """What is known of a step before a request drafts for it: its rows, and the tokens that it is expected to give."""

    def __init__(self, requests: int) -> None:
        """A step of as many requests, one row each."""
        self.rows: int = requests
        self.tokens: float = requests


class Drafts:
    """The drafts of one request. drafted, accepted: tokens so far.

    A draft has one token fewer than one of `DRAFT_ROWS`, or `most`, but no fewer than `least`. A request begins as if
    one of two tokens had been right, so that its first drafts are short. Where no length pays, drafts pause, and for
    twice as many tokens each time; the shortest is tried after each pause, and again as long as all of it is right.
    """

    def __init__(self, drafter: Drafter, most: int, least: int, seconds: Callable[[int], float]) -> None:
        """1 ≤ most; least ≤ most. seconds: of a step, by its rows."""
        self._drafter, self._seconds = drafter, seconds
        self._lengths = sorted({rows - 1 for rows in DRAFT_ROWS if least <= rows - 1 <= most} | {most})
        self._right, self._tried = 1.0, 2.0  # of tokens after right ones, which decay: those that were right, and all
        self._pause = _PAUSES[0]
        self._resumes = 0  # tokens of the sequence with which drafts continue
        self._before = Batch(1)  # the step of the last draft, without it
        self.drafted = self.accepted = 0

    def is_ready(self, ids: Sequence[int]) -> bool:
        """Whether there may be a draft after the token that follows `ids`."""
        return len(ids) + 1 >= self._resumes and self._drafter.is_ready(ids)

    def draft(self, ids: Sequence[int], room: int, batch: Batch) -> Sequence[int]:
        """Tokens to verify after `ids`, at most `room`, in the step of `batch`, to which they are added."""
        if len(ids) < self._resumes or room < self._lengths[0]:
            return ()
        likely = self._right / self._tried
        wanted = self._best(room, batch, likely) or self._lengths[0]
        given = self._drafter.draft(ids, wanted)
        length = next((length for length in reversed(self._lengths) if length <= len(given)), 0)
        if not length:
            return ()
        self._before.rows, self._before.tokens = batch.rows, batch.tokens
        batch.rows += length
        batch.tokens += _expected(length, likely)
        return given[:length]

    def verified(self, ids: Sequence[int], drafted: int, accepted: int) -> None:
        """Take note that of the last draft, of `drafted` tokens, the first `accepted` were right. ids: now."""
        self.drafted += drafted
        self.accepted += accepted
        self._right = _DECAY * self._right + accepted
        self._tried = _DECAY * self._tried + min(accepted + 1, drafted)
        likely = 1.0 if accepted == drafted else self._right / self._tried
        if self._best(self._lengths[-1], self._before, likely):
            self._pause = _PAUSES[0]
        else:
            self._resumes = len(ids) + self._pause
            self._pause = min(2 * self._pause, _PAUSES[1])

    def release(self) -> None:
        """Give up what the drafter holds: the request ends, or waits."""
        self._drafter.release()

    def _best(self, room: int, batch: Batch, likely: float) -> int:
        """The length that gives the most tokens a second of `batch`, which is without it; 0 if none pays."""
        best, most = 0, _MARGIN * batch.tokens / self._seconds(batch.rows)
        for length in self._lengths:
            rate = (batch.tokens + _expected(length, likely)) / self._seconds(batch.rows + length)
            if length <= room and rate > most:
                best, most = length, rate
        return best


def _expected(length: int, likely: float) -> float:
    """How many tokens of a draft are right on average, if each is right that often after right ones."""
    return length if likely >= 1 else likely * (1 - likely**length) / (1 - likely)


class Drafting:
    """Makes the drafts of an engine's requests, which share what is known about the time of steps."""

    def __init__(self, config: EngineConfig, vocabulary: int, model: Transformer | None = None) -> None:
        """vocabulary: the number of ids. model: the draft model, if there is one."""
        self._config, self._vocabulary, self._model = config, vocabulary, model
        self.seconds = StepSeconds()

    def drafts(self, ids: Sequence[int], params: SamplingParams) -> Drafts | None:
        """The drafts of a request with the prompt `ids`; None where it is to have none.

        Raises EngineError if it is to have those of a draft model, and there is none.
        """
        config = self._config
        kind = config.spec_type if params.spec_type is None else params.spec_type
        most = config.draft_max if params.draft_max is None else params.draft_max
        least = config.draft_min if params.draft_min is None else params.draft_min
        if params.spec_type is None and kind == NONE and self._model is not None:
            kind = DRAFT_MODEL
        if kind == NONE or most == 0:
            return None
        return Drafts(self.drafter(kind, ids), most, min(least, most), self.seconds)

    def drafter(self, kind: str, ids: Sequence[int]) -> Drafter:
        """The drafter of a kind, for a request with the prompt `ids`. Raises EngineError as `drafts` does."""
        if kind != DRAFT_MODEL:
            return PromptLookup(self._config.spec_ngram_size_n, self._vocabulary, ids)
        if self._model is None:
            sentence = f"spec_type={kind} needs a draft model: load the engine with model_draft"
            raise EngineError(sentence, settings=("spec_type", "model_draft"))
        return ModelDrafter(self._model, self._vocabulary)
