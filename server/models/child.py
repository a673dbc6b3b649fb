"""The process of one model: `python -m polarlm.server.models.child NAME`, started by a server of several models.

It speaks JSON lines with its parent, over standard input and output:

    parent → child  {"engine": settings, "server": settings}
    child → parent  {"fetching": {"done", "total"}}, any number of times; then {"fetched": {"path"}}
    parent → child  {"load": false, "reserved": {device: bytes}, "most"}, any number of times
    child → parent  {"fit": a Need, as an object}, for each of these
    parent → child  {"load": true}
    child → parent  {"loaded": {"port", "reads_images"}}
    child → parent  {"used": {"key", "tokens"}}, for each request of a key with a name
    child → parent  {"failed": {"message", "code"}}, and the process ends

Without settings of a server, the process only fetches the model. Otherwise it then is the HTTP server of this model, on
the loopback interface, with a key that only the parent knows. It ends when its parent does: its standard input is then
closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import sys
import time
from dataclasses import asdict, replace
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from polarlm.children import Parent
from polarlm.engine import EngineError
from polarlm.engine.cli.flags import in_flags
from polarlm.engine.config import EngineConfig
from polarlm.engine.loading.need import fetch_model, need
from polarlm.server.config import ServerConfig
from polarlm.server.running import journal
from polarlm.server.running.journal import note
from polarlm.server.running.listening import ListenError, tcp_socket
from polarlm.server.serving import load_driver, serve_engine

CLIENT = "x-polarlm-client"  # the header with the address of the client that the parent has
KEY_NAME = "x-polarlm-key"  # the header with the name of the key that it has sent
PRIORITY = "x-polarlm-priority"  # the header with the least priority of its requests
_PROGRESS_SECONDS = 0.2  # between two messages about a download
_LAST_SECONDS = 10.0  # to end in order when the parent is gone


class _Server(Parent):
    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._last_progress = 0.0
        super().__init__(self._lines.put, _end)

    def hear(self) -> dict[str, Any]:
        return self._lines.get()

    def fetching(self, bytes_done: int, total: int) -> None:
        """Tell how much of the model has arrived, now and then."""
        if time.monotonic() - self._last_progress >= _PROGRESS_SECONDS:
            self._last_progress = time.monotonic()
            self.tell({"fetching": {"done": bytes_done, "total": total}})


class _Charges(logging.Handler):
    """Tells the parent the tokens of each request that is logged."""

    def __init__(self, parent: Parent) -> None:
        super().__init__()
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        if key := (line := vars(record)["line"]).get("key"):
            tokens = line["prompt_tokens"] + line["completion_tokens"]
            self._parent.tell({"used": {"key": key, "tokens": tokens}})


def _end() -> None:
    """End this process, whose parent is gone, in the parent's own way."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LAST_SECONDS)
    os._exit(1)


def _with_clients_of_parent(app: ASGIApp) -> ASGIApp:
    """ASGI middleware that replaces the client, which is the parent, with the client of the parent, and its key."""

    async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
        for name, value in scope.get("headers", ()):
            if name == CLIENT.encode():
                host, _, port = value.decode("latin-1").rpartition(":")
                scope["client"] = (host, int(port) if port.isdecimal() else 0)
            elif name == KEY_NAME.encode():
                scope[journal.KEY] = value.decode("latin-1")
            elif name == PRIORITY.encode():
                scope[journal.PRIORITY] = int(value)
        await app(scope, receive, send)

    return middleware


def main() -> int:
    parent = _Server()
    try:
        _run(parent)
        return 0
    except EngineError as error:
        parent.tell({"failed": {"message": in_flags(error), "code": error.code}})
    except ListenError as error:
        parent.tell({"failed": {"message": str(error), "code": "internal"}})
    return 2


def _run(parent: _Server) -> None:
    first = parent.hear()
    model = fetch_model(EngineConfig(**first["engine"]), note, parent.fetching)
    parent.tell({"fetched": {"path": model.weights}})
    if first["server"] is None:
        return
    config = ServerConfig(**first["server"])
    model = _receive_settings(parent, model)
    with tcp_socket(config.host, 0) as http, load_driver(model, config, config.alias) as driver:
        journal.REQUESTS.addHandler(_Charges(parent))
        reply = {"port": http.getsockname()[1], "reads_images": driver.engine.reads_images}
        # Nobody else knows the port until the parent hears it.
        asyncio.run(
            serve_engine(driver, http, None, None, lambda: parent.tell({"loaded": reply}), _with_clients_of_parent)
        )


def _receive_settings(parent: _Server, model: EngineConfig) -> EngineConfig:
    """The settings to load the model with, once the parent says so. Raises EngineError.

    With other models in memory, the KV store may get less than `kv_memory`. On a CPU it gets exactly what the parent
    was told, since another model may take memory first. That is 0 for an encoder, and for a model that does not fit.
    """
    settings = model
    while not (message := parent.hear())["load"]:
        fit = need(model, message["reserved"], message["most"])
        parent.tell({"fit": asdict(fit)})
        is_limited = fit.store and (fit.device == "cpu" or message["reserved"] or message["most"] is not None)
        settings = replace(model, kv_memory=str(fit.store)) if is_limited else model
    return settings


if __name__ == "__main__":
    sys.exit(main())
