"""Settings of the replicas: flags of `python -m polarlm.server` without their dashes, as in {"ctx-size": 4096}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polarlm.engine import EngineConfig
from polarlm.engine.cli.flags import FlagError
from polarlm.server.config import ServerConfig, read_command_line

# For a Ray cluster of this machine alone: its controller looks once a second whether all is well, not ten times, since
# the replicas have the same cores.
RAY_ON_ONE_MACHINE = {"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1"}

_LISTENS = "Ray listens for all replicas, where http_options of the configuration says"
_NO_SOCKET = "there is no socket for JSON lines"
_NOT_HERE = {
    "host": _LISTENS,
    "port": _LISTENS,
    "max_connections": _LISTENS,
    "socket_port": _NO_SOCKET,
    "unix": _NO_SOCKET,
    "sessions": "only the replica that loads a session has it",
}


def read(settings: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """The configurations of a replica. Raises FlagError or EngineError with a sentence that names the flag.

    True stands for a flag without a value, a list for a flag that is given more than once.
    """
    flags: list[str] = []
    for name, value in settings.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not False:
                flags += [f"--{name}"] if one is True else [f"--{name}", str(one)]
    model, config = read_command_line(flags)
    for field, why in _NOT_HERE.items():
        if getattr(config, field) != getattr(ServerConfig, field):
            raise FlagError(f"--{field.replace('_', '-')} cannot be set here: {why}")
    return model, config
