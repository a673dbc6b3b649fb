"""Flags from the environment and from a file. They become words of a command line, ahead of the words that are typed.

The variable POLARLM_CTX_SIZE and the key ctx-size in a table of a TOML file stand for --ctx-size. A variable that is
empty is not set: Docker Compose passes ${X:-} so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from polarlm.engine.cli.flags import Check, FlagError, close_to, join_values, parser
from polarlm.engine.errors import EngineError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_HELP = "take flags that are neither typed nor variables (POLARLM_CTX_SIZE) from the table [{}] of this TOML file"
PREFIX = "POLARLM_"
_SIMILAR = 0.92  # names of which one is misspelt; POLARLM_MODELS, which is for the server alone, is not --model
_NO_FLAGS = ("help", "version", "ignored")
_MODEL = {"weights", "hf_repo", "models"}  # a model that is typed takes the place of one in a variable
_SWITCHED = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}
# In double quotes, a backslash of TOML is the beginning of another character.
QUOTES = "; write a path with backslashes in single quotes, as in path = 'C:\\models\\qwen3.gguf'"


def with_sources(
    argv: Sequence[str],
    groups: Mapping[str, type],
    table: str,
    environment: Mapping[str, str],
    checks: Mapping[str, Check],
) -> tuple[list[str], dict[str, str]]:
    """(`argv` behind words for flags that it lacks, their fields with the places of their values).

    A place is a variable, or else a key of `table` in the file of --config, then of --models. Writes a note to standard
    error about variables that seem misspelt. groups, checks: as of `parse`. Raises FlagError that names the place.
    """
    typed = join_values(argv, groups)
    if {"-h", "--help", "--version"} & {*typed}:
        return [*argv], {}
    made = parser(groups, prog="", description="", checks=checks)
    flags = {name: action for action in made._actions for name in action.option_strings}
    keys = {flag[2:]: action for flag, action in flags.items() if flag[:2] == "--" and action.dest not in _NO_FLAGS}
    try:
        given = {*vars(made.parse_known_intermixed_args(typed)[0])}
    except FlagError:  # which `parse` tells
        return [*argv], {}
    given |= _MODEL if given & _MODEL else set()
    words, places = list[str](), dict[str, str]()

    def give(key: str, value: Any, place: str) -> None:
        field = keys[key].dest
        if field not in given:
            try:
                words.extend(new := [*_words(key, keys[key], value)])
                made.parse_args(new)
            except FlagError as error:
                raise FlagError(f"{place}: {str(error).partition(': ')[2] or error}") from None
            given.add(field)
            places[field] = place

    variables = {PREFIX + key.upper().replace("-", "_"): key for key in keys}
    for variable, value in environment.items():
        if not value.strip():
            continue
        if (key := variables.get(variable)) is not None:
            give(key, _SWITCHED.get(value.strip().lower(), value) if keys[key].nargs == 0 else value, variable)
        elif variable.startswith(PREFIX):
            _note_misspelt(variable, [*variables])
    del keys["config"]
    for option in ("--config", "--models"):
        named = [word.partition("=")[2] for word in [*words, *typed] if word.startswith(f"{option}=")]
        if option not in flags or not named or not (file := Path(named[-1]).expanduser()).is_file():
            continue  # the check of the flag says that there is no such file
        settings = read_toml(f"{option} {named[-1]}", file).get(table, {} if option == "--models" else None)
        at = f"{option} {named[-1]}: [{table}]"
        if not isinstance(settings, Mapping):
            raise FlagError(f"{at}: there is no such table in it")
        given |= _MODEL if given & _MODEL else set()
        for key, value in settings.items():
            key = key.replace("_", "-")
            if key not in keys:
                close = close_to(key, keys)
                raise FlagError(f"{at}: there is no flag {key}" + (f"; did you mean {close}?" if close else ""))
            give(key, value, f"{at} {key}")
    return [*words, *argv], places


def _words(key: str, action: argparse.Action, value: Any) -> Iterator[str]:
    """The words for a flag. value: a switch's is a bool; that of a flag which may be repeated may be a list, or a table
    of names. Raises FlagError."""
    if (action.nargs == 0) is not isinstance(value, bool):
        raise FlagError("takes true or false" if action.nargs == 0 else "takes a value, not true or false")
    if isinstance(value, Mapping):
        value = [f"{name}={one}" for name, one in value.items()]
    if isinstance(value, list) and isinstance(action, argparse._StoreAction):
        raise FlagError("takes one value, not several")
    if not isinstance(value, bool):
        yield from (f"--{key}={one}" for one in (value if isinstance(value, list) else [value]))
    elif value:
        yield f"--{key}"


def _note_misspelt(variable: str, known: Sequence[str]) -> None:
    close = get_close_matches(variable[len(PREFIX) :], [name[len(PREFIX) :] for name in known], 1, _SIMILAR)
    for name in close:
        print(f"note: {variable} has no effect; did you mean {PREFIX}{name}?", file=sys.stderr)


@contextmanager
def naming(places: Mapping[str, str]) -> Iterator[None]:
    """Say in an EngineError from where the settings that it names are, unless they were typed."""
    try:
        yield
    except EngineError as error:
        if told := [places[name] for name in error.settings if name in places]:
            error.args = (f"{error} ({', '.join(told)})",)
        raise


def read_toml(at: str, file: Path) -> dict[str, Any]:
    """The tables of a TOML file. at: the flag that names it. Raises FlagError."""
    text = ""
    try:
        text = file.read_text(encoding="utf-8-sig")  # editors on Windows begin files with a byte order mark
        return tomllib.loads(text)
    except OSError as error:
        raise FlagError(f"{at}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise FlagError(f"{at}: is no text in UTF-8: save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise FlagError(f"{at}: is not a TOML file: {error}" + QUOTES * ("\\" in text)) from None
