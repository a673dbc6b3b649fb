"""Biases, penalties, DRY and masks before sampling; the same tests for the NumPy ops and for the device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.cuda.sampling import pack_sampler_inputs
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.errors import EngineError
from polarlm.engine.limits import MOST_LOGPROBS, PENALTY_WINDOW
from polarlm.engine.model.batch import StepBatch
from polarlm.engine.model.forward import Transformer
from polarlm.engine.outputs import TokenLogprob
from polarlm.engine.params import OPTIONS, SamplingParams
from polarlm.engine.sampling.sample import Penalties, Sampled, SamplerInput, Sampling, resolve
from polarlm.model_loaders.config import GenerationDefaults
from tests.cuda.emulated import DeviceArray, EmulatedDevice, open_device
from tests.cuda.test_model_emulated import model_of
from tests.sampling.constrained import mask_of
from tests.sampling.test_sample import OFF, distribution

V = 72  # three words of a mask, and rows that are taken as they lie
NEAR = 2e-6  # this near, the device, which adds masses in 2^-44 of float32 exponentials, may draw a neighbour


def near(value: float) -> float:
    """As the device gets it."""
    return float(np.float32(value))


@dataclass(frozen=True)
class Draw:
    logits: list[float]
    values: Mapping[str, Any]
    recent: list[int]
    uniform: float
    allowed: frozenset[int] | None
    dry: Mapping[int, float]

    @property
    def sampler_input(self) -> SamplerInput:
        chain = resolve(SamplingParams(**{**OFF, **self.values}), GenerationDefaults())
        dry = Penalties(np.array(list(self.dry), np.int32), np.array(list(self.dry.values()))) if self.dry else None
        mask = None if self.allowed is None else mask_of(self.allowed, V)
        return SamplerInput(chain, self.recent, self.uniform, V, dry=dry, allowed=mask)

    def distribution(self, slack: float = 0.0) -> dict[int, float]:
        """Token → probability, most likely first, by the plain chain; nothing where no token is left.

        DRY and the mask come behind the penalties, and so into the logits of a chain that has none.
        """
        chain = self.sampler_input.sampling
        x = [value + chain.logit_bias.get(i, 0.0) for i, value in enumerate(self.logits)]
        for token in set(self.recent):
            x[token] = x[token] / chain.repeat_penalty if x[token] > 0 else x[token] * chain.repeat_penalty
            x[token] -= self.recent.count(token) * chain.frequency_penalty + chain.presence_penalty
        x = [value - self.dry.get(i, 0.0) for i, value in enumerate(x)]
        x = [value if self.allowed is None or i in self.allowed else -math.inf for i, value in enumerate(x)]
        if max(x) == -math.inf:
            return {}
        cuts = {name: value for name, value in self.values.items() if name in OF_THE_DRAW}
        plain = resolve(SamplingParams(**{**OFF, **cuts}), GenerationDefaults())
        return {i: p for i, p in distribution(x, plain, [], slack).items() if x[i] > -math.inf}


# What the host works out: `SamplerInput.recent` and `.dry`, and tokens of `SamplerInput.allowed`.
ON_HOST = re.compile(r"(repeat_last_n|dry.*)$")


def test_every_field_reaches_the_device_or_is_worked_out_on_the_host() -> None:
    """A sampling option that the table lacks would have no effect on a GPU."""
    penalties = {"repeat_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {3: 1.0}}
    chain = Sampling(**penalties, top_n_sigma=1.0, xtc_probability=0.5)

    def packed(one: Sampling) -> bytes:
        return pack_sampler_inputs([SamplerInput(one, [5], 0.2, V)]).table.tobytes()

    names = [*OPTIONS]
    for name in names[names.index("temperature") : names.index("seed")]:  # the options of draws
        if ON_HOST.match(name) is None:
            was = getattr(chain, name)
            value = {3: 2.0} if name == "logit_bias" else type(was)(was / 2 or 1)
            assert packed(replace(chain, **{name: value})) != packed(chain), name


SAMPLERS: dict[str, Callable[[np.random.Generator], float]] = {
    "temperature": lambda rng: float(rng.choice([0, 0.25, 3.0])),
    "top_k": lambda rng: int(rng.integers(1, 20)),
    "top_p": lambda rng: near(rng.uniform(0.01, 1)),
    "min_p": lambda rng: near(rng.uniform(0.01, 1)),
    "top_n_sigma": lambda rng: near(rng.uniform(0.1, 2.5)),
    "xtc_probability": lambda rng: 1.0,
    "xtc_threshold": lambda rng: near(rng.uniform(0, 0.4)),
    "repeat_penalty": lambda rng: float(rng.choice([0.5, 2.0, 4.0])),
    "presence_penalty": lambda rng: float(rng.choice([-1.0, 0.5])),
    "frequency_penalty": lambda rng: float(rng.choice([-0.25, 0.5])),
}
OF_THE_DRAW = {name for name in SAMPLERS if not name.endswith("_penalty")}
ASKED = [*SAMPLERS, "logit_bias", "bans", "dry", "allowed", "nearly nothing"]


def quarters(rng: np.random.Generator, low: int, high: int, count: int) -> list[float]:
    """Exact in float32, whatever of the kind is added to them: ties are ties."""
    return (rng.integers(4 * low, 4 * high, count) / 4).tolist()


def row_of(seed: int, asked: Collection[str]) -> Draw:
    """A row whose best tokens are those that biases, penalties, DRY and mask are about, each of them about several."""
    rng = np.random.default_rng(seed)
    best = rng.choice(V, 12, replace=False)
    logits = np.array(quarters(rng, -10, 2, V))
    logits[best] = quarters(rng, -2, 8, 12)
    values = {name: make(rng) for name, make in SAMPLERS.items() if name in asked}
    bias = dict(zip(some(rng, best), quarters(rng, -9, 9, 12), strict=False)) if "logit_bias" in asked else {}
    bias |= dict.fromkeys(some(rng, best)[:4] if "bans" in asked else (), -math.inf)
    dry = dict(zip(some(rng, best), quarters(rng, 0, 5, 12), strict=False)) if "dry" in asked else {}
    allowed = frozenset(some(rng, np.arange(V))) if "allowed" in asked else None
    if "nearly nothing" in asked:
        allowed = frozenset(some(rng, best)[:2])
    recent = rng.choice(best, rng.integers(0, PENALTY_WINDOW + 1)).tolist()
    number = near(rng.integers(0, 999) / 1000)
    return Draw(logits.tolist(), {**values, "logit_bias": bias}, recent, number, allowed, dry)


def some(rng: np.random.Generator, of_these: np.ndarray) -> list[int]:
    return rng.permutation(of_these)[: rng.integers(0, len(of_these) + 1)].tolist()


rows = st.builds(row_of, st.integers(0, 2**32 - 1), st.sets(st.sampled_from(ASKED)))


def sampled(ops: Ops, logits: np.ndarray, sampler_inputs: Sequence[SamplerInput]) -> list[Sampled]:
    on_device = ops.to_device(logits)
    chosen = ops.fetch_tokens(ops.sample(on_device, ops.pack_sampler_inputs(sampler_inputs)), on_device, sampler_inputs)
    np.testing.assert_array_equal(ops.to_host(on_device), logits)  # as they were, for log-probabilities
    return chosen


@cache
def ops_of(backend: str) -> Ops:
    return NumpyOps() if backend == "NumPy" else CudaOps(open_device())


@pytest.fixture(params=["NumPy", "device"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_of(request.param)


@pytest.mark.parametrize("backend", ["NumPy", "device"])
@settings(max_examples=15)
@given(st.lists(rows, min_size=1, max_size=3))
def test_tokens_equal_those_of_the_reference_sampler(backend: str, batch: list[Draw]) -> None:
    """Masks, biases, penalties and DRY before every sampler; rows with and without them in one batch."""
    wanted = [row.distribution() for row in batch]
    # Where rounding may decide what a cut keeps, both are right.
    for row, expected in zip(batch, wanted, strict=True):
        assume(all(row.distribution(slack).keys() == expected.keys() for slack in (-NEAR, NEAR)))
    chosen = sampled(
        ops_of(backend), np.array([row.logits for row in batch], np.float32), [row.sampler_input for row in batch]
    )
    for row, expected, token in zip(batch, wanted, chosen, strict=True):
        if not expected:
            assert isinstance(token, EngineError)
            assert "bans every token" in str(token)
            continue
        edges = np.cumsum(list(expected.values()))
        places = [row.uniform * edges[-1] + off for off in (-NEAR, 0, NEAR)]
        among = np.searchsorted(edges, places, side="right").clip(0, len(edges) - 1)
        assert token in [list(expected)[i] for i in among]


@pytest.mark.parametrize("asked", ["logit_bias", "dry", "all"])
def test_changes_of_logits_are_exact_to_the_last_bit(ops: Ops, rng: np.random.Generator, asked: str) -> None:
    """By amounts that are inexact in binary: of two tokens, one changed to the logit of the other, the first wins."""
    logits, sampler_inputs, wanted = [], [], []
    for _ in range(100):
        x = np.float32(rng.normal(0, 4))
        bias, frequency, presence, dry = (round(value, 3) for value in rng.uniform(0, 2, 4).tolist())
        repeat, times = round(rng.uniform(0.6, 2), 3), int(rng.integers(1, PENALTY_WINDOW + 1))
        y, chain, recent, penalties = x, resolve(SamplingParams(temperature=0), GenerationDefaults()), [], None
        token, beside = (40, 3) if len(sampler_inputs) % 2 else (3, 40)
        if asked in ("logit_bias", "all"):
            chain, y = replace(chain, logit_bias={token: bias}), y + np.float32(bias)
        if asked in ("penalties", "all"):
            chain = replace(chain, repeat_penalty=repeat, frequency_penalty=frequency, presence_penalty=presence)
            recent = [token] * times
            y = y / np.float32(repeat) if y > 0 else y * np.float32(repeat)
            y = np.float32(np.float64(y) - times * frequency - presence)
        if asked in ("dry", "all"):
            penalties, y = Penalties(np.array([token]), np.array([dry])), np.float32(np.float64(y) - dry)
        row = np.full(V, -1e6, np.float32)
        row[token], row[beside] = x, y
        logits.append(row)
        sampler_inputs.append(SamplerInput(chain, recent, 0.5, V, dry=penalties))
        wanted.append(min(token, beside))
    assert sampled(ops, np.stack(logits), sampler_inputs) == wanted


def test_banning_every_possible_token_is_not_reported_as_damage(ops: Ops) -> None:
    """The model allows one token only, which a bias, DRY's largest amount or a mask forbids."""
    plain, ban = (
        resolve(SamplingParams(**values), GenerationDefaults()) for values in ({}, {"logit_bias": {40: -math.inf}})
    )
    others = mask_of(set(range(V)) - {40}, V)
    sampler_inputs = [
        SamplerInput(ban, [], 0.5, V),
        SamplerInput(plain, [], 0.5, V, dry=Penalties(np.array([40]), np.array([1e37]))),
        SamplerInput(plain, [], 0.5, V, allowed=others),
        SamplerInput(plain, [], 0.5, V, allowed=mask_of([], V)),
        SamplerInput(ban, [], 0.5, V, allowed=others),
    ]
    logits = np.full((len(sampler_inputs), V), -np.inf, np.float32)
    logits[:, 40] = 1.0
    biased, penalised, *masked, masked_and_biased = sampled(ops, logits, sampler_inputs)
    assert "logit_bias bans every token" in str(biased)
    assert penalised == 40
    assert all("constraint bans every token" in str(error) for error in masked)
    assert re.search("constraint, together with logit_bias, .* bans every token", str(masked_and_biased))


@pytest.mark.parametrize("logprobs", [None, 3])
@pytest.mark.parametrize(("temperature", "places"), [(0, (0, 6)), (1, (299, 3))])
def test_logits_that_are_not_finite_are_an_error_of_their_row_only(
    ops: Ops, rng: np.random.Generator, temperature: float, places: tuple[int, int], logprobs: int | None
) -> None:
    """NaN and infinity at these places, which penalties lower."""
    logits = rng.standard_normal((3, 300)).astype(np.float32)
    logits[[0, 2], places], logits[1, 40] = (np.nan, np.inf), 100
    penalised = asking(temperature=temperature, presence_penalty=1)
    draw = replace(penalised, vocabulary=300, recent=[*places, 5], logprobs=logprobs)
    first, second, third = sampled(ops, logits, [draw] * 3)
    assert isinstance(first, EngineError)
    assert (second.id if isinstance(second, TokenLogprob) else second) == 40
    assert isinstance(third, EngineError)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["NumPy", "device"])
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 30, 700]), st.sampled_from([0.0, 300.0, -3e4, 1e30]))
def test_log_probabilities_are_normalised_over_the_whole_row(
    backend: str, seed: int, vocabulary: int, offset: float
) -> None:
    """Flat and peaked rows, equal logits, logits of −inf, more log-probabilities than tokens.

    A GPU's sum is of float32 exponentials, see `cuda/sampling/logprobs.cu`.
    """
    off = 2.0**-22 if backend == "device" else 1e-13
    rng = np.random.default_rng(seed)
    logits = (np.round(rng.standard_normal((3, vocabulary)) * 4) / rng.choice([1, 4, 64]) + offset).astype(np.float32)
    logits[1, rng.integers(0, vocabulary, vocabulary // 2)] = -np.inf
    logits[1, 0] = offset
    counts = rng.integers(0, MOST_LOGPROBS + 1, 3).tolist()
    sampler_inputs = [
        replace(asking(temperature=0), vocabulary=vocabulary, recent=[], logprobs=count) for count in counts
    ]
    for row, count, told in zip(logits, counts, sampled(ops_of(backend), logits, sampler_inputs), strict=True):
        assert isinstance(told, TokenLogprob)
        x = row.astype(np.float64)
        order = np.argsort(-x, kind="stable")[:count]
        logprobs = x - x.max() - math.log(math.fsum(np.exp(x - x.max())))
        assert [told.id, *(i for i, _ in told.top)] == [row.argmax(), *(i for i in order if np.isfinite(row[i]))]
        values = [told.logprob, *(value for _, value in told.top)]
        assert values == pytest.approx([logprobs[told.id], *(logprobs[i] for i, _ in told.top)], rel=1e-12, abs=off)


# -- what is brought to the device, and back -------------------------------------------------------------------------


def asking(**values: Any) -> SamplerInput:
    return SamplerInput(resolve(SamplingParams(**values), GenerationDefaults()), [4, 5, 4], 0.5, V)


def test_tables_with_lists_have_few_sizes() -> None:
    bias = dict.fromkeys(range(30), 1.0)
    sizes = [
        len(pack_sampler_inputs([asking(logit_bias=dict(list(bias.items())[:count]))]).table) for count in range(1, 31)
    ]
    assert set(sizes) == {16 + 256}
    masked = SamplerInput(asking().sampling, [], 0.5, 128_256, allowed=np.zeros(4008, np.uint32))
    assert [len(pack_sampler_inputs([masked] * rows).table) - 16 * rows for rows in (1, 2, 3)] == [
        4096,
        8192,
        16384,
    ]
    plain = replace(masked, allowed=None)
    assert (
        len(pack_sampler_inputs([plain, masked, plain]).table) == 48 + 4096
    )  # a row without a mask has no room for one


class Counting(EmulatedDevice):
    back = 0

    def to_host(self, x: DeviceArray) -> np.ndarray:
        self.back += x.nbytes
        return super().to_host(x)


def everything(vocabulary: int, number: int) -> SamplerInput:
    """A draw with every setting but log-probabilities."""
    bias = {7: 3.0, 9: -2.5, 2: -math.inf, 3: -math.inf}  # as min_tokens bans the ends
    values = {"temperature": 0.0, "logit_bias": bias, "repeat_penalty": 1.3, "frequency_penalty": 0.1}
    dry = Penalties(np.array([11, 12]), np.array([0.8, 1.4]))
    allowed = mask_of(range(number, vocabulary, 2), vocabulary)
    chain = resolve(SamplingParams(**values), GenerationDefaults())
    return SamplerInput(chain, [7, 20, 7], 0.5, vocabulary, dry=dry, allowed=allowed)


def stepped(model: Transformer, sampler_inputs: Sequence[SamplerInput]) -> list[Sampled]:
    spans = [model.store.open_step(model.store.new_sequence()) for _ in sampler_inputs]
    tokens = model.step(StepBatch(spans, [5 + i for i in range(len(sampler_inputs))], sampler_inputs)).wait()
    for span in spans:
        model.store.commit(span)
        model.store.release(span.sequence)
    return tokens


def test_a_step_copies_no_logits_to_the_host() -> None:
    device = Counting(checked=False)
    ops = CudaOps(device)
    model = model_of(ops, "llama_gqa_linear", ("f16", "f16"))
    vocabulary = model.config.vocab_size
    sampler_inputs = [everything(vocabulary, number) for number in range(3)]
    device.back = 0
    device.launches.clear()
    tokens = stepped(model, sampler_inputs)
    assert device.back == 3 * 4  # the ids
    launches = [*device.launches]
    host = model_of(NumpyOps(), "llama_gqa_linear", ("f16", "f16"))
    assert tokens == stepped(host, sampler_inputs)
    free = [
        replace(sampler_input, sampling=asking(temperature=0).sampling, dry=None, allowed=None)
        for sampler_input in sampler_inputs
    ]
    assert tokens != stepped(model, free)
    device.launches.clear()
    stepped(model, free)
    around = ("sample_adjust_kernel", "sample_shaped_kernel", "sample_restore_kernel")  # only rows with lists need them
    assert device.launches == [name for name in launches if name not in around] != launches
    device.back = 0
    device.launches.clear()
    stepped(
        model,
        [replace(sampler_inputs[0], logprobs=1), replace(sampler_inputs[1], logprobs=MOST_LOGPROBS), sampler_inputs[2]],
    )
    assert device.back == 3 * 4 + 2 * (16 + 20 * 8)  # two rows of the largest number of log-probabilities
    assert device.launches == [*launches, "logprobs_kernel"]
