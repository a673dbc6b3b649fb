"""Calls that people try first, with what they know of other programs: they work, or one sentence says what does."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polarlm
from polarlm import AsyncEngine, Engine, EngineConfig, EngineError, PromptOptions, SamplingParams
from tests.tiny import GREEDY, assert_idle

ANEW = PromptOptions(cache_prompt=False)
SAID = [{"role": "user", "content": "the rain"}]
SEVERAL: list[Any] = [[], ["the end", "rain", "on"], ("the end",), [[5, 6, 7], [8]], [SAID, [*SAID, *SAID]]]


@pytest.mark.parametrize("prompts", SEVERAL, ids=str)
def test_several_prompts_get_their_answers_in_order(tiny: Engine, prompts: Any) -> None:
    alone = [tiny.generate(prompt, GREEDY, ANEW).text for prompt in prompts]
    assert [answer.text for answer in tiny.generate(prompts, GREEDY, ANEW)] == alone
    assert_idle(tiny)


def test_they_are_computed_together(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    work, running = tiny.work, list[int]()
    monkeypatch.setattr(tiny, "work", lambda: work() and not running.append(tiny.status().running))
    answers = tiny.generate(["the end", "rain", "on"] * 5, GREEDY)
    assert (len(answers), max(running)) == (15, tiny.config.parallel)
    assert len(running) < 6 * len(answers)  # one after the other: 12 steps and a prompt for each


@pytest.mark.parametrize("wrong", ["", "the " * 5000])
def test_a_wrong_prompt_of_several_is_named_before_any_is_computed(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(tiny, "work", lambda: pytest.fail("computes"))
    with pytest.raises(EngineError, match=r"^prompts\[1\]: The prompt"):
        tiny.generate(["the end", wrong, "rain"], GREEDY)
    assert_idle(tiny)


def test_a_text_in_chat_is_a_message_of_the_users(tiny: Engine) -> None:
    assert tiny.chat("the rain", GREEDY, ANEW).token_ids == tiny.chat(SAID, GREEDY, ANEW).token_ids
    parts = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "rain"}]}]
    assert tiny.prompt_ids(parts) == tiny.prompt_ids(SAID)


def test_settings_of_one_call_override_the_params(tiny: Engine) -> None:
    assert len(tiny.generate("the end", GREEDY, max_tokens=3).token_ids) == 3
    assert [len(one.token_ids) for one in tiny.generate(["the", "end"], GREEDY, max_tokens=2)] == [2, 2]
    assert len(tiny.chat("the end", max_tokens=4, temperature=0, ignore_eos=True).token_ids) == 4
    assert len(list(tiny.stream("the end", GREEDY, max_tokens=5))) == 5


CALLS: list[tuple[Callable[[Engine], Any], str]] = [
    (lambda engine: engine.stream(["the", "end"]), "2 prompts, which generate takes"),
    (lambda engine: engine.embed(["the", "end"]), "2 prompts, which embed_each takes"),
    (lambda engine: engine.chat(["the", "end"]), "chat takes a text or a list of messages"),
    (lambda engine: engine.chat([5, 6]), "chat takes a text or a list of messages"),
    (lambda engine: engine.chat([{"role": "user", "content": [{"type": "image_url"}]}]), "takes text alone"),
    (lambda engine: engine.generate("the", max_new_tokens=3), "did you mean max_tokens?"),
    (lambda engine: AsyncEngine("./model"), "AsyncEngine.load"),
    (lambda engine: Engine("./no-such-model"), "./no-such-model does not exist"),
]


def test_what_cannot_be_meant_is_one_sentence(tiny: Engine) -> None:
    for call, words in CALLS:
        with pytest.raises(EngineError) as raised:
            call(tiny)
        assert words in str(raised.value)


NAMES = [
    (EngineConfig, "ctx_size", "n_ctx num_ctx max_model_len max_seq_len context_length"),
    (EngineConfig, "device", "n_gpu_layers device_map tensor_parallel_size"),
    (EngineConfig, "weights", "model model_path weight"),
    (EngineConfig, "threads", "n_threads num_thread"),
    (EngineConfig, "cache_type", "kv_cache_dtype"),
    (EngineConfig, "cache_type_k", "type_k"),
    (EngineConfig, "weight_type", "dtype"),
    (EngineConfig, "kv_memory", "gpu_memory_utilization"),
    (EngineConfig, "parallel", "max_num_seqs"),
    (SamplingParams, "max_tokens", "max_new_tokens max_length n_predict num_predict predict"),
    (SamplingParams, "temperature", "do_sample temp temprature"),
    (SamplingParams, "stop", "stop_strings stop_sequences reverse_prompt"),
    (SamplingParams, "stop_token_ids", "eos_token_id"),
    (SamplingParams, "repeat_penalty", "repetition_penalty"),
    (SamplingParams, "schema", "json_schema response_format guided_json"),
    (PromptOptions, "tools", "tool"),
]


def test_the_name_that_another_program_has_for_a_setting_leads_to_ours() -> None:
    for config, ours, theirs in NAMES:
        for name in theirs.split():
            with pytest.raises(EngineError, match=f"{config.__name__} has no setting '{name}'; did you mean {ours}[?]"):
                config(**{name: 1})


def test_an_engine_shows_what_it_is(tiny_path: Path) -> None:
    engine = Engine(tiny_path, config=EngineConfig(device="cpu", ctx_size=64), cache_type="f16")
    shown = repr(engine)
    engine.close()
    assert shown.startswith(f"<Engine {tiny_path.name} · F16, ")
    assert shown.endswith(" on the cpu · context 64 tokens · cache f16>")
    assert repr(engine) == f"{shown[:-1]}, closed>"


def test_a_template_of_a_file_takes_the_place_of_the_models_own(demo_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    with Engine(demo_path, device="cpu", ctx_size=64, calibration=False, chat_template_file=str(file)) as engine:
        asked = engine.chat("Hi there", max_tokens=1).usage.prompt_tokens
        assert asked == engine.generate("[Hi there]", max_tokens=1).usage.prompt_tokens
    with pytest.raises(EngineError, match=r"none\.jinja cannot be read .*: give a Jinja template"):
        Engine(demo_path, device="cpu", chat_template_file=str(tmp_path / "none.jinja"))


def test_the_package_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert polarlm.__version__ == importlib.metadata.version("polarlm")
    monkeypatch.setattr("polarlm.engine.version.release", lambda: "")  # a checkout that is not installed
    assert polarlm.__version__ == "0.0.0"
