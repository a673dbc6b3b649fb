"""The server's settings, and the limits of their values on its command line."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polarlm.engine import EngineError
from polarlm.engine.cli.flags import Check, FlagError, parse, that
from polarlm.engine.config import EngineConfig, setting
from polarlm.engine.loading.checks import settle
from polarlm.engine.state.plan import parse_size

KEY_VARIABLE = "POLARLM_API_KEY"


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
    max_body: int = setting(
        1 << 20, "--max-body", metavar="BYTES", help="size of a request's body, or of a line on the socket"
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
    request_seconds: int = setting(
        600, "--request-seconds", metavar="N", help="most seconds from a request's arrival to the end of its answer"
    )
    sessions: str | None = setting(
        None, "--sessions", metavar="FOLDER", help="let clients save and load sessions, by name, in this folder"
    )
    share_blocks: bool = setting(
        False,
        "--share-blocks",
        help="let clients read and write the blocks of --cache-disk at /blocks, as engines with --cache-remote do",
    )
    max_sessions_size: str = setting(
        "10G", "--max-sessions-size", metavar="SIZE", help="what all sessions together may take on the disk"
    )
    parse_special: bool = setting(
        True,
        "--no-parse-special",
        help="names of control tokens in a raw prompt stay text, unless a request asks for the tokens; in messages "
        "they always do",
    )
    hide_cached_tokens: bool = setting(
        False, "--hide-cached-tokens", help="do not tell clients how much of a prompt was in the cache"
    )
    kv_events: str | None = setting(
        None,
        "--kv-events",
        metavar="ADDRESS",
        help="publish which blocks are in the cache, for routers, over ZeroMQ in vLLM's format; such as "
        "tcp://127.0.0.1:5557. Messages contain the tokens of prompts, and any program that reaches the address can "
        "read them. Needs the extra kv-events",
    )
    kv_events_replay: str | None = setting(
        None, "--kv-events-replay", metavar="ADDRESS", help="where routers get messages of --kv-events that they missed"
    )
    kv_events_topic: str = setting(
        "", "--kv-events-topic", metavar="TOPIC", help="topic of the messages of --kv-events"
    )
    log_prompts: bool = setting(False, "--log-prompts", help="write prompts and answers into the log")


GROUPS: Mapping[str, type] = {"Model": EngineConfig, "Server": ServerConfig}


def read_command_line(
    argv: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[EngineConfig, ServerConfig]:
    """The settings on the command line `argv`, which lacks the program's name.

    Raises FlagError or EngineError with a sentence that names the flag; `--help` raises SystemExit(0).
    """
    engine, server = parse(
        argv,
        GROUPS,
        prog="polarlm serve",
        description="Serve a local language model: OpenAI's HTTP API, and JSON lines over a socket.",
        checks=_CHECKS,
    )
    settle(None, engine, {})  # here already, before a model is downloaded and read
    if server.socket_port is not None and server.unix is not None:
        raise FlagError("--socket-port and --unix both say where the socket is; leave one of them out")
    if server.kv_events is None and (server.kv_events_replay is not None or server.kv_events_topic):
        raise FlagError("--kv-events-replay and --kv-events-topic are for messages that only --kv-events publishes")
    if server.share_blocks and engine.cache_disk is None:
        raise FlagError("--share-blocks shares what --cache-disk keeps: give that as well")
    key = environment.get(KEY_VARIABLE)
    if server.api_key is None and key is not None:
        if complaint := _CHECKS["api_key"](key):
            raise FlagError(f"{KEY_VARIABLE}: {complaint}")
        server = replace(server, api_key=key)
    return engine, server


def _is_key(text: str) -> bool:
    """Whether `text` has no white space and fits in an HTTP header."""
    return text != "" and all("!" <= character <= "~" for character in text)


def _is_name(text: str) -> bool:
    """Whether `text` is a host name or an address as in a Host header, without a port."""
    return re.fullmatch(r"[A-Za-z0-9._-]+", text) is not None or _is_address(text.removeprefix("[").removesuffix("]"))


def _is_zmq_address(text: str) -> bool:
    """Whether ZeroMQ can bind to `text`: a TCP address with a port, or a file name."""
    return re.fullmatch(r"tcp://[^\s/]+:([0-9]{1,5})|ipc://[^\s\0]+", text) is not None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_origin(text: str) -> bool:
    """Whether `text` is * or an Origin as browsers send it: in lower case, without a path or a final slash."""
    return text == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\sA-Z/?#@]+", text) is not None


def _size(text: str) -> str | None:
    try:
        parse_size(text)
    except EngineError:
        return "this is not a size; write 512M, 2G or a number of bytes"
    return None


_PORT = that(lambda port: 0 <= port <= 65535, "a port is a number from 0 to 65535")
_POSITIVE = that(lambda count: count >= 1, "this has to be 1 or more")
_PATH = that(lambda text: text != "" and "\0" not in text, "this needs a path")

_ZMQ_ADDRESS = that(_is_zmq_address, "an address is tcp://HOST:PORT, as in tcp://127.0.0.1:5557, or ipc://PATH")

_CHECKS: Mapping[str, Check] = {
    "host": that(lambda text: text.strip() == text != "", "this needs an address or a host name"),
    "port": _PORT,
    "socket_port": _PORT,
    "unix": _PATH,
    "sessions": _PATH,
    "max_sessions_size": _size,
    "kv_events": _ZMQ_ADDRESS,
    "kv_events_replay": _ZMQ_ADDRESS,
    "api_key": that(_is_key, "a key has ASCII letters, digits and punctuation only, and at least one"),
    "allowed_host": that(_is_name, "this needs a host name alone, as in chat.example.com"),
    "cors_origin": that(
        _is_origin,
        "an origin is * or a scheme and a host in lower case, without a path or a slash after them, as in "
        "https://chat.example.com:8443",
    ),
    "max_body": _POSITIVE,
    "max_connections": _POSITIVE,
    "max_queue": that(lambda count: count >= 0, "this has to be 0 or more"),
    "max_tokens": _POSITIVE,
    "request_seconds": _POSITIVE,
}
