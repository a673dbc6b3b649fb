"""The command `polarlm`: what it lists, what it says about a word that it does not know, and how little it imports."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest

from polarlm.command import COMMANDS, main
from polarlm.engine.cli.flags import parse
from tests.pairs import mostly_slow
from tests.programs import ROOT, output_of
from tests.random_model import random_model

FLAGS_OF_THE_ENGINE = (
    "quality",
    "speed",
    "completion",
)  # whose flags name cache types, which are found by importing them


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_it_lists_its_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, (_, meaning) in COMMANDS.items():
        assert [line for line in lines if line.split(maxsplit=1) == [name, meaning]], name
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_its_flags_and_refuses_an_unknown_one(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: polarlm {name} ")
    groups = importlib.import_module(COMMANDS[name][0]).GROUPS
    assert all(isinstance(title, str) and isinstance(cls, type) for title, cls in groups.items())
    assert main([name, "--no-such-flag", "word"]) == 2
    out, (error,) = (text.splitlines() for text in capsys.readouterr())
    assert out == []
    assert error.startswith("error: ")
    assert "--no-such-flag" in error


def test_every_command_takes_a_model_the_same_way() -> None:
    taking = set()
    for name, (module, _) in COMMANDS.items():
        groups = importlib.import_module(module).GROUPS
        if not any(field.name == "weights" for cls in groups.values() for field in fields(cls)):
            continue
        taking.add(name)
        before = ["a", "b"] if name == "verify" else ["text.txt"] if name in ("quality", "pack", "batch") else []
        ways = [("weights", ["a/b"]), ("weights", ["-m", "a/b"]), ("hf_repo", ["-hf", "a/b"])]
        for field, words in ways[1:] if name == "pack" else ways:  # which takes any number of texts
            parsed = parse([*before, *words], groups, prog=name, description="")
            assert [getattr(one, field) for one in parsed if hasattr(one, field)] == ["a/b"], (name, words)
    assert taking == {"chat", "serve", "batch", "pull", "show", "fit", "pack", "quality", "speed", "verify"}


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("server", "there is no command 'server' (did you mean serve?)"),
        ("halp", "there is no command 'halp' (did you mean help?)"),
        ("--verson", "there is no flag '--verson' (did you mean --version?)"),
        ("", "there is no command ''"),
        ("-m", "-m: flags follow a command, as in polarlm chat -m"),
    ],
)
def test_an_unknown_word_is_answered_with_a_sentence(
    word: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word, "--help"]) == 2
    assert capsys.readouterr().err == f"error: {sentence}; polarlm --help lists the commands\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_variable_that_is_no_flag_gets_a_note_from_every_command(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLARLM_CTX_SZIE", "many")
    main([name, "--no-such-flag"])
    told = capsys.readouterr().err
    assert told.startswith("note: POLARLM_CTX_SZIE has no effect; did you mean POLARLM_CTX_SIZE?\n"), told
    assert told.count("POLARLM_CTX_SZIE") == 1


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("help", "usage: polarlm COMMAND"),
        ("help fit", "usage: polarlm fit"),
        ("help run", "usage: polarlm chat"),
        ("version", "polarlm "),
        ("run --help", "usage: polarlm chat"),
        ("--version", f"polarlm {importlib.metadata.version('polarlm')}\n"),
    ],
)
def test_words_that_are_no_commands(words: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        main(words.split())
    assert capsys.readouterr().out.startswith(shown)


INTERRUPTED = """
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "polarlm.engine.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
"""


@mostly_slow("words", ["polarlm chat", "polarlm.server", "polarlm.fit", "polarlm.engine.chat"], ["polarlm chat"])
def test_ctrl_c_while_any_command_is_imported_shows_no_traceback(words: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    program = [sys.executable, "-m", *words.split()]
    ended = subprocess.run(program, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert (ended.stdout, ended.stderr) == (b"", b"")
    assert ended.returncode != 0


def test_help_imports_nothing_that_takes_time() -> None:
    program = "import sys; from polarlm.command import main; main([]); main(['caht']); print(*sys.modules)"
    imported = {*output_of(sys.executable, "-c", program).splitlines()[-1].split()}
    assert "polarlm.command" in imported
    ours = {name for name in imported if name.split(".")[0] in ("polarlm", "engine", "model_loaders", "server")}
    assert ours <= {"polarlm", "polarlm.aliases", "polarlm.command", "polarlm.engine"}  # which has names alone
    assert not imported & {"numpy", "argparse", "dataclasses", "inspect", "importlib.metadata", "tokenizers"}


WITHOUT_A_MODEL = ["--version", "ps", "list", *(f"help {name}" for name in COMMANDS if name not in FLAGS_OF_THE_ENGINE)]


@mostly_slow("words", WITHOUT_A_MODEL, ["--version", "list", "help chat", "help fit"])
def test_what_loads_no_model_imports_no_engine(words: str) -> None:
    program = f"""
import sys
from polarlm.command import main
try:
    main({words.split()})
except SystemExit:
    pass
print(*sys.modules)
"""
    imported = {*output_of(sys.executable, "-c", program).splitlines()[-1].split()}
    assert "polarlm.engine.cli.flags" in imported
    heavy = {"polarlm.engine.engine", "polarlm.engine.codecs", "tokenizers", "llvmlite", "prompt_toolkit", "starlette"}
    assert not imported & (heavy if words == "list" else {*heavy, "numpy"})  # which reads what files say


@mostly_slow("words", ["polarlm --help", "polarlm.fit"], ["polarlm --help"])
def test_a_reader_that_has_gone_ends_a_command_without_a_word(words: str, tmp_path: Path) -> None:
    """As `| head` does; 141 is what a shell says of a program that a closed pipe ended."""
    model = [str(random_model(tmp_path))] if words.endswith("fit") else []
    command = [sys.executable, "-m", *words.split(), *model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
@mostly_slow("words", ["--help", "completion bash"], ["--help"])
def test_a_full_disk_is_told_with_a_sentence(words: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "polarlm", *words.split()],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "error: standard output cannot be written: No space left on device\n"


@pytest.mark.skipif(os.name != "posix", reason="a shell closes the output")
@mostly_slow("words", ["--version", "completion bash"], ["--version"])
def test_a_process_without_standard_output_does_its_work(words: str) -> None:
    line = f'exec "{sys.executable}" -m polarlm {words} >&-'
    done = subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
