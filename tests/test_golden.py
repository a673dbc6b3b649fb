"""Greedy text and tokens of small real models against references made with transformers in float32."""

from __future__ import annotations

import json

import numpy as np
import pytest

from polarlm.engine import Engine, SamplingParams
from tests.shared_data import shared

GREEDY = SamplingParams(temperature=0)
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


def test_it_knows_paris_with_a_quantized_cache(demo: Engine) -> None:
    """After a preamble of more than three blocks, attention reads codes."""
    facts = "The bakery opens at seven, and the market on the square is held on Saturdays. " * 16
    preamble = [
        {"role": "user", "content": facts + "Say hello."},
        {"role": "assistant", "content": "Hello!"},
    ]
    completion = demo.chat([*preamble, *QUESTION], SamplingParams(temperature=0, max_tokens=24))
    assert completion.usage.prompt_tokens > 300
    assert "Paris" in completion.text
