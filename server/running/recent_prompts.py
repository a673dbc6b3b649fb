"""Why a prompt was read again: where it leaves the recent prompt that is most like it.

Of a recent prompt its token ids are kept, with those of its answer, and digests of what the request had: adapter, salt,
template options, tools, and the fields of messages. The ids say where two prompts part, and with which words; the
digests name what differs. A client hears of prompts with its own key alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np

from polarlm.engine import PromptOptions
from polarlm.engine.outputs import Reread
from polarlm.engine.requests.prompts import Prompt, is_chat
from polarlm.engine.sampling.detokenizer import text_of
from polarlm.model_loaders import Model

_MOST_TOKENS = 2 << 20  # of all prompts that are kept, 8 bytes each
_LEAST = 64  # tokens; of fewer nothing is said
_RUN = 16  # tokens in a row that count as the same text wherever they stand
_BEFORE, _AFTER = 4, 8  # tokens that are shown, before two prompts part and from there on
_MOST_REREADS, _SECONDS = 1000, 3600.0  # how many are kept, and for how long
_FACTORS = np.random.default_rng(0).integers(1, 1 << 62, _RUN, np.uint64)
_SHARED = ("adapter", "cache_salt")  # prompts that differ in these share no K/V


@dataclass(frozen=True, eq=False)
class _Record:
    """A recent prompt. `parts`: what the request had, by name, in the order of the prompt, as digests."""

    key: str
    response: str | None  # the id of its response
    ids: np.ndarray  # int64, of the prompt and its answer
    prompt: int  # tokens of the prompt alone
    messages: int
    parts: Mapping[str, bytes]
    reasoned: bool = False  # whether its answer has reasoning


@dataclass(frozen=True, eq=False)
class Comparison:
    """A prompt beside the recent one that is most like it."""

    record: _Record  # of the prompt
    earlier: _Record | None = None  # None: no recent prompt is like it
    at: int = 0  # tokens that both begin with
    places: tuple[str, ...] = ()  # what of the request differs
    words: tuple[str, str] = ("", "")  # where they part: those of the earlier prompt, and of this one
    repeated: np.ndarray | None = None  # (tokens from there on,) bool: whether the earlier one has them, too

    def reread(self, cached: int) -> Reread | None:
        """What was computed again; None for next to nothing. cached: tokens that the store had."""
        lost = max(0, self.at - cached)
        tokens = lost + (0 if self.repeated is None else int(self.repeated[max(0, cached - self.at) :].sum()))
        if tokens < _LEAST:
            return None
        return Reread(tokens, cached) if lost >= _LEAST else Reread(tokens, cached, self.places, *self.words)


class RecentPrompts:
    """The recent prompts of an engine, and what was read again in the last hour. Thread-safe."""

    def __init__(self, model: Model) -> None:
        self._model, self._lock = model, Lock()
        self._records: list[_Record] = []  # the newest last
        self._rereads: deque[tuple[float, Reread]] = deque(maxlen=_MOST_REREADS)

    def compare(
        self, prompt: Prompt, options: PromptOptions, ids: Sequence[int], key: str, response: str | None = None
    ) -> Comparison:
        """Compare a prompt, whose tokens have these ids, with the recent one with this key that has most in common with
        it. response: the id of the response to the one to compare it with, if that is kept."""
        messages = len(prompt) if is_chat(prompt) else 0
        now = _Record(key, None, np.asarray(ids, np.int64), len(ids), messages, dict(_parts(prompt, options)))
        digests = set(now.parts.values())
        with self._lock:
            records = [one for one in self._records if one.key == key]
        records = [one for one in records if one.response == response is not None] or records
        shared = [(len(digests.intersection(one.parts.values())), _common(one.ids, now.ids)) for one in records]
        if not records or not max(shared)[1]:
            return Comparison(now)
        nearest = max(range(len(records)), key=lambda index: (shared[index], index))
        earlier, at = records[nearest], shared[nearest][1]
        places = tuple(_differences(earlier, now))
        at = 0 if {*_SHARED} & {*places} else at
        if at == min(len(now.ids), len(earlier.ids)):
            return Comparison(now, earlier, at, places)
        if not places:
            places = (self._place_in_answer(earlier, now) if at >= earlier.prompt else "the chat template",)
        words = self._words(earlier.ids, at), self._words(now.ids, at)
        return Comparison(now, earlier, at, places, words, _repeated(earlier.ids[at:], now.ids[at:]))

    def add(
        self, comparison: Comparison, cached: int, answer: Sequence[int], response: str | None = None
    ) -> Reread | None:
        """Keep a prompt with the ids of its answer, in place of the one that it continues, and return what of it was
        read again. response: the id of the response. cached: see `Comparison.reread`."""
        tags, earlier = self._model.template.tags, comparison.earlier
        ids = np.concatenate([comparison.record.ids, np.asarray(answer, np.int64)])
        reasoned = tags is not None and tags.close in text_of(self._model.tokenizer, answer, control=True)
        with self._lock:
            if earlier is not None and comparison.at == len(earlier.ids):
                self._records = [one for one in self._records if one is not earlier]
            self._records.append(replace(comparison.record, ids=ids, response=response, reasoned=reasoned))
            while len(self._records) > 1 and sum(len(one.ids) for one in self._records) > _MOST_TOKENS:
                del self._records[0]
        if (reread := comparison.reread(cached)) is not None:
            self._rereads.append((time.monotonic(), reread))
        return reread

    def last_hour(self) -> list[Reread]:
        """What was read again in the last hour, the dearest first."""
        since = time.monotonic() - _SECONDS
        return sorted((one for at, one in [*self._rereads] if at >= since), key=lambda one: -one.tokens)

    def _place_in_answer(self, earlier: _Record, now: _Record) -> str:
        name = f"messages[{earlier.messages}]"
        dropped = earlier.reasoned and f"{name}.reasoning_content (assistant)" not in now.parts
        return f"{name}.{'reasoning_content' if dropped else 'content'} (assistant)"

    def _words(self, ids: np.ndarray, at: int) -> str:
        known = [int(one) for one in ids[max(0, at - _BEFORE) : at + _AFTER] if int(one) in self._model.vocabulary]
        return text_of(self._model.tokenizer, known, control=True)


def _parts(prompt: Prompt, options: PromptOptions) -> Iterator[tuple[str, bytes]]:
    """What a request has that its prompt and its K/V are made of: (name, digest)."""
    yield "adapter", _digest([options.lora, options.lora_scale])
    yield "cache_salt", _digest(options.cache_salt)
    for name, value in options.template_variables.items():
        yield f"the template option {name}", _digest(value)
    for index, tool in enumerate(options.tools):
        yield f"tools[{index}]", _digest(tool)
    for index, message in enumerate(prompt if is_chat(prompt) else ()):
        for name in ("reasoning_content", "content", "tool_calls"):
            if value := message.get(name):
                calls = [one.get("function") for one in value] if name == "tool_calls" else value  # without their ids
                yield f"messages[{index}].{name} ({message['role']})", _digest(calls)


def _digest(value: Any) -> bytes:
    text = json.dumps(
        value, default=lambda one: hashlib.sha256(one).hexdigest() if isinstance(one, bytes) else str(one)
    )
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _differences(earlier: _Record, now: _Record) -> Iterator[str]:
    """The names of what differs: of tools and of messages the first, and of messages those that both have."""
    told = set()
    for name in dict.fromkeys((*now.parts, *earlier.parts)):
        kind = name.partition("[")[0]
        is_new = kind == "messages" and int(name[9 : name.index("]")]) >= earlier.messages
        if earlier.parts.get(name) != now.parts.get(name) and kind not in told and not is_new:
            told.add(kind)
            yield name


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    count = min(len(one), len(other))
    different = one[:count] != other[:count]
    return int(different.argmax()) if different.any() else count


def _repeated(earlier: np.ndarray, now: np.ndarray) -> np.ndarray:
    """(tokens of `now`,) bool: those in a run of tokens that `earlier` has, too."""
    repeated = np.zeros(len(now), bool)
    if min(len(earlier), len(now)) >= _RUN:
        runs = [
            np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), _RUN) @ _FACTORS for ids in (earlier, now)
        ]
        found = np.isin(runs[1], runs[0])
        for offset in range(_RUN):
            repeated[offset : offset + len(found)] |= found
    return repeated
