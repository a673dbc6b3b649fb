"""The sampling kernels, run by the emulator with every check on, against `engine.sampling.sample.sample`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.cuda.launch import Launcher
from polarlm.engine.backends.cuda.sampling import pack_sampler_inputs
from polarlm.engine.backends.cuda.sampling import sample as sample_on
from polarlm.engine.sampling.sample import NEWEST, SamplerInput, Sampling, sample
from tests.cuda.emulated import EmulatedDevice
from tests.cuda.test_sampler_inputs import near
from tests.sampling.constrained import mask_of
from tests.sampling.test_sample import sampling

PLAIN = sampling()


def on_host(logits: np.ndarray, chain: Sampling, drawn: float) -> int:
    """`sample`, but where values at the edge of top-k are equal, the first ids are kept."""
    logits = logits.copy()
    if chain.top_k > 1:
        logits[np.argsort(-logits, kind="stable")[chain.top_k :]] = -np.inf
    return sample(logits, SamplerInput(chain, [], drawn, len(logits)))


def launch(
    logits: np.ndarray,
    rows: Sequence[tuple[Sampling, float]],
    recent: Sequence[Sequence[int]] | None = None,
    seed: int = 2,
    newest: np.ndarray | None = None,
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """Ids for logits (B, V), whose rows lie further apart than they are long, as the kernels want them: aligned.

    allowed: of each row.
    """
    batch, vocab = logits.shape
    held = np.full((batch, (vocab + 7) // 4 * 4), np.nan, np.float32)
    held[:, :vocab] = logits
    both = zip(rows, recent or [[]] * batch, strict=True)
    sampler_inputs = pack_sampler_inputs(
        [SamplerInput(chain, last, drawn, vocab, allowed=allowed) for (chain, drawn), last in both]
    )
    device: Any = EmulatedDevice()
    device.seed = seed
    on_device, last = device.from_host(held), None if newest is None else device.from_host(newest)
    ids = sample_on(device, Launcher(device), on_device, sampler_inputs, last)
    np.testing.assert_array_equal(device.to_host(on_device), held)
    return device.to_host(ids)


def right_answers(logits: np.ndarray, chain: Sampling, drawn: float) -> set[int]:
    """What `sample` says, and the tokens next to it where a cut or the draw is nearer to an edge than 1e-6."""
    slack = (-1e-6, 0.0, 1e-6)
    return {
        on_host(logits, replace(chain, top_p=top_p, min_p=min_p), min(max(drawn + moved, 0.0), 1 - 1e-9))
        for top_p in ([chain.top_p + by for by in slack] if chain.top_p < 1 else [chain.top_p])
        for min_p in [chain.min_p * (1 + by) for by in (slack if chain.min_p else (0.0,))]
        for moved in slack
    }


WIDE = [
    (PLAIN, 3.0),
    (replace(PLAIN, top_k=40, top_p=near(0.95), min_p=near(0.05), temperature=near(0.8)), 3.0),
    (replace(PLAIN, top_p=near(0.9)), 5.0),
    (replace(PLAIN, min_p=near(0.02), temperature=3.0), 3.0),
    (replace(PLAIN, temperature=0.0), 3.0),
    (replace(PLAIN, top_k=3000, top_p=near(0.99)), 1.0),  # the list of the best tokens does not suffice
    (replace(PLAIN, top_p=near(0.95)), 0.1),
    (replace(PLAIN, top_n_sigma=near(1.1), top_p=near(0.9)), 3.0),
    (replace(PLAIN, xtc_probability=near(0.5), xtc_threshold=near(0.01), min_p=near(0.001)), 5.0),
]


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_many_blocks_share_a_row(masked: bool, rng: np.random.Generator) -> None:
    """The best tokens are next to each other, as in vocabularies that are sorted by frequency."""
    vocab, drawn = 37_000, [0.0, 0.4, 0.999]
    for chain, spread in WIDE:
        logits = (spread * rng.standard_normal((3, vocab)) - np.linspace(0, spread, vocab)).astype(np.float32)
        allowed = np.flatnonzero(rng.random(vocab) < 0.5) if masked else np.arange(vocab)
        mask = mask_of(allowed, vocab) if masked else None
        ids = launch(logits, [(chain, u) for u in drawn], allowed=mask)
        for row, u, token in zip(logits, drawn, ids, strict=True):
            assert token in {int(allowed[i]) for i in right_answers(row[allowed], chain, u)}


@pytest.mark.slow
def test_equal_logits_are_drawn_in_order_of_ids() -> None:
    """More equal values than the list of the best has room for: the places of tokens decide, by id alone."""
    vocab = 5000
    logits = np.full((4, vocab), 3.0, np.float32)
    drawn = [0.0, 0.2502, 0.5, 0.9999]
    ids = launch(logits, [(PLAIN, u) for u in drawn])
    np.testing.assert_array_equal(ids, [int(np.float32(u) * vocab) for u in drawn])
    kept = replace(PLAIN, top_k=100)
    ids = launch(logits, [(kept, u) for u in drawn])
    np.testing.assert_array_equal(ids, [int(np.float32(u) * 100) for u in drawn])


EXACT_CASES = [
    # two of four equal tokens have half of the mass, and the third draws from a quarter on
    ([1.0] * 4, replace(PLAIN, top_p=0.5), 0.999, 1),
    ([1.0] * 4, replace(PLAIN, top_p=0.75), 0.999, 2),
    ([1.0] * 4, PLAIN, 0.75, 3),
    # min_p 1 keeps what is as likely as the best
    ([1.0, 2.0, 0.5, 2.0], replace(PLAIN, min_p=1.0), 0.25, 1),
    ([1.0, 2.0, 0.5, 2.0], replace(PLAIN, min_p=1.0), 0.75, 3),
    # zeros of both signs are equal
    ([-1.0, -0.0, 0.0, -0.0, -2.0], replace(PLAIN, temperature=0.0), 0.0, 1),
    ([-1.0, -0.0, 0.0, -0.0, -2.0], replace(PLAIN, top_k=2), 0.75, 2),
]


def test_the_newest_token_may_come_from_the_device(rng: np.random.Generator) -> None:
    """Once or several times among the recent tokens, and as one that could not be drawn, which no penalty counts."""
    chain = sampling(temperature=0, repeat_penalty=3.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits = rng.standard_normal((5, 40)).astype(np.float32)
    best = logits.argmax(1).astype(np.int32)
    best[4] = -2
    known = [[], [3, 4], [int(best[2])], [int(best[3]), 7, int(best[3])], [3]]
    ids = launch(logits, [(chain, 0.5)] * 5, [[*tokens, NEWEST] for tokens in known], newest=best)
    whole = [[*tokens, int(token)] if token >= 0 else tokens for tokens, token in zip(known, best, strict=True)]
    np.testing.assert_array_equal(ids, launch(logits, [(chain, 0.5)] * 5, whole))
    assert (ids[:4] != best[:4]).any()


def test_cases_without_rounding_give_the_expected_token() -> None:
    for logits, chain, drawn, expected in EXACT_CASES:
        assert on_host(np.array(logits, np.float32), chain, drawn) == expected
        assert launch(np.array([logits], np.float32), [(chain, drawn)])[0] == expected


@pytest.mark.parametrize("temperature", [1e-44, 1e-30, 1e4])
def test_extreme_temperatures_give_a_right_token(temperature: float, rng: np.random.Generator) -> None:
    logits = (20 + rng.standard_normal((1, 90))).astype(np.float32)
    chain = replace(PLAIN, temperature=near(temperature), top_p=near(0.9))
    id_ = launch(logits, [(chain, 0.5)])[0]
    assert id_ in right_answers(logits[0], chain, 0.5)


def test_the_order_of_threads_changes_nothing(rng: np.random.Generator) -> None:
    logits = rng.standard_normal((1, 1500)).astype(np.float32)
    chains = [replace(PLAIN, top_p=near(0.9)), replace(PLAIN, top_k=700), replace(PLAIN, min_p=near(0.01))]
    for chain, drawn in itertools.product(chains, [0.1, 0.9]):
        ids = {launch(logits, [(chain, drawn)], seed=seed)[0] for seed in range(3)}
        assert len(ids) == 1


class Unsaved(EmulatedDevice):
    """`sample` finds nothing of what `sample_adjust` has saved."""

    def run(self, text: str, kernel: str, grid: Sequence[int], block: Sequence[int], args: list, shared: int) -> None:
        if kernel == "sample_kernel":
            args = [*args[:5], np.empty(1, np.float32), *args[6:]]
        super().run(text, kernel, grid, block, args, shared)


def test_what_was_saved_is_read_only_where_no_token_is_left(rng: np.random.Generator) -> None:
    """One thread reads it, one number after another, and the row waits."""
    biases = {int(token): 1.0 for token in range(0, 90, 3)}
    inputs = pack_sampler_inputs([SamplerInput(replace(PLAIN, logit_bias=biases), [], 0.5, 100)])
    device: Any = Unsaved()
    logits = device.from_host(rng.standard_normal((1, 100)).astype(np.float32))
    assert device.to_host(sample_on(device, Launcher(device), logits, inputs, None))[0] >= 0
