"""Engines and servers for the tests of this folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine
from polarlm.server.http import streams, uvicorn_server
from polarlm.server.running.listening import tcp_socket, unix_socket
from polarlm.server.socket import connection
from tests import call_templates
from tests.server.fill_model import with_fills
from tests.server.http_server import Serving, serving
from tests.tiny import assert_idle, load_tiny
from tests.tool_model import tool_engine


@pytest.fixture(scope="session", autouse=True)
def nobody_is_in_a_hurry() -> Iterator[None]:
    """Streams are what is asked for, and clients may take their time, however slow a busy machine is.

    Tests of the signs of life and of limits set their own times.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "SILENT_SECONDS", 3600.0)
        patch.setattr(connection, "KEY_SECONDS", 3600.0)
        patch.setattr(uvicorn_server, "HEAD_SECONDS", 3600.0)
        yield


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What tests that are coroutines run on."""
    return "asyncio"


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[Engine]:
    """Computes two requests at a time and keeps nothing of them: what is not free is in use."""
    plain = {"cache_type": "f16", "calibration": False, "block_size": 16}
    with Engine.load(tiny_path, device="cpu", parallel=2, kept_sequences=0, **plain) as engine:
        yield engine
        assert_idle(engine)


@pytest.fixture
def slow_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A long answer is still under way when something happens to it, and what happens ends it before its time.

    Only the first steps are fast, so that a test may be late.
    """
    step, steps = engine._model.step, []

    def slow(*arguments: Any) -> Any:
        steps.append(threading.Event().wait(0.1 if len(steps) < 20 else 1))
        return step(*arguments)

    monkeypatch.setattr(engine._model, "step", slow)
    yield
    assert len(steps) < 100


@pytest.fixture
def start(engine: Engine) -> Iterator[Callable[..., Serving]]:
    """start(unix=…, **fields of ServerConfig): a server with a socket; it is stopped when the test is done."""
    with ExitStack() as ends:

        def begin(**settings: Any) -> Serving:
            path = settings.get("unix")
            lines = ends.enter_context(tcp_socket("127.0.0.1", 0) if path is None else unix_socket(path))
            return ends.enter_context(serving(engine, lines=lines, **settings))

        yield begin


@pytest.fixture
def socket_server(start: Callable[..., Serving]) -> Serving:
    return start()


@pytest.fixture
def server(tiny: Engine) -> Iterator[Serving]:
    """Serves the tiny model over HTTP, to one test."""
    with serving(tiny) as running:
        yield running


@pytest.fixture(scope="module")
def shared(tiny_path: Path) -> Iterator[Serving]:
    with Engine.load(tiny_path, device="cpu", cache_type="f16", block_size=16) as engine, serving(engine) as running:
        yield running


@pytest.fixture(scope="module")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = with_fills(tmp_path_factory.mktemp("filling"))
    with load_tiny(folder, device="cpu", cache_type="f16", block_size=16) as engine, serving(engine) as running:
        yield running


@pytest.fixture(scope="module")
def hermes_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model of random weights that calls tools as Hermes does."""
    with tool_engine(tmp_path_factory.mktemp("model"), call_templates.HERMES) as engine:
        yield engine


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with tool_engine(tmp_path_factory.mktemp("model"), call_templates.QWEN3) as engine, serving(engine) as running:
        yield running


@pytest.fixture
def hermes(hermes_engine: Engine) -> Iterator[Serving]:
    with serving(hermes_engine) as running:
        yield running
