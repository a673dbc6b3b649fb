"""The demonstration model wherever it lies, and its answers in the chat."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarlm import model_loaders
from polarlm.engine import Engine, SamplingParams
from polarlm.engine.params import PromptOptions
from polarlm.engine.requests.prompts import chat_text, prompt_ids
from polarlm.model_loaders.config import GenerationDefaults
from polarlm.model_loaders.demo import DEMO_GENERATION, DEMO_SYSTEM, FILE_NAME

QUESTION = {"role": "user", "content": "What is the capital of France?"}


def test_the_file_is_recognised_wherever_it_lies(demo_path: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "mine.gguf"
    elsewhere.symlink_to(demo_path)
    for path in (None, elsewhere):
        model = model_loaders.load(path)
        assert model.path == (path or demo_path)
        assert model.generation == DEMO_GENERATION
        asked = chat_text([QUESTION], model, PromptOptions())
        assert DEMO_SYSTEM[1] in asked
        assert prompt_ids([QUESTION], model) == model.tokenizer.tokenize(asked, control=True)
    empty = {"role": "system", "content": ""}
    assert DEMO_SYSTEM[1] not in chat_text([empty, QUESTION], model, PromptOptions())


def test_another_file_of_its_size_is_another_model(demo_path: Path, tmp_path: Path) -> None:
    other = tmp_path / FILE_NAME
    content = bytearray(demo_path.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    model = model_loaders.load(other)
    assert model.generation == GenerationDefaults()
    assert DEMO_SYSTEM[0] in model.template.source


@pytest.mark.slow
def test_a_repeated_question_gets_the_same_answer(demo: Engine) -> None:
    """The penalty against repetitions must not change facts. Three answers of up to 400 tokens take seconds."""
    messages: list[dict[str, str]] = []
    for _ in range(3):
        messages += [QUESTION]
        answer = demo.chat(messages, SamplingParams(max_tokens=400)).text
        assert "Paris" in answer
        messages += [{"role": "assistant", "content": answer}]
