"""How far a device's log-probabilities of a whole engine are from NumPy's, beside how far the kernels' roundings are.

The measure is how far NumPy with the roundings of the kernels is, in the median and at 95 % of a text's tokens; at 90 %
where there are codes, since a few flip. The largest difference is none: where a router's logits nearly tie, another
expert is chosen, which all later tokens see. So of three texts the middle one counts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from polarlm.engine import SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from tests.conftest import FIXTURES
from tests.cuda.test_model_emulated import Rounded, SameWeights
from tests.tiny import VOCABULARY, load_tiny

TEXTS = np.random.default_rng(0).integers(5, VOCABULARY, (3, 150)).tolist()  # each has three blocks
ANSWER = SamplingParams(max_tokens=5, temperature=2, seed=0, ignore_eos=True, logprobs=0)
ALL = [(path.name, types) for types in ("f16", "balanced") for path in sorted(FIXTURES.iterdir())]


def share(types: str) -> float:
    """The share of a text's tokens whose largest difference counts."""
    return 0.95 if types == "f16" else 0.9


def differences(path: Path, types: str, device: CudaOps) -> np.ndarray:
    """How far NumPy with the kernels' roundings is off, and the device: the median and `share` of a text's tokens. In
    full precision, where steps read what scoring reads, also the median of answers: (2, 2) or (2, 3).

    path: of a model of `tests.tiny.make_model`.
    """
    with load_tiny(path, ops=device, cache_type=types, ctx_size=256) as engine:
        answers = [engine.generate(text, ANSWER) for text in TEXTS]
        steps = [[token.logprob for token in answer.logprobs] for answer in answers]
        device_scores = np.concatenate([[engine.score(text).logprobs for text in TEXTS], steps], axis=1)
    scores = []
    for ops in (SameWeights(device), Rounded(device)):
        with load_tiny(path, ops=ops, cache_type=types, ctx_size=256) as engine:
            wholes = ([*text, *answer.token_ids] for text, answer in zip(TEXTS, answers, strict=True))
            scores.append([engine.score(whole).logprobs for whole in wholes])
    exact, rounded = np.array(scores)
    off = np.abs(np.array([rounded, device_scores]) - exact)
    of_text, of_answers = off[..., : len(TEXTS[0]) - 1], off[..., len(TEXTS[0]) - 1 :]
    parts = [np.median(np.quantile(of_text, part, axis=-1), axis=-1) for part in (0.5, share(types))]
    return np.stack([*parts, *([np.median(of_answers, axis=(1, 2))] if types == "f16" else [])], axis=-1)
