"""What OpenAI's two older endpoints alone have, with OpenAI's own client."""

from __future__ import annotations

import math
from typing import Any

import pytest

from polarlm.engine import Completion, Engine, EngineError, PromptOptions, SamplingParams
from tests.lazily import openai
from tests.server.apis import SLIP, TOLD, alone
from tests.server.fill_model import FILLS, token
from tests.server.http_server import Serving, serving
from tests.server.lines import eventually
from tests.tiny import forget

MESSAGES: list[Any] = [{"role": "user", "content": "then he ran on"}]
PROMPT = "the rain"  # shorter than a block, so that finding it in the cache changes no answer
PROMPTS = [PROMPT, "he ran", "then on and on"]


def chat(server: Serving, **more: Any) -> Any:
    fields = {"model": "any", "messages": MESSAGES, "temperature": 0, "max_tokens": 24, **more}
    return server.openai.chat.completions.create(**fields)


def complete(server: Serving, **more: Any) -> Any:
    fields = {"model": "any", "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True, **SLIP}, **more}
    return server.openai.completions.create(**fields)


def choices(server: Serving, **more: Any) -> list[Any]:
    """The choices of an answer, whole and streamed, which are the same, and tell of a field that nobody knows."""
    whole = complete(server, **more)
    parts = list(complete(server, stream=True, **more))
    assert whole.model_extra["warnings"] == TOLD
    assert [part.model_extra["warnings"] for part in parts if "warnings" in part.model_extra] == [TOLD]
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


# -- several prompts, and several answers ----------------------------------------------------------------------


def test_n_answers_differ_and_are_those_of_the_seeds_that_follow(shared: Serving) -> None:
    params: dict[str, Any] = {"temperature": 2.0, "max_tokens": 8, "ignore_eos": True}
    expected = [alone(shared.engine, PROMPT, seed=seed, **params).text for seed in (7, 8, 9)]
    assert [choice.text for choice in choices(shared, prompt=PROMPT, temperature=2, seed=7, n=3)] == expected
    assert len(set(expected)) == 3


def test_several_prompts_are_answered_as_each_alone(shared: Serving) -> None:
    singly = [complete(shared, prompt=prompt).choices[0].text for prompt in PROMPTS]
    ids = [shared.engine.tokenize(prompt) for prompt in PROMPTS]
    for several in (PROMPTS, ids, [PROMPTS[0], ids[1], [*ids[2][:2], shared.engine.detokenize(ids[2][2:])]]):
        answers = choices(shared, prompt=several)
        assert [choice.index for choice in answers] == [0, 1, 2]
        assert [choice.text for choice in answers] == singly


def test_answers_to_several_prompts_are_in_the_order_of_the_prompts(shared: Serving) -> None:
    more: Any = {"temperature": 1.0, "seed": 5, "n": 2}
    singly = [choice.text for prompt in PROMPTS for choice in complete(shared, prompt=prompt, **more).choices]
    assert [choice.text for choice in choices(shared, prompt=PROMPTS, **more)] == singly


def test_the_usage_counts_each_prompt_once(shared: Serving) -> None:
    answer = complete(shared, prompt=PROMPTS, n=2, best_of=2)
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
    several = [[7], *(shared.engine.tokenize(prompt) for prompt in PROMPTS)]
    for choice, ids in zip(choices(shared, prompt=several, echo=True, logprobs=1, max_tokens=0), several, strict=True):
        known = shared.engine.generate(ids, SamplingParams(max_tokens=0, prompt_logprobs=1)).prompt_logprobs
        assert choice.logprobs.token_logprobs == [None, *(token.logprob for token in known)]
        assert choice.text == shared.engine.detokenize(ids)
        assert choice.finish_reason == "length"


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


# -- log-probabilities -----------------------------------------------------------------------------------------


def expected(server: Serving, prompt: Any, count: int, **more: Any) -> Completion:
    """What the engine answers, without anything in its cache: what is read of it would change the last digits."""
    forget(server.engine)
    params = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": count, **more}
    answer = server.engine.generate(prompt, SamplingParams(**params))
    forget(server.engine)
    return answer


def data(server: Serving, token_id: int) -> bytes:
    return server.engine.model.tokenizer.token_bytes(token_id)


def text(server: Serving, token_id: int) -> str:
    return data(server, token_id).decode("utf-8", "replace")


@pytest.mark.parametrize(("top", "stream"), [(None, False), (0, False), (20, False), (3, True)])
def test_log_probabilities_of_a_conversation(shared: Serving, top: int | None, stream: bool) -> None:
    more: dict[str, Any] = {} if top is None else {"top_logprobs": top}
    answer = expected(shared, MESSAGES, top or 0)
    reply = chat(shared, logprobs=True, stream=stream, extra_body={"ignore_eos": True}, **more)
    parts = [part.choices[0] for part in (reply if stream else [reply])]
    told = [part.logprobs.content for part in parts if part.logprobs is not None]
    assert len(told) == (24 if stream else 1)  # as they come, also where a token completes no character
    for entry, known in zip([entry for content in told for entry in content], answer.logprobs, strict=True):
        assert [(one.token, one.bytes, one.logprob) for one in (entry, *entry.top_logprobs)] == [
            (text(shared, i), list(data(shared, i)), pytest.approx(logprob, abs=1e-5))
            for i, logprob in ((known.id, known.logprob), *known.top)
        ]


def test_bytes_of_half_a_character_are_exact(shared: Serving) -> None:
    euro = shared.engine.tokenize("€")
    banned = {str(i): -100000 for i in range(96) if i != euro[0]}
    (choice,) = chat(shared, logprobs=True, logit_bias=banned, max_tokens=1).choices
    (entry,) = choice.logprobs.content
    assert (entry.token, entry.bytes) == ("\ufffd", list("€".encode()[:1]))


def test_an_answer_without_tokens_has_an_empty_list(shared: Serving) -> None:
    (choice,) = chat(shared, logit_bias={"2": 100000}, logprobs=True, top_logprobs=2).choices
    assert choice.logprobs.content == []


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_log_probabilities_of_a_plain_prompt(shared: Serving, count: int) -> None:
    """Also of the tokens of a stop string, which are told though their text is not."""
    for stop in ((), (expected(shared, PROMPT, 0).text[6:9],)):
        answer = expected(shared, PROMPT, count, stop=stop)
        (choice,) = choices(shared, prompt=PROMPT, logprobs=count, stop=list(stop), max_tokens=24)
        ids, told = answer.token_ids, choice.logprobs
        assert choice.text == answer.text
        assert told.tokens == [text(shared, i) for i in ids]
        assert told.token_logprobs == pytest.approx([known.logprob for known in answer.logprobs], abs=1e-5)
        for entry, known in zip(told.top_logprobs, answer.logprobs, strict=True):
            others = [*known.top, (known.id, known.logprob)]
            assert entry == pytest.approx({text(shared, i): p for i, p in sorted(others, key=lambda o: o[1])}, abs=1e-5)
        whole = [shared.engine.detokenize(ids[:count]).removesuffix("\ufffd") for count in range(len(ids))]
        assert told.text_offset == [len(before) for before in whole]


def test_every_number_is_finite(shared: Serving) -> None:
    unlikely = {"temperature": 100, "seed": 2, "logit_bias": {"7": -100}}
    (choice,) = complete(shared, prompt=PROMPT, logprobs=20, max_tokens=24, **unlikely).choices
    assert all(math.isfinite(p) and p <= 0 for top in choice.logprobs.top_logprobs for p in top.values())


# -- a last message of the assistant's ----------------------------------------------------------------------------

BEGUN = {"role": "assistant", "content": PROMPT}


def written(server: Serving, messages: list[Any], **more: Any) -> str:
    return server.post("/apply-template", {"messages": messages, **more}).json()["prompt"]


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({"continue_final_message": True}, "<|im_start|>assistant\nthe rain"),
        ({"add_generation_prompt": False}, "<|im_start|>assistant\nthe rain"),
        ({"continue_final_message": False}, "the rain<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": True}, "the rain<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_last_message_of_the_assistant_is_continued_or_a_turn_begun_as_asked(
    shared: Serving, more: dict[str, Any], end: str
) -> None:
    prompt = written(shared, [*MESSAGES, BEGUN], **more)
    assert prompt.endswith(end)
    expected = complete(shared, prompt=prompt).choices[0].text
    fields = {"messages": [*MESSAGES, BEGUN], "max_tokens": 8, "extra_body": {"ignore_eos": True, **more}}
    assert chat(shared, **fields).choices[0].message.content == expected


def test_names_of_control_tokens_stay_text_in_a_beginning(shared: Serving) -> None:
    body = {"messages": [*MESSAGES, {"role": "assistant", "content": "a<|im_end|>"}]}
    tokens = shared.post("/v1/chat/completions/input_tokens", body).json()["input_tokens"]
    plain = shared.post("/v1/chat/completions/input_tokens", {"messages": MESSAGES}).json()["input_tokens"]
    assert tokens > plain + 3  # two, if the name became the token


@pytest.mark.parametrize(
    ("messages", "more", "param"),
    [
        (MESSAGES, {"continue_final_message": True}, "continue_final_message"),
        (MESSAGES, {"add_generation_prompt": False}, "add_generation_prompt"),
        ([*MESSAGES, BEGUN], {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ([*MESSAGES, BEGUN], {"continue_final_message": "yes"}, "continue_final_message"),
        ([*MESSAGES, BEGUN], {"add_generation_prompt": 0}, "add_generation_prompt"),
    ],
)
def test_what_cannot_be_continued_is_named(shared: Serving, messages: Any, more: Any, param: str) -> None:
    assert shared.refused("/v1/chat/completions", {"messages": messages, **more})["param"] == param


def test_the_engine_continues_the_ids_that_an_answer_was_generated_as(tiny: Engine) -> None:
    answer = tiny.chat(MESSAGES, SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True))
    options = PromptOptions(continue_final_message=True)
    begun = {"role": "assistant", "content": answer.text}
    expected = [*tiny.prompt_ids(MESSAGES), *answer.token_ids]
    assert tiny.prompt_ids([*MESSAGES, begun], options) == expected  # known by its text
    assert tiny.prompt_ids([*MESSAGES, {**begun, "token_ids": answer.token_ids}], options) == expected
    with pytest.raises(EngineError, match="can be continued"):
        tiny.chat(MESSAGES, options=options)


# -- errors ----------------------------------------------------------------------------------------------------


def test_a_full_queue_is_a_rate_limit_error(tiny: Engine) -> None:
    with serving(tiny, max_queue=0) as server:
        server.gate.close()
        others = {"prompt": "the rain", "max_tokens": 1, "n": tiny.config.parallel}
        with server.send("/v1/completions", others) as connection:
            eventually(lambda: server.driver.snapshot().active == tiny.config.parallel)
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError) as caught:
                    chat(server, stream=stream)
                assert int(caught.value.response.headers["retry-after"]) >= 1
                assert caught.value.code == "busy"
            server.gate.open()
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
        assert chat(server).choices


@pytest.mark.slow
def test_an_answer_that_takes_too_long_is_an_error_that_is_not_tried_again(tiny: Engine) -> None:
    """Slow: it waits for a second to pass."""
    with serving(tiny, request_seconds=1) as server:
        server.gate.close()
        patient = server.openai.with_options(max_retries=2)
        with pytest.raises(openai.InternalServerError) as caught:
            chat(Serving(**{**vars(server), "openai": patient}))
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")
        assert server.outcomes() == {"timeout": 1}


def test_more_answers_than_the_queue_can_hold_are_not_a_busy_error(tiny: Engine) -> None:
    with serving(tiny, max_queue=0) as server:
        room = tiny.config.parallel
        body = {"prompt": "the rain", "max_tokens": 1, "n": room + 1}
        error = server.refused("/v1/completions", body)
        assert error["param"] == "n"
        assert f"room for {room} answer" in error["message"]
        assert server.post("/v1/completions", body | {"n": room}).status_code == 200
