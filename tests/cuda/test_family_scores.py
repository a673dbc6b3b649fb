"""Every family as a whole engine on the device: its log-probabilities are as far from NumPy's as roundings are
(`tests.cuda.family_scores`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarlm.engine.backends.cuda.ops import CudaOps
from tests.cuda.emulated import open_device
from tests.cuda.family_scores import ALL, differences
from tests.cuda.programs import on_gpu
from tests.tiny import make_model

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
