"""Flags from the environment and from a file. They become words of a command line, ahead of the words that are typed.

The variable POLARLM_CTX_SIZE and the key ctx-size in a table of a TOML file stand for --ctx-size. A variable that is
empty is not set: Docker Compose passes ${X:-} so.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polarlm.engine.cli.flags import Check, FlagError, advise, close_to, join_values, parser, read_text, replacement
from polarlm.engine.errors import EngineError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_HELP = "take flags that are neither typed nor variables (POLARLM_CTX_SIZE) from the table [{}] of this TOML file"
PREFIX = "POLARLM_"
WITH_VARIABLES = ("chat", "serve")  # the subcommands that take variables
# Variables that are no flags.
NO_FLAGS = {PREFIX + name for name in ("CACHE", "CPU_LEVEL", "OVERLAP_LAUNCHES")}
_PLACES = ("FILE", "PLACE")  # values of flags that may be there when another command looks, from another folder
_NO_KEYS = ("help", "version")
_IGNORED = "ignored"  # the field of all flags of llama.cpp that are taken and change nothing
_MODEL = {"weights", "hf_repo", "models"}  # a model that is typed takes the place of one in a variable
_SWITCH_WORDS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}
# In double quotes, a backslash of TOML is the beginning of another character.
QUOTES = "; write a path with backslashes in single quotes, as in path = 'C:\\models\\qwen3.gguf'"


def with_sources(
    argv: Sequence[str],
    groups: Mapping[str, type],
    table: str,
    environment: Mapping[str, str],
    checks: Mapping[str, Check],
) -> tuple[list[str], dict[str, str]]:
    """(words for flags that `argv` lacks, then `argv`; the fields of these flags, with the places of their values).

    A place is a variable, or else a key of `table` in the file of --config, then of --models. Writes a note to standard
    error about variables that no command has. groups, checks: as of `parse`. Raises FlagError that names the place.
    """
    typed_words = join_values(argv, groups)
    if {"-h", "--help", "--version"} & {*typed_words}:
        return [*argv], {}
    flag_parser = parser(groups, prog="", description="", checks=checks)
    flags, keys = flag_parser._option_string_actions, _keys(flag_parser)
    try:
        given_fields = {*vars(flag_parser.parse_known_intermixed_args(typed_words)[0])}
    except FlagError:  # `parse` reports it
        return [*argv], {}
    given_fields |= _MODEL if given_fields & _MODEL else set()
    words, places = list[str](), dict[str, str]()

    def give(key: str, value: Any, place: str) -> None:
        field = keys[key].dest
        if field not in given_fields or field == _IGNORED:
            words.extend(_check_words(flag_parser, key, value, place))
            given_fields.add(field)
            places[field] = place

    variables, unknown = _variables(keys), list[str]()
    for variable, value in environment.items():
        if not value.strip():
            continue
        if (key := variables.get(variable)) is not None:
            give(key, _switch_value(keys[key], value), variable)
        elif variable.startswith(PREFIX) and variable not in NO_FLAGS:
            unknown.append(variable)
    if unknown:
        _check_unknown({variable: environment[variable] for variable in unknown}, [*variables, *NO_FLAGS])
    del keys["config"]
    for option in ("--config", "--models"):
        values = [word.partition("=")[2] for word in [*words, *typed_words] if word.startswith(f"{option}=")]
        if option not in flags or not values or not (file := Path(values[-1]).expanduser()).is_file():
            continue  # the check of the flag says that there is no such file
        settings = read_toml(f"{option} {values[-1]}", file).get(table, {} if option == "--models" else None)
        at = f"{option} {values[-1]}: [{table}]"
        if not isinstance(settings, Mapping):
            raise FlagError(f"{at}: there is no such table in it")
        given_fields |= _MODEL if given_fields & _MODEL else set()
        for key, value in settings.items():
            key = key.replace("_", "-")
            if key not in keys:
                raise FlagError(f"{at}: there is no flag {key}{advise(key, keys)}")
            give(key, value, f"{at} {key}")
    return [*words, *argv], places


def _keys(flag_parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Long names without dashes → flags."""
    flags = flag_parser._option_string_actions.items()
    return {flag[2:]: action for flag, action in flags if flag[:2] == "--" and action.dest not in _NO_KEYS}


def _variables(keys: Iterable[str]) -> dict[str, str]:
    return {PREFIX + key.upper().replace("-", "_"): key for key in keys}


def _switch_value(action: argparse.Action, value: str) -> str | bool:
    return _SWITCH_WORDS.get(value.strip().lower(), value) if action.nargs == 0 else value


def _check_words(flag_parser: argparse.ArgumentParser, key: str, value: Any, place: str) -> list[str]:
    """The words for a flag of this parser. Raises FlagError that names the place of the value."""
    try:
        words = [*_words(key, _keys(flag_parser)[key], value)]
        flag_parser.parse_args(words)
    except FlagError as error:
        raise FlagError(f"{place}: {str(error).partition(': ')[2] or error}") from None
    return words


def note_unknown(environment: Mapping[str, str]) -> None:
    """Writes a note about each variable that no command has; for a command that takes none itself."""
    names = [name for name in environment if name.startswith(PREFIX) and name not in NO_FLAGS]
    if unknown := [name for name in names if environment[name].strip()]:
        known = _flags_of_variables()
        for name in unknown:
            if name not in known:
                _note_no_effect(name, known)


def _check_unknown(unknown: Mapping[str, str], own: Sequence[str]) -> None:
    """Check variables that may be those of another command. Writes a note about each that is not. own: the variables of
    the command that runs, and those that are no flags. Raises FlagError for a wrong value."""
    others = _flags_of_variables()
    for variable, value in unknown.items():
        if variable in others:
            flag_parser, key = others[variable]
            if (action := _keys(flag_parser)[key]).metavar not in _PLACES:
                _check_words(flag_parser, key, _switch_value(action, value), variable)
        else:
            _note_no_effect(variable, own)


def _flags_of_variables() -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """Variables of the commands that take them → the flag, as a parser and its key there."""
    from polarlm.command import COMMANDS  # whose modules are imported by name

    flags: dict[str, tuple[argparse.ArgumentParser, str]] = {}
    for name in WITH_VARIABLES:
        module = importlib.import_module(COMMANDS[name][0])
        flag_parser = parser(module.GROUPS, prog="", description="", checks=module.CHECKS)
        flags |= {variable: (flag_parser, key) for variable, key in _variables(_keys(flag_parser)).items()}
    return flags


def _note_no_effect(variable: str, known: Iterable[str]) -> None:
    name = variable[len(PREFIX) :]
    close = close_to(name, [name[len(PREFIX) :] for name in known])
    hint = f"; did you mean {PREFIX}{close}?" if close else ": no flag has this name"
    if sentence := replacement(name):
        hint = f": {sentence}"
    print(f"note: {variable} has no effect{hint}", file=sys.stderr)


def _words(key: str, action: argparse.Action, value: Any) -> Iterator[str]:
    """The words for a flag. value: a switch's is a bool; that of a flag which may be repeated may be a list, or a table
    of names. Raises FlagError."""
    if action.dest == _IGNORED:
        yield f"--{key}" if action.nargs == 0 else f"--{key}={value}"
        return
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


@contextmanager
def naming(places: Mapping[str, str]) -> Iterator[None]:
    """Say in an EngineError from where the settings that it names are, unless they were typed."""
    try:
        yield
    except EngineError as error:
        if setting_places := [places[name] for name in error.settings if name in places]:
            error.args = (f"{error} ({', '.join(setting_places)})",)
        raise


def read_toml(at: str, file: Path) -> dict[str, Any]:
    """The tables of a TOML file. at: the flag that names it. Raises FlagError."""
    text = read_text(f"{at}:", file)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FlagError(f"{at}: is not a TOML file: {error}" + QUOTES * ("\\" in text)) from None
