"""Files of log-probabilities: we read files of llama.cpp's `llama-perplexity`.

tests/fixtures/llama_perplexity has a file that it wrote and figures that it printed, for two models that `models`
makes: one with random weights, and the same with its matrices rounded to Q4_0.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from polarlm.bench.lab import kld
from polarlm.bench.quality.states import exact_states, logits_of
from polarlm.bench.result import read
from polarlm.engine import EngineError
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading.assembly import assemble
from polarlm.engine.loading.checks import settle
from tests.conftest import FIXTURES
from tests.random_model import in_float32, random_model

RECORDED = FIXTURES.with_name("llama_perplexity")
PRINTED: dict[str, Any] = json.loads((RECORDED / "printed.json").read_text(encoding="utf-8"))
WINDOWS, TOKENS = 2, 192  # windows of the recorded text, tokens in each
# Float32 sums in another order move a logit of this model by less.
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The paths of a model (`base`) and of the same with rounded matrices (`rounded`)."""
    folder = tmp_path_factory.mktemp("models")
    made = random_model(folder)
    _recorded_weights(made)
    rounded = in_float32(folder / "rounded.gguf", made, gguf.GGMLQuantizationType.Q4_0)
    return SimpleNamespace(base=in_float32(folder / "base.gguf", made), rounded=rounded)


def _recorded_weights(model: Path) -> None:
    """Give the model the weights of the recorded model, drawn in the order of its file: the head is last."""
    rng = np.random.default_rng(0)
    for tensor in sorted(gguf.GGUFReader(model, "r+").tensors, key=lambda tensor: tensor.name == "output.weight"):
        if tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0:
            columns = int(tensor.shape[0])
            blocks = rng.integers(256, size=(tensor.data.shape[0], columns // 32, 34), dtype=np.uint8)
            blocks[..., :2] = np.array([columns**-0.5 / 74], "<f2").view(np.uint8)
            tensor.data[:] = blocks.reshape(tensor.data.shape)
        else:
            tensor.data[:] = 1


def full_precision(model: Path, base: kld.KldFile) -> list[np.ndarray]:
    """Logits (rows, V) of a model at the rows of each window, of a prefill in float32."""
    settings = {"cache_type": "f16", "ctx_size": TOKENS, "kept_sequences": 0}
    parts = assemble(settle(model, None, settings), None, ops=NumpyOps(1))
    actual = []
    for ids in kld.windows(base.ids, parts.source.tokenizer.bos_id):
        hidden = exact_states(parts.model, ids)[base.first : -1]
        actual.append(np.concatenate([rows.copy() for rows in logits_of(parts.model, hidden)]))
    parts.close()
    return actual


# -- the format ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: b"_logits!" + data[8:], "is no file of log-probabilities"),
        (lambda data: data[:-1], "is damaged: it has 102,635 bytes, and 2 windows of 192 tokens take 102,636"),
        (lambda data: data[:8] + struct.pack("<i", -1) + data[12:], "is damaged: it names 2 windows of -1 tokens"),
        (lambda data: data[:20] + struct.pack("<i", 262) + data[24:], "token ids outside of its vocabulary of 262"),
    ],
)
def test_a_damaged_file_is_refused(change: Any, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "base"
    file.write_bytes(change((RECORDED / "base.kld").read_bytes()))
    with pytest.raises(EngineError, match=sentence):
        kld.read(file)


# -- files and figures of llama.cpp ----------------------------------------------------------------------------------


def test_its_figures_are_ours(models: SimpleNamespace) -> None:
    """The rounded model's figures, in as many digits as it prints."""
    base = kld.read(RECORDED / "base.kld")
    actual = [
        kld.compare_stored(base.logprobs(window, 0, len(logits)), logits)
        for window, logits in enumerate(full_precision(models.rounded, base))
    ]
    kl, same = (np.concatenate([getattr(one, name) for one in actual]) for name in ("kl", "same_top1"))
    for name, figure in (
        ("Mean    KLD", kl.mean()),
        ("Maximum KLD", kl.max()),
        ("99.0%   KLD", np.quantile(kl, 0.99)),
        ("90.0%   KLD", np.quantile(kl, 0.9)),
        ("Median  KLD", np.median(kl)),
    ):
        assert figure == pytest.approx(PRINTED[name], abs=2e-5), name
    assert 100 * same.mean() == pytest.approx(PRINTED["Same top p"], abs=1e-3)


# -- the command -----------------------------------------------------------------------------------------------------


def test_cache_types_are_scored_against_its_file(
    models: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """f16 hardly diverges; codes do, and so do weights that are converted."""
    monkeypatch.chdir(tmp_path)
    words = [str(RECORDED / "base.kld"), "--model", str(models.base), "-t", "1", "-o", "out.html"]
    assert kld.main([*words, "--types", "f16,ring3"]) == 0
    f16, ring3 = (read(tmp_path / "out.json").figures("text", name)["kl_mean"] for name in ("f16", "ring3"))
    assert len(f16.runs) == WINDOWS
    assert abs(f16.value) < 1e-5 < ring3.value
    assert kld.main([*words, "--types", "f16", "--weight-type", "q4_0"]) == 0
    assert read(tmp_path / "out.json").value("text", "f16", "kl_mean") > 1e-5
