"""The server's settings, and the limits of their values on its command line."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polarlm.engine import EngineError
from polarlm.engine.cli.flags import Check, FlagError, check_that, no_file, parse
from polarlm.engine.cli.sources import CONFIG_HELP, naming, with_sources
from polarlm.engine.config import EngineConfig, parse_size, setting
from polarlm.engine.loading.checks import settle
from polarlm.model_loaders.forks import cached_property
from polarlm.server.keys import Keys, is_key

KEY_VARIABLE = "POLARLM_API_KEY"
HUB = "hub"  # the place of models that stands for all that have been downloaded


@dataclass(frozen=True)
class ServerConfig:
    """Where the server listens, and its limits per client."""

    host: str = setting(
        "127.0.0.1", "--host", metavar="ADDRESS", help="address to listen at; 0.0.0.0 lets other machines in"
    )
    port: int = setting(8080, "--port", metavar="N", help="port of the HTTP API; 0 takes a free one")
    socket_port: int | None = setting(
        None, "--socket-port", metavar="N", help="also speak JSON lines at this TCP port; 0 takes a free one"
    )
    unix: str | None = setting(
        None, "--unix", metavar="PATH", help="also speak JSON lines at a Unix socket, which only its owner can open"
    )
    api_key: str | None = setting(
        None,
        "--api-key",
        metavar="KEY",
        help=f"key that clients must send; the environment variable {KEY_VARIABLE} keeps it out of the process list",
    )
    api_key_file: str | None = setting(
        None,
        "--api-key-file",
        metavar="FILE",
        help="more keys, one on each line, after a name for the log and for counters if you like; a key is withdrawn "
        "by removing its line",
    )
    allowed_host: tuple[str, ...] = setting(
        (),
        "--allowed-host",
        metavar="NAME",
        help="a name that clients use for this server in Host headers; may be repeated. With an API key, any name is "
        "accepted",
    )
    cors_origin: tuple[str, ...] = setting(
        (),
        "--cors-origin",
        metavar="ORIGIN",
        help="let web pages of this origin use the HTTP API, such as https://chat.example.com; * for any origin. May "
        "be repeated",
    )
    alias: str | None = setting(
        None, "-a", "--served-model-name", "--alias", metavar="NAME", help="what answers and lists call the model"
    )
    max_body: int = setting(
        1 << 20,
        "--max-body",
        metavar="BYTES",
        help="size of a request's body, or of a line on the socket; "
        "a model that reads images takes 16 times as much over HTTP",
    )
    max_connections: int = setting(
        256, "--max-connections", metavar="N", help="connections at the same time, HTTP and socket each"
    )
    max_queue: int = setting(
        64,
        "--max-queue",
        metavar="N",
        help="requests that may wait for others to end; further ones are told to come back later",
    )
    max_tokens: int | None = setting(
        None, "--max-tokens", metavar="N", help="most tokens of an answer; without it, as many as the context holds"
    )
    reasoning_budget: int = setting(
        -1,
        "--reasoning-budget",
        metavar="N",
        help="most tokens of reasoning in answers to requests that name no budget; -1 is no limit",
    )
    request_seconds: int = setting(
        600,
        "--request-seconds",
        metavar="N",
        help="most seconds from a request's arrival to the end of its answer, unless it gives way to all others",
    )
    sessions: str | None = setting(
        None,
        "--sessions",
        "--slot-save-path",
        metavar="FOLDER",
        help="let clients save and load sessions, by name, in this folder",
    )
    conversations: str | None = setting(
        None,
        "--conversations",
        metavar="FOLDER",
        help="keep the chat page's conversations in this folder too, the same in every browser; without an API key, "
        "only in those on this machine",
    )
    adapters_folder: str | None = setting(
        None,
        "--adapters-folder",
        metavar="FOLDER",
        help="let clients load adapters (LoRA) from this folder, by name, and unload any, as vLLM does; no web pages",
    )
    mcp_config: str | None = setting(
        None,
        "--mcp-config",
        metavar="FILE",
        help="MCP servers whose tools models may call on the chat page, whose user confirms the calls; a JSON file as "
        "of Claude Desktop and Cursor. Without an API key, only in browsers on this machine. Needs the extra mcp",
    )
    max_sessions_size: str = setting(
        "10G", "--max-sessions-size", metavar="SIZE", help="what all sessions together may take on the disk"
    )
    max_conversations_size: str = setting(
        "1G", "--max-conversations-size", metavar="SIZE", help="what the file of --conversations may take on the disk"
    )
    parse_special: bool = setting(
        True,
        "--no-parse-special",
        help="names of control tokens in a raw prompt stay text, unless a request asks for the tokens; in messages "
        "they always do",
    )
    context_edits: str = setting(
        "exact",
        "--context-edits",
        choices=("exact", "in-place"),
        help="how results of tools that a client lets clear leave a prompt: it is read again without them, or no later "
        "token sees them and nothing is read again",
    )
    hide_cached_tokens: bool = setting(
        False, "--hide-cached-tokens", help="do not tell clients how much of a prompt was in the cache"
    )
    log_prompts: bool = setting(False, "--log-prompts", help="write prompts and answers into the log")
    models: str | None = setting(
        None,
        "--models",
        metavar="PLACE",
        help="serve several models by name, each in a process of its own that is started when it is asked for: those "
        f"in a folder, those that a TOML file lists, or, as {HUB}, all that have been downloaded. -hf given twice or "
        "more does the same for models of the hub",
    )
    models_memory: str | None = setting(
        None,
        "--models-memory",
        metavar="SIZE",
        help="most memory that loaded models have together, with their processes, such as 12G; without it, as much "
        "as is free. For another model, the one that has not been used for longest is unloaded",
    )
    idle_unload: float | None = setting(
        None,
        "--idle-unload",
        metavar="MINUTES",
        help="unload a model that nobody has used for so long; without it, models stay until another needs the memory",
    )
    pin: tuple[str, ...] = setting(
        (), "--pin", metavar="NAME", help="do not unload this model of --models once it is loaded; may be repeated"
    )
    allow_pull: bool = setting(
        False, "--allow-pull", help="let clients add models of the hub to --models, at /api/pull, which downloads them"
    )
    config_file: str | None = setting(None, "--config", metavar="FILE", help=CONFIG_HELP.format("server"))
    hub_models: tuple[str, ...] = ()  # -hf, given twice or more, or with --models

    @cached_property
    def keys(self) -> Keys:
        """Raises FlagError if the file is wrong."""
        return Keys(self.api_key, self.api_key_file)

    @property
    def several(self) -> bool:
        return self.models is not None or len(self.hub_models) > 1


GROUPS: Mapping[str, type] = {"Model": EngineConfig, "Server": ServerConfig}


def read_command_line(
    argv: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[EngineConfig, ServerConfig]:
    """The settings on a command line without the program's name, and of its environment and its files. Raises FlagError
    or EngineError."""
    argv, places = with_sources(argv, GROUPS, "server", environment, CHECKS)
    argv, hub_models = _without_hub_models(argv)
    engine, server = parse(
        argv,
        GROUPS,
        prog="polarlm serve",
        description="Serve a local language model, or several by name: OpenAI's HTTP API, JSON lines over a socket.",
        checks=CHECKS,
    )
    server = replace(server, hub_models=hub_models)
    with naming(places):
        engine = settle(None, engine, {})  # here already, before a model is downloaded and read
    _check_models(engine, server)
    if server.socket_port is not None and server.unix is not None:
        raise FlagError("--socket-port and --unix both say where the socket is; leave one of them out")
    _ = server.keys  # here already, before a model is downloaded and read
    return engine, server


def _without_hub_models(argv: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """(the other words, the names) of a command line for several models; one with a single -hf stays as it is."""
    names, rest, words = [], [], iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in ("-hf", "--hf-repo") and (equals or (value := next(words, ""))):
            names.append(value)
        else:
            rest.append(word)
    several = len(names) > 1 or any(word.partition("=")[0] == "--models" for word in rest)
    return (rest, tuple(names)) if several else (argv, ())


def _check_models(engine: EngineConfig, server: ServerConfig) -> None:
    """Raises FlagError for flags that contradict --models, or need it."""
    if server.several and engine.weights is not None:
        raise FlagError("--weights names one model, --models several; leave one of the two out")
    for name in _SINGLE_MODEL_SETTINGS if server.several else _MODELS_SETTINGS:
        flag, value = f"--{name.replace('_', '-')}", getattr(server, name)
        if value is None or value is False or value == ():
            continue
        if server.several:
            raise FlagError(f"{flag} is for a server of one model; leave out {flag}, or --models")
        raise FlagError(f"{flag} is about several models; give --models as well")


def _is_name(text: str) -> bool:
    """Whether `text` is a host name or an address as in a Host header, without a port."""
    address = literal_address(text.removeprefix("[").removesuffix("]"))
    return re.fullmatch(r"[A-Za-z0-9._-]+", text) is not None or address is not None


def literal_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a text spells; None for a name."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_origin(text: str) -> bool:
    """Whether `text` is * or an Origin as browsers send it: in lower case, without a path or a final slash."""
    return text == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\sA-Z/?#@]+", text) is not None


def _size(text: str) -> str | None:
    try:
        parse_size(text)
    except EngineError:
        return "this is not a size; write 512M, 2G or a number of bytes"
    return None


_PORT = check_that(lambda port: 0 <= port <= 65535, "a port is a number from 0 to 65535")
_POSITIVE = check_that(lambda count: count >= 1, "this has to be 1 or more")
_PATH = check_that(lambda text: text != "" and "\0" not in text, "this needs a path")

_SINGLE_MODEL_SETTINGS = ("alias", "unix", "socket_port", "adapters_folder")
_MODELS_SETTINGS = ("models_memory", "idle_unload", "pin", "allow_pull")

CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("port", "socket_port"), _PORT),
    **dict.fromkeys(("max_body", "max_connections", "max_tokens", "request_seconds"), _POSITIVE),
    "reasoning_budget": check_that(lambda number: number >= -1, "this needs a number from -1 up"),
    **dict.fromkeys(("unix", "sessions", "conversations", "api_key_file"), _PATH),
    **dict.fromkeys(("mcp_config", "config_file"), no_file),
    "adapters_folder": check_that(lambda text: Path(text).expanduser().is_dir(), "there is no such folder"),
    **dict.fromkeys(("max_sessions_size", "max_conversations_size", "models_memory"), _size),
    "host": check_that(lambda text: text.strip() == text != "", "this needs an address or a host name"),
    "models": check_that(
        lambda text: text == HUB or Path(text).expanduser().exists(),
        "there is no such folder or file; -hf names models of the hub",
    ),
    "idle_unload": check_that(lambda minutes: 0 < minutes < math.inf, "this has to be a number of minutes above 0"),
    "pin": check_that(lambda text: text != "", "this needs a model's name"),
    "api_key": check_that(is_key, "a key has ASCII letters, digits and punctuation only, and at least one"),
    "allowed_host": check_that(_is_name, "this needs a host name alone, as in chat.example.com"),
    "cors_origin": check_that(
        _is_origin,
        "an origin is * or a scheme and a host in lower case, without a path or a slash after them, as in "
        "https://chat.example.com:8443",
    ),
    "max_queue": check_that(lambda count: count >= 0, "this has to be 0 or more"),
}
