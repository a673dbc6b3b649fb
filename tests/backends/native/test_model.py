"""Whole models with compiled kernels, against the same models in float32."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from bench.quality.arithmetic import chunk_logits, step_logits
from engine import Engine
from engine.assembly import assemble, settle
from engine.backends.native.ops import NativeOps
from engine.backends.numpy.ops import NumpyOps
from engine.backends.ops import Ops
from scripts.make_golden import answer
from scripts.make_random_model import write
from tests.bare import kl
from tests.conftest import FIXTURES
from tests.random_model import TINY, tokenizer_file
from tests.shared_data import shared
from tests.tiny import VOCABULARY, load_tiny, make_model

FAMILIES = sorted(path.name for path in FIXTURES.iterdir())
# Nats between the best two tokens of a step. Rounding may decide a closer one.
MARGIN = 0.05
TOKENS = 24


def decided(engine: Engine, prompt: list[int]) -> list[int]:
    """A greedy answer, up to the first step whose best two tokens are closer than MARGIN."""
    ids, best, seconds = answer(engine, prompt, TOKENS)
    close = itertools.takewhile(lambda step: step[1] - step[2] >= MARGIN, zip(ids, best, seconds, strict=True))
    return [token for token, _, _ in close]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers_of_every_family_are_those_of_float32(name: str, tmp_path: Path) -> None:
    path, prompts = make_model(tmp_path, name), np.random.default_rng(0).integers(5, VOCABULARY, (4, 50)).tolist()
    settings = {"cache_type": "f16", "block_size": 16, "ctx_size": 128}
    with load_tiny(path, ops=NumpyOps(1), **settings) as engine:
        wanted = [decided(engine, prompt) for prompt in prompts]
    with load_tiny(path, ops=NativeOps(1), **settings) as engine:
        found = [answer(engine, prompt, TOKENS)[0] for prompt in prompts]
    assert [ids[: len(want)] for ids, want in zip(found, wanted, strict=True)] == wanted
    assert sum(map(len, wanted)) >= 8, "too few steps are decided"


def scored(path: Path, ops: Ops, ids: list[int], prompt: int, cache_type: str, **settings: object) -> np.ndarray:
    """Logits (T − prompt, V) of the ids after the prompt: by steps of compiled kernels, or of NumPy, which takes the
    rows of a block at once."""
    settings = {"cache_type": cache_type, "ctx_size": 512, **settings}
    parts = assemble(settle(path, None, settings), None, ops=ops)
    logits = (chunk_logits if isinstance(ops, NumpyOps) else step_logits)(parts.model, ids, prompt)
    parts.close()
    return logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_quantized_cache_costs_what_it_costs_in_float32(name: str, tmp_path: Path) -> None:
    """Heads of 8 or 16 numbers are few: a code that rounds the other way changes more than in a real model."""
    path, ids = make_model(tmp_path, name), np.random.default_rng(0).integers(5, VOCABULARY, 120).tolist()
    settings = {"block_size": 16, "ctx_size": 128, "calibration": False}
    exact = scored(path, NumpyOps(1), ids, 50, "f16", **settings)
    wide = scored(path, NumpyOps(1), ids, 50, "balanced", **settings)
    found = scored(path, NativeOps(1), ids, 50, "balanced", **settings)
    assert kl(wide, found) < 0.1 * kl(exact, wide)
    assert kl(exact, found) == pytest.approx(kl(exact, wide), rel=0.2)


@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
def test_packed_weights_compute_as_float32_does(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "tiny", TINY, kind, tokenizer_file(tmp_path))
    ids = np.random.default_rng(0).integers(5, 250, 200).tolist()
    exact, found = (scored(path, ops, ids, 130, "f16") for ops in (NumpyOps(1), NativeOps(1)))
    assert 0 < kl(exact, found) < 1e-7


def test_the_demonstration_model_computes_as_its_file_says(demo: Engine, demo_path: Path) -> None:
    """On WikiText. With inputs of 8 instead of 16 bits, the divergence would be .003."""
    text = shared("text", "wikitext2_test_raw.txt").read_text(encoding="utf-8")
    ids = demo.tokenize(text[:4000])[:320]
    exact, wide = (scored(demo_path, NumpyOps(1), ids, 192, cache_type) for cache_type in ("f16", "balanced"))
    f16, found = (scored(demo_path, NativeOps(1), ids, 192, cache_type) for cache_type in ("f16", "balanced"))
    assert kl(exact, f16) < 1e-5
    assert kl(exact, found) == pytest.approx(kl(exact, wide), rel=0.2)
