"""Perplexity and divergence: their arithmetic, windows, cache types, and figures of a real model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polarlm.bench.command import CacheType, cache_types
from polarlm.bench.quality.divergence import Divergence, compare
from polarlm.bench.quality.scores import CODED, SERVED, add_stretches, contestant, windows
from polarlm.bench.quality.survey import Survey
from polarlm.bench.result import Result
from polarlm.engine.backends.select import select
from polarlm.engine.cli.flags import FlagError
from tests.shared_data import shared

# -- arithmetic ----------------------------------------------------------------------------------------------------


def test_divergence_matches_its_definition_in_every_row(rng: np.random.Generator) -> None:
    """Σ p·ln(p/q), over more rows than are computed at once."""
    exact, other = rng.normal(0, 3, (2, 150, 11)).astype(np.float32)
    p, q = (np.exp(x.astype(np.float64)) for x in (exact, other))
    p, q = p / p.sum(axis=1, keepdims=True), q / q.sum(axis=1, keepdims=True)
    actual = compare(exact, other)
    np.testing.assert_allclose(actual.kl, (p * np.log(p / q)).sum(axis=1), rtol=1e-12)
    assert actual.same_top1.tolist() == [p[t].argmax() == q[t].argmax() for t in range(150)]
    assert 0 < actual.same_top1.mean() < 1


def test_divergence_by_position_by_hand() -> None:
    """Two windows of 300 and 129 positions: the second one reaches one position of the second stretch."""
    long, short = np.repeat([1.0, 2.0, 6.0], [128, 128, 44]), np.repeat([3.0, 131.0], [128, 1])
    same = [np.repeat([True, False, True], [128, 128, 44]), np.repeat([False, True], [128, 1])]
    result = Result({})
    windows = [Divergence(*both, both[0]) for both in zip((long, short), same, strict=True)]
    add_stretches(result, "type", windows)
    actual = [
        (subject, kl.more["positions"], kl.value, kl.error, top1.value, top1.error)
        for subject, _, figures in result.parts()
        for kl, top1 in [(figures["kl_mean"], figures["same_top1"])]
    ]
    half, eighth = pytest.approx(0.5**0.5, rel=0.1), pytest.approx(0.125**0.5, rel=0.1)
    far, few = pytest.approx(55.6, rel=0.15), pytest.approx(0.43, rel=0.15)
    assert actual == [
        ("positions 0 to 127", 256, 2.0, half, 0.5, eighth),
        ("positions 128 to 255", 129, (128 * 2 + 131) / 129, far, 1 / 129, few),
        ("positions 256 to 299", 44, 6.0, None, 1.0, None),
    ]


# -- windows and cache types ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 12, 13, 40])
def test_every_id_of_a_text_is_in_one_window(count: int) -> None:
    """With a BOS every id is predicted; without one the first id of a window is only read, and a single last id has
    nothing to predict it from."""
    ids = list(range(5, 5 + count))
    cut = windows(ids, 12, bos_id=1)
    assert all(window[0] == 1 and len(window) <= 12 for window in cut)
    assert [i for window in cut for i in window[1:]] == ids
    cut = windows(ids, 12, bos_id=None)
    assert all(2 <= len(window) <= 12 for window in cut)
    assert [i for window in cut for i in window] == (ids[:-1] if count % 12 == 1 else ids)


def test_cache_types_of_a_command_line() -> None:
    assert cache_types("f16, polarquant/f16,f16") == [
        CacheType("f16", "f16", "f16", True),
        CacheType("polarquant/f16", "polarquant", "f16", True),
    ]
    assert cache_types("ring3/ring3.5, ring5@1-2, f16@3,ring3,ring5@1/ring3.5:plain") == [
        CacheType("ring3/ring3.5,ring5@1-2,f16@3", "ring3", "ring3.5,ring5@1-2,f16@3", True),
        CacheType("ring3,ring5@1/ring3.5:plain", "ring3,ring5@1", "ring3.5", False),
    ]
    with pytest.raises(FlagError, match="--types ring3,int9@1: There is no cache type 'int9'"):
        cache_types("ring3,int9@1")
    with pytest.raises(FlagError, match=r"--types f16/polarquant: .*7"):
        CacheType.read("f16/polarquant").check(head_dim=7)


# -- a real model --------------------------------------------------------------------------------------------------


@pytest.mark.slow  # a whole model reads 1,024 tokens six times
def test_what_conditioning_is_for_on_a_real_model(demo_path: Path) -> None:
    """KL in nats on WikiText-2: the least and the most of each type, with compiled kernels."""
    bounds = {
        ("f16", SERVED): (0, 2e-3),
        ("polarquant", SERVED): (0, 0.025),
        ("polarquant", CODED): (0, 0.09),
        ("polarquant:plain", SERVED): (0.03, 0.06),
        ("polarquant:plain", CODED): (0.15, 0.25),
    }
    text = shared("text", "wikitext2_test_raw.txt").read_bytes().decode().replace("\r\n", "\n")
    types, ops = cache_types("f16,polarquant,polarquant:plain"), select("cpu", 0)[0]
    survey = Survey(str(demo_path), types, 1024, ops, lambda sentence: None, every_token_coded=True)
    list(survey.score(survey.tokenizer.tokenize(text[:8192])[:1024]))
    result = Result({})
    survey.add_to(result)
    survey.close()
    kl = {key: result.value("text", contestant(*key), "kl_mean") for key in bounds}
    assert all(low <= kl[key] <= high for key, (low, high) in bounds.items()), kl
    # Block means of the keys alone: 8 bits for each channel, and 16 for the scale of all 64, over 64 tokens.
    bits = [result.value("text", type, "bits_per_value") for type in ("polarquant", "polarquant:plain")]
    assert bits[0] - bits[1] == pytest.approx((8 + 16 / 64) / 64 / 2)
