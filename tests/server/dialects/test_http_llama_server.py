"""llama-server's own endpoints, as its documentation describes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.server.reading.infill import infill_of
from tests.model_loaders.vocabularies import real
from tests.pairs import in_turn
from tests.server.fill_model import FILLS, token
from tests.server.http_server import Serving, serving
from tests.server.lines import eventually
from tests.tiny import CONTEXT, forget

PROMPT = "the rain"


def complete(server: Serving, path: str = "/completion", **more: Any) -> Any:
    fields = {"prompt": PROMPT, "temperature": 0, "n_predict": 8, "ignore_eos": True, "cache_prompt": False, **more}
    response = server.post(path, fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(server: Serving, path: str = "/completion", **more: Any) -> list[dict[str, Any]]:
    fields = {"prompt": PROMPT, "temperature": 0, "n_predict": 8, "ignore_eos": True, "cache_prompt": False, **more}
    response = server.post(path, {**fields, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def refused(server: Serving, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    error = server.refused(path, body, status)
    assert error["code"] == status
    return error


# -- /completion -----------------------------------------------------------------------------------------------


def test_an_answer_has_llama_servers_fields(shared: Serving) -> None:
    """Those of a streamed one are in its last event."""
    expected = shared.engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    answer = complete(shared)
    assert answer["tokens"] == []
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "limit", "")
    assert (answer["truncated"], answer["index"], answer["prompt"]) == (False, 0, PROMPT)
    assert answer["model"] == shared.engine.model.name
    assert "completion_probabilities" not in answer
    assert complete(shared, return_tokens=True)["tokens"] == list(expected.token_ids)
    *parts, last = events(shared)
    assert [token for part in parts for token in part["tokens"]] == list(expected.token_ids)
    assert [part["stop"] for part in parts] == [False] * len(parts)
    assert {**last, "timings": None} == {**answer, "content": "", "timings": None}


def test_the_reason_for_the_end_is_told(shared: Serving) -> None:
    text = complete(shared)["content"]
    stop = text[3:5]
    for one in (complete(shared, stop=[stop]), events(shared, stop=[stop])[-1]):
        assert (one["stop_type"], one["stopping_word"]) == ("word", stop)
    eos = {"logit_bias": [[2, 100]], "ignore_eos": False}
    for one in (complete(shared, **eos), events(shared, **eos)[-1]):
        assert (one["stop_type"], one["stopping_word"], one["tokens_predicted"]) == ("eos", "", 0)


def test_an_answer_that_fills_the_context_is_truncated(shared: Serving) -> None:
    answer = complete(shared, n_predict=-1)
    assert answer["truncated"] is True
    assert answer["tokens_evaluated"] + answer["tokens_predicted"] == CONTEXT


def test_an_answer_that_the_servers_own_limit_ends_is_not(tiny: Engine) -> None:
    with serving(tiny, max_tokens=3) as server:
        answer = complete(server, n_predict=-1)
    assert (answer["tokens_predicted"], answer["stop_type"], answer["truncated"]) == (3, "limit", False)


def test_no_tokens_read_the_prompt_into_the_cache(tiny: Engine) -> None:
    with serving(tiny) as server:
        forget(tiny)
        prompt = "then he ran on and on and on"
        first = complete(server, prompt=prompt, n_predict=0, cache_prompt=True)
        assert (first["content"], first["tokens_predicted"], first["tokens_cached"]) == ("", 0, 0)
        again = complete(server, prompt=prompt, cache_prompt=True)
        assert again["tokens_cached"] > 0
        assert again["timings"]["cache_n"] == again["tokens_cached"]
        assert again["timings"]["cache_n"] + again["timings"]["prompt_n"] == again["tokens_evaluated"]
        assert complete(server, prompt=prompt)["tokens_cached"] == 0  # cache_prompt: false


def test_timings_count_and_time_both_parts(shared: Serving) -> None:
    answer = complete(shared)
    timings = answer["timings"]
    assert (timings["prompt_n"], timings["predicted_n"]) == (answer["tokens_evaluated"], 8)
    for part in ("prompt", "predicted"):
        assert timings[f"{part}_ms"] > 0
        assert timings[f"{part}_per_token_ms"] == pytest.approx(timings[f"{part}_ms"] / timings[f"{part}_n"])
        assert timings[f"{part}_per_second"] == pytest.approx(1000 / timings[f"{part}_per_token_ms"])
    assert complete(shared, n_predict=1)["timings"]["predicted_per_second"] == 0.0  # it comes with the prompt
    *parts, _ = events(shared, timings_per_token=True)
    assert parts[0]["timings"]["predicted_per_second"] < 1e6
    assert [part["timings"]["predicted_n"] for part in parts] == list(range(1, 9))
    assert all("timings" not in part for part in events(shared)[:-1])


def test_probabilities_of_the_most_likely_tokens(shared: Serving) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    expected = shared.engine.generate(PROMPT, params, PromptOptions(cache_prompt=False)).logprobs
    answer = complete(shared, n_probs=3)["completion_probabilities"]
    assert [part for event in events(shared, n_probs=3)[:-1] for part in event["completion_probabilities"]] == answer
    for one, known in zip(answer, expected, strict=True):
        assert (one["id"], one["logprob"]) == (known.id, known.logprob)
        assert [(top["id"], top["logprob"]) for top in one["top_logprobs"]] == list(known.top)
        assert bytes(one["bytes"]).decode("utf-8", "replace") == one["token"]


def test_every_form_of_a_prompt_is_taken(shared: Serving) -> None:
    ids = shared.engine.tokenize(PROMPT)
    expected = complete(shared)["content"]
    rest = shared.engine.detokenize(ids[1:])
    for prompt in (ids, [ids[0], rest], {"prompt_string": PROMPT}, [PROMPT]):
        assert complete(shared, prompt=prompt)["content"] == expected
    several = [PROMPT, ids, {"prompt_string": PROMPT}, [ids[0], rest]]
    answers = complete(shared, prompt=several)
    assert [one["index"] for one in answers] == [0, 1, 2, 3]
    assert [one["content"] for one in answers] == [expected] * 4
    answer = dict.fromkeys(range(4), "")
    for event in events(shared, prompt=several):
        answer[event["index"]] += event["content"]
    assert answer == dict.fromkeys(range(4), expected)
    assert [one["index"] for one in complete(shared, prompt=[PROMPT, ids], n_cmpl=2)] == [0, 1, 2, 3]


def test_settings_are_those_that_were_used(shared: Serving) -> None:
    of_role_play = {"top_n_sigma": 2.0, "xtc_probability": 0.5, "xtc_threshold": 0.2}
    answer = complete(shared, top_k=7, stop=["zzz"], logit_bias=[[7, 1.5], [8, False]], seed=3, **of_role_play)
    settings = answer["generation_settings"]
    assert "warnings" not in answer
    assert {name: settings[name] for name in of_role_play} == of_role_play
    assert (settings["top_k"], settings["temperature"], settings["seed"], settings["n_predict"]) == (7, 0, 3, 8)
    assert settings["stop"] == ["zzz"]
    assert settings["logit_bias"] == [[7, 1.5], [8, False]]
    assert (settings["top_p"], settings["n_ctx"]) == (0.95, CONTEXT)


# -- /infill ---------------------------------------------------------------------------------------------------


def test_infill_writes_between_prefix_and_suffix(filling: Serving) -> None:
    engine = filling.engine
    before, after, middle = (token(engine, name) for name in FILLS[:3])
    written = [before, *engine.tokenize("he"), after, *engine.tokenize("on"), middle, *engine.tokenize("ran")]
    expected = complete(filling, prompt=written)["content"]
    body = {"input_prefix": "he", "input_suffix": "on", "prompt": "ran"}
    assert complete(filling, "/infill", **body)["content"] == expected
    assert "".join(event["content"] for event in events(filling, "/infill", **body)) == expected


def test_infill_puts_other_files_before_it(filling: Serving) -> None:
    engine = filling.engine
    before, after, middle, repository, file = (token(engine, name) for name in FILLS[:5])
    written = [repository, "myproject\n", file, "a.py\nthe rain\n", file, "filename\n", before, "he", after, middle]
    expected = complete(filling, prompt=written)
    body = {"input_prefix": "he", "input_extra": [{"filename": "a.py", "text": "the rain"}], "prompt": ""}
    answer = complete(filling, "/infill", **body)
    assert (answer["content"], answer["tokens_evaluated"]) == (expected["content"], expected["tokens_evaluated"])


def test_what_comes_behind_a_middle_ends_it(filling: Serving) -> None:
    end = token(filling.engine, FILLS[4])
    answer = complete(filling, "/infill", input_prefix="he", prompt="", logit_bias=[[end, 100]], ignore_eos=False)
    assert (answer["stop_type"], answer["tokens_predicted"]) == ("eos", 0)


@in_turn(
    "body param",
    [
        ({"input_prefix": 3}, "input_prefix"),
        ({"input_suffix": 5}, "input_suffix"),
        ({"prompt": ["a"]}, "prompt"),
        ({"input_extra": "a"}, "input_extra"),
        ({"input_extra": [3]}, "input_extra[0]"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"input_extra": [{"filename": 3, "text": ""}]}, "input_extra[0].filename"),
        ({"input_extra": [{"text": ""}] * 300}, "input_extra"),
    ],
)
def test_a_wrong_field_of_infill_is_named(filling: Serving, body: Any, param: str) -> None:
    assert refused(filling, "/infill", body)["param"] == param


def test_a_model_without_the_tokens_refuses_infill(shared: Serving) -> None:
    error = refused(shared, "/infill", {"input_prefix": "he", "input_suffix": "on"})
    assert "this model has no tokens for filling in" in error["message"]


# -- about the server --------------------------------------------------------------------------------------------


def test_props_tell_the_defaults_and_the_template(shared: Serving) -> None:
    props = shared.http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == CONTEXT
    defaults = complete(shared, temperature=None, n_predict=1, ignore_eos=None)["generation_settings"]
    assert props["default_generation_settings"]["params"] == {**defaults, "n_predict": -1, "max_tokens": -1}
    assert props["total_slots"] == shared.engine.config.parallel
    assert props["chat_template"] == shared.engine.model.template.source
    assert props["chat_template_is_default"] is True  # the file of this model has none
    assert props["model_path"] == shared.engine.model.path.name
    assert props["build_info"].startswith("polarlm")
    assert props["is_sleeping"] is False
    assert props["modalities"] == {"vision": False, "audio": False}


def test_slots_tell_what_is_computed(tiny: Engine) -> None:
    with serving(tiny) as server:
        slots = server.http.get("/slots").json()
        assert [slot["id"] for slot in slots] == list(range(tiny.config.parallel))
        assert not any(slot["is_processing"] for slot in slots)
        assert {slot["n_ctx"] for slot in slots} == {CONTEXT}
        assert not any(slot["speculative"] for slot in slots)
        server.engine.config = replace(server.engine.config, spec_type="ngram-simple")
        assert all(slot["speculative"] for slot in server.http.get("/slots").json())
        assert server.http.get("/slots?fail_on_no_slot=1").status_code == 200
        server.gate.close()
        connections = [server.send("/completion", {"prompt": PROMPT}) for _ in slots]
        eventually(lambda: server.engine.status().waiting == len(slots))
        assert all(slot["is_processing"] for slot in server.http.get("/slots").json())
        assert server.http.get("/slots?fail_on_no_slot=1").status_code == 503
        for connection in connections:
            connection.close()
        server.gate.open()
        eventually(lambda: not server.busy)


def test_a_template_is_applied(shared: Serving) -> None:
    messages = [{"role": "system", "content": "then on"}, {"role": "user", "content": "he ran"}]
    prompt = shared.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert prompt.startswith("<|im_start|>system\nthen on<|im_end|>\n<|im_start|>user\nhe ran")
    assert prompt.endswith("<|im_start|>assistant\n")
    chat = shared.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0}).json()
    assert complete(shared, prompt=prompt, ignore_eos=False)["content"] == chat["choices"][0]["message"]["content"]


def test_slots_are_saved_restored_and_erased_as_wrappers_of_llama_server_do(tiny: Engine, tmp_path: Path) -> None:
    """Two programs with a slot each; what one asks last is not what the other saves."""
    prompts = {slot: f"{PROMPT} in slot {slot}, " * 6 for slot in (0, 1)}
    with serving(tiny, sessions=str(tmp_path)) as server:
        cached = {
            slot: complete(server, prompt=prompts[slot], id_slot=slot, cache_prompt=True)["tokens_evaluated"]
            for slot in prompts
        }
        for slot in prompts:
            saved = server.post(f"/slots/{slot}?action=save", {"filename": f"{slot}.bin"}).json()
            size = (tmp_path / f"{slot}.bin.session").stat().st_size
            assert (saved["id_slot"], saved["filename"], saved["n_written"]) == (slot, f"{slot}.bin", size)
            assert saved["n_saved"] > cached[slot]  # with the answer
        forget(tiny)
        restored = server.post("/slots/0?action=restore", {"filename": "0.bin"}).json()
        assert (restored["n_restored"], restored["timings"]["restore_ms"] > 0) == (saved["n_saved"], True)
        assert complete(server, prompt=prompts[1], id_slot=1, cache_prompt=True)["timings"]["cache_n"] < 64
        assert complete(server, prompt=prompts[0], id_slot=0, cache_prompt=True)["timings"]["cache_n"] >= cached[0] - 1
        assert server.post("/slots/0?action=erase", {}).json() == {"id_slot": 0, "n_erased": cached[0] + 8}
        for path, body, status, word in (
            ("/slots/0?action=save", {"filename": "a"}, 400, "slot 0 is empty"),
            ("/slots/0?action=restore", {"filename": "b"}, 404, "b"),
            ("/slots/0?action=save", {"filename": "../a"}, 400, "filename"),
            ("/slots/0?action=move", {}, 400, "action"),
            (f"/slots/{tiny.config.parallel}?action=erase", {}, 400, "--parallel"),
        ):
            assert word in refused(server, path, body, status)["message"]


def test_what_this_server_does_otherwise_is_refused(shared: Serving) -> None:
    error = refused(shared, "/props", {}, 501)
    assert error["type"] == "not_supported_error"


# -- which vocabularies have tokens for filling in -------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2.5-json"])
def test_vocabularies_with_the_tokens(name: str) -> None:
    tokenizer = real(name)
    infill = infill_of(tokenizer)
    names = [tokenizer.token_name(token) for token in (infill.prefix, infill.suffix, infill.middle)]
    assert names == ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    assert {tokenizer.token_name(token) for token in infill.ends} == {"<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"}
    assert infill.prompt("a", "b") == [infill.prefix, "a", infill.suffix, "b", infill.middle]
    with_file = infill.prompt("a", "", "c", [("x.py", "y")])
    assert with_file[:4] == [infill.repository, "myproject\n", infill.file, "x.py\ny\n"]
    assert with_file[4:] == [infill.file, "filename\n", infill.prefix, "a", infill.suffix, infill.middle, "c"]


@pytest.mark.parametrize("name", ["llama3-json", "llama2-model", "stories15M-json"])
def test_vocabularies_without_them(name: str) -> None:
    assert infill_of(real(name)) is None
