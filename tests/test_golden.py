"""Greedy text and tokens of small models against references made with transformers in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from tests.conftest import FIXTURES
from tests.pairs import mostly_slow
from tests.shared_data import shared
from tests.tiny import load_tiny, make_model

MODELS = ["stories260K", "stories15M"]

# Rounding may decide a step whose best two logits are closer than this.
MARGIN = 0.02


def reference(model: str) -> list[dict]:
    return json.loads((shared("models", model) / "reference_greedy.json").read_text())["cases"]


def decided(case: dict) -> int:
    """The number of generated tokens before the first step at which the two best logits are nearly equal."""
    margins = [top[0][1] - top[1][1] for top in case["top5_per_step"]]
    return next((i for i, margin in enumerate(margins) if margin < MARGIN), len(case["generated_ids"]))


@pytest.mark.parametrize("block_size", [16, 64])
def test_full_precision_gives_the_reference_text(block_size: int) -> None:
    folder = shared("models", "stories260K")
    with Engine.load(folder, cache_type_k="f16", cache_type_v="f16", block_size=block_size) as engine:
        for case in reference("stories260K"):
            assert engine.tokenize(case["prompt"]) == case["prompt_ids"][1:]
            limit = len(case["generated_ids"])
            answer = engine.generate(case["prompt"], SamplingParams(temperature=0, max_tokens=limit))
            same = decided(case)
            assert list(answer.token_ids[:same]) == [i for i in case["generated_ids"][:same] if i not in (1, 2)]
            if same == limit:
                assert engine.detokenize(answer.token_ids) == case["text"]


@pytest.mark.parametrize("model", MODELS)
def test_teacher_forced_logits_are_those_of_the_reference(model: str) -> None:
    with Engine.load(shared("models", model), cache_type_k="f16", cache_type_v="f16", block_size=16) as engine:
        for case in reference(model):
            prompt, generated = case["prompt_ids"], case["generated_ids"]
            logits = engine.score([*prompt, *generated], logits=True).logits[len(prompt) - 1 : -1]
            for row, top in zip(logits, case["top5_per_step"], strict=True):
                ids, values = zip(*top, strict=True)
                np.testing.assert_allclose(row[list(ids)], values, atol=2e-3 * (row.max() - row.min()))


def greedy(engine: Engine, messages: list[dict[str, str]], limit: int = 24) -> str:
    return engine.chat(messages, SamplingParams(temperature=0, max_tokens=limit)).text


QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


def test_the_demonstration_model_knows_paris(demo: Engine) -> None:
    assert greedy(demo, QUESTION) == ANSWER


# `scripts/make_fixtures.py` wrote `greedy.json`, and chose prompts whose answers vary. Where the most likely token is
# the same for ever, as in Gemma's tied models, the answer is of tokens that are not among the last ones (`apart`). A
# store in full precision holds halves, so an answer may only differ from the reference's where a token's margin over
# the next one is as small as what rounding changes.
RUNS: dict[str, dict[str, Any]] = json.loads((FIXTURES.parent / "greedy.json").read_text(encoding="utf-8"))
OF_200 = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, repeat_penalty=1, dry_multiplier=0)


@mostly_slow("name", RUNS, ["gemma4_shared_kv", "gpt_oss_mxfp4"])  # 20 models, 200 steps each
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Also with compiled kernels, where there are any."""
    path, run = make_model(tmp_path, name), RUNS[name]
    params = replace(OF_200, presence_penalty=1000, repeat_last_n=run["apart"])
    for ops in (NumpyOps(), None):
        with load_tiny(path, ops=ops, device="cpu", ctx_size=256, cache_type="f16") as engine:
            assert [*engine.generate(run["prompt"], params).token_ids] == run["answer"]
