"""The command `polarlm`. Each of its commands is a module, which is imported only when the command is called."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence

# Name → (module, one line of help). The module has `main(argv) -> int`, which returns the exit code, and `GROUPS`, the
# dataclasses of its flags.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "chat": ("polarlm.engine.chat.__main__", "chat with a model in the terminal"),
    "serve": ("polarlm.server.__main__", "serve a model: a chat page, and OpenAI's, Anthropic's and Ollama's APIs"),
    "batch": ("polarlm.server.batch", "answer a file of requests in the format of OpenAI's batches"),
    "verify": ("polarlm.server.verify", "compute an answer of serve --replayable again, and compare them"),
    "pull": ("polarlm.pull", "download a model from the Hugging Face hub"),
    "list": ("polarlm.list", "list the models on this machine"),
    "show": ("polarlm.show", "show what a model's files say about it"),
    "rm": ("polarlm.rm", "remove models from this machine"),
    "ps": ("polarlm.ps", "show the chats and servers that run on this machine"),
    "cache": ("polarlm.cache", "show what is kept in the cache folder, and remove kinds of it"),
    "fit": ("polarlm.fit", "show which weights, cache types and contexts fit on this machine, before loading them"),
    "pack": ("polarlm.pack", "compute a long context once, for chats and servers that begin with it"),
    "quality": ("polarlm.bench.quality.__main__", "measure what cache types cost on your model and text: one page"),
    "speed": ("polarlm.bench.speed.__main__", "measure tokens a second and memory on this machine"),
    "completion": ("polarlm.completion", "print a script that completes flags in bash, zsh or fish"),
}

_SAME: Mapping[str, str] = {"run": "chat", "help": "--help", "version": "--version"}  # words of other programs

_BAD_REQUEST, _INTERRUPT_EXIT_CODE = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` begins with, and returns its exit code: 2 if there is no such command, 141 when the
    reader of the output has closed it, 1 when its disk is full. argv: None means the process's own."""
    try:
        code = _run([*(sys.argv[1:] if argv is None else argv)] or ["--help"])
        if sys.stdout is not None:  # as in a process that was started without it
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:  # while modules are imported; commands handle it themselves
        return _INTERRUPT_EXIT_CODE
    except OSError as error:
        from polarlm.engine.cli.commands import lost_output

        if (exit_code := lost_output(error)) is None:
            raise
        return exit_code


def _run(words: Sequence[str]) -> int:
    name, *rest = words
    if name == "help" and rest:
        name, rest = rest[0], ["--help"]
    name = _SAME.get(name, name)
    if name in COMMANDS:
        from polarlm.engine.cli.sources import WITH_VARIABLES, note_unknown

        if name not in WITH_VARIABLES:  # which tell it themselves
            note_unknown(os.environ)
        return int(importlib.import_module(COMMANDS[name][0]).main(rest))
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        from polarlm.engine.cli.flags import version

        print(version())
        return 0
    print(f"error: {_unknown(name)}; polarlm --help lists the commands", file=sys.stderr)
    return _BAD_REQUEST


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{meaning}" for name, (_, meaning) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: polarlm COMMAND [flags]",
            "",
            "Run language models on this machine.",
            "",
            *lines,
            "",
            "polarlm help COMMAND lists the flags of a command; polarlm version shows the version.",
            "polarlm run is polarlm chat.",
        ]
    )


def _unknown(word: str) -> str:
    from difflib import get_close_matches

    if close := get_close_matches(word, [*COMMANDS, *_SAME, "--help", "--version"], n=1):
        return f"there is no {'flag' if word.startswith('-') else 'command'} {word!r} (did you mean {close[0]}?)"
    if word.startswith("-"):
        return f"{word}: flags follow a command, as in polarlm chat {word}"
    return f"there is no command {word!r}"
