"""lm-eval asks an engine: log-likelihoods and answers, beside a plain forward pass, and tasks made here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.bare import bare_model, log_softmax, prefill_logits, read_model
from tests.tiny import CONTEXT, load_tiny

pytest.importorskip("lm_eval", reason="needs lm-eval, which the extra 'eval' has")

from lm_eval.api.instance import Instance

from polarlm.engine import EngineError, SamplingParams
from polarlm.lm_eval import PolarLM

CONTEXTS = ["the rain in the north", "an inn on the hill and the other one here", "on"]
ANSWERS = [" is here", " and there", " no"]
LONG = "the other inn on the hill, and then the rain in the north again. " * 12


@pytest.fixture(scope="module")
def model(tiny_path: Path) -> Iterator[PolarLM]:
    model = PolarLM(str(tiny_path), device="cpu", cache_type="f16", batch_size=1, max_batch_size=None)
    yield model
    model.engine.close()


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, request, number) for number, request in enumerate(arguments)]


def plain(path: Path, ids: list[int]) -> np.ndarray:
    """Log-probabilities (T, V) of a forward pass without a cache."""
    config, weights = read_model(path)
    return log_softmax(prefill_logits(bare_model(config, weights, block_size=len(ids) + 8 - len(ids) % 4), ids))


def test_log_likelihoods_are_those_of_a_forward_pass(tiny_path: Path, model: PolarLM) -> None:
    pairs = [(context, answer) for context in CONTEXTS for answer in ANSWERS]
    results = model.loglikelihood(requests("loglikelihood", *pairs, ("", "the hill")), disable_tqdm=True)
    for (context, answer), (logprob, greedy) in zip([*pairs, ("", "the hill")], results, strict=True):
        before = model.tok_encode(context) or [model.prefix_token_id]
        ids = before + model.tok_encode(context + answer)[len(before) if context else 0 :]
        logprobs, following = plain(tiny_path, ids)[len(before) - 1 : -1], ids[len(before) :]
        assert logprob == pytest.approx(logprobs[np.arange(len(following)), following].sum(), abs=2e-3 * len(following))
        assert greedy == (logprobs.argmax(axis=1) == following).all()


def test_a_text_longer_than_the_context_is_scored_in_windows(tiny_path: Path, model: PolarLM) -> None:
    """Every token once, after the prefix token or after as many tokens as there is room for."""
    ids = model.tok_encode(LONG)
    assert len(ids) > 2 * CONTEXT
    (logprob,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", (LONG,)), disable_tqdm=True)
    expected, window = 0.0, CONTEXT - 1
    for start in range(0, len(ids), window):
        end = min(start + window, len(ids))
        window_ids = [model.prefix_token_id, *ids[:end]] if start == 0 else ids[max(0, end - window - 1) : end]
        logprobs = plain(tiny_path, window_ids)[:-1]
        at = np.arange(len(window_ids) - 1 - (end - start), len(window_ids) - 1)
        expected += float(logprobs[at, ids[start:end]].sum())
    assert logprob == pytest.approx(expected, rel=1e-4)


def test_answers_are_the_engines_and_end_at_stop_strings(model: PolarLM) -> None:
    settings = {"until": ["\n\n", ""], "max_gen_toks": 12}
    results = model.generate_until(requests("generate_until", *((c, settings) for c in CONTEXTS)), disable_tqdm=True)
    for context, text in zip(CONTEXTS, results, strict=True):
        assert text == model.engine.generate(context, SamplingParams(temperature=0, max_tokens=12)).text
    letter = next(character for character in results[0][1:] if character.isalnum())
    (cut,) = model.generate_until(
        requests("generate_until", (CONTEXTS[0], {"until": letter, "max_gen_toks": 12})), disable_tqdm=True
    )
    assert cut == results[0].partition(letter)[0]


def test_requests_with_the_same_context_compute_it_once(tiny_path: Path) -> None:
    """All tokens of the context but the last, whose logits are needed: by the engine's own counters."""
    model = PolarLM(str(tiny_path), device="cpu", cache_type="balanced")
    context = LONG[:200]
    pairs = [(context, answer) for answer in [*ANSWERS, " a hill"]]
    tokens = len(model.tok_encode(context))
    model.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    assert model.prompt_tokens == len(pairs) * tokens
    assert tokens > 100
    # Those that run at once share complete blocks, 64 tokens each; later ones also what follows these.
    blocks = (tokens - 1) // 64 * 64
    assert model.cached_tokens >= (len(pairs) - 1) * blocks
    before = model.cached_tokens
    model.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    assert model.cached_tokens - before == len(pairs) * (tokens - 1)
    model.engine.close()


def test_a_continuation_without_room_is_refused(model: PolarLM) -> None:
    with pytest.raises(EngineError, match=f"does not fit into the context of {CONTEXT}: raise ctx_size"):
        model.loglikelihood(requests("loglikelihood", ("the", LONG)), disable_tqdm=True)


def test_a_conversation_is_the_templates(tiny_path: Path, model: PolarLM) -> None:
    history = [{"role": "user", "content": "where"}]
    text = model.apply_chat_template(history)
    with load_tiny(tiny_path, cache_type="f16", device="cpu") as engine:
        assert model.tok_encode(text) == engine.prompt_ids(history)
    begun = model.apply_chat_template(
        [*history, {"role": "assistant", "content": "on the"}], add_generation_prompt=False
    )
    assert begun == text + "on the"


# -- tasks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task, whose data are a file here."""
    for name, folder in (("HF_HOME", "hf"), ("HF_DATASETS_CACHE", "data")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    lines = [{"q": context, "choices": [a.strip() for a in ANSWERS], "a": 1} for context in CONTEXTS]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (folder := tmp_path / "tasks").mkdir()
    (folder / "chosen.yaml").write_text(
        f"task: chosen\ndataset_path: json\ndataset_kwargs: {{data_files: '{data}'}}\ntest_split: train\n"
        'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: a\n'
        'doc_to_text: "{{q}}"\nmetric_list: [{metric: acc}]\n',
        encoding="utf-8",
    )
    return folder


@pytest.mark.slow
def test_the_command_runs_tasks_by_name(tasks: Path, tiny_path: Path, model: PolarLM) -> None:
    """With the accuracy that the model's log-likelihoods have."""
    right = 0
    for context in CONTEXTS:
        scores = model.loglikelihood(requests("", *((context, a) for a in ANSWERS)), disable_tqdm=True)
        right += int(np.argmax([logprob for logprob, _ in scores])) == 1
    words = ["--model", "polarlm", "--tasks", "chosen", "--include_path", str(tasks), "--device", "cpu"]
    for arguments, code, said in (
        (
            f"weights={tiny_path},cache_type=f16,ctx_size={CONTEXT}",
            0,
            rf"\|chosen *\|.*\b{right / len(CONTEXTS):.4f}\b",
        ),
        ("weights=none.gguf", 2, "error: none.gguf does not exist"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "polarlm.lm_eval", *words, "--model_args", arguments],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ,
        )
        assert done.returncode == code, done.stderr
        assert re.search(said, done.stdout + done.stderr)
        assert code == 0 or "Traceback" not in done.stderr
