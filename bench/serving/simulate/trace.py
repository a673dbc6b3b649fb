"""Random loads with a seed: conversations of people and agents, with shared system prompts, turns and pauses."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from polarlm.engine import EngineError

_LEAST, _MOST = 4, 16384  # least and most tokens of a message


@dataclass(frozen=True)
class Lognormal:
    """A log-normal distribution, given by its median and the standard deviation of its logarithm."""

    median: float
    sigma: float

    def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
        return self.median * np.exp(self.sigma * rng.standard_normal(size))

    @property
    def mean(self) -> float:
        return float(self.median * np.exp(self.sigma**2 / 2))


@dataclass(frozen=True)
class Kind:
    """A kind of conversation. Messages are in tokens; pauses are seconds from an answer's end to the next turn."""

    systems: int  # number of system prompts, whose use follows Zipf's law
    system: Lognormal
    opening: Lognormal  # the first message
    message: Lognormal  # later ones
    answer: Lognormal
    turns: float  # mean number of turns, geometrically distributed
    pause: Lognormal
    away: float  # share of long pauses
    away_seconds: float  # mean of long pauses, exponentially distributed


CHAT = Kind(
    systems=50,
    system=Lognormal(800, 0.7),
    opening=Lognormal(60, 1.2),
    message=Lognormal(60, 1.2),
    answer=Lognormal(150, 0.9),
    turns=3.5,
    pause=Lognormal(30, 1.0),
    away=0.05,
    away_seconds=600,
)
AGENT = Kind(
    systems=10,
    system=Lognormal(6000, 0.4),
    opening=Lognormal(2000, 0.8),
    message=Lognormal(400, 1.2),
    answer=Lognormal(120, 0.8),
    turns=15,
    pause=Lognormal(4, 1.0),
    away=0.1,
    away_seconds=300,
)


_ROWS = 1_000_000  # turns to draw at a time
_PILOT = 2000  # conversations from which the mean number of turns is estimated


@dataclass(frozen=True)
class Trace:
    """Conversations in the order of their first turns. Turns of conversation c are first[c] to first[c + 1] - 1."""

    begins: np.ndarray  # of each conversation: time of the first turn, seconds
    system: np.ndarray  # of each conversation: index of the system prompt
    history: np.ndarray  # of each conversation: tokens of earlier turns, without the system prompt
    first: np.ndarray
    prompt: np.ndarray  # of each turn: new tokens, without the conversation so far
    answer: np.ndarray  # of each turn: tokens
    pause: np.ndarray  # of each turn: seconds since the previous answer; not for the first turn
    system_tokens: np.ndarray  # of each system prompt

    @property
    def requests(self) -> int:
        """The most requests: a turn is none if the previous answer ends after the simulation."""
        return len(self.prompt)


def make(
    rate: float, begin: float, end: float, agents: float, context: int, seed: int, before: float = 1200.0
) -> Trace:
    """A trace with about `rate` requests per second from `begin` to `end`.

    agents: share of the requests that are agents'. context: a conversation ends before it has more tokens. before:
    conversations that started up to this many seconds before `begin` have a history then; their answers until then are
    assumed to take no time. Raises EngineError if there is no request.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for kind, part, base in ((CHAT, 1 - agents, 0), (AGENT, agents, CHAT.systems)):
        pilot = _conversations(kind, np.zeros(_PILOT), context, base, rng)
        turns_mean = pilot[2].mean()  # less than kind.turns, since the context limits some
        windows = max(1, round(rate * part * (before + end - begin) / _ROWS))
        edges = np.linspace(begin - before, end, windows + 1)
        for left, right in pairwise(edges):
            count = rng.poisson(rate * part / turns_mean * (right - left))
            if count:
                drawn = _conversations(kind, rng.uniform(left, right, count), context, base, rng)
                parts.append(_within(begin, end, *drawn))
    if not parts:
        raise EngineError("--rate and --load: no request arrives in that time; choose more of them, or more --seconds")
    begins, system, history, turns, *columns = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    order = np.argsort(begins, kind="stable")
    starts = np.cumsum(turns) - turns
    first = np.concatenate([[0], np.cumsum(turns[order])])
    rows = np.arange(first[-1]) + np.repeat(starts[order] - first[:-1], turns[order])
    prompt, answer, pause = (column[rows] for column in columns)
    tokens = np.concatenate([kind.system.draw(rng, kind.systems) for kind in (CHAT, AGENT)]).astype(int)
    return Trace(begins[order], system[order], history[order], first, prompt, answer, pause, tokens)


def _conversations(
    kind: Kind, begins: np.ndarray, context: int, base: int, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Random (begins, system, turns, prompt, answer, pause) for conversations of one kind."""
    count = len(begins)
    weights = 1 / np.arange(1, kind.systems + 1)
    system = base + rng.choice(kind.systems, count, p=weights / weights.sum())
    turns = rng.geometric(1 / kind.turns, count)
    owner, number = _owners(turns)
    rows = len(owner)
    prompt = np.where(number == 0, kind.opening.draw(rng, rows), kind.message.draw(rng, rows))
    prompt = np.clip(prompt, _LEAST, min(_MOST, context // 2)).astype(int)
    answer = np.clip(kind.answer.draw(rng, rows), _LEAST, min(_MOST, context // 4)).astype(int)
    away = rng.random(rows) < kind.away
    pause = np.where(away, rng.exponential(kind.away_seconds, rows), kind.pause.draw(rng, rows))
    pause[number == 0] = 0
    room = context - kind.system.median * np.exp(3 * kind.system.sigma)
    fits = (_sums(prompt + answer, turns) <= room) | (number == 0)
    kept = np.bincount(owner[fits], minlength=count)
    return begins, system, kept, prompt[fits], answer[fits], pause[fits]


def _within(
    begin: float, end: float,
    begins: np.ndarray, system: np.ndarray, turns: np.ndarray, prompt: np.ndarray, answer: np.ndarray,
    pause: np.ndarray,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """(begins, system, history, turns, prompt, answer, pause) of conversations, with their turns from `begin` to `end`
    only."""
    owner, _ = _owners(turns)
    times = begins[owner] + _sums(pause, turns)
    kept = (times >= begin) & (times < end)
    history = np.bincount(owner[times < begin], (prompt + answer)[times < begin], len(begins)).astype(int)
    left = np.bincount(owner[kept], minlength=len(begins))
    some = left > 0
    firsts = times[kept][(np.cumsum(left) - left)[some]]
    return firsts, system[some], history[some], left[some], prompt[kept], answer[kept], pause[kept]


def _owners(turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row, that is each turn: the index of its conversation, and its number within it."""
    owner = np.repeat(np.arange(len(turns)), turns)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(turns) - turns, turns)


def _sums(values: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """For each row: the sum of its conversation's values up to and including it."""
    total = np.cumsum(values)
    starts = np.cumsum(turns) - turns
    return total - np.repeat((total - values)[starts], turns)
