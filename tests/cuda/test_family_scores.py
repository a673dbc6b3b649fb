"""Every family as a whole engine on the device: its log-probabilities are as far from NumPy's as roundings are.

The measure is how far NumPy with the roundings of the kernels is, in the median and at 95 % of a text's tokens; at 90 %
where there are codes, since a few flip. The largest difference is none: where a router's logits nearly tie, another
expert is chosen, which all later tokens see. So of three texts the middle one counts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import SamplingParams
from polarlm.engine.backends.cuda.ops import CudaOps
from tests.conftest import FIXTURES
from tests.cuda.emulated import open_device
from tests.cuda.programs import on_gpu
from tests.cuda.test_model_emulated import Rounded, SameWeights
from tests.tiny import VOCABULARY, load_tiny, make_model

TEXTS = np.random.default_rng(0).integers(5, VOCABULARY, (3, 150)).tolist()  # each has three blocks
ANSWER = SamplingParams(max_tokens=5, temperature=2, seed=0, ignore_eos=True, logprobs=0)
ALL = [(path.name, types) for types in ("f16", "balanced") for path in sorted(FIXTURES.iterdir())]
MOST = 1.5, 2.0, 2.0  # times the measure: in the median, at 95 or 90 %, and of an answer's few tokens in the median
# Whole texts and windows, shared K/V, sink scores, experts, short convolutions, delta rules, Mamba 2, queries
# that grow with their positions, norms after RoPE, and LayerNorms before attention and network side by side.
QUICK = [
    ("cohere2_windows_tied", "balanced"),
    ("deepseek_v2_greedy", "balanced"),
    ("gemma4_shared_kv", "f16"),
    ("glm4_moe_lite", "f16"),
    ("gpt_oss_mxfp4", "f16"),
    ("granite_hybrid_tied", "f16"),
    ("hunyuan_v1_dense_alpha_tied", "balanced"),
    ("kimi_linear_nope", "balanced"),
    ("lfm3_gated_tied", "f16"),
    ("mistral3_with_images", "f16"),
    ("qwen3_5_tied", "balanced"),
]


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


@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "types"), ALL if on_gpu() else QUICK)
def test_each_kind_of_layer_is_as_exact_as_its_roundings(tmp_path: Path, fixture: str, types: str) -> None:
    """A model takes ten seconds on the emulator; on a GPU, which is fast, every family is compared."""
    measure, device = differences(make_model(tmp_path, fixture), types, CudaOps(open_device(checked=False)))
    sides = (" / ".join(f"{part:.4f}" for part in side) for side in (measure, device))
    print(f"off by {', '.join(sides)}")  # `make gpu-test` keeps it
    assert (measure[:2] > 0).all()
    most = MOST * measure[[0, 1, 0]]
    assert (device <= most[: len(device)] + 1e-4).all(), f"off by {device}, allowed are {most}"
