"""The chat's settings, and the limits of the values on its command line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from polarlm.engine.cli.flags import Check, FlagError, parse, that
from polarlm.engine.config import EngineConfig, setting
from polarlm.engine.limits import complaint
from polarlm.engine.loading.checks import settle
from polarlm.engine.params import SAMPLING, SamplingParams


@dataclass(frozen=True)
class ChatConfig:
    prompt: str | None = setting(
        None,
        "-p",
        "--prompt",
        metavar="TEXT",
        text=True,
        help="the first message; with -no-cnv, the text to continue from",
    )
    file: str | None = setting(None, "-f", "--file", metavar="FILE", help="read the prompt from FILE (UTF-8)")
    system_prompt: str | None = setting(
        None, "-sys", "--system-prompt", metavar="TEXT", text=True, help="the system prompt, ahead of the conversation"
    )
    conversation: bool = setting(
        True,
        "-no-cnv",
        "--no-conversation",
        help="continue from the prompt as plain text, without a chat template, and exit",
    )
    json_schema: str | None = setting(
        None,
        "--json-schema",
        metavar="FILE",
        help="every answer is JSON of the JSON schema in FILE; needs the package llguidance (extra json)",
    )
    single_turn: bool = setting(False, "-st", "--single-turn", help="answer one message and exit")
    loop_check: bool = setting(
        True,
        "--no-loop-check",
        help="do not stop an answer whose last 300 tokens or more are the same ones over and over, three times or more",
    )
    show_timings: bool = setting(
        False, "--show-timings", help="after each answer, print speed, context and size of the cache"
    )
    color: str = setting(
        "auto",
        "--color",
        choices=("on", "off", "auto"),
        bare="on",
        help="colour the prompt and the notes; auto does so on a terminal, unless NO_COLOR is set",
    )
    verbose: bool = setting(
        False,
        "-v",
        "--verbose",
        help="say why no GPU is used and which kernels are, and show where an unexpected error came from",
    )


GROUPS: Mapping[str, type] = {"Model": EngineConfig, "Sampling": SamplingParams, "Chat": ChatConfig}


def read_command_line(argv: Sequence[str]) -> tuple[EngineConfig, SamplingParams, ChatConfig]:
    """The settings on the command line `argv`, which lacks the program's name. Raises FlagError or EngineError with a
    sentence that names the flag; `--help` raises SystemExit(0)."""
    engine, sampling, chat = parse(
        argv,
        GROUPS,
        prog="polarlm chat",
        description=(
            "Chat with a local language model; /help in the chat lists its commands. "
            "Piped input is one message per line, and standard output holds the answers alone."
        ),
        checks=_CHECKS,
    )
    settle(None, engine, {})  # here already, before a model is downloaded and read
    if chat.prompt is not None and chat.file is not None:
        raise FlagError("-p/--prompt and -f/--file both give the prompt; leave one of them out")
    if chat.json_schema is not None:
        sampling = replace(sampling, schema=_read_schema(chat.json_schema))
    return engine, sampling, chat


def read_prompt(chat: ChatConfig) -> str | None:
    """The text of -p, or of the file of -f without its last line end. Raises FlagError."""
    if chat.file is None:
        return chat.prompt
    return _read_text("-f/--file", chat.file).removesuffix("\n")


def _read_text(flag: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise FlagError(f"{flag}: {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FlagError(f"{flag}: {file} is not UTF-8 text") from None


def _read_schema(file: str) -> str:
    text = _read_text("--json-schema", file)
    try:
        json.loads(text)
    except ValueError as error:
        raise FlagError(f"--json-schema: {file} is not JSON: {error}") from None
    return text


def _sampling(name: str, value: Any) -> str | None:
    """The complaint about a sampling parameter beyond its limits; argparse puts the flag's name in front."""
    wrong = complaint(SAMPLING, name, value)
    return wrong and f"this {wrong}"


_SOME_TEXT = that(lambda text: text != "", "this needs text that is not empty")

_CHECKS: Mapping[str, Check] = {
    **{name: partial(_sampling, name) for name in SAMPLING},
    "logit_bias": that(lambda pair: pair[1] != math.inf, "-inf bans a token, but +inf cannot force one"),
    "stop": _SOME_TEXT,
    "dry_sequence_breakers": _SOME_TEXT,
}
