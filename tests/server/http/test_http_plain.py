"""The endpoints that OpenAI's API does not have: tokens, health, metrics."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from polarlm.engine import Engine
from polarlm.server.http.plain import tokens as tokens_of_texts
from polarlm.server.running import readers
from tests.pairs import in_turn
from tests.server.http_server import Serving, serving
from tests.server.lines import PATIENCE, eventually
from tests.tiny import CHARACTERS, PLAIN, VOCABULARY, load_tiny


def test_paths_that_are_gone_say_what_to_do(shared: Serving) -> None:
    for method, path, words in (
        ("PUT", f"/blocks/{bytes(16).hex()}", "--kv-store"),
        ("POST", "/v1/blocks", "--kv-store"),
        ("GET", "/v1/encoding", "--kv-store"),
        ("POST", "/v1/files", "polarlm batch FILE --url"),
    ):
        answer = shared.http.request(method, path, content=None if method == "GET" else b"no JSON")
        assert answer.status_code == 410
        assert words in answer.json()["error"]["message"]


# -- tokens ----------------------------------------------------------------------------------------------------


@given(tokens=st.lists(st.integers(0, VOCABULARY - 1)))
def test_any_tokens_have_a_text(shared: Serving, tokens: list[int]) -> None:
    text = shared.post("/detokenize", {"tokens": tokens}).json()["content"]
    assert text == shared.engine.detokenize(tokens, control=True)


@given(parts=st.lists(st.one_of(st.sampled_from(["<|im_end|>", "<|im_start|>", " "]), st.text(CHARACTERS))))
def test_control_tokens_come_back(shared: Serving, parts: list[str]) -> None:
    body = {"content": "".join(parts), "parse_special": True}
    tokens = shared.post("/tokenize", body).json()["tokens"]
    assert shared.post("/detokenize", {"tokens": tokens}).json() == {"content": body["content"]}


def test_control_strings_are_tokens_where_they_are_in_prompts(shared: Serving) -> None:
    def tokens(**more: Any) -> list[int]:
        return shared.post("/tokenize", {"content": "the<|im_end|>", **more}).json()["tokens"]

    assert tokens() == tokens(parse_special=True) == [*shared.engine.tokenize("the"), 2]
    assert 2 not in tokens(parse_special=False)


def test_a_server_may_take_raw_prompts_as_text(tiny: Engine) -> None:
    def count(**more: Any) -> int:
        body = {"prompt": "the<|im_end|>", "max_tokens": 1, **more}
        return server.post("/v1/completions", body).json()["usage"]["prompt_tokens"]

    with serving(tiny, parse_special=False) as server:
        assert count() == len(tiny.tokenize("the<|im_end|>")) > count(parse_special=True)
        assert 2 not in server.post("/tokenize", {"content": "<|im_end|>"}).json()["tokens"]


def test_the_token_that_begins_every_text_is_added(shared: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(**more: Any) -> list[int]:
        return shared.post("/tokenize", {"content": "the", **more}).json()["tokens"]

    plain = tokens()
    assert tokens(add_special=True) == plain  # this model wants none
    monkeypatch.setattr(shared.engine.model.tokenizer, "bos_id", 1)
    assert tokens(add_special=True) == [1, *plain]
    assert tokens(add_special=False) == tokens(add_special=None) == plain


def test_tokens_are_returned_with_their_pieces(shared: Serving) -> None:
    euro = "€".encode()
    tokens = shared.post("/tokenize", {"content": "the<|im_end|>€", "with_pieces": True}).json()["tokens"]
    assert [token["id"] for token in tokens] == shared.engine.tokenize("the<|im_end|>€", control=True)
    assert tokens[-4]["piece"] == "<|im_end|>"
    assert "".join(token["piece"] for token in tokens[:-4]) == "the"
    assert [token["piece"] for token in tokens[-3:]] == [[byte] for byte in euro]


def test_the_number_of_returned_tokens_is_bounded(shared: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_of_texts, "MOST_TOKENS", 9)
    monkeypatch.setattr(tokens_of_texts, "MOST_PIECES", 3)
    assert len(shared.post("/tokenize", {"content": "1" * 9}).json()["tokens"]) == 9
    assert shared.post("/tokenize", {"content": "1" * 10}).status_code == 400
    assert len(shared.post("/tokenize", {"content": "1" * 3, "with_pieces": True}).json()["tokens"]) == 3
    assert shared.post("/tokenize", {"content": "1" * 4, "with_pieces": True}).status_code == 400


def test_the_text_of_tokens_is_bounded(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    (the,) = tiny.tokenize("th")
    with serving(tiny, max_body=1000) as server:
        assert server.post("/detokenize", {"tokens": [the] * 200}).json()["content"] == "th" * 200
        monkeypatch.setattr(server.engine.model.tokenizer, "token_bytes", lambda token: b"x" * 10)
        assert server.post("/detokenize", {"tokens": [the] * 100}).status_code == 200
        assert "1000 bytes" in server.refused("/detokenize", {"tokens": [the] * 101})["message"]


def test_texts_wait_in_a_queue_of_their_own_that_is_bounded(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And hold up no answer."""
    go_on, begun = threading.Event(), threading.Semaphore(0)
    tokenize = tiny.model.tokenizer.tokenize

    def slow(*arguments: Any, **more: Any) -> list[int]:
        begun.release()
        assert go_on.wait(PATIENCE)
        return tokenize(*arguments, **more)

    with serving(tiny, max_queue=1) as server:
        monkeypatch.setattr(tiny.model.tokenizer, "tokenize", slow)
        with ExitStack() as connections:
            for _ in range(5):  # four threads, and one that waits
                connections.enter_context(server.send("/tokenize", {"content": "the"}))
            eventually(lambda: server.driver.snapshot().active == 5)
            for _ in range(4):
                assert begun.acquire(timeout=PATIENCE)
            assert server.refused("/detokenize", {"tokens": [5]}, 429)["code"] == "busy"
            assert server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 1}).status_code == 200
            go_on.set()
            eventually(lambda: server.driver.snapshot().active == 0)
        assert server.outcomes() == {"busy": 1, "length": 1, "tokenized": 5}
        assert server.post("/detokenize", {"tokens": [5.0]}).status_code == 200
        assert server.outcomes()["detokenized"] == 1


@in_turn(
    "path body param",
    [
        *(("/tokenize", {"content": content}, "content") for content in (None, 5, ["the"], {"text": "the"}, True)),
        *(("/tokenize", {"content": "the", name: 1}, name) for name in ("add_special", "parse_special", "with_pieces")),
        *(("/detokenize", {"tokens": tokens}, "tokens") for tokens in (None, 5, "the", {"0": 1})),
        *(("/detokenize", {"tokens": [5, token]}, "tokens[1]") for token in (-1, 2**64, 1.5, True, None, "the", [5])),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
    ],
)
def test_a_wrong_value_is_named(shared: Serving, path: str, body: Any, param: str) -> None:
    assert shared.refused(path, body)["param"] == param


def test_an_id_that_is_no_token_is_a_bad_request(shared: Serving) -> None:
    for token in (VOCABULARY, 2**31):
        assert shared.post("/detokenize", {"tokens": [5, token]}).status_code == 400


# -- health ----------------------------------------------------------------------------------------------------


def test_a_server_is_healthy_until_it_is_about_to_end(server: Serving) -> None:
    response = server.http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    server.run(server.driver.drain(60))
    response = server.http.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "closing"})
    assert server.refused("/v1/completions", {"prompt": "a"}, 503)["code"] == "closing"


def test_an_unexpected_error_is_generic_for_clients(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise RuntimeError("a secret of the server's")

    monkeypatch.setattr(server.driver, "snapshot", failing)
    response = server.http.get("/metrics")
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert server.http.get("/health").status_code == 200


# -- metrics ---------------------------------------------------------------------------------------------------


def metrics(server: Serving) -> dict[str, float]:
    """Every sample, as "name" or "name{labels}"."""
    response = server.http.get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0, */*;q=0.1"})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"  # which is what it is
    samples = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(value for _, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def test_metrics_count_what_was_served(server: Serving) -> None:
    before = metrics(server)
    assert {name for name in before if name.endswith("_total") and before[name]} == set()
    body = {"prompt": "the rain then ran on and on", "temperature": 0, "ignore_eos": True, "max_tokens": 9}
    usages = [server.post("/v1/completions", body).json()["usage"] for _ in range(2)]
    after = metrics(server)
    assert after["polarlm_requests_total{length}"] == 2
    for name in ("prompt_tokens", "completion_tokens"):
        assert after[f"polarlm_{name}_total"] == sum(usage[name] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert after["polarlm_cached_tokens_total"] == cached > 0
    for name in ("prefill_seconds", "generation_seconds", "request_seconds"):
        assert after[f"polarlm_{name}_total"] > 0
    assert after["polarlm_requests_active"] == 0


def test_drafted_tokens_are_counted(server: Serving) -> None:
    """Only where there are any: in the usage, in llama-server's timings, and in the metrics."""
    body = {"prompt": "the rain then ran on " * 3, "temperature": 0, "ignore_eos": True, "max_tokens": 40}
    body["cache_prompt"] = False
    plain = server.post("/v1/completions", body).json()
    assert "completion_tokens_details" not in plain["usage"]
    drafted = server.post("/v1/completions", body | {"speculative.type": "ngram-simple"}).json()
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    details = drafted["usage"]["completion_tokens_details"]
    right, wrong = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert min(right, wrong) >= 0 < right + wrong
    after = metrics(server)
    assert after["polarlm_drafted_tokens_total"] == right + wrong
    assert after["polarlm_accepted_tokens_total"] == right
    now = server.http.get("/stats").json()
    assert (now["drafted_tokens"], now["accepted_tokens"]) == (right + wrong, right)
    timings = server.post("/completion", body | {"speculative.type": "ngram-simple"}).json()["timings"]
    assert timings["draft_n"] >= timings["draft_n_accepted"] >= 0
    assert "draft_n" not in server.post("/completion", body | {"speculative.n_max": 0}).json()["timings"]


def test_metrics_have_the_blocks_of_the_whole_store(tiny_path: Path) -> None:
    with load_tiny(tiny_path, **PLAIN, kv_memory="1M") as engine, serving(engine) as server:
        (group,) = engine._store.groups
        assert group.quantized.size > 2 * engine.context // 8
        assert f'num_gpu_blocks="{group.quantized.size}"' in server.http.get("/metrics").text


def test_metrics_have_gauges_by_the_names_of_vllm(server: Serving) -> None:
    idle = metrics(server)
    gauges = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    names = [f"vllm:{gauge}{{{server.engine.model.name}}}" for gauge in gauges]
    assert [idle[name] for name in names] == [0, 0, 0]
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    (blocks,) = [sample for family in families for sample in family.samples if "cache_config" in sample.name]
    assert (blocks.name, blocks.value) == ("vllm:cache_config_info", 1)
    assert blocks.labels == {"block_size": "16", "num_gpu_blocks": str(int(idle["polarlm_kv_blocks"]))}
    server.gate.close()
    body = {"prompt": "the rain " * 8, "ignore_eos": True, "stream": True}
    with ExitStack() as requests:
        sent = [requests.enter_context(server.send("/v1/completions", body)) for _ in range(3)]
        eventually(lambda: server.engine.status().waiting == len(sent))
        assert [metrics(server)[name] for name in names] == [3, 0, 0]
        server.gate.let(1)
        eventually(lambda: metrics(server)["polarlm_kv_blocks_used"])
        loaded = metrics(server)
        assert [loaded[name] for name in names[:2]] == [2, 1]  # one in prefill, or in steps
        assert loaded[names[2]] == loaded["polarlm_kv_blocks_used"] / loaded["polarlm_kv_blocks"] > 0

        def all_are_computed() -> bool:
            server.gate.let_another()
            return [metrics(server)[name] for name in names[:2]] == [0, 3]

        eventually(all_are_computed)
    eventually(lambda: metrics(server)["polarlm_requests_active"] == 0)


# -- tokens, as vLLM has them ------------------------------------------------------------------------------------


def test_vllms_names_are_taken(shared: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.engine.model.tokenizer, "bos_id", 1)
    ids = shared.engine.tokenize("the rain")
    reply = shared.post("/tokenize", {"prompt": "the rain", "return_token_strs": True, "model": "any"}).json()
    assert (reply["tokens"], reply["count"], reply["max_model_len"]) == ([1, *ids], len(ids) + 1, 256)
    assert reply["token_strs"][0] == "<s>"
    bare = shared.post("/tokenize", {"prompt": "the rain", "add_special_tokens": False}).json()
    assert (bare["tokens"], bare["token_strs"]) == (ids, None)


def test_no_text_waits_for_chats_and_no_usual_chat_for_long_ones(
    shared: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, begun, goes_on = shared.engine.model.template._process, list[Any](), threading.Event()
    ask = process.ask

    def late(request: Any) -> Any:
        if "rain" in str(request):
            begun.append(request)
            assert goes_on.wait(PATIENCE)
        return ask(request)

    monkeypatch.setattr(process, "ask", late)
    body: dict[str, Any] = {"max_tokens": 1, "cache_prompt": False}
    chat, others = ([{"role": "user", "content": text}] for text in ("rain", "the"))
    paths = ("/v1/chat/completions", "/tokenize", "/apply-template", "/v1/messages/count_tokens")
    for most, free in ((1 << 18, ()), (1, paths)):  # what is long, and where usual chats go on
        begun.clear()
        goes_on.clear()
        monkeypatch.setattr(readers, "_LONG", most)
        with ThreadPoolExecutor(16) as threads:
            waiting = [threads.submit(shared.post, path, body | {"messages": chat}) for path in paths * 4]
            eventually(lambda: len(begun) == 8)  # in all threads that take them
            assert shared.post("/tokenize", {"content": "t"}).status_code == 200
            assert shared.post("/v1/completions", body | {"prompt": "t"}).status_code == 200
            monkeypatch.setattr(readers, "_LONG", 1 << 18)
            for path in free:
                assert shared.post(path, body | {"messages": others}).status_code == 200
            goes_on.set()
            assert all(one.result(PATIENCE).status_code == 200 for one in waiting)


def test_messages_are_tokenized_as_for_an_answer(shared: Serving) -> None:
    messages = [{"role": "user", "content": "he ran"}]
    used = shared.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    reply = shared.post("/tokenize", {"messages": messages}).json()
    assert reply["count"] == len(reply["tokens"]) == used
    begun = [*messages, {"role": "assistant", "content": "the"}]
    assert shared.post("/tokenize", {"messages": begun}).json()["tokens"][: reply["count"]] == reply["tokens"]


# -- paths -----------------------------------------------------------------------------------------------------


def test_a_client_may_leave_v1_out_of_its_base_url(shared: Serving) -> None:
    """What is posted so is answered: tests/server/http/test_isolation.py."""
    client = shared.openai.with_options(base_url=shared.url)
    for one in (client, shared.openai):
        assert one.models.retrieve(shared.engine.model.name).id == one.models.list().data[0].id
