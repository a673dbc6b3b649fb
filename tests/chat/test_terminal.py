"""The chat at a terminal: what a person sees and can press. The slow tests start a process or two each."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from polarlm.engine.chat.console import ctrl_c_pressed
from polarlm.engine.chat.line_editor import _history_file
from polarlm.model_loaders import first_model, hub
from polarlm.model_loaders.first_model import CHOICES
from polarlm.model_loaders.user_dirs import state_folder
from tests.model_loaders.hub_server import Repository
from tests.pairs import mostly_slow

FAKE_CHAT = Path(__file__).with_name("fake_engine.py")
CTRL_C, CTRL_D, ENTER, ALT_ENTER, UP = "\x03", "\x04", "\r", "\x1b\r", "\x1b[A"
HANG = 120.0  # seconds after which a chat that says nothing counts as hung


class Terminal:
    """A program behind a pseudo-terminal, driven by what it shows."""

    def __init__(
        self, command: Sequence[str | Path], environment: Mapping[str, str], columns: int = 200, **streams: int
    ):
        self._own, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            **{"stdin": other, "stdout": other, "stderr": other, **streams},
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C becomes a signal
        )
        os.close(other)
        self.shown = ""
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def say(self, message: str) -> None:
        """Types a message at the chat's next prompt."""
        self.until("> ")
        self.type(message + ENTER)

    def leave(self) -> int:
        """Presses Ctrl-D at the chat's next prompt; gives its exit code."""
        self.until("> ")
        self.type(CTRL_D)
        return self.end()

    def until(self, text: str) -> str:
        """Waits until `text` is shown after what was waited for before; gives what came with it."""
        while (end := self.shown.find(text, self._seen)) < 0:
            assert self._receive(), f"{text!r} never came; shown so far:\n{self.shown}"
        begin, self._seen = self._seen, end + len(text)
        return self.shown[begin : self._seen]

    def end(self) -> int:
        """Waits until the program is over; gives its exit code."""
        while self._receive():
            pass
        return self.process.wait(timeout=HANG)

    def _receive(self) -> bool:
        ready, _, _ = select.select([self._own], [], [], HANG)
        try:
            data = os.read(self._own, 65536) if ready else b""
        except OSError:  # how Linux says that the other side is closed
            data = b""
        self.shown += data.decode(errors="replace")
        return data != b""

    def flags(self) -> int:
        return int(termios.tcgetattr(self._own)[3])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._own)


@pytest.fixture
def open_chat(tmp_path, monkeypatch):
    for variable in ("NO_COLOR", "COLUMNS"):  # some runners of tests set a width, which would count as the terminal's
        monkeypatch.delenv(variable, raising=False)
    settings = {"PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(tmp_path), "PYTHONUTF8": "1"}
    opened = []
    (tmp_path / "polarlm").mkdir()
    (tmp_path / "polarlm" / "told").touch()

    def start(*argv, asked=True, term="xterm", **streams):
        """asked: whether an earlier chat has asked for a model."""
        if asked:
            (tmp_path / "polarlm" / "model").open("a").close()
        opened.append(Terminal([sys.executable, FAKE_CHAT, *argv], {**settings, "TERM": term}, **streams))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def put_choices(hub):
    for name, _ in CHOICES:
        repo, _, label = name.partition(":")
        hub.repositories[repo] = Repository({f"{repo.partition('/')[2]}-{label}.gguf": bytes(3 << 19)})


@mostly_slow("words", ["", "-st -p hi"], ["-st -p hi"])
def test_a_dumb_terminal_gets_no_escape_codes(open_chat, words):
    chat = open_chat(*words.split(), term="dumb")
    if not words:
        chat.say("hi")
        chat.until("you said: hi")
        assert chat.leave() == 0
    assert chat.end() == 0
    assert "you said: hi" in chat.shown
    assert "\x1b" not in chat.shown


@pytest.mark.slow
def test_text_is_shown_while_it_comes_and_ctrl_c_keeps_the_session(open_chat):
    chat = open_chat()
    chat.say("slow")
    chat.until("slow slow slow")  # the whole answer takes half a minute
    assert not chat.flags() & termios.ECHO
    chat.type(CTRL_C)
    assert "^C" not in chat.until("The answer was stopped.")
    chat.say("/stats")
    told = chat.until("stopped\r\n")
    tokens, rate = re.search(r"answer: (\d+) tokens, ([0-9.]+) tokens/s, stopped", told).groups()
    assert int(tokens) >= 3
    assert 0 < float(rate) <= 100  # a hundredth of a second is waited for each token
    chat.say("still there?")
    chat.until("you said: still there?")
    chat.say("/exit")
    assert chat.end() == 0
    assert chat.flags() & termios.ECHO, "the terminal is not left as it was"
    assert chat.flags() & termios.ICANON


@pytest.mark.slow
def test_a_long_prompt_shows_how_far_it_is_and_can_be_stopped(open_chat):
    chat = open_chat()
    chat.say("long")
    chat.until("reading the prompt")
    chat.until("/3000 tokens")
    chat.type(CTRL_C)
    chat.until("Stopped before the first token.")
    chat.say("/regen")
    chat.until("There is no answer yet.")


@pytest.mark.slow
def test_impatient_presses_of_ctrl_c_lose_no_conversation(open_chat):
    """Two in a row stop an answer and leave nothing; two more at the prompt leave, and `/load` continues."""
    chat = open_chat()
    chat.say("remember me")
    chat.until("you said: remember me")
    chat.say("slow")
    chat.until("slow slow slow")
    chat.type(CTRL_C)
    time.sleep(0.1)
    chat.type(CTRL_C)
    chat.until("Ctrl-D or /exit leaves")
    chat.say("still there?")
    chat.until("you said: still there?")
    for said in ("Ctrl-D or /exit leaves", "/load in the next chat continues this conversation."):
        chat.until("> ")
        chat.type(CTRL_C)
        chat.until(said)
    assert chat.end() == 0
    assert "Traceback" not in chat.shown
    again = open_chat()
    again.say("/load")
    again.until("The last conversation continues.\r\n> still there?\r\nyou said: still there?")
    again.say("/regen")
    again.until("you said: still there?")
    assert again.leave() == 0


def test_a_second_ctrl_c_within_a_step_ends_it_and_keeps_the_chat(open_chat):
    chat = open_chat("-p", "stuck")
    chat.until("stuck")
    chat.until("stuck")
    chat.type(CTRL_C)
    time.sleep(0.2)
    chat.type(CTRL_C)
    chat.until("The answer was stopped.")
    chat.say("still there?")
    chat.until("you said: still there?")


def test_what_is_typed_during_an_answer_waits_for_the_prompt(open_chat):
    chat = open_chat("-p", "slow")
    chat.until("slow slow")
    chat.type("hellp")
    chat.until("slow slow slow")
    chat.type("\x7fo")
    chat.until("slow slow slow")
    chat.type(CTRL_C)
    assert "h" not in chat.until("The answer").replace("The answer", "")
    chat.until("> ")
    chat.until("hello")
    chat.type(ENTER)
    chat.until("you said: hello")


@pytest.mark.slow
def test_the_last_conversation_is_the_one_that_load_continues(open_chat, tmp_path):
    """One that was saved, or one of another chat that was had later; not the one that is there."""
    chat = open_chat()
    for line, answer in (
        *(("one", "you said: one"), ("/save", "12 tokens."), ("/system x", "A new"), ("two", "you said: two")),
        *(("/load", "chat.session continues: 12 tokens."), ("three", "you said: three")),
    ):
        chat.say(line)
        chat.until(answer)
    assert chat.leave() == 0
    again = open_chat()
    again.say("four")
    again.until("you said: four")
    again.say("/load")
    again.until("The last conversation continues. /load ")
    again.until("> three")
    for line, answer in (("five", "you said: five"), ("/clear", "forgotten")):
        again.say(line)
        again.until(answer)
    assert again.leave() == 0
    (folder,) = tmp_path.rglob("talks")
    assert {file.stat().st_mode & 0o077 for file in [folder, *folder.iterdir()]} == {0}
    talks = [[message["content"] for message in json.loads(file.read_text())["messages"]] for file in folder.iterdir()]
    assert sorted(talk[-1] for talk in talks) == [f"you said: {what}" for what in ("four", "one", "three", "two")]


def test_notes_are_wrapped_at_the_edge(open_chat):
    chat = open_chat(columns=44)
    chat.say("/help")
    chat.until("/?")
    chat.until("starts with /.")
    chat.say("error")
    chat.until("shorten it")
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", chat.shown).splitlines()
    told = [line for line in lines if not line.startswith(">")]
    assert max(map(len, told)) <= 44
    assert "error: the prompt has 200 tokens and the" in told


def test_a_line_is_completed_cleared_wrapped_and_continued(open_chat):
    """By Tab, by Ctrl-C, at the edge of 200 columns; with a backslash at its end, with Alt-Enter, and pasted."""
    chat = open_chat()
    chat.until("> ")
    chat.type("/reg\t")
    chat.until("/reg")
    chat.until("en")
    chat.type(ENTER)
    chat.until("There is no answer yet.")
    chat.until("> ")
    chat.type("forget this")
    chat.until("forget this")
    chat.type(CTRL_C + "instead" + ENTER)
    chat.until("you said: instead")
    chat.say("word " * 60)
    chat.until("you said:")
    chat.until("word\r\nword")
    for typed in ("one\\" + ENTER + "two", "one" + ALT_ENTER + "two", "\x1b[200~one\ntwo\x1b[201~"):
        chat.say(typed)
        chat.until("you said: one\r\ntwo\r\n")


@mostly_slow(
    "answer, model", [("", "Qwen/Qwen3-0.6B-GGUF:Q8_0"), ANOTHER := ("7\n2", CHOICES[1][0]), ("3", "fake")], [ANOTHER]
)
def test_a_first_chat_asks_once_for_a_model(open_chat, hub, tmp_path, answer, model):
    put_choices(hub)
    chat = open_chat(asked=False)
    chat.until("1.5 MiB  answers everyday questions")
    chat.until("Enter takes 1): ")
    chat.type(f"{answer}\n")
    chat.until(f"Reading the weights of {model}")
    assert chat.leave() == 0
    again = open_chat("-p", "hi", "-st")
    again.until(f"Reading the weights of {model}")
    assert again.end() == 0
    assert "Which model" not in again.shown


@pytest.mark.slow
def test_a_first_chat_without_a_hub_asks_nothing_and_the_next_one_does(open_chat, hub):
    chat = open_chat(asked=False)
    chat.until("Reading the weights of fake")
    assert chat.leave() == 0
    put_choices(hub)
    chat = open_chat(asked=False)
    chat.until("Enter takes 1): ")
    assert "Reading the weights" not in chat.shown


def test_a_hub_that_is_silent_holds_no_chat_up(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(hub, "size", lambda name: ended.wait(60))
    monkeypatch.setattr(first_model, "_SECONDS", 0.01)
    assert first_model.choose(pytest.fail, pytest.fail) is None
    ended.set()


@pytest.mark.slow
def test_messages_of_earlier_chats_come_back_but_for_a_paste_that_was_refused(open_chat, tmp_path):
    first = open_chat()
    for message in ("error", "\x1b[200~error" + " paste" * 400 + "\x1b[201~"):
        first.say(message)
        first.until("the prompt has 200 tokens")
    first.until("> ")
    first.type(UP + "s?" + ENTER)  # "errors?", which is an error, too
    first.until("errors?")
    first.until("the prompt has 200 tokens")
    assert first.leave() == 0
    (history,) = tmp_path.rglob("chat_history")
    assert [line for line in history.read_text().splitlines() if line.startswith("+")] == ["+error", "+errors?"]
    assert history.stat().st_mode & 0o077 == 0
    second = open_chat()
    second.until("> ")
    second.type(UP + " again" + ENTER)
    second.until("errors? again")
    second.until("the prompt has 200 tokens")


def test_without_a_home_folder_messages_come_back_in_the_same_chat(tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_state_path", lambda name: Path("~/.local/state") / name)
    monkeypatch.chdir(tmp_path)
    assert state_folder() is None
    assert _history_file() == os.devnull
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_slow_file_shows_how_far_it_is_and_ctrl_c_keeps_the_session(open_chat, tmp_path):
    chat = open_chat()
    chat.say("hello")
    chat.until("you said: hello")
    for command, what in (("/save", "saving"), ("/load", "loading")):
        chat.say(f"{command} {tmp_path / 'slow'}")
        chat.until(f"{what} ")
        chat.until("% |")
        chat.type(CTRL_C)
        chat.until("Stopped; the conversation and the file are as they were.")
        assert not (tmp_path / "slow").exists()
    chat.say("/regen")
    chat.until("you said: hello")


def test_control_characters_do_not_reach_the_terminal(open_chat, tmp_path):
    """An answer has them, or a saved conversation."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a\x1b]0;title\x07b"}]
    (tmp_path / "talk").write_text(json.dumps({"messages": messages}))
    chat = open_chat("-p", "c\x1b]0;title\x07d")
    chat.until("you said: c␛]0;title␇d")
    chat.say(f"/load {tmp_path / 'talk'}")
    chat.until("a␛]0;title␇b")


def test_ctrl_c_in_a_single_turn_is_an_interrupt(open_chat):
    chat = open_chat("-st", "-p", "slow")
    chat.until("slow slow")
    chat.type(CTRL_C)
    assert chat.end() == 130


@pytest.mark.slow
@pytest.mark.parametrize(("argv", "no_color", "colored"), [([], "", True), ([], "1", False), (["--color"], "1", True)])
def test_colors_can_be_refused(open_chat, monkeypatch, argv, no_color, colored):
    monkeypatch.setenv("NO_COLOR", no_color)
    chat = open_chat(*argv, "-p", "hi", "-st")
    assert chat.end() == 0
    assert ("\x1b[2m" in chat.shown) == colored


@pytest.mark.slow
def test_with_output_in_a_file_the_dialogue_stays_on_the_terminal(open_chat, tmp_path):
    with (tmp_path / "answers").open("wb") as file:
        chat = open_chat(stdout=file.fileno())
        chat.until("> ")
        # Nothing on the terminal tells when the answer is in the file, so the rest is typed ahead, line by line:
        # Ctrl-D would be lost between two prompts.
        chat.type("hello" + ENTER)
        chat.type("/exit" + ENTER)
        assert chat.end() == 0
    assert (tmp_path / "answers").read_text() == "you said: hello\n"


def test_ctrl_c_is_asked_about_and_a_second_one_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with ctrl_c_pressed() as asked:
        assert not asked()
        signal.raise_signal(signal.SIGINT)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
