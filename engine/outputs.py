"""Results of the engine: chunks, completions, usage, scores, status."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np

# Bounds of histograms in seconds: from a token on a GPU to an answer of a thousand tokens on a laptop.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)


class Reread(NamedTuple):
    """Tokens of a prompt that were computed again, although an earlier prompt has them, too, and why."""

    tokens: int  # how many, about
    cached: int  # tokens before them, which were found in the KV store
    places: tuple[str, ...] = ()  # what differs from the earlier prompt; nothing: the store had lost what was read
    before: str = ""  # words of the earlier prompt, from before it parts
    now: str = ""  # words of this one, likewise

    def __str__(self) -> str:
        why = f"other than before: {', '.join(self.places)}" if self.places else "the store had lost them"
        return f"{self.tokens:,} prompt tokens read again ({why})"


@dataclass(frozen=True)
class Usage:
    """Tokens and seconds of a request. Seconds are computing time, but for those in the queue, which do not count."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were found in the KV store
    completion_tokens: int
    prefill_seconds: float  # up to the logits of the first token
    generation_seconds: float  # in later steps that produced a token
    drafted_tokens: int = 0  # drafted tokens that steps verified
    accepted_tokens: int = 0  # drafted tokens that became part of the answer
    # Source → cached tokens: "store", the KV store, or the tier that they were restored from: "ram", "disk", "remote".
    # Their sum is `cached_tokens`.
    cached_from: Mapping[str, int] = field(default_factory=dict)
    queue_seconds: float = 0.0  # from the request to the first unit of its prompt
    reasoning_tokens: int = 0  # of a server's answer: completion tokens that are reasoning
    reread: Reread | None = None  # of a server's answer: why much of the prompt was read again
    replay_digest: str = (
        ""  # of `replayable` engines: of what answers, the prompt's ids, the answer's, and its logprobs
    )

    @property
    def from_tiers(self) -> Mapping[str, int]:
        """`cached_from` without the KV store."""
        return {place: tokens for place, tokens in self.cached_from.items() if place != "store"}

    @property
    def prompt_rate(self) -> float:
        """Prefilled tokens per second."""
        return (self.prompt_tokens - self.cached_tokens) / max(self.prefill_seconds, 1e-9)

    @property
    def generation_rate(self) -> float:
        """Tokens per second of steps; the first token is the prefill's."""
        return max(0, self.completion_tokens - 1) / max(self.generation_seconds, 1e-9)


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a generated token, and of the most likely tokens at its position, in nats.

    It is the log-softmax of the model's logits over the vocabulary, before bias, penalties, temperature, top-k, top-p
    and min-p. Computed in float64; every value is finite.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, logprob) of the most likely tokens, best first, ties by id


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer. `text` holds whole characters only and may be empty."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None  # on the last chunk: "stop", "length" or "cancelled"
    usage: Usage | None = None  # on the last chunk
    stopped_by: str | None = None  # on the last chunk: the stop string before which the answer ends
    # On the last chunk: a sentence for each part of the messages that was left out or changed, such as an image.
    warnings: tuple[str, ...] = ()
    prefilled: int = 0  # progress of the prefill: tokens done, of prompt_tokens
    prompt_tokens: int = 0
    cached_tokens: int = 0  # with `prefilled`: how many prefilled tokens were found in the KV store
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token id if `SamplingParams.logprobs` is set
    # In one chunk before the first token, if requested: one per token of the prompt after the first.
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_ids: tuple[int, ...] = ()  # with `prompt_logprobs`: all tokens of the prompt
    embedding: np.ndarray | None = None  # in one chunk, if requested: (E,) float32, of length 1


class Outbox(Protocol):
    """Receives the chunks of a request."""

    def append(self, item: Chunk | Exception, /) -> None:
        """Append a chunk, or an error in place of the last chunk. Must not block."""


@dataclass(frozen=True)
class Completion:
    """A whole answer. An answer to messages with tools is parsed: its text is without its reasoning and its calls."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # as in the last chunk, or "tool_calls" for an answer whose calls are complete
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()  # as in the chunks
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    warnings: tuple[str, ...] = ()  # as in the last chunk
    reasoning: str = ""  # of an answer to messages with tools
    # Of such an answer: its calls in OpenAI's form, which messages take: {"id", "type", "function": {"name",
    # "arguments"}}. Arguments are the text of a JSON object, or the beginning of one if the answer is cut off.
    tool_calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Embedding:
    """The embedding of a text."""

    vector: np.ndarray  # (E,) float32, of length 1
    usage: Usage
    warnings: tuple[str, ...] = ()  # see `Completion`


def fold(chunks: Iterable[Chunk]) -> Completion:
    """The completion that consists of `chunks`."""
    pieces = list(chunks)
    last = pieces[-1]
    assert last.finish_reason is not None
    assert last.usage is not None
    ids = tuple(i for piece in pieces for i in piece.token_ids)
    logprobs = tuple(token for piece in pieces for token in piece.logprobs)
    prompt_logprobs = tuple(token for piece in pieces for token in piece.prompt_logprobs)
    text = "".join(piece.text for piece in pieces)
    return Completion(text, ids, last.finish_reason, last.usage, logprobs, prompt_logprobs, last.warnings)


@dataclass(frozen=True)
class Score:
    """Teacher-forced results for ids (T,)."""

    logprobs: np.ndarray  # (T − 1,) float32: log p(ids[t + 1] | ids[: t + 1])
    logits: np.ndarray  # (T, V) float32 if requested, else (0, V)


@dataclass(frozen=True)
class Threads:
    """The number of CPU threads of a step, the reason for it in a few words, and the process's compiled kernels."""

    number: int
    why: str
    kernels: tuple[str, ...] = ()  # names, in alphabetical order


@dataclass(frozen=True)
class TierStatus:
    """What a tier holds, and its failures since the engine was loaded."""

    place: str  # "ram", "disk" or "remote"
    bytes: int | None  # stored, after this process's last write; None for a tier without a limit
    objects: int | None
    damaged: int  # objects that were found damaged and not used
    timeouts: int  # requests that were computed without the tier because it took too long
    read_errors: int
    write_errors: int


@dataclass(frozen=True)
class ExpertStatus:
    """The experts in memory, and how often chosen experts were there; gate_up and down are counted apart."""

    experts: int  # in memory at a time, for each layer
    hits: int
    misses: int  # weights that were read from the file
    bytes: int  # read from the file


@dataclass(frozen=True)
class SnapshotStatus:
    """Snapshots of recurrent layers, each of them of all these layers."""

    snapshots: int  # that there is room for
    used: int  # held by requests
    kept: int  # held by no request; the prefix cache can find them until their room is needed
    bytes: int  # in the computer's memory, for all snapshots, used or not


@dataclass(frozen=True)
class Status:
    """Counts of requests, and of quantized blocks over all groups of layers but recurrent ones. A block is used, kept
    or free."""

    running: int  # requests that take part in steps
    waiting: int  # requests in the queue or in prefill
    prefilling: int  # waiting requests that are in prefill
    blocks: int
    blocks_used: int  # held by requests
    blocks_kept: int  # held by no request; the prefix cache can find them until they are allocated again
    blocks_free: int  # held by no request and not in the prefix cache
    threads: Threads | None  # None on a GPU
    backend: str = ""  # "numpy", "native" or "cuda"
    tiers: tuple[TierStatus, ...] = ()  # the fastest first
    experts: ExpertStatus | None = None  # None if all experts are in memory, or there are none
    snapshots: SnapshotStatus | None = None  # None for a model without recurrent layers
    blocks_of_largest: int = 0  # blocks of the largest group of layers


@dataclass(frozen=True)
class CacheStats:
    """Memory of the newest sequence in the KV store."""

    tokens: int
    bytes: int  # blocks and full-precision slots
    bits_per_value: float  # of a sequence that fills the context, with its recent blocks in full precision
    f16_bytes: int  # the same blocks in half precision
    context: int  # tokens that fit
    context_bytes: int  # of a sequence that fills the context
    context_f16_bytes: int  # of that sequence in half precision


@dataclass
class Times:
    """A histogram of durations."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))  # up to each bound, and above the last
    seconds: float = 0.0  # the sum of all durations

    def add(self, seconds: float, count: int = 1) -> None:
        """Add `count` durations of `seconds` each."""
        self.counts[bisect_left(BOUNDS, seconds)] += count
        self.seconds += count * seconds

    def buckets(self) -> list[tuple[str, int]]:
        """The buckets of a Prometheus histogram: (upper bound, how many durations are at most that)."""
        return list(zip([*map(str, BOUNDS), "+Inf"], accumulate(self.counts), strict=True))


@dataclass
class CompilationCounts:
    """How many constraints were compiled since the engine was loaded, and how long requests waited for each."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """By outcome: "compiled", "refused", "abandoned" (no request wanted it any more), "too_many" (full queue)."""
    waiting: int = 0  # constraints that wait or are being compiled
    took: Times = field(default_factory=Times)  # until a constraint was compiled or refused, from its arrival

    def copy(self, waiting: int) -> CompilationCounts:
        """A copy with `waiting` constraints that wait."""
        return CompilationCounts(self.outcomes.copy(), waiting, Times(list(self.took.counts), self.took.seconds))
