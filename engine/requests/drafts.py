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
from statistics import median

from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.limits import DRAFT_MODEL, DRAFT_NAMES, DRAFT_ROWS, DRAFTS, HEADS, MTP
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.layers.mtp import MtpLayer
from polarlm.engine.params import SamplingParams
from polarlm.engine.requests.drafters.draft_model import ModelDrafter
from polarlm.engine.requests.drafters.drafter import Drafter, DraftTask
from polarlm.engine.requests.drafters.mtp import MtpDrafter
from polarlm.engine.requests.drafters.prompt_lookup import NGRAM, PromptLookup
from polarlm.engine.state.store import SequenceKV

_RECENT = 5  # latest steps with the same number of rows, whose median is taken
_FIRST = 2  # first steps of a number of rows, which are compiled or recorded: they are not measured
_STALE = 512  # steps after which a median expires: contexts grow, and requests end
_ROW = 0.15  # time that each row adds to a step, relative to a step of no row; used until steps are measured
_DECAY = 0.8  # factor on the counts of accepted tokens at each verified draft
_MARGIN = 1.02  # least speed-up for which a draft is made
_PAUSES = 8, 64  # tokens: the first pause of a drafter that does not pay, and the longest


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
        seconds = self._recent_seconds(rows)
        if seconds is not None:
            return seconds
        measured = [other for other in self._medians if self._recent_seconds(other) is not None]
        if not measured:
            return 1 + _ROW * rows
        closest, *others = sorted(measured, key=lambda other: abs(other - rows))[:2]
        seconds = self._medians[closest][0]
        row = (seconds - self._medians[others[0]][0]) / (closest - others[0]) if others else 0.0
        usual = seconds * _ROW / (1 + _ROW * closest)  # a lower bound: by noise, more rows may seem to take less time
        return seconds + (rows - closest) * max(row, usual)

    def _recent_seconds(self, rows: int) -> float | None:
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

    def task(self, ids: Sequence[int], room: int, plan: StepPlan) -> DraftTask | None:
        """Return the draft to make after `ids` for the step `plan`, of at most `room` tokens, and add it to `plan`;
        None if there is to be none."""
        if len(ids) < self._resumes or room < self._lengths[0] or not self._drafter.is_ready(ids):
            return None
        likely = self._right / self._tried
        length = self._best(room, plan, likely) or self._lengths[0]
        self._before.rows, self._before.tokens = plan.rows, plan.tokens
        plan.rows += length
        plan.tokens += _expected_tokens(length, likely)
        return DraftTask(self._drafter, ids, length)

    def cut(self, drafted: Sequence[int]) -> Sequence[int]:
        """Return as many of the drafted tokens as a draft may have."""
        return drafted[: next((length for length in reversed(self._lengths) if length <= len(drafted)), 0)]

    def record(self, ids: Sequence[int], drafted: int, accepted: int) -> None:
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
            rate = (plan.tokens + _expected_tokens(length, likely)) / self._seconds(plan.rows + length)
            if length <= room and rate > best_rate:
                best, best_rate = length, rate
        return best


def _expected_tokens(length: int, likely: float) -> float:
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
        kind = config.spec_type if params.spec_type is None else DRAFT_NAMES[params.spec_type]
        draft_max = config.draft_max if params.draft_max is None else params.draft_max
        if params.spec_type is None and kind == DRAFTS[0] and self.model is not None:
            kind = DRAFT_MODEL
        if kind == DRAFTS[0] or draft_max == 0 or (kind == DRAFT_MODEL and max(ids) >= self._vocabulary):
            return None  # a draft model reads no images
        return Drafts(self.drafter(kind, ids, kv), draft_max, self.seconds)

    def drafter(self, kind: str, ids: Sequence[int], kv: Callable[[], SequenceKV | None]) -> Drafter:
        """Return a drafter of `kind` for a request with the prompt `ids`. Raises EngineError as `drafts` does."""
        if kind in (MTP, *HEADS):
            if self._mtp is None or kind != self._config.spec_type:
                sentence = f"spec_type={kind} needs a layer that is not loaded: load the engine with spec_type={kind}"
                raise EngineError(sentence, settings=("spec_type",))
            return MtpDrafter(self._mtp, self._vocabulary, kv)
        if kind != DRAFT_MODEL:
            return PromptLookup(NGRAM, self._vocabulary, ids)
        if self.model is None:
            sentence = f"spec_type={kind} needs a draft model: load the engine with model_draft"
            raise EngineError(sentence, settings=("spec_type", "model_draft"))
        return ModelDrafter(self.model, self._vocabulary)
