"""A budget of reasoning: reasoning ends within it, with the template's own text, and the answer goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.engine.requests.prompts import Prompt
from polarlm.engine.sampling.constraints import mask_words, only_token
from polarlm.engine.sampling.reasoning_budget import ReasoningBudget, ReasoningEdges, budget_of
from polarlm.model_loaders.chat.channels import Channels
from tests import call_templates
from tests.test_reasoning import QUESTION, engine, loaded  # noqa: F401 - fixtures
from tests.tool_model import tool_engine

MESSAGES = [{"role": "user", "content": QUESTION}]
ENDING = "\n</think>\n\n"
FREE = SamplingParams(temperature=1, seed=1, ignore_eos=True, max_tokens=60)


def writing(engine: Engine, *pieces: str) -> SamplingParams:  # noqa: F811
    """Parameters with which a random model writes these pieces alone."""
    return replace(FREE, logit_bias={engine.tokenize(piece, control=True)[0]: 100.0 for piece in pieces})


def begun(engine: Engine) -> tuple[Prompt, PromptOptions]:  # noqa: F811
    """Messages whose answer begins with reasoning, whether the prompt opens it or the model."""
    if engine.model.template.place_of_answer({}) == "inside":
        return MESSAGES, PromptOptions()
    return [*MESSAGES, {"role": "assistant", "content": "<think>"}], PromptOptions(continue_final_message=True)


def answer_ids(engine: Engine, params: SamplingParams) -> list[int]:  # noqa: F811
    prompt, options = begun(engine)
    return [token for chunk in engine.stream(prompt, params, options) for token in chunk.token_ids]


def reasoning_ids(engine: Engine, ids: list[int]) -> list[int]:  # noqa: F811
    """The tokens before the text that ends reasoning."""
    ending = engine.tokenize(ENDING, control=True)
    return next(ids[:at] for at in range(len(ids)) if ids[at : at + len(ending)] == ending)


@pytest.mark.parametrize("budget", [0, 1, 30])
def test_reasoning_ends_where_its_budget_is_used_up(engine: Engine, budget: int) -> None:  # noqa: F811
    ids = answer_ids(engine, replace(writing(engine, "t", "h"), reasoning_budget=budget))
    assert len(reasoning_ids(engine, ids)) == budget
    assert len(ids) == FREE.max_tokens
    assert engine.model.template.reasoning_ending == ENDING


def test_it_ends_behind_a_sentence_of_the_last_part(engine: Engine) -> None:  # noqa: F811
    params, counts = replace(writing(engine, "t", "h", "?"), reasoning_budget=32, max_tokens=40), set()
    params = replace(params, logit_bias={**params.logit_bias, engine.tokenize("?")[0]: 105.0})
    for seed in range(5):
        ids = reasoning_ids(engine, answer_ids(engine, replace(params, seed=seed)))
        assert 28 < len(ids) <= 32
        assert len(ids) == 32 or engine.detokenize(ids).endswith("?")
        counts.add(len(ids))
    assert min(counts) < 32


def test_a_model_that_ends_by_itself_is_left_alone(engine: Engine) -> None:  # noqa: F811
    params = writing(engine, "t", "</think>")
    assert answer_ids(engine, replace(params, reasoning_budget=50)) == answer_ids(engine, params)


def test_what_follows_is_what_the_model_would_write_there(engine: Engine) -> None:  # noqa: F811
    """The K/V of the tokens that are forced are computed as those of others."""
    params = replace(FREE, temperature=0)
    ids = answer_ids(engine, replace(params, reasoning_budget=9))
    cut = 9 + len(engine.tokenize(ENDING, control=True))
    after = engine.stream([*engine.prompt_ids(*begun(engine)), *ids[:cut]], replace(params, max_tokens=len(ids) - cut))
    assert [token for chunk in after for token in chunk.token_ids] == ids[cut:]


def test_a_schema_holds_behind_the_budget(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    template = call_templates.QWEN3.replace("<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think>\\n' }}")
    schema = {"type": "object", "properties": {"is": {"type": "boolean"}}, "required": ["is"]}
    with tool_engine(tmp_path, template) as tools:
        assert tools.model.template.place_of_answer({}) == "inside"
        completion = tools.generate(MESSAGES, replace(FREE, schema=schema, reasoning_budget=12, ignore_eos=False))
        _, tag, answer = completion.text.partition("</think>")
        assert tag
        assert completion.finish_reason == "stop"
        assert isinstance(json.loads(answer)["is"], bool)


def channel_budget(
    tools: Engine, tokens: int, constraint: Any = None, *, calls_tools: bool = False
) -> tuple[ReasoningBudget, Channels]:
    """A budget of a model that answers in channels."""
    edges, channels = ReasoningEdges.from_template(tools.model, calls_tools=calls_tools), tools.model.template.channels
    assert edges is not None
    assert channels is not None
    return ReasoningBudget(tokens, edges, tools.model, constraint, is_open=False), channels


def write(tools: Engine, budget: ReasoningBudget, text: str) -> None:
    for token in tools.tokenize(text, control=True):
        budget.accept(token)


def forced(tools: Engine, budget: ReasoningBudget) -> str:
    """The text of the tokens that are forced now."""
    ids = []
    while (mask := budget.allowed()) is not None:
        if (token := only_token(mask, tools.model.vocabulary.stop)) is None:
            break
        ids.append(token)
        budget.accept(token)
    return tools.detokenize(ids, control=True)


@pytest.mark.parametrize("calls_tools", [False, True])
def test_channels_of_reasoning_share_a_budget(calls_tools: bool, tmp_path: Path) -> None:
    """Where a call may come next, the model chooses; reasoning that is opened again is closed at once."""
    with tool_engine(tmp_path, call_templates.GPT_OSS) as tools:
        budget, channels = channel_budget(tools, 6, calls_tools=calls_tools)
        header = channels.header(channels.reasoning)
        write(tools, budget, f"{header}abcde")
        assert not forced(tools, budget)
        write(tools, budget, "f")
        answer = f"{channels.message_separator}{channels.header(channels.final)}"
        assert forced(tools, budget) == (channels.message_separator if calls_tools else answer)
        assert budget.allowed() is None
        write(tools, budget, header)
        assert forced(tools, budget) == answer


def test_a_closing_text_goes_as_far_as_the_answer_may(tmp_path: Path) -> None:
    """An answer that must be a call has no header of a final one."""

    class Without:
        """Allows all tokens but one."""

        finished = False

        def __init__(self, tools: Engine, token: int) -> None:
            self._words, self._token = mask_words(tools.model.vocabulary.stop), token

        def allowed(self) -> np.ndarray:
            mask = np.full(self._words, 0xFFFFFFFF, np.uint32)
            mask[self._token // 32] ^= 1 << self._token % 32
            return mask

        def accept(self, token: int) -> None:
            assert token != self._token

    with tool_engine(tmp_path, call_templates.GPT_OSS) as tools:
        final = tools.model.template.channels.final
        budget, channels = channel_budget(tools, 1, Without(tools, tools.tokenize(final)[0]))
        write(tools, budget, f"{channels.header(channels.reasoning)}a")
        answer = f"{channels.message_separator}{channels.header(final)}"
        assert forced(tools, budget) == answer.partition(final)[0]


def test_a_character_ends_before_reasoning_does(tmp_path: Path) -> None:
    """Where a grammar takes whole characters alone, of which a token may be a part."""
    pytest.importorskip("llguidance")
    template = call_templates.QWEN3.replace("<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think>\\n' }}")
    with tool_engine(tmp_path, template) as tools:
        part, rest = tools.tokenize("é")
        bias = {part: 100.0, rest: 99.0}
        for budget in (4, 5):
            params = replace(FREE, grammar='root ::= "done"', logit_bias=bias, max_tokens=40)
            text = tools.generate(MESSAGES, replace(params, reasoning_budget=budget)).text
            assert text == f"{'é' * (-(-budget // 2))}{ENDING}done"


def test_an_effort_stands_for_a_budget_where_the_template_has_none(engine: Engine, tmp_path: Path) -> None:  # noqa: F811
    model = engine.model
    assert [budget_of(model, -1, effort) for effort in (None, "high", "low")] == [-1, -1, 1024]
    assert budget_of(model, 7, "low") == 7
    (tmp_path / "other").mkdir()
    with tool_engine(tmp_path / "other", call_templates.GPT_OSS) as tools:
        assert budget_of(tools.model, -1, "low") == -1


def test_a_budget_that_limits_nothing_is_told(tmp_path: Path) -> None:
    with tool_engine(tmp_path, call_templates.HERMES) as tools:
        completion = tools.generate(MESSAGES, replace(FREE, reasoning_budget=12, max_tokens=2))
        assert completion.warnings == ("the budget of reasoning is ignored: this model's template knows no reasoning",)
        assert tools.generate("Hi", replace(FREE, reasoning_budget=12, max_tokens=2)).warnings == ()
