"""Several models over HTTP: real processes, asked by name in the shape of each API."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from polarlm.engine.loading.need import PROCESS_BYTES
from polarlm.server.config import ServerConfig
from polarlm.server.http.app import create_app
from polarlm.server.http.warnings import HEADER
from polarlm.server.models import proxy
from polarlm.server.models.app import GET_PATHS, POST_PATHS, create_models_app, expand_v1
from polarlm.server.models.process import FAILED, LOADING, READY, UNLOADED
from polarlm.server.running.driver import Driver
from tests.encoders import make_folder
from tests.lazily import anthropic, ollama, openai
from tests.server.lines import PATIENCE, eventually
from tests.server.models.running import KEY, Front, front, two_models
from tests.server.reading.test_http_fuzz import JUNK, status_of

# Answers that are more than all buffers on the way take, so that their process waits for who reads them.
ANNAS = "sk-of-anna"  # a key with a name
LONG: dict[str, Any] = {
    "prompt": ["a"] * 4,
    "n": 8,
    "max_tokens": -1,
    "ignore_eos": True,
    "logprobs": 5,
    "stream": True,
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """The models `big` and `small`, each loaded once in this module; streams show life at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proxy, "SILENT_SECONDS", 0.05)
        patch.setattr(proxy, "SIGN_SECONDS", 0.2)
        patch.setattr(proxy, "_CRASH_SECONDS", PATIENCE)
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")  # where nobody is, and nothing is sent
        patch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        folder = tmp_path_factory.mktemp("models")
        (folder / "keys").write_text(f"anna {ANNAS}\n")
        with front(two_models(folder), api_key_file=str(folder / "keys")) as server:
            yield server


def unload(server: Front, name: str) -> None:
    """Returns when a model is not in memory."""
    if server.state(name) == READY:
        assert server.http.post("/models/unload", json={"model": name}).status_code == 200
    eventually(lambda: server.state(name) in (UNLOADED, FAILED))


def said(answer: Any) -> str:
    return answer.json()["choices"][0]["text"]


def test_a_stream_shows_life_while_its_model_is_loaded(running: Front) -> None:
    unload(running, "big")
    body = {"model": "big", "prompt": "Once", "max_tokens": 4, "temperature": 0, "stream": True}
    with running.http.stream("POST", "/v1/completions", json=body) as answer:
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        frames = answer.read().decode().split("\n\n")
    assert frames[0].startswith(": big: loading, ")
    *events, end, nothing = [frame for frame in frames if not frame.startswith(":")]
    assert (end, nothing) == ("data: [DONE]", "")
    text = "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)
    assert text == said(running.ask("big"))


def test_a_stream_of_ollamas_shows_life_in_pieces_without_text(running: Front) -> None:
    unload(running, "small")
    client = ollama.Client(running.url, headers={"Authorization": f"Bearer {KEY}"})
    options = {"num_predict": 4, "temperature": 0}
    first, *pieces = client.generate("small:latest", "Once", stream=True, options=options, raw=True)
    assert (first.model, first.response, first.done) == ("small", "", False)
    assert "".join(piece.response for piece in pieces) == said(running.ask("small"))
    assert pieces[-1].done_reason == "length"


def test_the_name_decides_which_model_answers(running: Front) -> None:
    answers = {name: running.ask(name).json() for name in ("big", "small")}
    assert {name: answer["model"] for name, answer in answers.items()} == {"big": "big", "small": "small"}
    texts = {answer["choices"][0]["text"] for answer in answers.values()}
    assert len(texts) == 2
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEY) as client:
        assert [model.id for model in client.models.list()] == ["big", "small"]
        assert client.models.retrieve("small").id == "small"
        for name in ("big", "small"):
            chunks = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "Hi"}], max_tokens=3, stream=True
            )
            assert {chunk.model for chunk in chunks} == {name}
    with anthropic.Anthropic(base_url=running.url, api_key=KEY) as other:
        message = other.messages.create(model="small", max_tokens=3, messages=[{"role": "user", "content": "Hi"}])
        assert message.model == "small"
        assert [model.id for model in other.models.list()] == ["big", "small"]


def test_adapters_are_not_loaded_while_it_runs(running: Front) -> None:
    body = {"model": "small", "lora_name": "sql", "lora_path": "sql"}
    answer = running.http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 403
    assert "a server of one model takes" in answer.json()["error"]["message"]


def test_a_models_process_continues_the_trace(running: Front) -> None:
    """The span in the response is its own: this process makes none."""
    pytest.importorskip("opentelemetry.sdk")
    trace, span, state = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "rojo=1"
    headers = {"traceparent": f"00-{trace}-{span}-00", "tracestate": state}
    body = {"model": "small", "prompt": "Once", "max_tokens": 1}
    answer = running.http.post("/v1/completions", json=body, headers=headers)
    (parent,) = answer.headers.get_list("traceparent")
    assert parent.split("-")[1] == trace
    assert parent.split("-")[2] != span
    assert answer.headers.get_list("tracestate") == [state]
    answer = running.http.post("/v1/completions", json=body, headers={**headers, "tracestate": b"rojo=\xe9"})
    assert (answer.status_code, "tracestate" in answer.headers) == (200, False)


@pytest.mark.parametrize("megabytes", [12, 20])
def test_a_request_that_is_too_large_for_its_model_is_told_so(running: Front, megabytes: int) -> None:
    """A model that reads images would take the smaller one."""
    assert running.ask("small", prompt="a" * (megabytes << 20)).status_code == 413


def test_models_in_memory_answer_while_their_folder_is_gone(running: Front) -> None:
    assert said(running.ask("small"))
    folder = running.slot("small").model.path.parent
    folder.rename(folder.with_suffix(".gone"))
    try:
        for path in ("/v1/models", "/v1/models/other", "/api/tags", "/props?model=other"):
            answer = running.http.get(path)
            assert (path, answer.status_code) == (path, 507)
            assert "The folder of --models cannot be read: No such file or directory" in answer.text
        assert running.ask("other").status_code == 507
        for path in ("/health", "/props?model=small", "/v1/models/small", "/metrics"):
            assert (path, running.http.get(path).status_code) == (path, 200)
        assert "small" in running.http.get("/api/ps").text
        assert said(running.ask("small"))
    finally:
        folder.with_suffix(".gone").rename(folder)


def test_lists_tell_what_is_loaded(running: Front) -> None:
    for name in ("big", "small"):
        assert said(running.ask(name))
    listed = running.http.get("/models").json()["data"]
    assert [(one["id"], one["status"]["value"], one["context_length"]) for one in listed] == [
        ("big", "loaded", 256),
        ("small", "loaded", 256),
    ]
    tags = running.http.get("/api/tags").json()["models"]
    assert [(one["name"], one["details"]["family"], one["size"] > 0) for one in tags] == [
        ("big", "llama", True),
        ("small", "llama", True),
    ]
    loaded = running.http.get("/api/ps").json()["models"]
    assert [(one["name"], one["expires_at"][:4], one["context_length"]) for one in loaded] == [
        ("big", "9999", 256),
        ("small", "9999", 256),
    ]
    shown = running.http.post("/api/show", json={"model": "big"}).json()
    assert shown["details"]["family"] == "llama"
    assert 'polarlm_model_loaded{model="big"} 1.0' in running.http.get("/metrics").text
    assert running.http.get("/metrics", params={"model": "big"}).text.count("polarlm_requests_total") > 1
    assert running.http.get("/props", params={"model": "small"}).json()["model_alias"] == "small"


def test_one_page_has_the_metrics_of_all_loaded_models(running: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    def page() -> dict[tuple[str, ...], float]:
        """The samples, by name and labels; each family is there once."""
        text = running.http.get("/metrics").text
        assert max(Counter(re.findall(r"(?m)^# TYPE (\S+)", text)).values()) == 1
        families = text_string_to_metric_families(text)
        return {(one.name, *sorted(one.labels.values())): one.value for each in families for one in each.samples}

    for name in ("big", "small"):
        assert running.http.post("/tokenize", json={"model": name, "content": "a"}).is_success
    unload(running, "small")
    key = {"Authorization": f"Bearer {ANNAS}"}
    body = {"model": "big", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
    assert running.http.post("/v1/completions", json=body, headers=key).is_success
    samples = page()
    assert samples["polarlm_key_completion_tokens_total", "anna", "big"] == 3
    assert samples["polarlm_request_latency_seconds_count", "big"] >= 1
    assert samples["polarlm_model_starts_total", "big"] == running.slot("big").starts
    assert {name: samples["polarlm_model_loaded", name] for name in ("big", "small")} == {"big": 1, "small": 0}
    assert ("polarlm_requests_active", "small") not in samples
    assert (samples["polarlm_model_up", "big"], ("polarlm_model_up", "small") in samples) == (1, False)
    monkeypatch.setattr(proxy, "METRICS_SECONDS", 0.1)
    os.kill(running.pid("big"), signal.SIGSTOP)
    try:
        samples = page()
    finally:
        os.kill(running.pid("big"), signal.SIGCONT)
    assert (samples["polarlm_model_up", "big"], ("polarlm_requests_active", "big") in samples) == (0, False)


def test_limits_of_a_key_hold_for_all_models_together(running: Front) -> None:
    file = Path(running.supervisor._config.api_key_file)
    key, body = {"Authorization": f"Bearer {ANNAS}"}, {"prompt": "a", "max_tokens": 12, "ignore_eos": True}
    file.write_text(f"anna {ANNAS} tokens=10\n")
    try:
        assert running.http.post("/v1/completions", json={**body, "model": "big"}, headers=key).is_success
        answers: list[httpx.Response] = []

        def is_refused() -> bool:
            answers.append(running.http.post("/v1/completions", json={**body, "model": "small"}, headers=key))
            return answers[-1].status_code == 429

        eventually(is_refused)  # the model's process tells the tokens after its answer
        assert answers[-1].json()["error"]["code"] == "rate_limited"
        assert int(answers[-1].headers["Retry-After"]) > 5
        assert running.ask("small").is_success  # of another key
    finally:
        file.write_text(f"anna {ANNAS}\n")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/completions", lambda body: body["error"]["message"]),
        ("/v1/messages", lambda body: body["error"]["message"]),
        ("/api/chat", lambda body: body["error"]),
        ("/completion", lambda body: body["error"]["message"]),
    ],
)
def test_an_unknown_model_is_a_404_in_the_shape_of_the_api(running: Front, path: str, message: Any) -> None:
    answer = running.http.post(path, json={"model": "other", "messages": []})
    assert (answer.status_code, message(answer.json())) == (
        404,
        "There is no model called other; there are: big, small",
    )


def test_the_front_asks_for_the_key_and_knows_the_paths(running: Front) -> None:
    assert running.http.get("/v1/models", headers={"Authorization": "Bearer other"}).status_code == 401
    assert running.http.post("/v1/nothing", json={"model": "big"}).status_code == 404
    assert running.http.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"}).is_error
    assert running.http.post("/v1/completions", json={"model": 5}).json()["error"]["param"] == "model"
    for soon in ("soon", "9" * 100_000, f"{'9' * 100_000}h"):
        wrong = running.http.post("/api/chat", json={"model": "big", "keep_alive": soon, "messages": []})
        assert (wrong.status_code, wrong.json()["error"][:10]) == (400, "keep_alive")
    odd = {"anthropic-version": "é".encode("latin-1"), "accept": b"\xff"}
    assert running.http.post("/tokenize", json={"model": "big", "content": "a"}, headers=odd).status_code == 200
    slashes = running.http.post(f"{running.url}//tokenize", json={"model": "big", "content": "a"})
    assert slashes.status_code == 200
    refusal = running.http.post("/api/pull", json={"model": "user/repo"})
    assert (refusal.status_code, "--allow-pull" in refusal.json()["error"]) == (501, True)
    assert running.http.post("/api/pull", json={"model": "big", "stream": False}).json() == {"status": "success"}


def test_every_path_of_one_model_is_one_of_several(engine: Any, running: Front) -> None:
    """A new endpoint has to be named among those that are passed on, or be the front's own."""
    config = ServerConfig()
    one, several = (
        create_app(Driver(engine, config), config),
        create_models_app(running.supervisor, running.proxy, config),
    )
    paths, known = ({getattr(route, "path", "") for route in app.routes} for app in (one, several))
    assert paths <= known
    assert {*expand_v1(POST_PATHS), *expand_v1(GET_PATHS)} <= paths


@pytest.mark.slow  # some times unload a model
def test_no_name_and_no_time_breaks_the_front(running: Front) -> None:
    """What else bodies may hold, one model reads: tests/server/reading/test_http_fuzz.py."""
    durations = ["1h30m", "9" * 90, "-1", "1e9", "٣m", ".", "h", 1e300, -(10**400)]
    names = ["..", "../small", "big/../small", "big\0", "small:latest:latest", "hf:a/b", "a" * 5000, "\x1b[31m"]
    asks = {"messages": [{"role": "user", "content": "on"}], "options": {"num_predict": 1}, "stream": False}
    bodies: list[tuple[str, Any]] = [
        ("/api/chat", asks | {"model": "small", "keep_alive": o}) for o in JUNK + durations
    ]
    for path in ("/models/load", "/models/unload", "/api/show", "/api/pull", "/tokenize"):
        bodies += [(path, {"model": odd, "content": "on", "stream": False}) for odd in JUNK + names]
    for path, body in bodies:
        status_of(running.http, path, json.dumps(body).encode(), {200, 400, 404, 501})
    for listed in ("/models", "/v1/models", "/api/tags", "/api/ps", "/metrics", "/health"):
        assert running.http.get(listed).status_code == 200
    eventually(lambda: running.slot("big").active == running.slot("small").active == 0)


@pytest.mark.slow
def test_a_killed_process_ends_its_streams_with_an_error_and_nothing_else(running: Front) -> None:
    assert said(running.ask("small"))
    with running.http.stream("POST", "/v1/completions", json={"model": "big"} | LONG) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))  # no signs of life
        next(lines)
        running.kill("big")
        *_, last = lines
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "model_ended"
    assert error["message"].startswith("The process of big crashed (SIGKILL) while it answered")
    assert (running.state("big"), running.state("small")) == (FAILED, READY)
    assert running.http.get("/v1/models/big").json()["status"]["failed"] is True
    assert said(running.ask("small"))
    assert running.slot("big").active == 0
    assert said(running.ask("big"))  # which starts it again


# -- processes that are started again and again ----------------------------------------------------------------


@pytest.mark.slow
def test_an_encoder_is_loaded_where_memory_is_limited(tmp_path: Path) -> None:
    """It has no KV store that could be made smaller."""
    make_folder(tmp_path / "encoder", "bert_f32")
    with front(tmp_path, models_memory=str(PROCESS_BYTES + (1 << 20))) as server:
        answer = server.ask("encoder", "/v1/embeddings", prompt=None, input="the rain")
        assert answer.status_code == 200, answer.text
    with front(tmp_path, models_memory=str(PROCESS_BYTES + 100_000)) as server:  # less than its weights
        answer = server.ask("encoder", "/v1/embeddings", prompt=None, input="the rain")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_memory")


@pytest.mark.slow
def test_what_a_client_says_about_keeping_a_model_holds(tmp_path: Path) -> None:
    with front(two_models(tmp_path)) as server:
        client = ollama.Client(server.url, headers={"Authorization": f"Bearer {KEY}"})
        before = datetime.now(timezone.utc)
        assert client.generate("big", keep_alive="10m").done_reason == "load"
        (entry,) = client.ps().models
        assert entry.expires_at is not None
        assert before <= entry.expires_at - timedelta(minutes=10) <= datetime.now(timezone.utc)
        assert client.generate("big", keep_alive=0).done_reason == "unload"
        server.becomes("big", UNLOADED)
        assert server.http.get("/metrics", params={"model": "big"}).json()["error"]["code"] == "model_not_loaded"
        assert server.http.get("/stats", params={"model": "big"}).json() == {"model": "big", "state": "unloaded"}
        for long in (10**400, -(10**400), 1e300, "999999999999h"):
            body = {"model": "big", "keep_alive": long, "stream": False}
            assert server.http.post("/api/generate", json=body).status_code == 200
            (entry,) = client.ps().models
            assert str(entry.expires_at).startswith("9999")
        client.generate("small", "Hi", keep_alive=0, options={"num_predict": 2})
        server.becomes("small", UNLOADED)
        assert client.generate("small", keep_alive=0).done_reason == "unload"  # without loading it
        assert server.slot("small").starts == 1


@pytest.mark.slow
def test_llama_servers_way_of_loading_and_unloading(tmp_path: Path) -> None:
    with front(two_models(tmp_path)) as server:
        assert server.http.post("/models/load", json={"model": "big"}).json() == {"success": True}
        again = server.http.post("/models/load", json={"model": "big"})
        assert again.status_code == 400
        assert again.json()["error"]["message"] in [f"big is {state} already" for state in (LOADING, READY)]
        server.becomes("big", READY)
        unloaded = server.http.post("/models/unload", json={"model": "big", "froce": True})
        assert unloaded.json() == {"success": True, "warnings": [unloaded.headers[HEADER]]}
        assert unloaded.headers[HEADER] == "froce is unknown and ignored"
        server.becomes("big", UNLOADED)
        assert server.http.post("/models/unload", json={"model": "big"}).status_code == 400
        assert server.http.post("/models/load", json={}).json()["error"]["param"] == "model"


@pytest.mark.slow
def test_a_client_that_hangs_up_cancels_its_request_in_the_process(tmp_path: Path) -> None:
    with front(two_models(tmp_path)) as server:
        server.ask("big")
        with server.http.stream("POST", "/v1/completions", json={"model": "big"} | LONG) as answer:
            next(answer.iter_lines())
        eventually(lambda: server.slot("big").active == 0)

        def cancelled() -> bool:
            return 'outcome="cancelled"' in server.http.get("/metrics", params={"model": "big"}).text

        eventually(cancelled)


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_says_why_in_a_stream_that_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "SILENT_SECONDS", 0.05)
    (tmp_path / "torn.gguf").write_bytes(b"GGUF" + bytes(20))
    with front(tmp_path) as server:
        whole = server.ask("torn")
        assert (whole.status_code, whole.json()["error"]["code"]) == (400, "model_unavailable")
        sentence = whole.json()["error"]["message"]
        assert "torn.gguf" in sentence
        assert str(tmp_path) not in sentence
        for path in ("/v1/completions", "/v1/messages", "/v1/responses", "/api/generate"):
            answer = server.ask("torn", path, stream=True)
            assert answer.status_code == 200
            assert sentence in answer.text.splitlines()[-1 if path == "/api/generate" else -2], path
        assert server.slot("torn").error is not None
