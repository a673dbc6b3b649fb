"""Prompts that a server computes for another engine: the answers are those of one engine, whatever the link does."""

from __future__ import annotations

import io
import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Completion, Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.storage import objects
from polarlm.engine.storage.tiers import remote_prefill
from polarlm.engine.storage.tiers.opening import KEY_VARIABLE
from polarlm.engine.storage.tiers.prompt_blocks import NOTE, note
from polarlm.server.http.plain import prefill
from tests.hybrids import EXACT
from tests.server.http_server import Serving, serving
from tests.server.lines import eventually
from tests.server.process import Process
from tests.server.slow_link import link_to
from tests.storage.arrays import assert_same
from tests.tiers.test_engine import kv_of
from tests.tiny import assert_idle, ids, load_tiny, make_model

N = 16
PROMPT = ids(1, 150)  # nine blocks and a part of one
ALL_SENT = len(PROMPT) - 1
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
MODELS = ["llama_gqa_linear", "qwen2_mixed_windows", "qwen3_next_shared_keys", "nemotron_h_experts"]


class Pair:
    """A server, and engines with the same model on weaker machines."""

    def __init__(self, model: Path, engines: ExitStack, **more: Any) -> None:
        self.settings = {
            "device": "cpu",
            "block_size": N,
            "ctx_size": 512,
            "cache_type": "ring4",
            "state_type": "f32",
            **more,
        }
        self._model, self._engines = model, engines
        self.strong = self.load()
        self.server: Serving = engines.enter_context(serving(self.strong))

    def load(self, **more: Any) -> Engine:
        return self._engines.enter_context(load_tiny(self._model, **{**self.settings, **more}))

    def weak(self, url: str | None = None, **more: Any) -> Engine:
        return self.load(prefill_at=url or self.server.url, **more)

    def on_one_machine(self, *prompts: list[int], options: PromptOptions | None = None) -> Completion:
        """The answer to the last prompt of an engine that has computed all of them but their last tokens, as the server
        has: the last one is then a row of a step."""
        alone = self.load()
        for prompt in prompts:
            alone.generate(prompt[:-1], SamplingParams(temperature=0, max_tokens=1), options)
        return alone.generate(prompts[-1], PARAMS, options)


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as engines:
        yield Pair(make_model(tmp_path_factory.mktemp("model"), request.param), engines)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as engines:
        yield Pair(make_model(tmp_path_factory.mktemp("model")), engines)


@pytest.fixture(autouse=True)
def asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_prefill, "_SUSPENSION", 0.0)


def same(answer: Completion, other: Completion) -> bool:
    return answer.token_ids == other.token_ids and answer.logprobs == other.logprobs


def test_a_prompt_is_computed_there_and_the_answer_is_that_of_one_machine(pair: Pair) -> None:
    """Log-probabilities included; then longer prompts, of which the server computes what is new, and an edited one."""
    weak, asked = pair.weak(), list[list[int]]()
    longer = [*PROMPT, *ids(2, 140)]
    for prompt, sent in (
        (PROMPT, ALL_SENT),
        (longer[:220], 70),
        (longer, 70),
        ([*PROMPT[:100], *ids(9, 60)], 60),
    ):
        asked.append(prompt)
        answer = weak.generate(prompt, PARAMS)
        assert same(answer, pair.on_one_machine(*asked))
        assert answer.usage.cached_tokens == len(prompt) - 1
        assert sent <= answer.usage.cached_from["prefill-at"] <= sent + N
    assert_idle(weak)


@pytest.mark.parametrize("preset", ["quality", "balanced", "compact"])
def test_blocks_have_bits_by_age(preset: str, tmp_path: Path) -> None:
    with ExitStack() as engines:
        pair = Pair(make_model(tmp_path), engines, cache_type=preset)
        assert same(pair.weak().generate(PROMPT, PARAMS), pair.on_one_machine(PROMPT))


def test_what_the_engine_has_is_not_sent(plain: Pair) -> None:
    weak = plain.weak()
    with link_to(plain.server.url) as link:
        first = plain.weak(link.url)
        first.generate(PROMPT, PARAMS)
        whole = link.carried
        first.generate([*PROMPT, *ids(3, 40)], PARAMS)
        assert 0 < link.carried < whole / 2
        first.generate([*PROMPT, *ids(3, 40)][:-1], PARAMS)  # all of it is there
        assert 0 < link.carried < whole / 2
    short = weak.generate(PROMPT[: 2 * N - 1], PARAMS)
    assert "prefill-at" not in short.usage.cached_from


def test_progress_is_told_and_salts_are_kept_apart(plain: Pair) -> None:
    weak = plain.weak()
    chunks = [*weak.stream(ids(5, 200), PARAMS, PromptOptions(cache_salt="mine"), progress=True)]
    assert chunks[0].prompt_tokens == 200
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.cached_from == {"prefill-at": 199}
    assert "".join(chunk.text for chunk in chunks) == plain.on_one_machine(ids(5, 200)).text
    other = plain.strong.generate(ids(5, 200), PARAMS)
    assert other.usage.cached_tokens == 0
    same_salt = plain.strong.generate(ids(5, 200), PARAMS, PromptOptions(cache_salt="mine"))
    assert same_salt.usage.cached_tokens > 0


def test_what_tiers_lack_is_computed_there(plain: Pair, tmp_path: Path) -> None:
    prompt = ids(23, 150)
    disk = {"cache_disk": "10M", "cache_disk_folder": str(tmp_path)}
    with load_tiny(plain._model, **plain.settings, **disk) as engine:
        engine.generate(prompt[: 4 * N], PARAMS)
    answer = plain.weak(**disk).generate(prompt, PARAMS)
    assert answer.usage.cached_from == {"prefill-at": ALL_SENT}
    assert same(answer, plain.on_one_machine(prompt))


def test_signs_of_life_are_no_blocks(plain: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_SILENT_SECONDS", 1e-6)
    prompt, settings = ids(21, 300), dict(plain.strong._identity)
    sent = plain.server.post("/v1/blocks", {"ids": prompt, "first": 0, "root": "0" * 32, "settings": settings})
    source = io.BytesIO(sent.content)
    arrived = [*iter(lambda: objects.read_packed(source.read, 1 << 30), None)]
    assert {} in [objects.unpack(*one).header for one in arrived if one[0] == NOTE]
    answer = plain.weak().generate(ids(22, 300), PARAMS)
    assert answer.usage.cached_from == {"prefill-at": 299}


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"cache_type": "ring5"}, "cache types"), ({"block_size": 32}, "block size"), ({"calibration": False}, "encoded")],
)
def test_an_engine_with_other_settings_computes_itself(
    plain: Pair, settings: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    weak, alone = plain.weak(**settings), plain.load(**settings)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert same(weak.generate(PROMPT, PARAMS), alone.generate(PROMPT, PARAMS))
        weak.generate(ids(8, 90), PARAMS)  # it is asked again, and says the same
    (record,) = [one for one in caplog.records if "computed here" in one.message]
    assert words in record.message


def test_an_engine_with_another_model_is_told_its_name(plain: Pair) -> None:
    settings = {**plain.strong._identity, "name": "another", "model": "0" * 64}
    question = {"ids": PROMPT, "first": 0, "root": "0" * 32, "settings": settings}
    response = plain.server.post("/v1/blocks", question)
    assert response.status_code == 409
    assert "the model of the engine that asks is another" in response.text


def test_a_server_that_is_not_there(plain: Pair, caplog: pytest.LogCaptureFixture) -> None:
    sentences: list[str] = []
    url = "http://127.0.0.1:1"
    with Engine.load(plain._model, verbose=sentences.append, prefill_at=url, **plain.settings) as weak:
        assert any(f"{url}/encoding cannot be read (Connection refused)" in one for one in sentences)
        assert same(weak.generate(PROMPT, PARAMS), plain.load().generate(PROMPT, PARAMS))
        assert [tier.read_errors for tier in weak.status().tiers] == [1]
    assert any("Connection refused" in one.message for one in caplog.records)


@pytest.mark.parametrize("more", [{"prefill_at": "ftp://host"}, {"prefill_at": "http://host", "kept_sequences": 0}])
def test_wrong_settings_are_refused(plain: Pair, more: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="prefill_at"):
        plain.load(**more)


@pytest.mark.parametrize("trouble", ["cut", "flip"])
@pytest.mark.parametrize("part", [pytest.param(n, marks=[] if n in (3, 25) else pytest.mark.slow) for n in range(30)])
def test_a_link_that_breaks_or_damages_at_any_byte_changes_no_answer(pair: Pair, trouble: str, part: int) -> None:
    """60 moments. What arrived whole before is used, as the server has it."""
    prompt = ids(100 + part, 150)
    with link_to(pair.server.url) as link:
        weak = pair.weak(link.url)
        weak.generate(ids(50, 150), PARAMS)
        size = link.carried
        setattr(link, trouble, size * part // 30 + part % 7)
        answer = weak.generate(prompt, PARAMS)
        link.cut = link.flip = None
        found = answer.usage.cached_tokens
        assert found in (ALL_SENT, *range(0, ALL_SENT, N))
        kept, sent = kv_of(weak, [*prompt, *answer.token_ids[:-1]]), kv_of(pair.strong, prompt[:found])
        whole = [key for key in sent if key in kept and key[0] < found // N]  # else with a later state of other layers
        assert len({number for number, *_ in whole}) == found // N
        assert_same({key: kept[key] for key in whole}, {key: sent[key] for key in whole})
        again = weak.generate(ids(200 + part, 100), PARAMS)
        assert again.usage.cached_from == {"prefill-at": 99}
        assert_idle(weak)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_thousand_requests_over_a_link_that_loses_and_delays(model: str, tmp_path: Path) -> None:
    """Nothing is coded, so that the answers are those of an engine alone, whatever arrives."""
    chance, bases, found = random.Random(7), [ids(300 + number, 200) for number in range(5)], 0
    with ExitStack() as engines:
        pair = Pair(make_model(tmp_path, model), engines, **EXACT)
        link = engines.enter_context(link_to(pair.server.url))
        weak, alone = pair.weak(link.url), pair.load()
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        for number in range(250):
            base = chance.choice(bases)
            prompt = [*base[: chance.randrange(1, 200)], *ids(1000 + number, chance.randrange(1, 60))]
            link.delay = chance.random() * 0.002
            link.cut = chance.randrange(60_000) if chance.random() < 0.5 else None
            answer = weak.generate(prompt, params)
            assert answer.token_ids == alone.generate(prompt, params).token_ids
            found += answer.usage.cached_from.get("prefill-at", 0) > 0
        assert found > 50
        assert_idle(weak)
        assert_idle(pair.strong)


@pytest.mark.parametrize("part", range(0, 60, 6))
def test_an_engine_that_vanishes_leaves_nothing_behind(plain: Pair, part: int) -> None:
    weak = plain.load()
    question = {
        "ids": ids(400 + part, 400),
        "first": 0,
        "root": weak._prefixes.hashes(())[0].hex(),
        "settings": dict(weak._identity),
    }
    with plain.server.http.stream("POST", "/v1/blocks", json=question) as response:
        assert response.status_code == 200
        for got, _ in enumerate(response.iter_raw(4096)):
            if got == part:
                break
    eventually(lambda: plain.server.engine.status().running + plain.server.engine.status().waiting == 0)
    assert_idle(plain.strong)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": []}, "ids"),
        ({"ids": ["a"]}, "ids"),
        ({"ids": [10**9, 1]}, "id"),
        ({"first": -1}, "first"),
        ({"first": None}, "first"),
        ({"root": "zz"}, "root"),
        ({"settings": []}, "settings"),
        ({"cache_salt": 7}, "cache_salt"),
    ],
)
def test_a_wrong_request_is_a_sentence(plain: Pair, change: dict[str, Any], words: str) -> None:
    question = {"ids": PROMPT, "first": 0, "root": "0" * 32, "settings": dict(plain.strong._identity)}
    response = plain.server.post("/v1/blocks", question | change)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_a_server_with_a_key_wants_it(plain: Pair, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    with serving(plain.strong, api_key="secret") as server:
        weak = plain.weak(server.url)
        assert not weak.generate(ids(6, 100), PARAMS).usage.cached_from
        assert "API key" in caplog.text
        monkeypatch.setenv(KEY_VARIABLE, "secret")
        weak = plain.weak(server.url)
        assert weak.generate(ids(6, 100), PARAMS).usage.cached_from == {"prefill-at": 99}


def test_a_server_asks_a_stronger_one(plain: Pair) -> None:
    with serving(plain.weak()) as server:
        body = {"prompt": ids(7, 120), "max_tokens": 4, "temperature": 0}
        first = server.post("/v1/completions", body).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 119
        assert server.http.get("/metrics").text.count('place="prefill-at"') > 0
        question = {"ids": PROMPT, "first": 0, "root": "0" * 32, "settings": dict(plain.strong._identity)}
        response = server.post("/v1/blocks", question)  # two servers could ask each other
        assert (response.status_code, plain.server.url in response.text) == (409, True)


@pytest.mark.parametrize("lie", ["endless", "silent", "notes", "html", "closed"])
def test_a_server_that_lies_is_given_up(plain: Pair, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    monkeypatch.setattr(remote_prefill, "_SILENT_SECONDS", 0.3)
    monkeypatch.setattr(remote_prefill, "_MOST_SECONDS", 1.0)
    monkeypatch.setattr(remote_prefill, "_LEAST_SECONDS", 1.0)
    block = b"".join(objects.Object({"kind": "block"}).pack(bytes(range(16))))

    class Liar(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if lie == "closed":
                return
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                if lie == "html":
                    self.wfile.write(b"<html>" * 50)
                while lie == "endless":
                    self.wfile.write(block)
                while lie == "notes":
                    self.wfile.write(note(tokens=1))
            if lie == "silent":
                time.sleep(1)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        weak = plain.weak(f"http://127.0.0.1:{server.server_address[1]}")
        began = time.monotonic()
        assert same(weak.generate(PROMPT, PARAMS), plain.load().generate(PROMPT, PARAMS))
        assert time.monotonic() - began < 30
        assert [tier.read_errors for tier in weak.status().tiers] == [1]
        server.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "delay"), [(125e6, 0.0005), (12.5e6, 0.015)])
def test_two_processes_and_a_link(tiny_path: Path, tmp_path: Path, rate: float, delay: float) -> None:
    """1 Gbit/s and 1 ms there and back; 100 Mbit/s and 30 ms."""
    settings: dict[str, Any] = {"device": "cpu", "ctx_size": 2048, "calibration": False}
    prompt = ids(1, 1500)
    with (
        Process(tiny_path, tmp_path, "--ctx-size", "2048") as server,
        link_to(server.url, rate, delay) as link,
        Engine.load(tiny_path, prefill_at=link.url, **settings) as weak,
        Engine.load(tiny_path, **settings) as alone,
    ):
        began = time.monotonic()
        answer = weak.generate(prompt, PARAMS)
        assert time.monotonic() - began > link.carried / rate + delay
        assert answer.usage.cached_from == {"prefill-at": len(prompt) - 1}
        alone.generate(prompt[:-1], SamplingParams(temperature=0, max_tokens=1))
        assert same(answer, alone.generate(prompt, PARAMS))
