"""The DRY penalty, compared with its definition in plain Python, and in an engine's answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.sampling.dry import Dry
from polarlm.engine.sampling.repeats import Repeats
from polarlm.engine.sampling.sample import Sampling, resolve
from polarlm.model_loaders.config import GenerationDefaults

WORDS = [b"a", b"b", b" c", b".\n", b"d:", b"<", b"s", b"top", b">", b"x<stop>y"]
"""Texts of ids; the breakers are "\\n", ":" and "<stop>", which may be spread over four tokens, or stand in one."""

BREAKERS = ("\n", ":", "<stop>")


def repetitive(seed: int, length: int) -> list[int]:
    """Ids that repeatedly copy an earlier piece."""
    rng = np.random.default_rng(seed)
    words = rng.choice(len(WORDS), rng.integers(1, len(WORDS) + 1), replace=False)
    ids = rng.choice(words, rng.integers(1, 5)).tolist()
    while len(ids) < length:
        begin = rng.integers(0, len(ids))
        ids += ids[begin : begin + rng.integers(1, 12)] if rng.random() < 0.6 else [int(rng.choice(words))]
    return ids[:length]


sequences = st.builds(repetitive, st.integers(0, 2**32 - 1), st.integers(1, 90))
settings_of_dry = st.fixed_dictionaries(
    {
        "dry_multiplier": st.sampled_from([0.5, 0.8, 3.0]),
        "dry_base": st.sampled_from([1.0, 1.25, 1.75, 4.0, 1000.0]),
        "dry_allowed_length": st.integers(0, 4),
        "dry_penalty_last_n": st.one_of(st.just(-1), st.integers(1, 70)),
        "dry_sequence_breakers": st.sampled_from([(), ("\n",), BREAKERS]),
    }
)


def sampling(**values) -> Sampling:
    return resolve(SamplingParams(**values), GenerationDefaults())


def by_definition(ids: Sequence[int], s: Sampling) -> dict[int, float]:
    """Token → what is subtracted: for every earlier place, how many of the last tokens stand before it, one by one."""
    window = list(ids) if s.dry_penalty_last_n < 0 else list(ids)[-s.dry_penalty_last_n :]
    # A repetition does not reach back to or beyond the token in which a breaker ends.
    behind = next((n for n in range(len(ids)) if breaker_ends_in(ids[: len(ids) - n], s)), len(ids))
    longest: dict[int, int] = {}
    for place in range(1, len(window)):
        length = 0
        while length < min(place, behind) and window[place - 1 - length] == window[-1 - length]:
            length += 1
        if length >= s.dry_allowed_length:
            longest[window[place]] = max(length, longest.get(window[place], 0))
    return {
        token: min(s.dry_multiplier * min(float(s.dry_base) ** min(length - s.dry_allowed_length, 99), 1e300), 1e37)
        for token, length in longest.items()
        if not any(breaker.encode() in WORDS[token] for breaker in s.dry_sequence_breakers)
    }


def breaker_ends_in(ids: Sequence[int], s: Sampling) -> bool:
    text, before = b"".join(WORDS[i] for i in ids), len(b"".join(WORDS[i] for i in ids[:-1]))
    encoded = [breaker.encode() for breaker in s.dry_sequence_breakers]
    return any(text[:end].endswith(breaker) for breaker in encoded for end in range(before + 1, len(text) + 1))


@given(sequences, st.integers(1, 90), settings_of_dry)
@settings(max_examples=20)
@example(
    [0, 5, 6, 7, 8, 1, 2, 0, 5, 6, 7, 8, 1],
    3,
    {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_sequence_breakers": ("<stop>",)},
)  # behind it, "b" alone
@example([0, 1, 2, 0, 1, 2, 0, 1], 8, {"dry_multiplier": 1.0, "dry_base": 2.0})  # 2 is 2 · 2^(5 - 2), no less
@example([7] * 90, 1, {"dry_multiplier": 1.0, "dry_base": 1000.0})  # beyond what a float32 holds
def test_penalties_match_the_definition(ids: list[int], prompt: int, values: dict[str, float]) -> None:
    chain = sampling(**values)
    dry = Dry(chain, WORDS.__getitem__)
    for count in range(min(prompt, len(ids)), len(ids) + 1):
        penalties = dry.penalties(ids[:count])
        expected = by_definition(ids[:count], chain)
        if penalties is None:
            assert expected == {}
        else:
            assert penalties.ids.tolist() == sorted(expected)
            assert penalties.amounts.tolist() == pytest.approx([expected[i] for i in sorted(expected)], rel=1e-12)


def test_a_prompt_is_read_without_the_engine_lock(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a long prompt takes tenths of a second, which would stall every stream."""
    extend, taken = Repeats.extend, []

    def watched(self: Repeats, ids: Sequence[int]) -> None:
        taken.append((len(ids), tiny._lock.taken))
        extend(self, ids)

    monkeypatch.setattr(Repeats, "extend", watched)
    ids = tiny.tokenize("the rain the rain the rain the rain")
    tiny.generate(ids, SamplingParams(max_tokens=3, dry_multiplier=1.0, ignore_eos=True))
    assert taken == [(len(ids), False), (0, True), (1, True), (1, True)]


def test_the_answer_alone() -> None:
    """With -2, text of the prompt may be repeated."""
    alone = Dry(sampling(dry_multiplier=1.0, dry_penalty_last_n=-2), WORDS.__getitem__, prompt=8)
    ids = [0, 1, 2, 5, 0, 1, 2, 5]
    for token in [0, 1, 2, 5, 0, 1]:
        assert alone.penalties(ids) is None
        ids.append(token)
    penalties = alone.penalties(ids)
    assert (penalties.ids.tolist(), penalties.amounts.tolist()) == ([2], [1.0])


@pytest.mark.parametrize("off", [{}, {"dry_multiplier": 0}, {"dry_multiplier": 5.0, "dry_penalty_last_n": 0}])
def test_off_computes_nothing(tiny: Engine, off: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polarlm.engine.requests.sampler.Dry", None)
    tiny.generate("the rain", SamplingParams(max_tokens=3, **off))
