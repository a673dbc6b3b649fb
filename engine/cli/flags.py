"""Command lines from frozen dataclasses: flags, defaults and `--help` come from the fields' metadata.

`config.setting` stores the metadata: `flags`, `help`, and optionally `metavar`, `choices`, `bare` (the value of a flag
that is given without one) and `text` (the value is text for the model and must be UTF-8). A field without flags is not
on the command line. A first name without a dash, such as `MODEL`, is a positional argument. It is required unless the
field has other names as well, or `bare`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from polarlm.engine.config import FORMER_SETTINGS, EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.version import release

Check = Callable[[Any], "str | None"]
"""Returns what is wrong with a value, as a sentence for the user; None if it is valid."""

IGNORED: Mapping[tuple[str, ...], tuple[str, str]] = {
    ("-ngl", "--n-gpu-layers", "--gpu-layers"): ("N", "all layers are on the GPUs that --device names, or on the CPU"),
    ("-fa", "--flash-attn"): ("MODE", "attention never holds a whole row of scores for the context in memory"),
    ("--no-mmap",): ("", "the weights file is read, and never mapped"),
    ("--mlock",): ("", "the system decides which memory it swaps"),
    ("--jinja",): ("", "the model's own template is always used"),
    ("--no-display-prompt",): ("", "a prompt is not repeated on an output that is no terminal"),
    ("-cb", "--cont-batching"): ("", "requests are always computed together"),
    ("--metrics",): ("", "the server always has /metrics"),
    ("--slots",): ("", "the server always has /stats, which say what its requests take"),
    ("--embedding", "--embeddings", "--reranking", "--rerank"): ("", "the server does what its model is for"),
    ("--draft-min", "--draft-n-min"): ("N", "a draft is as long as pays most"),
    ("--spec-ngram-size-n",): ("N", "ngram-simple looks for the newest 4 tokens"),
    ("--typical", "--typical-p"): ("N", "there is no typical-p"),
    ("--dynatemp-range", "--dynatemp-exp"): ("N", "there is no dynamic temperature"),
    ("--mirostat", "--mirostat-lr", "--mirostat-ent"): ("N", "there is no Mirostat"),
}
"""llama.cpp's flags that have no effect here: names → the name of the value (empty for a switch), and why."""
WITHOUT_EFFECT = {name: reason for names, (_, reason) in IGNORED.items() for name in names}
_VALUED = {name for names, (value, _) in IGNORED.items() if value for name in names}
_SHORT = 6  # letters: of a shorter word, more have to be alike, or --nope were meant to be --top-p
_IGNORED_VALUE = re.compile(r"-?\d+(\.\d*)?|\.\d+|on|off|auto|all", re.IGNORECASE)


def check_that(holds: Callable[[Any], bool], sentence: str) -> Check:
    return lambda value: None if holds(value) else sentence


def no_file(text: str) -> str | None:
    """A check of a flag whose value is a file."""
    return None if Path(text).expanduser().is_file() else f"there is no file {text}"


class FlagError(Exception):
    """The command line cannot be understood. The message names the flag."""


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        if match := re.match(r"the following arguments are required: (\w+)", message):
            action = next(action for action in self._actions if action.metavar == match[1])
            raise FlagError(f"{match[1]} is missing: {str(action.help) % {}}")
        raise FlagError(message.removeprefix("argument "))


class _Help(argparse.HelpFormatter):
    """Writes a flag's value once, after its last name, and breaks no name at a hyphen."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        if not names:
            return str(action.metavar)
        if action.nargs == 0:
            return names
        return f"{names} {self._format_args(action, action.dest.upper())}"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def parser(
    groups: Mapping[str, type], *, prog: str, description: str, checks: Mapping[str, Check] = {}
) -> argparse.ArgumentParser:
    """The parser of the flags and positional arguments of `groups` (title: class). Its result has only given fields,
    its errors are FlagErrors. checks: field name → check."""
    words = [field for cls in groups.values() for field in _on_command_line(cls) if _word(field)]
    usage_words = [f"[{_word(field)}]" if _is_optional(field) else _word(field) for field in words]
    flag_parser = _FlagParser(
        prog=prog,
        usage=" ".join(["%(prog)s", *map(str, usage_words), "[flags]"]),
        description=description,
        formatter_class=_Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    flag_parser.add_argument("--version", action="version", version=version(), help="show the version and exit")
    for title, cls in groups.items():
        group = flag_parser.add_argument_group(title)
        types = typing.get_type_hints(cls)
        for field in _on_command_line(cls):
            _add(group, field, types[field.name], checks.get(field.name))
    if EngineConfig in groups.values():
        group = flag_parser.add_argument_group("Flags of llama.cpp without effect")
        for names, (value, reason) in IGNORED.items():
            takes: dict[str, Any] = {"nargs": "?", "metavar": value} if value else {"nargs": 0}
            group.add_argument(*names, action=_Ignore, dest="ignored", help=reason, **takes)
    return flag_parser


class _Word(argparse.Action):
    """A positional argument that a flag may give instead."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if hasattr(namespace, self.dest):
            other = getattr(namespace, self.dest)
            raise FlagError(f"{other} and {values} are both given as {self.metavar}; leave one out")
        setattr(namespace, self.dest, values)


class _Ignore(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        namespace.ignored = [*getattr(namespace, "ignored", ()), f"{option_string} has no effect: {self.help}"]


def parse(
    argv: Sequence[str], groups: Mapping[str, type], *, prog: str, description: str, checks: Mapping[str, Check] = {}
) -> list[Any]:
    """One instance per dataclass of `groups` (title: class), with the values in `argv`, else the fields' defaults.
    Writes a note to standard error about each flag of `IGNORED`. Raises FlagError; `--help` and `--version` print and
    raise SystemExit(0). checks: field name → check."""
    flag_parser = parser(groups, prog=prog, description=description, checks=checks)
    joined_words = join_values(argv, groups)
    try:
        namespace, unknown = flag_parser.parse_known_intermixed_args(joined_words)
    except FlagError:
        # A misspelt flag leaves a word too many or too few; the flag is the mistake to report.
        known_flags = flag_parser._option_string_actions
        unknown = [word for word in joined_words if word.startswith("--") and word.partition("=")[0] not in known_flags]
        if not unknown:
            raise
    if unknown:
        raise FlagError(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown[0], groups)}") from None
    values = vars(namespace)
    for sentence in values.pop("ignored", ()):
        print(f"note: {sentence}", file=sys.stderr)
    return [cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values}) for cls in groups.values()]


def describe(cls: type) -> Iterator[tuple[str, str]]:
    """(flag, help) of each field on the command line: ("-c, --ctx-size N", "tokens of context; … (default: 0)")."""
    for field in _on_command_line(cls):
        names = ", ".join(_names(field)) or str(_word(field))
        if not _is_switch(field) and _names(field):
            value = _value_name(field)
            names += f" [{value}]" if "bare" in field.metadata else f" {value}"
        yield names, _explain(field)


def advise(name: str, names: Iterable[str]) -> str:
    """What ends a sentence about an unknown flag: what to do in place of a former one, or which of `names` it is like;
    empty if there is neither."""
    if sentence := replacement(name):
        return f": {sentence}"
    close = close_to(name, names)
    return f"; did you mean {close}?" if close else ""


def replacement(name: str) -> str | None:
    """What to do in place of a former setting, by its name as a flag, a key of a file or a variable without its prefix;
    None for other names."""
    return FORMER_SETTINGS.get(name.lstrip("-").replace("-", "_").lower())


def close_to(word: str, words: Iterable[str]) -> str | None:
    cutoff = 0.75 if len(word.strip("-")) < _SHORT else 0.6
    return next(iter(get_close_matches(word, list(words), n=1, cutoff=cutoff)), None)


def in_flags(error: EngineError) -> str:
    """The message of an error with flags in place of the settings that it names.

    >>> in_flags(EngineError("threads=-1: give a number of threads", settings=("threads",)))
    '--threads -1: give a number of threads'
    """
    sentence = str(error)
    for field in _on_command_line(EngineConfig):
        if field.name in error.settings:
            flag = next(flag for flag in field.metadata["flags"] if flag.startswith("--"))
            if _is_switch(field):
                sentence = sentence.replace(f"{field.name}={not field.default}", flag)
            else:
                sentence = re.sub(rf"\b{field.name}=", f"{flag} ", sentence)
            if "_" in field.name:  # other names are English words as well
                sentence = re.sub(rf"\b{field.name}\b", flag, sentence)
    return sentence


def _on_command_line(cls: type) -> list[Field[Any]]:
    return [field for field in fields(cls) if field.metadata.get("flags")]


def _is_switch(field: Field[Any]) -> bool:
    return isinstance(field.default, bool)


def _word(field: Field[Any]) -> str | None:
    """The name of a field as a positional argument, if it can be one."""
    first = str(field.metadata["flags"][0])
    return None if first.startswith("-") else first


def _names(field: Field[Any]) -> list[str]:
    """The names of a field's flag."""
    return [name for name in field.metadata["flags"] if name.startswith("-")]


def _is_optional(field: Field[Any]) -> bool:
    """Whether a positional argument may be left out."""
    return "bare" in field.metadata or bool(_names(field))


def _value_name(field: Field[Any]) -> str:
    if "choices" in field.metadata:
        return "{" + ",".join(map(str, field.metadata["choices"])) + "}"
    return str(field.metadata.get("metavar", field.name.upper()))


def _explain(field: Field[Any]) -> str:
    meaning = str(field.metadata["help"])
    silent = field.default in (MISSING, None) or isinstance(field.default, tuple) or _is_switch(field)
    return meaning if silent else f"{meaning} (default: {field.default})"


def _hint(word: str, groups: Mapping[str, type]) -> str:
    """A hint at what to do in place of a former flag, or at the flag that an unknown one resembles; empty if there is
    neither."""
    if not word.startswith("-"):
        return ""
    name = word.partition("=")[0]
    if sentence := replacement(name):
        return f" ({sentence})"
    flags = [flag for cls in groups.values() for field in _on_command_line(cls) for flag in _names(field)]
    candidates = [flag for flag in flags if flag.startswith("--") or not name.startswith("--")]  # --nope is not -np
    asks = get_close_matches(name, ["--help", "--version"], cutoff=0.8)  # --temp is not meant to be --help
    begun = (flag for flag in candidates if flag.startswith(f"{name}-"))
    flag = next(begun, None) or close_to(name, [*asks, *candidates])
    return f" (did you mean {flag}?)" if flag else ""


def version() -> str:
    """The line that `--version` prints. A checkout that is not installed has no version."""
    if number := release():
        return f"polarlm {number}"
    return f"polarlm, not installed: the files in {Path(__file__).resolve().parents[2]}"


def join_values(argv: Sequence[str], groups: Mapping[str, type]) -> list[str]:
    """`argv` with `-p -x` as `--prompt=-x`: a flag that needs a value takes the next word, even one with a dash. Raises
    FlagError for the value `--`."""
    long_names = {
        flag: _names(field)[-1]
        for cls in groups.values()
        for field in _on_command_line(cls)
        for flag in _names(field)
        if not _is_switch(field) and "bare" not in field.metadata
    }
    words, joined_words = deque(argv), []
    while words:
        word = words.popleft()
        value = words.popleft() if words and word in long_names else None
        if value == "--":  # argparse drops it before Python 3.12
            raise FlagError(f"{word}: the value cannot be '--'")
        if word in _VALUED and not (words and _IGNORED_VALUE.fullmatch(words[0])):
            word += "="  # the next word is a model
        joined_words.append(word if value is None else f"{long_names[word]}={value}")
    return joined_words


def _add(group: argparse._ArgumentGroup, field: Field[Any], annotation: Any, check: Check | None) -> None:
    options: dict[str, Any] = {"help": _explain(field).replace("%", "%%")}
    names, word = _names(field), _word(field)
    if _is_switch(field):
        action = "store_false" if field.default else "store_true"
        group.add_argument(*names, dest=field.name, action=action, **options)
        return
    options["choices"] = field.metadata.get("choices")
    container, read = _reader(annotation)
    names_of_values = field.metadata.get("names", {})
    options["type"] = _checking_reader(_read_text if field.metadata.get("text") else read, check, names_of_values)
    if word is not None:
        count = "+" if container is tuple else "?" if _is_optional(field) else None
        short_help = {"help": f"the same as {names[0]}"} if names else {}
        group.add_argument(field.name, metavar=word, nargs=count, action=_Word, **options | short_help)
    if not names:
        return
    if options["choices"] is None:  # which argparse lists itself
        options["metavar"] = _value_name(field)
    if "bare" in field.metadata:
        options |= {"nargs": "?", "const": field.metadata["bare"]}
    if container is not None:
        options["action"] = _collect(container)
    group.add_argument(*names, dest=field.name, **options)


def _collect(container: type) -> type[argparse.Action]:
    class Collect(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
            earlier = getattr(namespace, self.dest, container())
            items = earlier.items() if isinstance(earlier, dict) else earlier
            setattr(namespace, self.dest, container([*items, values]))

    return Collect


def _checking_reader(read: Callable[[str], Any], check: Check | None, names: Mapping[str, str]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        value = names[text] if text in names else read(text)
        if check is not None and (complaint := check(value)):
            raise argparse.ArgumentTypeError(complaint)
        return value

    return convert


def _reader(annotation: Any) -> tuple[type | None, Callable[[str], Any]]:
    """(container of a repeated flag or None, parser of one value) for a field of type `annotation`."""
    arguments, container = typing.get_args(annotation), typing.get_origin(annotation)
    if type(None) in arguments:
        (kind,) = (kind for kind in arguments if kind is not type(None))
        return _reader(kind)
    if container is dict:
        return dict, _read_bias if arguments[0] is int else _read_named
    if container is tuple:
        return tuple, _READERS[arguments[0]]
    return None, _READERS[annotation]


def _read_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes a whole number, not {text!r}") from None


def _read_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes a number, not {text!r}") from None


def _read_text(text: str) -> str:
    """A UTF-8 argument as text, even if the locale's encoding lacks it and Python made its bytes lone surrogates."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        pass
    try:
        return os.fsencode(text).decode()
    except UnicodeError:
        raise argparse.ArgumentTypeError("this is not UTF-8 text") from None


def read_text(at: str, file: Path) -> str:
    """Return the text of a file. at: what errors name it by. Raises FlagError."""
    try:
        return file.read_text(encoding="utf-8-sig")  # editors on Windows begin files with a byte order mark
    except OSError as error:
        raise FlagError(f"{at} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise FlagError(f"{at} is not UTF-8 text: save it as UTF-8") from None


def _read_bias(text: str) -> tuple[int, float]:
    """`42-1.5` → (42, -1.5): a token id, then a signed number."""
    match = re.fullmatch(r"(\d+)([+-](?:inf|\d+\.?\d*|\.\d+))", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"takes a token id and a signed number, as in 42-1.5, not {text!r}")
    return int(match[1]), float(match[2])


def _read_named(text: str) -> tuple[str, str]:
    """`name=path` → (name, path); a path alone is named after its folder or file, without a scale."""
    name, equals, path = text.partition("=")
    if equals:
        return name, path
    return Path(re.sub(r":-?[\d.]+$", "", text)).name.removesuffix(".gguf").removesuffix(".pack"), text


_READERS: dict[Any, Callable[[str], Any]] = {int: _read_int, float: _read_float, str: str, str | int: str}
