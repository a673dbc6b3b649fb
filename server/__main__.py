"""`python -m polarlm.server`: serves a model, or several by name, until a signal arrives.

Exit codes: 0 after SIGTERM or SIGINT; 1 for an unexpected error, a GPU that works no more, a port in use or missing
packages; 2 for an error in a flag or the model. A second signal ends the process at once, with 128 plus the signal's
number.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from polarlm.engine.cli.commands import run
from polarlm.engine.config import EngineConfig, parse_size
from polarlm.engine.errors import DeviceLost
from polarlm.model_loaders import first_model
from polarlm.server.config import CHECKS, GROUPS, HUB, KEY_VARIABLE, ServerConfig, read_command_line
from polarlm.server.mcp.session import read_mcp_file
from polarlm.server.running import journal, listening
from polarlm.server.running.journal import note

__all__ = ["CHECKS", "GROUPS", "main"]


class _MissingPackages(Exception):
    """Packages that only the server needs are missing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal arrives, and returns the exit code."""
    return run(_run, argv, (DeviceLost, listening.ListenError, _MissingPackages))


def _run(argv: Sequence[str]) -> None:
    model, config = read_command_line(argv)
    if config.mcp_config is not None:
        _check_mcp(config.mcp_config)
    if config.several:
        _serve_models(model, config)
    else:
        _serve_model(model, config)


def _serve_models(common: EngineConfig, config: ServerConfig) -> None:
    models = _need("models.app")
    place = config.models if config.models in (None, HUB) else Path(config.models).expanduser()
    registry = models.Registry(common, place, config.hub_models, config.pin)
    with listening.tcp_socket(config.host, config.port) as http:
        _warn(config, http, 2 * config.max_connections + listening.BACKLOG)  # one more to a model's process for each
        note(f"Models: {models.in_words(registry.models())}. Each is loaded when it is first asked for")
        journal.set_up()
        asyncio.run(models.serve(registry, config, http, lambda: _tell(http, None)))


def _serve_model(model: EngineConfig, config: ServerConfig) -> None:
    from polarlm.server.running.conversations import ConversationStore

    serving = _need("serving")
    if model.weights is None:
        model = replace(model, weights=first_model.remembered_name())
    with ExitStack() as stack:
        http = stack.enter_context(listening.tcp_socket(config.host, config.port))
        lines: socket.socket | None = None
        if config.unix is not None:
            lines = stack.enter_context(listening.unix_socket(config.unix))
        elif config.socket_port is not None:
            lines = stack.enter_context(listening.tcp_socket(config.host, config.socket_port, "--socket-port"))
        listeners = 1 if lines is None else 2
        _warn(config, http, listeners * (config.max_connections + listening.BACKLOG))
        if config.conversations is not None:  # here already, before a model is downloaded and read
            ConversationStore(config.conversations, parse_size(config.max_conversations_size)).close()
        early_clients = stack.enter_context(listening.EarlyClients(http))
        with serving.load_driver(model, config) as driver:
            asyncio.run(serving.serve_engine(driver, http, lines, early_clients, lambda: _tell(http, lines)))


def _warn(config: ServerConfig, http: socket.socket, connections: int) -> None:
    """Say what is wrong with a server without a key, or with so many connections."""
    if not config.keys.are_required and not listening.is_local(http):
        note(f"warning: --host {config.host} lets other machines in, and no key keeps them out: set {KEY_VARIABLE}")
    elif not config.keys.are_required and KEY_VARIABLE in os.environ:
        note(f"note: {KEY_VARIABLE} is empty, which is no key: clients need none")
    for warning in filter(None, (config.keys.warning(), listening.allow_open_files(connections))):
        note(warning)


def _tell(http: socket.socket, lines: socket.socket | None) -> None:
    """Print where the server listens; a program that starts it waits for this line."""
    where = f"Listening at http://{listening.address_of(http)}"
    print(where if lines is None else f"{where} and, for JSON lines, at {listening.address_of(lines)}", flush=True)


def _need(room: str) -> Any:
    """A module of the server. Raises _MissingPackages; `_run` calls it before it loads a model."""
    try:
        return importlib.import_module(f"polarlm.server.{room}")
    except ImportError as error:
        raise _MissingPackages(f"{error}: the server needs more packages: pip install 'polarlm[serve]'") from None


def _check_mcp(path: str) -> None:
    """Raises EngineError if the file is wrong, and _MissingPackages without the package, before a model is loaded."""
    read_mcp_file(path)
    try:
        version("mcp")
    except PackageNotFoundError:
        raise _MissingPackages("--mcp-config needs more packages: pip install 'polarlm[mcp]'") from None


if __name__ == "__main__":
    sys.exit(main())
