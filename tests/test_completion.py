"""What a shell offers for half a command line of `polarlm`, once it has read the script of `polarlm completion`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from polarlm.command import COMMANDS, main
from polarlm.completion import script
from tests.chat.test_terminal import Terminal

PATIENCE = 60.0  # seconds for a shell that has other work to do


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for shell in ("bash", "zsh", "fish"):
        (folder / shell).write_text(script(shell), encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model's file, a folder and a text."""
    (tmp_path / "my model.gguf").touch()
    (tmp_path / "text.txt").touch()
    (tmp_path / "sessions").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def path_of(shell: str) -> str:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    return path


def test_the_script_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == script("bash") + "\n"


@pytest.mark.parametrize("argv", [[], ["tcsh"]])
def test_a_shell_that_is_missing_or_unknown_is_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *argv]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: SHELL")
    assert "fish" in told


def offered_by_bash(scripts: Path, *words: str) -> set[str]:
    program = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_polarlm; '
    program += 'printf "%s\\n" "${COMPREPLY[@]}"'
    command = [path_of("bash"), "--norc", "-c", program, "bash", str(scripts / "bash"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stderr == ""
    return {*done.stdout.splitlines()} - {""}


def offered_by_fish(scripts: Path, *words: str) -> set[str]:
    line = " ".join(word.replace(" ", "\\ ") for word in words)
    command = [path_of("fish"), "--no-config", "-c", f"source {scripts / 'fish'}; complete -C '{line}'"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stderr == ""
    return {entry.split("\t")[0].replace("\\ ", " ").rstrip("/") for entry in done.stdout.splitlines()}


@pytest.mark.parametrize("offered", [offered_by_bash, offered_by_fish], ids=["bash", "fish"])
def test_names_flags_and_values_are_offered(offered: Callable[..., set[str]], scripts: Path, folder: Path) -> None:
    assert offered(scripts, "polarlm", "") >= {*COMMANDS}
    assert offered(scripts, "polarlm", "ch") == {"chat"}
    assert offered(scripts, "polarlm", "chat", "--cache-type-") == {"--cache-type-k", "--cache-type-v"}
    assert offered(scripts, "polarlm", "serve", "--temp") == set()  # the chat's
    assert offered(scripts, "polarlm", "serve", "--max-q") == {"--max-queue"}
    assert offered(scripts, "polarlm", "chat", "--device", "c") == {"cpu", "cuda"}
    assert offered(scripts, "polarlm", "serve", "-c", "64", "--cache-type", "ba") == {"balanced"}
    assert offered(scripts, "polarlm", "chat", "--weight-type", "q8") == {"q8_0"}
    assert offered(scripts, "polarlm", "chat", "--no-mmap", "--model", "my") == {"my model.gguf"}
    assert offered(scripts, "polarlm", "serve", "--sessions", "") == {"sessions"}
    assert offered(scripts, "polarlm", "completion", "fi") == {"fish"}


@pytest.mark.parametrize(
    ("name", "flags", "set_up"),
    [
        ("bash", ["--norc", "--noprofile", "-i"], 'source "{}"'),
        ("zsh", ["-f", "-i"], 'autoload -U compinit; compinit -D -u; eval "$(cat {})"'),
    ],
)
def test_the_tab_key_completes_at_a_terminal(
    name: str, flags: list[str], set_up: str, scripts: Path, folder: Path
) -> None:
    environment = {"TERM": "dumb", "PS1": "> ", "LC_ALL": "C.UTF-8"}
    with closing(Terminal([path_of(name), *flags], environment)) as running:
        running.type(f"{set_up.format(scripts / name)}; polarlm() {{ printf '<%s>' \"$@\"; }}; echo rea''dy\n")
        running.until("ready")
        running.type("polarlm ser\t--sess\tsess\t --dev\tcu\t\n")
        running.until("<cuda>")
        assert "<serve><--sessions><sessions><--device><cuda>" in running.shown.replace("sessions/>", "sessions>")
        running.type("polarlm chat -m my\t\n")
        running.until("<my model.gguf>")
