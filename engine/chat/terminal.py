"""The terminal chat: `python -m polarlm.engine.chat`.

Piped input is a part of the message of -p or -f; without them, each line is a message. Standard output gets only the
answers, each with a line end.
Exit codes: 0; 1 for an unexpected error; 2 for an error in a flag, the model or, without a terminal, a message;
130 after Ctrl-C outside a conversation at the terminal; 141 when the reader of the output has closed it.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

from polarlm.engine.backends.select import NO_DRIVER, driver_version
from polarlm.engine.chat.config import PARAMETERS, ChatConfig, in_words, read_command_line, read_prompt, with_parameter
from polarlm.engine.chat.console import Console, columns
from polarlm.engine.chat.kept_talks import KeptTalks
from polarlm.engine.chat.session import ChatSession, Turn, cpu, kernels, numbers, why_it_ended
from polarlm.engine.chat.wrapping import wrap
from polarlm.engine.cli.commands import lost_output, note_in_flags, use_utf8
from polarlm.engine.cli.flags import FlagError, close_to, in_flags
from polarlm.engine.config import EngineConfig
from polarlm.engine.engine import Engine
from polarlm.engine.errors import EngineError, no_answers
from polarlm.engine.params import SamplingParams
from polarlm.model_loaders import first_model

_BAD_REQUEST, _INTERRUPT_EXIT_CODE = 2, 130

_HELP = """\
/help, /?       show this list
/clear          forget the conversation, keep the system prompt
/regen          answer the last message again
/system         show the system prompt
/system TEXT    start anew with TEXT as the system prompt
/image PATH     send the image in a file with the next message
/save [PATH]    write the conversation and its cache to a file
/load [PATH]    continue with a conversation that was saved; /load alone with the last one
/set NAME VALUE set a parameter of answers, such as temp, top-p, seed or predict; /set alone shows them
/think N        at most N tokens of reasoning in an answer, 0 for none; /think alone sets no limit
/stats          show speed, context and cache of the last answer
/exit, /quit, /bye  leave, as Ctrl-D does
Enter sends; a \\ at the end of the line, or Alt-Enter, starts a new line. Ctrl-C stops an answer.
Begin a message with // to send one that starts with /."""
_COMMANDS = list(dict.fromkeys(re.findall(r"(?:^|(?<=, ))/[a-z?]+", _HELP, re.MULTILINE)))
_COMPLETIONS = (*_COMMANDS, *(f"/set {name}" for name in PARAMETERS))


def main(argv: Sequence[str] | None = None, *, load: Callable[..., Engine] = Engine.load) -> int:
    use_utf8()
    verbose = False
    try:
        config, params, chat = read_command_line(sys.argv[1:] if argv is None else argv)
        verbose = chat.verbose
        return _run(config, params, chat, load)
    except FlagError as error:
        _complain(f"{error}; --help lists the flags")
    except EngineError as error:
        _complain(in_flags(error))
    except KeyboardInterrupt:
        return _INTERRUPT_EXIT_CODE
    except Exception as error:
        if isinstance(error, OSError) and (code := lost_output(error)) is not None:
            return code
        if verbose:
            traceback.print_exc()
        else:
            _complain(f"unexpected {type(error).__name__}: {error}; run with --verbose to see where")
        return 1
    return _BAD_REQUEST


def _run(config: EngineConfig, params: SamplingParams, chat: ChatConfig, load: Callable[..., Engine]) -> int:
    console = Console(chat.color, _COMPLETIONS)
    if chat.system_prompt is not None and not chat.conversation:
        console.note("note: -sys has no effect with -no-cnv, which uses no chat template")
    prompt = read_prompt(chat, console.read_all)
    if config.weights is None:
        asks = console.interactive and prompt is None
        model_name = first_model.choose(console.note, console.ask) if asks else first_model.remembered_name()
        config = replace(config, weights=model_name)
    if chat.verbose and config.device == "auto" and driver_version() is None:
        console.note(f"{NO_DRIVER}: running on the CPU.")
    with load(config.weights, config=config, verbose=lambda sentence: console.note(note_in_flags(sentence))) as engine:
        if engine.model.config.is_encoder:
            raise no_answers(engine.model.name, scores_pairs=engine.model.config.scores_pairs)
        if chat.conversation and (note := engine.model.template.missing_note(engine.model.name)):
            console.note(note)
        console.note(engine.fit_line() if chat.verbose else engine.start_line())
        if chat.verbose and (names := kernels(engine)):
            console.note(names)
        system = chat.system_prompt if chat.conversation else None
        kept_talks = KeptTalks() if console.interactive and chat.conversation and not chat.single_turn else None
        session = ChatSession(engine, params, console, system, loop_check=chat.loop_check, kept_talks=kept_talks)
        loop = _InputLoop(session, console, chat, is_demo=config.weights is None)
        return loop.run(prompt) if chat.conversation else loop.complete(prompt or "")


class _InputLoop:
    """Runs messages and commands until the input ends."""

    def __init__(self, session: ChatSession, console: Console, chat: ChatConfig, *, is_demo: bool) -> None:
        self._session, self._console, self._chat, self._is_demo = session, console, chat, is_demo
        self._one_turn = chat.single_turn or not chat.conversation
        self._code = 0
        self._is_over = False
        self._ctrl_c = False  # whether the last input was Ctrl-C at the prompt

    def run(self, prompt: str | None) -> int:
        """Answers `prompt` first, if given, and then the input; returns the exit code."""
        if self._console.interactive and not self._one_turn:
            self._console.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.")
        if prompt is not None:
            self._console.show_message(prompt)
            self._interruptible(lambda: self._send(prompt))
        try:
            while not self._is_over:
                self._interruptible(self._next)
        finally:
            self._console.keep_message()
        return self._code

    def _interruptible(self, work: Callable[[], None]) -> None:
        """Lets Ctrl-C leave the chat when it is pressed twice at the prompt; what stops an answer is no such press."""
        try:
            work()
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            if not self._ctrl_c:
                self._console.note("Ctrl-D or /exit leaves, and so does Ctrl-C once more.")
            elif self._session.is_kept:
                self._console.note("/load in the next chat continues this conversation.")
            self._is_over, self._ctrl_c = self._ctrl_c, True

    def _next(self) -> None:
        """Does what the next line of input says."""
        text = self._read()
        self._ctrl_c = False
        if text.startswith("/") and not text.startswith("//"):
            self._command(text)
        elif text.strip():
            self._send(text[1:] if text.startswith("//") else text)

    def complete(self, prompt: str) -> int:
        """Continues plain text, which a terminal shows before the model's text; returns the exit code."""
        if self._console.on_terminal:
            self._console.write(prompt)
        self._turn(lambda: self._session.complete(prompt))
        return self._code

    def _read(self) -> str:
        """The next line of input; empty at its end."""
        try:
            return self._console.read()
        except EOFError:
            self._is_over = True
            return ""

    def _send(self, message: str) -> None:
        self._is_over = self._one_turn
        self._turn(lambda: self._session.send(message))

    def _turn(self, answer: Callable[[], Turn | None]) -> None:
        is_interactive = self._is_interactive
        try:
            turn = answer()
        except KeyboardInterrupt:
            if not is_interactive:
                raise
            self._console.note("Stopped before the first token.")
            return
        except EngineError as error:
            self._show_error(error)
            if error.code == "context_length_exceeded" and is_interactive:
                self._console.drop_message()
                self._console.note("/clear forgets the conversation so far.")
            return
        if turn is None:
            self._console.note("There is no answer yet.")
            return
        if turn.finish_reason == "cancelled" and not is_interactive:
            raise KeyboardInterrupt
        if (sentence := why_it_ended(turn, self._session.params, self._session.engine.model.generation)) is not None:
            self._console.note(sentence)
        if self._chat.show_timings:
            self._console.note(numbers(turn, self._session.engine))
        if self._is_demo and (sentence := first_model.better()):
            self._console.note(sentence)

    @property
    def _is_interactive(self) -> bool:
        """Whether a user at a terminal can react to an error."""
        return self._console.interactive and not self._one_turn

    def _show_error(self, error: EngineError) -> None:
        self._console.error(in_flags(error))
        self._code = 0 if self._is_interactive else _BAD_REQUEST

    def _transfer(self, work: Callable[[], str]) -> None:
        try:
            self._console.note(work())
        except EngineError as error:
            self._show_error(error)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            self._console.note("Stopped; the conversation and the file are as they were.")

    def _stats(self) -> str:
        session = self._session
        if session.last is None:
            return "There is no answer yet."
        lines = [numbers(session.last, session.engine), cpu(session.engine)]
        if self._chat.verbose:
            lines.append(kernels(session.engine))
        return "\n".join(line for line in lines if line)

    def _set(self, argument: str) -> str:
        """Sets a parameter, and returns the values of all that are in force."""
        name, value = [*argument.removeprefix("parameter ").split(maxsplit=1), "", ""][:2]  # Ollama's word
        if name:
            try:
                self._session.params = with_parameter(self._session.params, name, value.strip())
            except FlagError as error:
                names = ", ".join(sorted(flag.lstrip("-") for flag in {*PARAMETERS.values()}))
                return f"{error}{'' if str(error).endswith('?') else '.'} /set takes {names}."
        return in_words(self._session.params, self._session.engine.model.generation)

    def _command(self, text: str) -> None:
        name, argument = [*text.split(maxsplit=1), ""][:2]
        session, tell = self._session, self._console.note
        match name:
            case "/help" | "/?":
                tell(_HELP)
            case "/clear":
                session.clear()
                tell("The conversation is forgotten.")
            case "/regen":
                self._turn(session.regenerate)
            case "/system" if argument:
                session.set_system(argument.strip())
                tell("A new conversation with this system prompt.")
            case "/system":
                tell(session.system or "There is no system prompt; /system TEXT sets one.")
            case "/image" if argument:
                self._transfer(lambda: session.attach(argument.strip()))
            case "/image":
                tell("Which image? /image PATH sends one with the next message.")
            case "/save":
                self._transfer(lambda: session.save(argument.strip()))
            case "/load":
                self._transfer(lambda: session.load(argument.strip()))
            case "/stats":
                tell(self._stats())
            case "/set":
                tell(self._set(argument))
            case "/think":
                tell(self._set(f"reasoning-budget {argument.strip() or -1}"))
            case "/exit" | "/quit" | "/bye":
                self._is_over = True
            case _:
                close = close_to(name, _COMMANDS)
                hint = f"Did you mean {close}? " if close else ""
                tell(f"There is no command {name}. {hint}/help lists them, and // begins a message that starts with /.")


def _complain(sentence: str) -> None:
    text = f"error: {sentence}"
    print(wrap(text, columns) if sys.stderr.isatty() else text, file=sys.stderr)
