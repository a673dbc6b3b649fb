"""`polarlm completion SHELL`: a script that completes commands, flags and their values in a shell.

The script is made from the dataclasses of the flags and contains all names: no program runs when a key is pressed.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

import shtab

from polarlm.command import COMMANDS
from polarlm.engine import codecs, weight_formats
from polarlm.engine.cli.commands import with_flags
from polarlm.engine.cli.flags import parser
from polarlm.engine.config import AS_STORED, setting
from polarlm.engine.state.cache_types import PRESETS

_SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Options:
    shell: str = setting(MISSING, "SHELL", choices=_SHELLS, help="bash, zsh or fish")


GROUPS: Mapping[str, type] = {"Completion": Options}


@with_flags(
    GROUPS,
    "polarlm completion",
    "Print a script that completes polarlm's commands, flags and their values. For bash: polarlm completion bash > "
    "~/.local/share/bash-completion/completions/polarlm; docs/flags.md has the lines for zsh and fish.",
)
def main(options: Options) -> None:
    print(script(options.shell))


def script(shell: str) -> str:
    """The script for "bash", "zsh" or "fish"."""
    whole = argparse.ArgumentParser("polarlm", description="Run language models on this machine.")
    whole.add_argument("--version", action="store_true", help="show the version and exit")
    commands = whole.add_subparsers()
    for name, (module, meaning) in COMMANDS.items():
        groups = importlib.import_module(module).GROUPS
        flag_parser = parser(groups, prog=f"polarlm {name}", description=meaning)
        for action in flag_parser._actions:
            if action.metavar in _PLACES:
                action.complete = _PLACES[action.metavar]  # type: ignore[attr-defined]
            action.choices = _NAMES.get(action.dest, action.choices)
            if shell == "fish":  # which knows names of one letter, and names after two dashes
                action.option_strings = [n for n in action.option_strings if n.startswith("--") or len(n) == 2]
        commands.add_parser(name, help=meaning, description=meaning, parents=[flag_parser], add_help=False)
    return shtab.complete(whole, shell)


_PLACES: Mapping[Any, Any] = {
    **dict.fromkeys(("MODEL", "PATH", "FILE", "TEXT"), shtab.FILE),
    "FOLDER": shtab.DIRECTORY,
}
_CODECS = codecs.available()
_NAMES: Mapping[str, Sequence[str]] = {
    "device": ("auto", "cpu", "cuda"),
    "cache_type": (*PRESETS, *_CODECS),
    "cache_type_k": _CODECS,
    "cache_type_v": _CODECS,
    "types": (*PRESETS, *_CODECS),
    "weight_type": (AS_STORED, *weight_formats.writable()),
}
"""Field → values to complete, of flags that take others as well and so have no `choices`."""
