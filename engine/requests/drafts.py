"""Drafted tokens: guesses at the next tokens of a request, which one step verifies together.

A step computes the rows of the newest token and of the drafted ones. Each row samples the token after it as if all
drafted tokens before it were right, and rows are accepted up to the first that samples another token than the drafted
one. Each row attends to the same keys and values and uses the same random number as in a step of its own.

`StepSeconds` measures how long a step of more rows takes. With p, the probability that a drafted token is right after
right ones, p + p² + … + p^d tokens of a draft of d tokens are right on average. `Drafts` estimates p and chooses the
length that gives the whole step the most tokens per second. While no length pays, it tries the shortest now and then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from statistics import median
from typing import Protocol

from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.limits import DRAFT_MODEL, DRAFT_ROWS, DRAFTS, MOST_DRAFTED, MTP
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.layers.mtp import MtpLayer
from polarlm.engine.params import SamplingParams
from polarlm.engine.sampling.sample import Sampled, greedy
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.store import SequenceKV

_RECENT = 5  # latest steps with the same number of rows, whose median is taken
_FIRST = 2  # first steps of a number of rows, which are compiled or recorded: they are not measured
_STALE = 512  # steps after which a median expires: contexts grow, and requests end
_ROW = 0.15  # time that each row adds to a step, relative to a step of no row; used until steps are measured
_DECAY = 0.8  # factor on the counts of accepted tokens at each verified draft
_MARGIN = 1.02  # least speed-up for which a draft is made
NGRAM = 4  # newest tokens that ngram-simple looks for
_PAUSES = 8, 64  # tokens: the first pause of a drafter that does not pay, and the longest


class Drafter(Protocol):
    """Guesses the next tokens of one request. Each call gets all of the request's ids so far."""

    def draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
        """Return up to `most` tokens that may follow `ids`."""

    def is_ready(self, ids: Sequence[int]) -> bool:
        """Whether a draft may follow the token that follows `ids`. If so, the next step waits for that token."""
        return True

    def release(self) -> None:
        """Free blocks of shared stores, if it holds any: the request ends, or waits."""
        return


class PromptLookup(Drafter):
    """Drafts the tokens that followed the latest earlier occurrence of the newest `size` tokens in the sequence; a
    draft that reaches its end repeats itself. An index maps each n-gram to the position after it."""

    def __init__(self, size: int, vocabulary: int, ids: Sequence[int] = ()) -> None:
        """vocabulary: the number of ids. ids: the prompt, which is indexed here."""
        self._size, self._vocabulary = size, vocabulary
        self._modulus = vocabulary**size
        self._read = 0  # number of indexed ids
        self._run = 0  # the newest n-gram: its ids are the digits of a number in base `vocabulary`
        self._places: dict[int, int] = {}  # n-gram → the position after its latest occurrence
        self._earlier: int | None = None  # the position after the previous occurrence of the newest n-gram
        self.read(ids)

    def read(self, ids: Sequence[int]) -> None:
        """Index the new ones of `ids`."""
        run, places, earlier = self._run, self._places, self._earlier
        for place in range(self._read, len(ids)):
            run = (run * self._vocabulary + ids[place]) % self._modulus
            if place + 1 >= self._size:
                earlier = places.get(run)
                places[run] = place + 1
        self._read, self._run, self._earlier = len(ids), run, earlier

    def draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
        self.read(ids)
        if self._earlier is None:
            return ()
        following = ids[self._earlier : self._earlier + most]
        while len(following) < most:
            following = [*following, *following][:most]
        return [*takewhile(lambda token: token < self._vocabulary, following)]  # rows of images are no tokens

    def is_ready(self, ids: Sequence[int]) -> bool:
        self.read(ids)
        return self._earlier is not None


class MtpDrafter(Drafter):
    """Drafts the most likely tokens of one request; none after a pause, until a step has computed a hidden state.

    Its rows are in a span that is aborted: the step that verifies them opens another one, at the same place.
    """

    def __init__(self, layer: MtpLayer, vocabulary: int, kv: Callable[[], SequenceKV | None]) -> None:
        """vocabulary: the number of ids. kv: returns the request's sequence in the engine's store, if it has one."""
        self._layer, self._vocabulary, self._kv = layer, vocabulary, kv

    def draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
        kv, guesses = self._kv(), list[int]()
        if kv is None or kv.hidden is None or kv.length != len(ids) - 1:
            return ()
        hidden = kv.hidden
        try:
            span = self._layer.store.open_step(kv, most)
        except OutOfBlocks:
            return ()
        try:
            while len(guesses) < most:
                row = span.part(len(guesses), 1)
                token, hidden = self._layer.draft(row, guesses[-1] if guesses else ids[-1], hidden)
                if not isinstance(token, int):  # it is an error, which the model's own row has too if it is the model's
                    break
                if token >= self._vocabulary:  # the head may have rows that are no tokens
                    break
                guesses.append(token)
        finally:
            self._layer.store.abort(span)
        return guesses


class ModelDrafter(Drafter):
    """Drafts the most likely tokens of one request, each by a step of a second, smaller model; none if its store has no
    room.

    K/V of rejected tokens are discarded before the next draft; they are all in the current block, where a draft ends.
    Layers with a window may then attend to as many tokens fewer: a draft may be worse, but the answer stays the same.
    """

    def __init__(self, model: Transformer, vocabulary: int) -> None:
        """model: the draft model, which all requests share. vocabulary: the number of ids."""
        self._model, self._store = model, model.store
        self._sampler_input = greedy(vocabulary)
        self._kv: SequenceKV | None = None
        self._stored: list[int] = []  # the ids whose K/V are stored

    def draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
        try:
            kv = self._common(ids)
            guesses: list[int] = []
            token = self._compute(kv, ids[kv.length :])
            while isinstance(token, int):
                guesses.append(token)
                if len(guesses) == most:
                    break
                token = self._compute(kv, [token])
        except OutOfBlocks:
            self.release()
            return ()
        return guesses

    def release(self) -> None:
        if self._kv is not None:
            self._store.release(self._kv)
        self._kv, self._stored = None, []

    def _common(self, ids: Sequence[int]) -> SequenceKV:
        """Return the K/V of the longest stored prefix of `ids[:-1]`, and discard the K/V of other tokens."""
        stored, same = self._stored, max(0, len(self._stored) - MOST_DRAFTED)  # earlier tokens were verified
        while same < min(len(stored), len(ids) - 1) and stored[same] == ids[same]:
            same += 1
        if self._kv is not None and same < len(stored):
            if same < self._store.first_of_block(self._kv):
                self.release()
            else:
                self._store.truncate(self._kv, same)
                del stored[same:]
        if self._kv is None:
            self._kv = self._store.new_sequence()
        return self._kv

    def _compute(self, kv: SequenceKV, ids: Sequence[int]) -> Sampled:
        """Compute the rows of `ids`, which follow `kv`, and return the most likely next token. Raises OutOfBlocks."""
        if len(ids) > MOST_DRAFTED:
            span = self._store.open(kv, len(ids) - 1)
            with self._store.abort_on_error([span]):
                self._model.forward([span], ids[:-1], outputs=1)
                self._store.commit(span)
            self._stored += ids[:-1]
            ids = ids[-1:]
        sampled: Sampled = -1
        while ids:
            room = min(len(ids), self._store.rows_of_block(kv))
            now = ids[: max(rows for rows in (1, *DRAFT_ROWS) if rows <= room)]  # those that have kernels
            span = self._store.open_step(kv, len(now))
            with self._store.abort_on_error([span]):
                *_, sampled = self._model.step([span], now, [self._sampler_input] * len(now))
                self._store.commit(span)
            self._stored += now
            ids = ids[len(now) :]
        return sampled


class StepSeconds:
    """The seconds that a step takes by its number of rows: the median of recent steps, or extrapolated from the two
    closest numbers of rows that were measured recently."""

    def __init__(self) -> None:
        self._count = 0
        self._first: dict[int, int] = {}  # rows → steps so far that were not measured
        self._recent: dict[int, deque[float]] = {}
        self._medians: dict[int, tuple[float, int]] = {}  # rows → the median, and the count of steps at its last update

    def record(self, rows: int, seconds: float) -> None:
        """Record a step of `rows` rows, summed over its requests."""
        self._count += 1
        if (first := self._first.get(rows, 0)) < _FIRST:
            self._first[rows] = first + 1
            return
        recent = self._recent.setdefault(rows, deque(maxlen=_RECENT))
        recent.append(seconds)
        self._medians[rows] = median(recent), self._count

    def __call__(self, rows: int) -> float:
        """Return the seconds of a step of `rows` rows; while nothing is measured, in multiples of a step of no row."""
        seconds = self._lately(rows)
        if seconds is not None:
            return seconds
        measured = [other for other in self._medians if self._lately(other) is not None]
        if not measured:
            return 1 + _ROW * rows
        closest, *others = sorted(measured, key=lambda other: abs(other - rows))[:2]
        seconds = self._medians[closest][0]
        row = (seconds - self._medians[others[0]][0]) / (closest - others[0]) if others else 0.0
        usual = seconds * _ROW / (1 + _ROW * closest)  # a lower bound: by noise, more rows may seem to take less time
        return seconds + (rows - closest) * max(row, usual)

    def _lately(self, rows: int) -> float | None:
        seconds, number = self._medians.get(rows, (0.0, -_STALE))
        return seconds if self._count - number < _STALE else None


class StepPlan:
    """A step that is being planned: its rows, and the tokens that it is expected to give, with the drafts so far."""

    def __init__(self, requests: int) -> None:
        """requests: their number; each has one row, and gives one token."""
        self.rows: int = requests
        self.tokens: float = requests


class Drafts:
    """The drafts of one request. drafted, accepted: tokens so far.

    A draft has `most` tokens, or one fewer than a number in `DRAFT_ROWS`. p starts at 1/2, so that first drafts are
    short. While no length pays, drafts pause, for twice as many tokens each time; then the shortest is tried, again as
    long as it is right.
    """

    def __init__(self, drafter: Drafter, most: int, seconds: Callable[[int], float]) -> None:
        """1 ≤ most. seconds: rows of a step → its time."""
        self._drafter, self._seconds = drafter, seconds
        self._lengths = sorted({rows - 1 for rows in DRAFT_ROWS if 0 < rows - 1 <= most} | {most})
        self._right, self._tried = 1.0, 2.0  # decaying counts of drafted tokens after right ones: right ones, and all
        self._pause = _PAUSES[0]
        self._resumes = 0  # length of the sequence at which drafts resume
        self._before = StepPlan(1)  # the last draft's step, without that draft
        self.drafted = self.accepted = 0

    def is_ready(self, ids: Sequence[int]) -> bool:
        """Whether there may be a draft after the token that follows `ids`."""
        return len(ids) + 1 >= self._resumes and self._drafter.is_ready(ids)

    def draft(self, ids: Sequence[int], room: int, plan: StepPlan) -> Sequence[int]:
        """Return tokens to verify after `ids` in the step `plan`, at most `room`, and add them to `plan`."""
        if len(ids) < self._resumes or room < self._lengths[0]:
            return ()
        likely = self._right / self._tried
        length_wanted = self._best(room, plan, likely) or self._lengths[0]
        drafted = self._drafter.draft(ids, length_wanted)
        length = next((length for length in reversed(self._lengths) if length <= len(drafted)), 0)
        if not length:
            return ()
        self._before.rows, self._before.tokens = plan.rows, plan.tokens
        plan.rows += length
        plan.tokens += _expected(length, likely)
        return drafted[:length]

    def verified(self, ids: Sequence[int], drafted: int, accepted: int) -> None:
        """Record that the first `accepted` of the last draft's `drafted` tokens were right. ids: those after it."""
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
        """Free the drafter's blocks: the request ends, or waits."""
        self._drafter.release()

    def _best(self, room: int, plan: StepPlan, likely: float) -> int:
        """Return the length of a draft with which `plan` gives the most tokens per second; 0 if none pays."""
        best, best_rate = 0, _MARGIN * plan.tokens / self._seconds(plan.rows)
        for length in self._lengths:
            rate = (plan.tokens + _expected(length, likely)) / self._seconds(plan.rows + length)
            if length <= room and rate > best_rate:
                best, best_rate = length, rate
        return best


def _expected(length: int, likely: float) -> float:
    """Return how many tokens of a draft are right on average: each with probability `likely` after right ones."""
    return length if likely >= 1 else likely * (1 - likely**length) / (1 - likely)


class Drafting:
    """Makes the drafts of an engine's requests, which share the measured times of steps."""

    def __init__(
        self,
        config: EngineConfig,
        vocabulary: int,
        model: Transformer | None = None,
        mtp: MtpLayer | None = None,
    ) -> None:
        """vocabulary: the number of ids. model: the draft model, if there is one. mtp: the layer of the engine's model
        that drafts, if it is loaded."""
        self._config, self._vocabulary, self.model, self._mtp = config, vocabulary, model, mtp
        self.seconds = StepSeconds()

    def drafts(self, ids: Sequence[int], params: SamplingParams, kv: Callable[[], SequenceKV | None]) -> Drafts | None:
        """Return the drafts of a request with the prompt `ids`; None if it has none. kv: returns its sequence in the
        engine's store, if it has one. Raises EngineError if the request asks for what is not loaded."""
        config = self._config
        kind = config.spec_type if params.spec_type is None else params.spec_type
        draft_max = config.draft_max if params.draft_max is None else params.draft_max
        if params.spec_type is None and kind == DRAFTS[0] and self.model is not None:
            kind = DRAFT_MODEL
        if kind == DRAFTS[0] or draft_max == 0 or (kind == DRAFT_MODEL and max(ids) >= self._vocabulary):
            return None  # a draft model reads no images
        return Drafts(self.drafter(kind, ids, kv), draft_max, self.seconds)

    def drafter(self, kind: str, ids: Sequence[int], kv: Callable[[], SequenceKV | None]) -> Drafter:
        """Return a drafter of `kind` for a request with the prompt `ids`. Raises EngineError as `drafts` does."""
        if kind == MTP:
            if self._mtp is None:
                sentence = f"spec_type={MTP} needs a layer that is not loaded: load the engine with spec_type={MTP}"
                raise EngineError(sentence, settings=("spec_type",))
            return MtpDrafter(self._mtp, self._vocabulary, kv)
        if kind != DRAFT_MODEL:
            return PromptLookup(NGRAM, self._vocabulary, ids)
        if self.model is None:
            sentence = f"spec_type={kind} needs a draft model: load the engine with model_draft"
            raise EngineError(sentence, settings=("spec_type", "model_draft"))
        return ModelDrafter(self.model, self._vocabulary)
