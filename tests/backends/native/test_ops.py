"""Ops are functions of their arguments, and a layer has kernels or is NumPy's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from polarlm.engine import SamplingParams
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from tests.tiny import VOCABULARY, load_tiny

PROMPT = np.random.default_rng(0).integers(5, VOCABULARY, 100).tolist()
SOME = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"block_size": 32, "ctx_size": 256, "cache_type_k": "ring4", "cache_type_v": "kivi4@1,ring4"}


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
