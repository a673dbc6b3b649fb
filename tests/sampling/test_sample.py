"""Sampling: llama.cpp's chain against the same chain in plain Python, and error messages for invalid values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polarlm.engine.errors import EngineError
from polarlm.engine.limits import PENALTY_WINDOW
from polarlm.engine.params import SamplingParams
from polarlm.engine.sampling.sample import SamplerInput, Sampling, resolve, sample
from polarlm.model_loaders.config import GenerationDefaults

V = 12
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}


def sampling(**values) -> Sampling:
    """Everything off except `values`."""
    return resolve(SamplingParams(**{**OFF, **values}), GenerationDefaults())


def drawn_with(logits: np.ndarray, params: Sampling, recent: Sequence[int], uniform: float) -> int:
    return sample(logits, SamplerInput(params, recent[-PENALTY_WINDOW:], uniform, len(logits)))


def distribution(logits: Sequence[float], s: Sampling, recent: Sequence[int], slack: float = 0.0) -> dict[int, float]:
    """Token → probability, most likely first, in float64, if XTC drops tokens. `slack` moves the cuts a little."""
    x = [float(value) + s.logit_bias.get(i, 0.0) for i, value in enumerate(logits)]
    window = list(recent)[-64:]
    for token in set(window):
        x[token] = x[token] / s.repeat_penalty if x[token] > 0 else x[token] * s.repeat_penalty
        x[token] -= window.count(token) * s.frequency_penalty + s.presence_penalty
    possible = [value for value in x if value > -math.inf]
    order = sorted((i for i in range(len(x)) if x[i] > -math.inf), key=lambda i: (-x[i], i))
    if s.top_n_sigma > 0:
        mean = math.fsum(possible) / len(possible)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in possible) / len(possible))
        order = [i for i in order if x[i] >= max(x) - s.top_n_sigma * deviation * (1 + slack)]
    if s.top_k:
        order = order[: s.top_k]
    p = softmax([x[i] for i in order])
    if s.top_p < 1:
        total, count = 0.0, 0
        while count < len(p) and total < s.top_p + slack:
            total += p[count]
            count += 1
        order = order[: max(count, 1)]
    order = [i for i, value in zip(order, p, strict=False) if value >= s.min_p * p[0] * (1 + slack)] or order[:1]
    if s.xtc_probability > 0 and s.xtc_threshold <= 0.5:
        p = softmax([x[i] for i in order])
        reached = [i for i, value in zip(order, p, strict=True) if value >= s.xtc_threshold * (1 + slack)]
        order = order[max(len(reached) - 1, 0) :]
    if s.temperature == 0:
        return {order[0]: 1.0}
    return dict(zip(order, softmax([(x[i] - x[order[0]]) / s.temperature for i in order]), strict=True))


def softmax(x: Sequence[float]) -> list[float]:
    weights = [math.exp(value - max(x)) for value in x]
    return [weight / sum(weights) for weight in weights]


# Logits and what is done to them are multiples of powers of two: exact in float32, so that ties are ties.
quarters = st.integers(-40, 40).map(lambda i: i / 4)
settings_of_the_chain = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 0.25, 1.0, 3.0]),
        "top_k": st.integers(0, V + 3),
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 1)),
        "min_p": st.one_of(st.just(0.0), st.floats(0, 1)),
        "top_n_sigma": st.one_of(st.sampled_from([-1.0, 0.0]), st.floats(0.01, 3)),
        "xtc_probability": st.sampled_from([0.0, 1.0]),
        "xtc_threshold": st.floats(0, 0.6),
        "repeat_penalty": st.sampled_from([1.0, 0.5, 2.0, 4.0]),
        "presence_penalty": st.sampled_from([0.0, -1.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.25, 0.5]),
        "logit_bias": st.dictionaries(st.integers(0, V - 1), st.one_of(quarters, st.just(-math.inf)), max_size=V - 1),
    }
)


@settings(max_examples=250)
@given(
    st.lists(quarters, min_size=V, max_size=V),
    settings_of_the_chain,
    st.lists(st.integers(0, V - 1), max_size=80),
    st.floats(0, 1, exclude_max=True),
)
def test_a_draw_matches_the_plain_chain(logits, values, recent, drawn) -> None:
    chain = sampling(**values)
    expected = distribution(logits, chain, recent)
    # Where rounding may decide what a cut keeps, both are right.
    assume(all(distribution(logits, chain, recent, slack) == expected for slack in (-1e-9, 1e-9)))
    token = drawn_with(np.array(logits, np.float32), chain, recent, drawn)
    edges = np.cumsum(list(expected.values()))
    near = {int(np.searchsorted(edges, drawn * edges[-1] + off, side="right").clip(0, len(edges) - 1))
            for off in (-1e-9, 0, 1e-9)}  # fmt: skip
    assert token in [list(expected)[i] for i in near]
    assert expected[token] > 0


def support(logits, values, recent=()) -> set[int]:
    """The tokens that some draw returns."""
    chain = sampling(**values)
    return {drawn_with(np.float32(logits), chain, recent, i / 1000) for i in range(1000)}


def test_top_k_keeps_the_first_of_equal_tokens() -> None:
    """So many that a partial sort would pick others."""
    chain = sampling(top_k=2)
    assert {drawn_with(np.zeros(400, np.float32), chain, [], i / 50) for i in range(50)} == {0, 1}


def test_top_p_is_applied_after_top_k() -> None:
    even = [1.0] * 4 + [0.0] * 4  # the best two have 0.365 of all tokens' probability, and half of the best four's
    assert support(even, {"top_k": 4, "top_p": 0.5}) == {0, 1}
    assert support(even, {"top_k": 0, "top_p": 0.5}) == {0, 1, 2}


# Logits of one half, a quarter, and so on.
HALVES = [-math.log(2) * i for i in range(1, 9)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"top_n_sigma": 0.5}, {0, 1}),  # of 1.59
        ({"top_n_sigma": 0.5, "top_k": 1}, {0}),
        ({"xtc_probability": 1, "xtc_threshold": 0.2}, {*range(1, 8)}),
        ({"xtc_probability": 1, "xtc_threshold": 0.2, "temperature": 0}, {1}),
        ({"xtc_probability": 1, "xtc_threshold": 0.51}, {*range(8)}),
        ({"xtc_probability": 1, "xtc_threshold": 0.3, "min_p": 0.4}, {1}),  # min-p is before it: ⅔ and ⅓ are left
    ],
)
def test_the_order_of_the_chain(values, expected: set[int]) -> None:
    assert support(HALVES, values) == expected


def test_xtc_drops_tokens_as_often_as_it_says() -> None:
    """Whatever the draw is then: the random number that decides leaves a whole one."""
    chain = sampling(xtc_probability=0.3, xtc_threshold=0.2)
    plain = np.array(softmax(HALVES))
    dropped = np.where(np.arange(8) >= 1, plain, 0)
    tokens = [drawn_with(np.float32(HALVES), chain, [], i / 5000) for i in range(5000)]
    shares = np.bincount(tokens, minlength=8) / 5000
    np.testing.assert_allclose(shares, 0.7 * plain + 0.3 * dropped / dropped.sum(), atol=8e-4)


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e4])
def test_extreme_temperatures(temperature: float) -> None:
    expected = {1} if temperature < 1 else {0, 1, 2}
    assert support([0.0, 3.0, -80.0], {"temperature": temperature}) == expected


# The largest logit and a drawn one are found by other code, which sees NaN and infinities in its own way.
@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("broken", [[0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_nan_or_infinite_logits_are_an_error(broken, temperature: float) -> None:
    with pytest.raises(EngineError, match="not finite"):
        support(broken, {"temperature": temperature})


WRONG = [
    ("temperature", [math.nan, math.inf, -0.1, "1", True, [1]]),
    ("top_p", [0, 0.0, 1.01, math.nan, "0.9", False]),
    ("min_p", [-0.1, 1.1, math.nan, "0", True]),
    ("top_n_sigma", [math.nan, 1001, "1", None]),
    ("xtc_probability", [-0.1, 1.1, math.nan, None]),
    ("xtc_threshold", [-0.1, 1.1, math.nan, None]),
    ("repeat_penalty", [0, -1, math.nan, math.inf, "1", True]),
    ("presence_penalty", [math.nan, math.inf, None, "0", True]),
    ("frequency_penalty", [math.nan, -math.inf, None, "0", True]),
    ("dry_multiplier", [-0.1, 1001, math.nan, "0", True]),
    ("dry_base", [0.99, 1001, math.nan, None, "2", True]),
    ("dry_allowed_length", [-1, 1.5, None, "2", True]),
    ("dry_penalty_last_n", [-3, 1.5, "64", True]),
    ("dry_sequence_breakers", ["\n", [""], ("a", 1)]),
    ("top_k", [-1, 1.5, "40", True, math.nan]),
    ("max_tokens", [-2, 1.0, "9", True]),
    ("seed", [-2, 1.0, "9", None, True]),
    ("stop", ["END", [""], ("a", 1), [None], None, 3, b"x"]),
    ("logit_bias", [{1: math.nan}, {1: math.inf}, {1: "2"}, {1: None}, {1: True}, {"1": 2.0}, {1.0: 2.0}, {True: 1.0},
                    {-1: 1.0}, {1: 1e39}, None, [1]]),
    ("ignore_eos", ["no", None, 1]),
    ("stop_token_ids", [5, (-1,), ("5",)]),
    ("min_tokens", [-1, 1.0, None]),
    ("logprobs", [-1, 21, 1.0, "2", True, math.nan]),
]  # fmt: skip


def test_refuses_invalid_values_by_name() -> None:
    for name, value in [(name, value) for name, values in WRONG for value in values]:
        with pytest.raises(EngineError, match=f"^{name} is .* but must be ") as raised:
            resolve(SamplingParams(**{name: value}), GenerationDefaults())
        assert raised.value.code == "invalid_request"


THE_LIMITS_CASES = [
    {"temperature": 0},
    {"temperature": 1},
    {"top_p": 1},
    {"min_p": 1},
    {"top_k": 0},
    {"top_k": 10**20},
    {"max_tokens": 0},
    {"seed": 2**70},
    {"stop": ["a"]},
    {"logit_bias": {0: -math.inf, 7: 3}},
    {"logprobs": None},
    {"logprobs": 0},
    {"logprobs": 20},
]


def test_accepts_values_at_the_limits() -> None:
    for values in THE_LIMITS_CASES:
        resolve(SamplingParams(**values), GenerationDefaults())


def test_defaults_come_from_the_model_and_then_from_the_engine() -> None:
    of_model = GenerationDefaults({"temperature": 0.3, "top_k": 7})
    chosen = resolve(SamplingParams(top_k=9), of_model)
    assert (chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p) == (0.3, 9, 0.95, 0.05)
    assert resolve(SamplingParams(), GenerationDefaults(greedy=True)).temperature == 0
    assert resolve(SamplingParams(temperature=1.0), GenerationDefaults(greedy=True)).temperature == 1.0
