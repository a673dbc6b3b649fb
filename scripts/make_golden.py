"""Makes `tests/fixtures/golden.json`: answers and scores of small models with every kind of cache.

    python -m scripts.make_golden

Runs that the file has stay as they are; runs of `TYPES` that it lacks are added. For a change that is meant to change
answers, delete the file first. `tests/test_golden_runs.py` compares with it.
The models are the random ones of tests/fixtures and the demonstration model.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading import kept_arrays
from polarlm.model_loaders.demo import demo_model
from tests.tiny import VOCABULARY, load_tiny, make_model

FILE = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "golden.json"
DEMO = "demonstration model"
SETTINGS = {"ctx_size": 256}

# Model → cache types, each codec family at least once.
_FAMILIES = (
    "balanced",
    "f16",
    "polarquant",
    "polarpair-m4n4/ring4",
    "turbo3",
    "linear8/ring2.5",
)
TYPES: dict[str, tuple[str, ...]] = {
    "llama_gqa_linear": _FAMILIES,
    "llama_wide_heads_biases": ("balanced", "f16", "quality", "compact"),
    "mistral_window_sharded": ("balanced", "f16", "turbo4"),
    DEMO: ("balanced",),
}
PROMPT_TOKENS, MOST_TOKENS = 140, 32
QUESTION = "How do I boil an egg?"
SCORED = slice(20, None, 10)  # the log-probabilities of prompt and answer that are stored

# Nats between the best two tokens of a step. Answers end before the first step with less, whose token may depend on
# rounding.
MARGIN = 0.02


@contextmanager
def open_engine(model: str, cache_type: str) -> Iterator[Engine]:
    """An engine of one of the models, in float32. Raises LoadError if the demonstration model is not available."""
    ops = NumpyOps(1)
    if model == DEMO:
        with load_tiny(demo_model(None), ops=ops, cache_type=cache_type, **SETTINGS) as engine:
            yield engine
        return
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder), model)
        with load_tiny(path, ops=ops, cache_type=cache_type, block_size=16, **SETTINGS) as engine:
            yield engine


def prompt_of(engine: Engine, model: str, seed: int) -> list[int]:
    """More than five blocks of token ids: random ones, or a chat."""
    if model == DEMO:
        text = "<|im_start|>user\n" + "The market on the square is held on Saturdays. " * 12
        text += f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        return engine.tokenize(text, control=True)
    return np.random.default_rng(seed).integers(5, VOCABULARY, PROMPT_TOKENS).tolist()


def answer(engine: Engine, prompt: list[int], most: int) -> tuple[list[int], list[float], list[float]]:
    """Greedy token ids, their log-probabilities, and the log-probabilities of the second best."""
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, logprobs=2, dry_multiplier=0)
    generated = engine.generate(prompt, params)
    seconds = [second for _, (_, second) in (token.top for token in generated.logprobs)]
    return list(generated.token_ids), [token.logprob for token in generated.logprobs], seconds


def scores(engine: Engine, model: str, ids: list[int]) -> dict[str, list[float]]:
    """Log-probabilities SCORED of `ids`, teacher-forced, and the mean of all; of random models in both ways of scoring.

    The demonstration model is not scored with every token coded: errors of 30 layers add up there, and another order of
    float32 sums changes single log-probabilities by 0.3.
    """
    ways = {"scores": False} if model == DEMO else {"scores": False, "every_token_coded": True}
    entries = {}
    for name, coded in ways.items():
        logprobs = engine.score(ids, every_token_coded=coded).logprobs
        entries[name] = rounded([*logprobs[SCORED], logprobs.mean(dtype=np.float64)])
    return entries


def rounded(numbers: Iterable[float]) -> list[float]:
    """Numbers rounded to the digits of the file."""
    return [round(float(number), 5) for number in numbers]


def run(engine: Engine, model: str, prompt: list[int]) -> dict[str, Any]:
    """The file's entry for one engine."""
    ids, logprobs, seconds = answer(engine, prompt, MOST_TOKENS)
    close = [first - second < MARGIN for first, second in zip(logprobs, seconds, strict=True)]
    end = close.index(True) if True in close else len(ids)
    return {"answer": ids[:end], "logprobs": rounded(logprobs[:end]), **scores(engine, model, [*prompt, *ids[:end]])}


def without_runs(model: str, seed: int) -> dict[str, Any]:
    """A model's entry with a prompt alone."""
    with open_engine(model, TYPES[model][0]) as engine:
        return {"prompt": prompt_of(engine, model, seed), "types": {}}


def completed(model: str, known: dict[str, Any]) -> dict[str, Any]:
    """A model's entry with runs for all cache types; known ones stay."""
    entries = dict.fromkeys(TYPES[model]) | known["types"]
    for cache_type in TYPES[model]:
        if entries[cache_type] is None:
            with open_engine(model, cache_type) as engine:
                entries[cache_type] = run(engine, model, known["prompt"])
    return {"prompt": known["prompt"], "types": {cache_type: entries[cache_type] for cache_type in TYPES[model]}}


def main() -> int:
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    golden = {}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_arrays, "cache_folder", lambda: Path(folder))
        for model in TYPES:
            seeds = range(1 if model == DEMO else 12)
            starts = [known[model]] if model in known else [without_runs(model, seed) for seed in seeds]
            golden[model] = max((completed(model, start) for start in starts), key=least_varied)
            print(f"{model}: at least {least_varied(golden[model])} different tokens", file=sys.stderr)
    text = json.dumps(golden, indent=1)
    FILE.write_text(re.sub(r",\n +(?=[-\d])", ", ", text) + "\n", encoding="utf-8")  # lists of numbers in one line
    return 0


def least_varied(entry: dict[str, Any]) -> int:
    """The least number of distinct tokens in an answer: some models repeat one token."""
    return min(len(set(one["answer"])) for one in entry["types"].values())


if __name__ == "__main__":
    sys.exit(main())
