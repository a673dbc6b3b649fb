"""/v1/completions: several prompts, `echo`, `suffix` and `best_of`."""

from __future__ import annotations

from typing import Any

import pytest

from polarlm.engine import SamplingParams
from tests.lazily import openai
from tests.server.fill_model import FILLS, token
from tests.server.http_server import Serving
from tests.server.lines import eventually
from tests.tiny import forget

PROMPTS = ["the rain", "he ran", "then on and on"]


def complete(server: Serving, **more: Any) -> Any:
    fields = {"model": "any", "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}, **more}
    return server.openai.completions.create(**fields)


def choices(server: Serving, **more: Any) -> list[Any]:
    """The choices of an answer, whole and streamed, which are the same."""
    whole = complete(server, **more)
    parts = list(complete(server, stream=True, **more))
    assert {whole.object, *(part.object for part in parts)} == {"text_completion"}
    for choice in whole.choices:
        pieces = [part.choices[0] for part in parts if part.choices[0].index == choice.index]
        assert "".join(part.text for part in pieces) == choice.text
        assert [part.finish_reason for part in pieces] == [None] * (len(pieces) - 1) + [choice.finish_reason]
        if choice.logprobs is not None:
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                joined = [value for part in pieces if part.logprobs for value in getattr(part.logprobs, name)]
                assert joined == getattr(choice.logprobs, name)
    return list(whole.choices)


# -- several prompts -----------------------------------------------------------------------------------------------


def test_several_prompts_are_answered_as_each_alone(shared: Serving) -> None:
    alone = [complete(shared, prompt=prompt).choices[0].text for prompt in PROMPTS]
    ids = [shared.engine.tokenize(prompt) for prompt in PROMPTS]
    for several in (PROMPTS, ids, [PROMPTS[0], ids[1], [*ids[2][:2], shared.engine.detokenize(ids[2][2:])]]):
        answers = choices(shared, prompt=several)
        assert [choice.index for choice in answers] == [0, 1, 2]
        assert [choice.text for choice in answers] == alone


def test_answers_to_several_prompts_are_in_the_order_of_the_prompts(shared: Serving) -> None:
    more: Any = {"temperature": 1.0, "seed": 5, "n": 2}
    alone = [choice.text for prompt in PROMPTS for choice in complete(shared, prompt=prompt, **more).choices]
    assert [choice.text for choice in choices(shared, prompt=PROMPTS, **more)] == alone


def test_the_usage_counts_each_prompt_once(shared: Serving) -> None:
    answer = complete(shared, prompt=PROMPTS, n=2)
    assert answer.usage.prompt_tokens == sum(len(shared.engine.tokenize(prompt)) for prompt in PROMPTS)
    assert answer.usage.completion_tokens == 3 * 2 * 8
    *_, last = complete(shared, prompt=PROMPTS, n=2, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens == answer.usage.prompt_tokens
    assert last.usage.completion_tokens == answer.usage.completion_tokens


def test_a_bad_prompt_among_several_is_named_and_nothing_is_left(shared: Serving) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(shared, prompt=["the rain", [7] * 300])
    assert caught.value.code == "context_length_exceeded"
    for wrong, param in ((["a", None], "prompt[1]"), ([[]], "prompt"), (["a", [7, {}]], "prompt[1][1]")):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(shared, prompt=wrong)
        assert caught.value.param == param
    eventually(lambda: not shared.busy)


# -- echo ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["the rain", ["the rain", "he ran"], [5, 9, 7], [5, "he ran"]])
def test_echo_puts_the_prompt_before_the_answer(shared: Serving, prompt: Any) -> None:
    plain = [choice.text for choice in complete(shared, prompt=prompt, n=2).choices]
    texts = {"the rain": ["the rain"] * 2, "he ran": ["he ran"] * 2}
    if isinstance(prompt, str):
        before = texts[prompt]
    elif isinstance(prompt[0], str):
        before = [text for one in prompt for text in texts[one]]
    else:
        before = ["".join(p if isinstance(p, str) else shared.engine.detokenize([p]) for p in prompt)] * 2
    echoed = choices(shared, prompt=prompt, n=2, echo=True)
    assert [choice.text for choice in echoed] == [b + text for b, text in zip(before, plain, strict=True)]
    assert all(choice.logprobs is None for choice in echoed)


def test_echo_with_logprobs_has_those_of_the_prompt(shared: Serving) -> None:
    ids = shared.engine.tokenize("then he ran")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    answer = shared.engine.generate(ids, params)
    expected = answer.prompt_logprobs
    for prompt in ("then he ran", ids):
        (choice,) = choices(shared, prompt=prompt, echo=True, logprobs=2)
        told = choice.logprobs
        assert choice.text == "then he ran" + answer.text
        assert told.token_logprobs == [None, *(t.logprob for t in expected), *(t.logprob for t in answer.logprobs)]
        assert told.top_logprobs[0] is None
        assert [len(top) for top in told.top_logprobs[1:]] == [
            len({token.id, *(other for other, _ in token.top)}) for token in (*expected, *answer.logprobs)
        ]
        assert "".join(told.tokens[: len(ids)]) == "then he ran"
        assert all(choice.text[at:].startswith(token) for at, token in zip(told.text_offset, told.tokens, strict=True))


def test_echo_without_tokens_scores_the_prompt_alone(shared: Serving) -> None:
    """As lm-eval asks for it."""
    several = [shared.engine.tokenize(prompt) for prompt in PROMPTS]
    for choice, ids in zip(choices(shared, prompt=several, echo=True, logprobs=1, max_tokens=0), several, strict=True):
        known = shared.engine.generate(ids, SamplingParams(max_tokens=0, prompt_logprobs=1)).prompt_logprobs
        assert choice.logprobs.token_logprobs == [None, *(token.logprob for token in known)]
        assert choice.text == shared.engine.detokenize(ids)
        assert choice.finish_reason == "length"


def test_a_prompt_of_one_token_has_no_log_probability(shared: Serving) -> None:
    (choice,) = choices(shared, prompt=[7], echo=True, logprobs=0, max_tokens=0)
    assert choice.logprobs.token_logprobs == [None]


def test_best_of_n_changes_nothing(shared: Serving) -> None:
    assert len(complete(shared, prompt="the rain", n=2, best_of=2).choices) == 2


# -- suffix --------------------------------------------------------------------------------------------------------


def test_a_suffix_is_what_comes_behind_the_answer(filling: Serving) -> None:
    engine = filling.engine
    before, after, middle = (token(engine, name) for name in FILLS[:3])
    written = [before, *engine.tokenize("the rain"), after, *engine.tokenize(" ends"), middle]
    forget(engine)
    expected = complete(filling, prompt=written).choices[0].text
    for prompt in ("the rain", ["the rain"]):
        (choice,) = choices(filling, prompt=prompt, suffix=" ends")
        assert choice.text == expected


def test_names_of_control_tokens_in_code_stay_text(filling: Serving) -> None:
    plain = complete(filling, prompt="a", suffix="b").usage.prompt_tokens
    assert complete(filling, prompt="a", suffix="<|fim_middle|>").usage.prompt_tokens > plain + 3


@pytest.mark.parametrize(("more", "param"), [({"prompt": [5, 7]}, "prompt"), ({"prompt": "a", "echo": True}, "suffix")])
def test_a_suffix_needs_a_text_and_no_echo(filling: Serving, more: Any, param: str) -> None:
    assert filling.refused("/v1/completions", {"suffix": "b", "max_tokens": 1, **more})["param"] == param
