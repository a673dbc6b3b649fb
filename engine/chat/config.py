"""The chat's settings, and the limits of the values on its command line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from polarlm.engine.cli.flags import Check, FlagError, check_that, close_to, no_file, parse, parser, read_text
from polarlm.engine.cli.sources import CONFIG_HELP, naming, with_sources
from polarlm.engine.config import EngineConfig, names_of, setting
from polarlm.engine.limits import complaint
from polarlm.engine.loading.checks import settle
from polarlm.engine.params import SAMPLING, SamplingParams
from polarlm.model_loaders.config import GenerationDefaults


@dataclass(frozen=True)
class ChatConfig:
    prompt: str | None = setting(
        None,
        "PROMPT",
        "-p",
        "--prompt",
        metavar="TEXT",
        text=True,
        help="the first message, or its beginning: a file of -f follows, and then what is piped in; with -no-cnv, the "
        "text to continue from",
    )
    file: str | None = setting(
        None, "-f", "--file", metavar="FILE", help="a text (UTF-8) that follows -p in the message, or is the message"
    )
    lines: bool = setting(
        False, "--lines", help="answer each line that is piped in as a message of its own, after the one of -p or -f"
    )
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
    config_file: str | None = setting(None, "--config", metavar="FILE", help=CONFIG_HELP.format("chat"))


GROUPS: Mapping[str, type] = {"Model": EngineConfig, "Sampling": SamplingParams, "Chat": ChatConfig}


def read_command_line(
    argv: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[EngineConfig, SamplingParams, ChatConfig]:
    """The settings on the command line `argv`, which lacks the program's name, of its environment and its file. Raises
    FlagError or EngineError with a sentence that names the flag; `--help` raises SystemExit(0)."""
    argv, places = with_sources(argv, GROUPS, "chat", environment, CHECKS)
    engine, sampling, chat = parse(
        argv,
        GROUPS,
        prog="polarlm chat",
        description=(
            "Chat with a local language model; /help in the chat lists its commands. Piped input is a part of the "
            "message of -p or -f; without them, each line is a message. Standard output holds the answers alone."
        ),
        checks=CHECKS,
    )
    with naming(places):
        engine = settle(None, engine, {})  # here already, before a model is downloaded and read
    if chat.json_schema is not None:
        sampling = replace(sampling, schema=_read_schema(chat.json_schema))
    return engine, sampling, chat


def read_prompt(chat: ChatConfig, read_pipe: Callable[[], str]) -> str | None:
    """The first message: the text of -p, the file of -f and `read_pipe`, which gives what is piped in, a blank line
    between them; None if there is neither -p nor -f. Raises FlagError."""
    if chat.conversation and chat.prompt is None and chat.file is None:
        return None
    file = "" if chat.file is None else read_text(f"-f/--file: {chat.file}", Path(chat.file)).removesuffix("\n")
    parts = [chat.prompt or "", file]
    if not chat.lines:
        parts.append(read_pipe())
    if text := "\n\n".join(filter(None, parts)):
        return text
    if chat.conversation:
        raise FlagError("-p/--prompt and -f/--file need a text that is not empty")
    raise FlagError("-no-cnv/--no-conversation needs a prompt; give one with -p/--prompt or -f/--file")


# What `/set` takes → the flag of the same meaning: "temperature" and "temp" are --temp.
_FLAGS = {field.name: field.metadata["flags"][-1] for field in fields(SamplingParams) if field.metadata["flags"]}
PARAMETERS: Mapping[str, str] = {
    name.replace("_", "-"): _FLAGS[field] for name, field in names_of(SamplingParams).items() if field in _FLAGS
}


def with_parameter(params: SamplingParams, name: str, value: str) -> SamplingParams:
    """`params` with the parameter of this name set. value: as on the command line; empty for a switch. Raises
    FlagError."""
    flag = PARAMETERS.get(name.lstrip("-").replace("_", "-"))
    if flag is None:
        guess = close_to(name, PARAMETERS)
        raise FlagError(f"there is no parameter {name}" + (f"; did you mean {guess}?" if guess else ""))
    flag_parser = parser({"Sampling": SamplingParams}, prog="/set", description="", checks=CHECKS)
    return replace(params, **vars(flag_parser.parse_args([f"{flag}={value}" if value else flag])))


def in_words(params: SamplingParams, defaults: GenerationDefaults) -> str:
    """The parameters as `/set` takes them, with the values in force: "temp 0, top-k 40". defaults: of the model's
    files."""
    from polarlm.engine.sampling.sample import resolve

    values = {**vars(resolve(params, defaults)), "logit_bias": params.logit_bias}  # without the model's bans
    words = ((_FLAGS[name].removeprefix("--"), _in_word(values[name])) for name in _FLAGS)
    return ", ".join(f"{name} {value}" for name, value in words if value)


def _in_word(value: Any) -> str:
    """A value as on the command line; empty for a switch that is off, and for no values."""
    if isinstance(value, dict):
        return " ".join(f"{token}{bias:+g}" for token, bias in value.items())
    if isinstance(value, tuple):
        return " ".join(map(repr, value))
    if isinstance(value, bool):
        return "on" if value else ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read_schema(file: str) -> str:
    text = read_text(f"--json-schema: {file}", Path(file))
    try:
        json.loads(text)
    except ValueError as error:
        raise FlagError(f"--json-schema: {file} is not JSON: {error}") from None
    return text


def _sampling(name: str, value: Any) -> str | None:
    """The complaint about a sampling parameter beyond its limits; argparse puts the flag's name in front."""
    wrong = complaint(SAMPLING, name, value)
    return wrong and f"this {wrong}"


_SOME_TEXT = check_that(lambda text: text != "", "this needs text that is not empty")

CHECKS: Mapping[str, Check] = {
    **{name: partial(_sampling, name) for name in SAMPLING},
    "config_file": no_file,
    "logit_bias": check_that(lambda pair: pair[1] != math.inf, "-inf bans a token, but +inf cannot force one"),
    "stop": _SOME_TEXT,
    "dry_sequence_breakers": _SOME_TEXT,
}
