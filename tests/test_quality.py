"""What the default cache type costs on a real model, and what conditioning is for.

KL in nats against full precision, over one window of 1,024 tokens of WikiText-2.
"""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine import Engine
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.model.weights import load_weights
from polarlm.model_loaders import load_weights as open_weights
from tests.bare import bare_model, log_softmax, prefill_logits
from tests.shared_data import shared

WINDOW = 1024


@pytest.fixture(scope="module")
def window(demo: Engine) -> list[int]:
    text = shared("text", "wikitext2_test_raw.txt").read_bytes().decode().replace("\r\n", "\n")
    return demo.tokenize(text[: 8 * WINDOW])[:WINDOW]


@pytest.fixture(scope="module")
def reference(demo_path, window) -> np.ndarray:
    """Log-probabilities (T, V) of a plain prefill, which is exact."""
    config, source, _ = open_weights(demo_path)
    weights = load_weights(NumpyOps(), config, source)
    source.close()
    return log_softmax(prefill_logits(bare_model(config, weights, block_size=64, tokens=WINDOW), window))


def divergence(reference: np.ndarray, logits: np.ndarray) -> float:
    """Mean KL of softmax(logits) from the reference, rows at a time."""
    total = 0.0
    for first in range(0, len(reference), 256):
        p = reference[first : first + 256]
        total += float((np.exp(p) * (p - log_softmax(logits[first : first + 256]))).sum())
    return total / len(reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "conditioned", "bounds"),
    [
        ("f16", True, {False: (0, 1e-5)}),
        ("polarquant", True, {False: (0, 0.025), True: (0, 0.09)}),
        ("polarquant", False, {False: (0.03, 0.06), True: (0.15, 0.25)}),
    ],
)
def test_divergence(demo_path, window, reference, types, conditioned, bounds) -> None:
    """bounds: with every token coded, or complete blocks alone → the least and the most."""
    settings = {"cache_type_k": types, "cache_type_v": types, "key_conditioning": conditioned}
    with Engine.load(demo_path, ctx_size=WINDOW, **settings) as engine:
        for every_token_coded, (low, high) in bounds.items():
            logits = engine.score(window, every_token_coded=every_token_coded, logits=True).logits
            value = divergence(reference, logits)
            assert low <= value <= high
