"""`polarlm ps`: the chats and servers that run on this machine, and the models that they have in memory."""

from __future__ import annotations

import json
import os
import shlex
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

import psutil

from polarlm.engine.cli.commands import columns, note, with_flags
from polarlm.engine.config import format_bytes

_SECONDS = 2.0  # until a server counts as silent
_COMMANDS = ("chat", "run", "serve")
_MODULES = {"polarlm.engine.chat": "chat", "engine.chat": "chat", "polarlm.server": "serve", "server": "serve"}
_WIDEST = 50  # characters of a command


GROUPS: Mapping[str, type] = {}


@with_flags(GROUPS, "polarlm ps", "Show the chats and servers that run here.")
def main() -> None:
    rows = list(_rows())
    if rows:
        print("\n".join(columns([["command", "pid", "memory", "since", "address", "models"], *rows])))
        for *_, address, models in rows:
            print("".join(_rereads(address, models.split(", ") if address else [])), end="")
    else:
        note("No chat and no server runs here.")


def _rows() -> Iterator[list[str]]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (words := _words(process.cmdline())) is None:
                continue
            processes = [process, *process.children(recursive=True)]
            address, models = _address_and_models(process) if words[0] == "serve" else ("", "")
            command = shlex.join(words)
            yield [
                command if len(command) <= _WIDEST else f"{command[: _WIDEST - 2]} …",
                str(process.pid),
                format_bytes(sum(one.memory_info().rss for one in processes)),
                datetime.fromtimestamp(process.create_time()).strftime("%m-%d %H:%M"),
                address,
                models,
            ]


def _words(line: Sequence[str]) -> list[str] | None:
    """The command and its flags of a command line of this program; None for any other one."""
    for at, word in enumerate(line[:4]):
        if word in _MODULES and line[at - 1] == "-m":
            return [_MODULES[word], *line[at + 1 :]]
        if PurePath(word).stem == "polarlm" and line[at + 1 : at + 2] and line[at + 1] in _COMMANDS:
            return list(line[at + 1 :])
    return None


def _address_and_models(process: psutil.Process) -> tuple[str, str]:
    """The address of a server, and the models that it has in memory."""
    connections = process.net_connections if hasattr(process, "net_connections") else process.connections
    for one in connections("tcp"):
        if one.status != psutil.CONN_LISTEN:
            continue
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(one.laddr.ip, one.laddr.ip)
        address = f"{host}:{one.laddr.port}"
        try:
            models = [model["name"] for model in _get(f"http://{address}/api/ps")["models"]]
            return address, ", ".join(models) or "none"
        except urllib.error.HTTPError as error:
            return address, "its key is needed: set POLARLM_API_KEY" if error.code == 401 else f"error {error.code}"
        except (OSError, ValueError, LookupError):  # it loads its model, or this is the port of another protocol
            continue
    return "", "loading"


def _rereads(address: str, models: Sequence[str]) -> Iterator[str]:
    """Lines on what the models of a server have read again in the last hour."""
    for model in models:
        with suppress(OSError, ValueError, LookupError):
            stats = _get(f"http://{address}/stats?model={quote(model)}")
            for sentence in stats["rereads"]:
                yield f"{address}, {model}, in the last hour: {sentence}\n"


def _get(url: str) -> Any:
    """The JSON of a response. Raises OSError or ValueError."""
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("POLARLM_API_KEY")) else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_SECONDS) as answer:
        return json.load(answer)
