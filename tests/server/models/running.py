"""A server of several models in a thread with an event loop of its own; the models' processes are real."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from polarlm.engine.config import EngineConfig
from polarlm.engine.loading.checks import settle
from polarlm.server.config import ServerConfig
from polarlm.server.http.app import error_shapes
from polarlm.server.mcp.session import McpServers
from polarlm.server.models.app import create_models_app
from polarlm.server.models.process import ModelSlot
from polarlm.server.models.proxy import Proxy
from polarlm.server.models.registry import Registry
from polarlm.server.models.supervisor import Supervisor
from polarlm.server.running.journal import JournalMiddleware
from polarlm.server.running.listening import tcp_socket
from tests.server.http_server import join, quiet_config
from tests.server.lines import eventually
from tests.tiny import make_model

QUICK: dict[str, Any] = {"device": "cpu", "cache_type": "f16", "calibration": False, "threads": 1}
KEY = "sk-of-the-front"
PATIENT = Path(__file__).with_name("patient")  # in PYTHONPATH, it has processes of models wait for tiers


def common(**settings: Any) -> EngineConfig:
    """The settings of every model in these tests."""
    return settle(None, None, QUICK | settings)


def two_models(folder: Path) -> Path:
    """A folder with the models `big` and `small`, which differ in their weights."""
    for name, fixture in (("big", "llama_gqa_linear"), ("small", "llama_mha")):
        (folder / name).mkdir()
        make_model(folder / name, fixture)
    return folder


@dataclass
class Front:
    supervisor: Supervisor
    proxy: Proxy
    http: httpx.Client
    url: str
    loop: asyncio.AbstractEventLoop

    def ask(self, model: str, path: str = "/v1/completions", **more: Any) -> httpx.Response:
        return self.http.post(path, json={"model": model, "prompt": "Once", "max_tokens": 4, "temperature": 0} | more)

    def slot(self, name: str) -> ModelSlot:
        return self.supervisor.find(name)

    def state(self, name: str) -> str:
        return self.slot(name).state

    def becomes(self, name: str, state: str) -> None:
        eventually(lambda: self.state(name) == state)

    def pid(self, name: str) -> int:
        process = self.slot(name).process
        return process.pid

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)


@contextmanager
def front(place: Path, *, model: dict[str, Any] | None = None, **settings: Any) -> Iterator[Front]:
    """A server of the models in `place`. settings: of ServerConfig; model: of all models."""
    config = ServerConfig(api_key=KEY, models=str(place), **settings)
    listener, ready = tcp_socket("127.0.0.1", 0), threading.Event()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    held: list[Any] = []

    async def main() -> None:
        supervisor = Supervisor(Registry(common(**(model or {})), place, config.hub_models, config.pin), config)
        proxy = Proxy(supervisor, config, error_shapes())
        mcp = McpServers(config)
        app = create_models_app(supervisor, proxy, config, mcp)
        server = uvicorn.Server(quiet_config(JournalMiddleware(app)))
        held.extend((supervisor, proxy, server, asyncio.get_running_loop()))
        ready.set()
        await server.serve(sockets=[listener])
        await mcp.close()
        await supervisor.close()
        await proxy.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="front", daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as http:
            yield Front(held[0], held[1], http, url, held[3])
    finally:
        held[2].should_exit = True
        join(thread, held[3])
