"""Ops are functions of their arguments, and a layer has kernels or is NumPy's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from polarlm.engine import SamplingParams
from polarlm.engine.backends.native.graphs import Graphs
from polarlm.engine.backends.native.launch import Launcher
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from tests.tiny import VOCABULARY, load_tiny

MACHINE = Launcher, Graphs, NumpyOps  # compiled kernels and memory, recordings, cores
PROMPT = np.random.default_rng(0).integers(5, VOCABULARY, 100).tolist()
SOME = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"block_size": 32, "ctx_size": 256, "cache_type_k": "ring4", "cache_type_v": "kivi4@1,ring4"}


def contents(x: Any) -> Any:
    """All that can be reached from an object, but for the machine's."""
    if isinstance(x, np.ndarray):
        return x.shape, x.tobytes()
    if isinstance(x, Mapping):
        return {key: contents(value) for key, value in x.items()}
    if isinstance(x, (list, tuple, set)):
        return [contents(value) for value in x]
    if isinstance(x, MethodType):
        return contents(x.__self__)
    if isinstance(x, (FunctionType, type, *MACHINE)) or not hasattr(x, "__dict__"):
        return x
    return contents(vars(x))


def test_no_op_keeps_state(tiny_path: Path) -> None:
    """Of an engine with layers of both kinds, which takes prompts, steps, a second turn and a score."""
    ops = NativeOps(1)
    before = contents(ops)
    with load_tiny(tiny_path, ops=ops, **SETTINGS) as engine:
        answer = engine.generate(PROMPT, SOME)
        engine.generate([*PROMPT, *answer.token_ids, *PROMPT[:20]], SOME)
        engine.score(PROMPT, every_token_coded=True)
    assert contents(ops) == before


def test_a_layer_without_kernels_is_numpys(tiny_path: Path) -> None:
    answers = []
    for ops in NativeOps(1), NumpyOps(1):
        with load_tiny(
            tiny_path, ops=ops, **{**SETTINGS, "cache_type_k": "f16", "cache_type_v": "kivi4@1,f16"}
        ) as engine:
            first = engine.generate(PROMPT, SOME)
            second = engine.generate([*PROMPT, *first.token_ids, *PROMPT[:20]], SOME)
            answers.append((first.token_ids, second.token_ids))
            layers = [type(engine._store.cache(layer)).__name__ for layer in (0, 1)]
        assert layers == (["TileCache", "LayerCache"] if ops.backend == "native" else ["LayerCache"] * 2)
    assert answers[0] == answers[1]
