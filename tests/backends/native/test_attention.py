"""Attention of steps over tiles, against attention in float64 over what the blocks read back as.

Most tests have tiles of `f16`, which hold the keys and values exactly: only float32's arithmetic differs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine.backends.kv import HeadTransform, ScoreRule
from polarlm.engine.backends.native import codecs
from polarlm.engine.backends.native.attention_ops.heads import HeadOps
from polarlm.engine.backends.native.attention_ops.step_table import StepTable
from polarlm.engine.backends.native.attention_ops.steps import AttentionOps
from polarlm.engine.backends.native.graphs import Graphs
from polarlm.engine.backends.native.launch import CannotRecord
from polarlm.engine.backends.numpy.kv.cache import LayerCache
from polarlm.engine.codecs.parts.rotation import dense, signed_hadamard, twice_signed_hadamard
from polarlm.engine.jit.compile.target import best
from polarlm.engine.jit.lang import Level
from tests.backends.native.attending import SCALE, Sequence_, Shape, Step, attended, exact, step
from tests.backends.native.launching import launcher
from tests.jit.levels import SOME, some_levels
from tests.pairs import each, in_turn

TYPES = [
    ("ring4", "ring3.5"),
    ("ring5", "turbo3"),
    ("q8_0", "ring4"),
    ("turbo4", "f16"),
    ("f16", "q4_0"),
    ("polarpair-m4n4", "ring4"),
    ("ring3", "turbo2"),
    ("ring2.5", "linear8"),
    ("linear8", "ring2.5"),
    ("trellis2.5", "trellis2.5"),
    ("q4_0", "q8_0"),
    ("polarquant", "polarquant"),
]

RAGGED = [Sequence_(0), Sequence_(3), Sequence_(16), Sequence_(47), Sequence_(700), Sequence_(2000), Sequence_(31)]
SEVERAL = [Sequence_(5, 4), Sequence_(64, 1), Sequence_(78, 16), Sequence_(15, 2), Sequence_(640, 9)]


def check(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@some_levels
@in_turn("window", [None, 20, 600])
@pytest.mark.parametrize("sequences", [RAGGED, SEVERAL], ids=["one row", "several rows"])
def test_attention_at_every_level(level: Level, window: int | None, sequences: list[Sequence_]) -> None:
    case = step(Shape(), sequences, window)
    check(attended(case, level, window), exact(case, window))


def sink_scores(heads: int) -> np.ndarray:
    """Scores below, among and above the scores of tokens, one for each head."""
    return np.linspace(-20, 12, heads).astype(np.float32)


@some_levels
@pytest.mark.parametrize(("softcap", "has_sink_scores"), [(1.5, False), (None, True), (50.0, True)])
def test_scores_with_a_cap_and_heads_with_a_sink(level: Level, softcap: float | None, has_sink_scores: bool) -> None:
    case = step(Shape(), [Sequence_(2000), Sequence_(78, 16), Sequence_(3)], 600)
    rule = {"softcap": softcap, "sink_scores": sink_scores(6) if has_sink_scores else None}
    wanted = exact(case, 600, **rule)
    assert np.abs(wanted - exact(case, 600)).max() > 0.01 * np.abs(wanted).max()
    check(attended(case, level, 600, **rule), wanted)


@in_turn("level rotation", each(SOME, [dense, None, signed_hadamard, twice_signed_hadamard]))
def test_the_result_is_scaled_and_rotated_back(level: Level, rotation: object) -> None:
    rng = np.random.default_rng(0)
    dim = 80 if level == best() else 64
    matrix = None if rotation is None else rotation(dim)  # type: ignore[operator]
    given = HeadTransform(2, None, None, matrix, rng.uniform(0.5, 2, 6).astype(np.float32))
    (transform,) = HeadOps(launcher(level)).prepare([given])
    case = step(Shape(dim=dim), [Sequence_(100, 2), Sequence_(5)], None)
    check(attended(case, level, None, transform), exact(case, None, transform))


@pytest.mark.parametrize(("large", "softcap"), [(30.0, None), (1e3, None), (1e3, 3.0)])
def test_scores_that_are_far_apart(large: float, softcap: float | None) -> None:
    """Weights of 0, and tops that grow from chunk to chunk; scores far beyond the cap."""
    case = step(Shape(), [Sequence_(1300)], None)
    case = case._replace(q=case.q * np.float32(large))
    check(attended(case, best(), None, softcap=softcap), exact(case, None, softcap=softcap))


def alone(case: Step, number: int) -> Step:
    """The sequence with a number, of one row, as a step of its own."""
    view = case.views[number]
    first = view.rows.start
    return case._replace(views=[replace(view, rows=slice(0, 1))], q=case.q[first : first + 1])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_recording_follows_the_tables(threads: int) -> None:
    """More chunks and fewer, blocks in other places, longer and shorter current blocks."""
    case = step(Shape(types=("ring4", "ring3.5")), [Sequence_(length) for length in (535, 350, 515, 421)], None)
    launch = launcher(best(), threads)
    ops, graphs = AttentionOps(launch), Graphs(launch)
    calls = []

    def work(q: np.ndarray, table: StepTable) -> np.ndarray:
        calls.append(table)
        return ops.attention(q, case.cache, table, ScoreRule(SCALE))

    for number in range(4):
        own = alone(case, number)
        found = graphs.run("step", work, [own.q, ops.spans(own.views, 16)])
        np.testing.assert_array_equal(found, attended(own, best(), None))
    assert len(calls) == 1


def test_a_sequence_finds_the_same_alone() -> None:
    case = step(Shape(), RAGGED, None)
    together = attended(case, best(), None)
    for number in range(len(RAGGED)):
        np.testing.assert_array_equal(attended(alone(case, number), best(), None), together[number : number + 1])


def check_over_codes(case: Step, level: Level, window: int | None, **rule: Any) -> None:
    """Queries are bytes: a query's error is its largest channel / 127 / √12 for each channel, and so is, about, the
    error of a table's points. Keys have channels of about unit variance around their mean, so a score is off by √2
    times that, times √D and the scale of scores: for 64 normal channels, whose largest is near 2.6, by .02. A weight is
    off by that factor, by its own for each token, and so is what the weights sum up to. The bytes of weights and of the
    values' points add less than .01."""
    largest = np.abs(case.q).max(-1) / 127
    most = 0.01 + SCALE * np.sqrt(2 * case.q.shape[-1] / 12) * np.sqrt((largest**2).mean())
    wanted = exact(case, window, **rule)
    error = attended(case, level, window, **rule) - wanted
    assert np.sqrt((error**2).mean() / (wanted**2).mean()) < most
    assert np.abs(error).max() < 4 * most * np.abs(wanted).max()


@in_turn("level types", each(SOME, TYPES))
def test_attention_over_codes(level: Level, types: tuple[str, str]) -> None:
    """The tests of `codecs/` read the codes of every codec at every level."""
    shape = Shape(dim=64, types=types, block_size=64)
    check_over_codes(step(shape, [Sequence_(1000, 3), Sequence_(10), Sequence_(320)], 900), level, 900)


@in_turn("types", TYPES)
def test_caps_and_sinks_over_codes(types: tuple[str, str]) -> None:
    case = step(Shape(dim=64, types=types, block_size=64), [Sequence_(1000, 3), Sequence_(320)], 900)
    rule = {"softcap": 1.5, "sink_scores": sink_scores(6)}
    check_over_codes(case, best(), 900, **rule)
    wanted = exact(case, 900, **rule)
    for name in rule:
        without = exact(case, 900, **{**rule, name: None})
        assert np.abs(wanted - without).max() > 0.2 * np.abs(wanted).max(), f"{name} does little"


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    types=st.sampled_from(TYPES),
    dim=st.sampled_from([32, 64, 80, 96, 128, 256]),
    group=st.integers(1, 8),
    block_size=st.sampled_from([16, 32, 48, 64, 128]),
    mean_bits=st.sampled_from([0, 8, 16]),
    lengths=st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 16)), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 800),
    seed=st.integers(0, 99),
)
def test_attention_over_codes_of_any_shape(
    types: tuple[str, str],
    dim: int,
    group: int,
    block_size: int,
    mean_bits: int,
    lengths: list[tuple[int, int]],
    window: int | None,
    seed: int,
) -> None:
    """Sequences of several lengths and numbers of rows; all read codes, unless a window hides them."""
    dim = -(-dim // 32) * 32 if any(name.startswith("q") for name in types) else dim
    shape = Shape(2, group, dim, block_size, types, mean_bits)
    sequences = [Sequence_(3 * block_size + length, rows) for length, rows in lengths]
    check_over_codes(step(shape, sequences, window, seed), best(), window)


def test_a_layer_without_tiles_attends_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_module", lambda name: None)
    case = step(Shape(types=("ring4", "ring3.5")), [Sequence_(100), Sequence_(40, 3)], None)
    assert type(case.cache) is LayerCache
    check(attended(case, best(), None), exact(case, None))
    launch = launcher(best())
    ops = AttentionOps(launch)
    with pytest.raises(CannotRecord), launch.record():
        ops.attention(case.q, case.cache, ops.spans(case.views, 16), ScoreRule(SCALE))


@some_levels
def test_nan_in_a_slot_gives_nan(level: Level) -> None:
    """Damaged weights are found by their results. The second sequence has a slot of its own."""
    for side in ("full_k", "full_v"):
        case = step(Shape(), [Sequence_(5), Sequence_(40)], None)
        getattr(case.cache, side)[case.views[0].current.block, :, 2, 7] = np.nan
        found = attended(case, level, None)
        assert (np.isnan(found[0]).any(-1)).all(), side
        np.testing.assert_array_equal(found[1:], attended(alone(case, 1), level, None), side)
