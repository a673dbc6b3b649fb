"""A tier in an object store: Redis and a WebDAV folder of nginx, which run, and an emulator of S3."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import EngineError
from polarlm.engine.storage.tiers import object_store
from polarlm.engine.storage.tiers.object_store import ObjectStoreTier
from tests.ports import free_port
from tests.server.lines import PATIENCE, eventually
from tests.tiers.test_engine import HIT, PARAMS, PROMPT, N, check_child_answers, load, next_turn
from tests.tiny import forget, ids, make_model

pytest.importorskip("opendal", reason="the extra store is not installed")

NAME = bytes(range(16))
NGINX = """daemon off; master_process off; pid {folder}/pid; events {{}}
http {{ access_log off; client_body_temp_path {folder}/t; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s; server {{ listen 127.0.0.1:{port}; root {folder}/files;
location / {{ dav_methods PUT DELETE; create_full_put_path on; client_max_body_size 0; }} }} }}"""


def accepts(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False


@contextmanager
def store(kind: str, folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the URL of a store and its process."""
    port = free_port()
    words = {
        "redis": ["redis-server", "--port", str(port), "--save", "", "--dir", str(folder)],
        "webdav": ["nginx", "-e", f"{folder}/errors", "-c", f"{folder}/nginx.conf"],
        "s3": [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
    }[kind]
    if kind == "s3" and importlib.util.find_spec("moto") is None:
        pytest.skip("moto's server is not installed: pip install 'moto[server]'")
    if (program := shutil.which(words[0], path=f"{os.environ['PATH']}:/usr/sbin")) is None:
        pytest.skip(f"{words[0]} is not installed")
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port))
    (folder / "files").mkdir()
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([program, *words[1:]], **silent) as process:
        try:
            eventually(lambda: accepts(port) or process.poll() is not None)
            host = f"127.0.0.1:{port}"
            if kind == "s3":
                urllib.request.urlopen(urllib.request.Request(f"http://{host}/bucket", method="PUT")).close()
                keys = "access_key_id=someone&secret_access_key=secret"
                yield f"s3://bucket/conversations?endpoint=http://{host}&region=us-east-1&{keys}", process
            else:
                yield f"{kind}://{host}/{'2/' if kind == 'redis' else ''}conversations", process
        finally:
            process.kill()


@pytest.fixture(scope="module", params=["redis", "webdav", "s3"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with store(request.param, tmp_path_factory.mktemp(request.param)) as (url, _):
        yield url


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    (folder := tmp_path / "redis").mkdir()
    with store("redis", folder) as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_what_is_written_is_found(url: str) -> None:
    header, place, other = b"polarkv2" + NAME, ObjectStoreTier(url), ObjectStoreTier(url)
    assert not place.has(NAME)
    assert place.read(NAME) is None
    place.write(NAME, header, memoryview(b"payload"))
    assert place.has(NAME)
    assert other.has(NAME)
    assert other.read(NAME) == header + b"payload"
    place.write(bytes(16), header, memoryview(b""))
    assert not other.has(bytes(16))  # it is the object of another name
    other.remove(NAME)
    assert not other.has(NAME)
    assert place.read(NAME) is None
    assert not place.has(NAME)
    assert "secret" not in place.place


def test_another_engine_goes_on_bit_for_bit(model: Path, url: str, tmp_path: Path) -> None:
    with load(model, None) as engine:
        first = engine.generate(PROMPT, PARAMS)
        expected = next_turn(engine, first)
    with load(model, None, kv_store=url) as engine:
        engine.generate(PROMPT, PARAMS)
    with load(model, tmp_path, kv_store=url) as engine:
        answer = next_turn(engine, first)
        assert answer.usage.cached_from == {"remote": len(PROMPT) + 12}
        assert answer.logprobs == expected.logprobs
    with load(model, tmp_path) as engine:  # what came from there is on the own disk afterwards
        assert next_turn(engine, first).usage.cached_from["disk"] >= len(PROMPT) + 12 - N


TURNS = """
import json, sys
from polarlm.engine import Engine, SamplingParams
url, weights = sys.argv[1:]
settings = {"device": "cpu", "block_size": 8, "calibration": False, "ctx_size": 256, "kv_store": url}
with Engine.load(weights, **settings) as engine:
    for line in sys.stdin:
        answer = engine.generate(json.loads(line), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        assert engine._tiers._writer.flush(60)
        print(json.dumps([list(answer.token_ids), answer.usage.cached_from]), flush=True)
"""


@contextmanager
def replica(url: str, model: Path) -> Iterator[Callable[[list[int]], Any]]:
    """Yield a function that asks an engine in a process of its own: ids → the answer's, and where cached tokens are
    from."""
    command = [sys.executable, "-c", TURNS, url, str(model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask(prompt: list[int]) -> Any:
            process.stdin.write(json.dumps(prompt) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()
        assert process.wait(PATIENCE) == 0


@pytest.mark.slow  # five processes start and compile their kernels
def test_two_replicas_share_a_conversation(model: Path, url: str) -> None:
    past = ids(5, 30)
    with replica(url, model) as one, replica(url, model) as other:
        answer, cached = one(past)
        assert cached == {}
        for ask in (other, one):
            length = len(past) + len(answer) - 1
            past = [*past, *answer, *ids(6, 20)]
            answer, cached = ask(past)
            assert cached.pop("remote") + cached.get("store", 0) == length


def test_a_damaged_object_is_computed_anew_and_told_once(model: Path, redis, caplog: pytest.LogCaptureFixture) -> None:
    with load(model, None, kv_store=redis[0]) as engine:
        first = engine.generate(PROMPT, PARAMS)
        assert engine._tiers._writer.flush(PATIENCE)
        name = engine._tiers._names.block(engine._prefixes.hashes(PROMPT)[1][0])
        place = ObjectStoreTier(redis[0])
        content = bytearray(place.read(name))
        content[-1] ^= 1
        place.write(name, bytes(content), memoryview(b""))
        for cached in (0, HIT):
            forget(engine)
            answer = engine.generate(PROMPT, PARAMS)
            assert (answer.usage.cached_tokens, answer.token_ids) == (cached, first.token_ids)
            assert engine._tiers._writer.flush(PATIENCE)
    assert [name.hex() in record.message for record in caplog.records if "damaged" in record.message] == [True]


@pytest.mark.parametrize("trouble", ["dies", "hangs"])
def test_trouble_there_is_a_miss_here(
    model: Path, redis, tmp_path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An operation has a time limit, and after it the request asks the store no more; a disk goes on to work."""
    monkeypatch.setattr(object_store, "_SECONDS", 0.2)
    url, process = redis
    with load(model, tmp_path / "disk", kv_store=url) as engine:
        first = engine.generate(PROMPT, PARAMS)
        assert engine._tiers._writer.flush(PATIENCE)
        process.send_signal(signal.SIGKILL if trouble == "dies" else signal.SIGSTOP)
        for prompt, cached in ((PROMPT, {"disk": HIT}), (ids(8, 45), {})):
            forget(engine)
            assert engine.generate(prompt, PARAMS).usage.cached_from == cached
            assert engine._tiers._writer.flush(PATIENCE)
        process.send_signal(signal.SIGCONT)
        assert next_turn(engine, first).finish_reason == "length"
    told = [record.message for record in caplog.records if "remote" in record.message]
    assert all("for now" in sentence and "\n" not in sentence for sentence in told)
    assert 1 <= len(told) <= 2  # of reading and of writing


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_does_not_wait_for_its_parent_s_store(model: Path, redis) -> None:
    with load(model, None, kv_store=redis[0]) as engine:
        check_child_answers(engine)


def test_a_store_that_cannot_be_is_a_sentence(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_SECONDS", 0.2)
    nothing = f"127.0.0.1:{free_port()}"
    for url, words in (
        (f"redis://:word@{nothing}/0", f"kv_store=redis://{nothing}/0: io operation timeout reached; look at"),
        (f"webdav://{nothing}/x", "Connection refused"),
        (f"s3://b/x?region=a&endpoint=http://{nothing}&access_key_id=a&secret_access_key=word", "Connection refused"),
        ("s3:///x", "The bucket is misconfigured"),
        ("az://container/x", "endpoint is empty"),
    ):
        with pytest.raises(EngineError) as raised:
            load(model, None, kv_store=url)
        assert words in str(raised.value)
        assert "word" not in str(raised.value)
        assert "\n" not in str(raised.value)
    monkeypatch.setitem(sys.modules, "opendal", None)
    with pytest.raises(EngineError, match=r"opendal is not here; pip install 'polarlm\[store\]' installs it"):
        load(model, None, kv_store="s3://bucket/x")
