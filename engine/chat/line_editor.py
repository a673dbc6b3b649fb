"""Typing at the chat's prompt: several lines, keys, and a history of messages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import NestedCompleter, PathCompleter, WordCompleter, merge_completers
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth, create_output

from polarlm.model_loaders.user_dirs import state_folder

PROMPT = "> "
_SHORT = 1000  # characters: a refused message of at most this length stays in the history


class LineEditor:
    def __init__(self, prompt: str, colored: bool, completions: Sequence[str]) -> None:
        """completions: what the Tab key completes."""
        paths = NestedCompleter({"/image": PathCompleter(expanduser=True)})
        self.history = History(_history_file())
        self._session: PromptSession[str] = PromptSession(
            ANSI("\n" + prompt),
            prompt_continuation=" " * len(PROMPT),
            multiline=True,
            history=self.history,
            key_bindings=_keys(),
            completer=merge_completers([WordCompleter(completions, sentence=True), paths], deduplicate=True),
            complete_while_typing=False,
            color_depth=None if colored else ColorDepth.DEPTH_1_BIT,
            output=create_output(always_prefer_tty=True),
        )

    def read(self) -> str:
        """The next message. Raises EOFError for Ctrl-D and KeyboardInterrupt for Ctrl-C, both at the empty prompt."""
        self.history.keep()
        return str(self._session.prompt())


class History(FileHistory):
    """Messages of earlier chats and of this one. The last message is added once it is known not to be refused."""

    _last: str | None = None

    def append_string(self, string: str) -> None:
        self._last = string

    def keep(self) -> None:
        if self._last is not None:
            with suppress(OSError):  # a full disk: this chat still has it
                super().append_string(self._last)
            self._last = None

    def drop(self) -> None:
        """Forgets the last message if it is long."""
        if self._last is not None and len(self._last) > _SHORT:
            self._last = None


def _history_file() -> str:
    """A file that only its owner can read; the null device where there is no folder to write to."""
    folder = state_folder()
    if folder is None:
        return os.devnull
    path = folder / "chat_history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return os.devnull
    return str(path) if os.access(path, os.R_OK | os.W_OK) else os.devnull


def _keys() -> KeyBindings:
    """Enter sends; after a backslash, Enter starts a new line, as Alt-Enter always does; Ctrl-C clears the line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.text.endswith("\\"):
            buffer.cursor_position = len(buffer.text)
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            # Bytes that are not UTF-8 arrive as lone surrogates, which neither the history nor a tokenizer accepts.
            buffer.text = buffer.text.encode("utf-8", "replace").decode()
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys
