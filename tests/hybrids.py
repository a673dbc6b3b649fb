"""Engines whose models have recurrent layers, small ones of random weights, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.outputs import Completion
from tests.tiny import VOCABULARY, make_model

N = 16
# Nothing is coded, so that an answer never depends on what was found in a store.
EXACT = {
    "weight_type": "f32",
    "device": "cpu",
    "block_size": N,
    "ctx_size": 512,
    "cache_type": "f16",
    "state_type": "f32",
}
_MORE = pytest.param("kimi_linear_nope", marks=pytest.mark.slow)  # whose slots have more decays
MODELS = ["qwen3_next_shared_keys", "nemotron_h_experts", _MORE]  # gated delta rules, and Mamba 2
Load = Callable[..., Engine]


@contextmanager
def loading(folder: Path, model: str) -> Iterator[Load]:
    """Yield a function that loads engines, which keep everything exactly unless its settings say otherwise, and close
    them."""
    path = make_model(folder, model)
    with ExitStack() as engines:
        yield lambda **settings: engines.enter_context(Engine.load(path, **{**EXACT, **settings}))


def ids_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, VOCABULARY, count).tolist()


def answer(engine: Engine, ids: Sequence[int], tokens: int = 24, **more: Any) -> Completion:
    params = SamplingParams(max_tokens=tokens, temperature=1, seed=1, ignore_eos=True)
    return engine.generate(list(ids), params, **more)


def alone(load: Load, ids: Sequence[int], tokens: int = 24) -> tuple[int, ...]:
    """The answer of an engine that has computed nothing before, and finds nothing."""
    return answer(load(), ids, tokens).token_ids
