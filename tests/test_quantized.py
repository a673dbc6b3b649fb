"""Engines with quantized safetensors answer as engines with their values do."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.weight_formats import find
from tests.adapters import random_changes, write_peft
from tests.conftest import FIXTURES
from tests.pairs import mostly_slow
from tests.quantized import KINDS, quantized_model
from tests.tiny import VOCABULARY, load_tiny, tokenizer_json

IDS = np.random.default_rng(3).integers(5, VOCABULARY, 40).tolist()
SETTINGS = {"device": "cpu", "cache_type": "f16", "calibration": False, "ctx_size": 128}
# Of the spread of logits. Kernels round the inputs of a product to 16 bits. With q8_0, a product is off by 0.7 % of its
# deviation (tests/weight_formats/test_contract.py), 14 of them by 2.6 %, and the furthest of thousands of logits by 10
# % of it, which is 1.5 % of the spread: here twice that, since attention may enlarge it.
IN_PLACE, AS_Q8_0 = 2**-10, 0.03


def folders(folder: Path, kind: str, model: str) -> list[Path]:
    """A quantized model and the one that has its values."""
    paths = [quantized_model(folder, FIXTURES / model, KINDS[kind]) / "quantized", folder / "plain"]
    for path in paths:
        (path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    return paths


@mostly_slow("kind", KINDS, ["compressed-tensors", "nf4"])
def test_logits_are_those_of_the_values(kind: str, tmp_path: Path) -> None:
    """To the bit in NumPy, which has the values of every kind but NF4; with compiled kernels near them."""
    is_rounded = kind == "nf4" or find(KINDS[kind].type) is None  # a router may then choose other experts
    for model in ("llama_mha", "llama_gqa_linear") if is_rounded else ("llama_mha", "glm4_moe_biases_two_shared"):
        exact, compiled = [], []
        for path in folders(tmp_path / model, kind, model):
            with load_tiny(path, ops=NumpyOps(), **SETTINGS) as engine:
                exact.append(engine.score(IDS, logits=True).logits)
            with Engine.load(path, **SETTINGS) as engine:
                compiled.append(engine.score(IDS, logits=True).logits)
        tolerance = AS_Q8_0 if is_rounded else IN_PLACE
        np.testing.assert_allclose(*exact, rtol=0, atol=tolerance * np.ptp(exact[1]) * (kind == "nf4"))
        np.testing.assert_allclose(*compiled, rtol=0, atol=tolerance * np.ptp(exact[1]))


def test_an_adapter_changes_a_quantized_model_as_it_changes_the_values(tmp_path: Path) -> None:
    answers = []
    paths = folders(tmp_path, "gptq", "llama_mha")
    lora = write_peft(tmp_path / "adapter", random_changes(paths[1], 4, seed=1), 8.0)
    for path in paths:
        with load_tiny(path, ops=NumpyOps(), lora={"adapter": str(lora)}, **SETTINGS) as engine:
            params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
            options = [PromptOptions(), PromptOptions(lora="adapter")]
            answers.append([engine.generate(IDS, params, one).token_ids for one in options])
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]
