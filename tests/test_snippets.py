"""Every command and every snippet of the documents that can be run is run, in the order of the page.

The tiny model stands for the models that the pages name, and a server of its own for the one that they talk to.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polarlm.model_loaders import demo
from tests.compiled import share_kernels
from tests.model_loaders.hub_server import Hub, Repository
from tests.server.process import Process
from tests.tiny import make_model

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *(page for folder in ("docs", "cuda", "engine") for page in (ROOT / folder).rglob("*.md")),
        ROOT / "tests" / "README.md",
    }
)
# What needs the network, a GPU, minutes, or the whole test suite.
NOT_RUN = ("hf download", "make test", "make gpu-test", "make gpu-bench", "make compile-all")
NOT_RUN += ("python3 -m venv", "CMAKE_ARGS=", "pip install", ". .venv/bin/activate", ".venv/bin/python -m pytest")
NOT_RUN += ("llama-perplexity", "llama-quantize", "python -m polarlm.lm_eval")
NOT_RUN += ("claude ", "cline ", "qwen ", "aider ", "open-webui ")  # programs of others
NOT_IMPORTED = re.compile(r"^(?:import|from) (?:llama_index|smolagents|dspy|instructor)\b", re.MULTILINE)  # likewise
PYTHON = """\
import json, os, subprocess, sys
with open("asked", "a") as asked:
    print(json.dumps(sys.argv[2:]), file=asked)
if sys.argv[2:4] == ["polarlm", "chat"] or sys.argv[2] == "engine.chat":
    # The last --weights counts, a model of the hub is taken from the hub, and one thread is enough.
    named = sys.argv[4:5] and "/" in sys.argv[4] or "-hf" in sys.argv
    model = [] if named else ["--weights", "./smollm2"]
    sys.exit(subprocess.call([sys.executable, *sys.argv[1:], *model, "--device", "cpu", "-n", "8"]))
if sys.argv[2:4] == ["polarlm", "pack"]:
    sys.exit(subprocess.call([sys.executable, *sys.argv[1:], "--weights", "./smollm2", "--device", "cpu"]))
if sys.argv[2:4] == ["polarlm", "pull"]:
    sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))
"""


@dataclass(frozen=True)
class Block:
    """What stands between fences, and where."""

    page: Path
    line: int
    language: str
    text: str

    def commands(self) -> Iterator[tuple[str, str]]:
        """(command, the output that the page shows) for each line behind a "$ "."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            lines = part.splitlines(keepends=True)
            end = next(i for i, line in enumerate(lines) if not line.endswith("\\\n"))
            yield "".join(lines[: end + 1]).strip(), "".join(lines[end + 1 :]).strip()


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text[: at.start()].count("\n") + 2, at[1], at[2]) for at in fences]


def runs(page: Path) -> bool:
    """Whether there is anything to run; docs/adding.md has a file, which a test of its own puts into its place."""
    return page.name != "adding.md" and any(block.language in ("python", "console") for block in blocks(page))


def talks_to_one(page: Path) -> bool:
    """Whether the page asks a server for something."""
    return any(re.search(r"127\.0\.0\.1\W+808[01]", block.text) for block in blocks(page))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub, small_ggufs: dict[str, bytes]) -> Path:
    """A checkout that is set up, as far as the commands see it, with models at ./smollm2 and ./qwen3-vl, and a hub."""
    for page in PAGES:
        for name in re.findall(
            r"(?:\bhf:|-hf |polarlm pull |polarlm chat )(\w[\w.-]*/\w[\w.-]*)", page.read_text(encoding="utf-8")
        ):
            hub.repositories[name] = Repository(small_ggufs)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("notes.txt", "manual.txt", "src/main.c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("Rome is the capital of Italy.")
    Image.new("RGB", (40, 30), "teal").save(tmp_path / "photo.jpg")
    make_model_at, of_images = tmp_path / "smollm2", tmp_path / "qwen3-vl"
    for at, fixture in ((make_model_at, "llama_gqa_linear"), (of_images, "qwen3_vl_deepstack_tied")):
        at.mkdir()
        make_model(at, fixture)
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, tmp_path)
    for name in (".installed", ".installed-dev", ".installed-serve"):
        (tmp_path / ".venv" / name).touch()
    (tmp_path / "python.py").write_text(PYTHON, encoding="utf-8")
    programs = tmp_path / ".venv" / "bin"
    for name, words in (("python", ""), ("polarlm", "-m polarlm")):
        text = f"#!/bin/sh\nexec '{sys.executable}' '{tmp_path / 'python.py'}' {words} \"$@\"\n"
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    monkeypatch.setattr(demo, "demo_model", lambda verbose: make_model_at)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", os.pathsep.join([str(programs), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("POLARLM_CACHE", str(share_kernels(tmp_path / "cache")))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="the pages' commands are for a Unix shell")
@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_can_be_run(page: Path, folder: Path) -> None:
    names: dict[str, Any] = {"__name__": page.stem}
    flags = ("--sessions", str(folder / "sessions"), "--socket-port", "0")
    with ExitStack() as stack:
        server = stack.enter_context(Process(folder / "smollm2", folder, *flags)) if talks_to_one(page) else None
        for block in blocks(page):
            text = _at(server, block.text)
            if block.language == "python" and not NOT_IMPORTED.search(text):
                exec(compile("\n" * (block.line - 1) + text, str(block.page), "exec"), names)
            elif block.language == "console":
                for command, output in block.commands():
                    if not command.startswith(NOT_RUN):
                        _run(_at(server, command), output, folder)


def _at(server: Process | None, text: str) -> str:
    """`text` with the addresses of `server` in place of the usual ones."""
    if server is None:
        return text
    host, port = server.line.split()[-1].rsplit(":", 1)
    text = text.replace("127.0.0.1:8080", ":".join(map(str, server.address)))
    return text.replace('("127.0.0.1", 8081)', f'("{host}", {port})').replace("127.0.0.1 8081", f"{host} {port}")


def _run(command: str, expected: str, folder: Path) -> None:
    if not {*shlex.split(command)} & {"curl", "make", "nc"} <= _programs():
        return  # the other commands of the page are run all the same
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command.replace("curl ", "curl --silent --show-error --fail ", 1)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    if expected:
        assert _shape(json.loads(done.stdout)) == _shape(json.loads(expected)), command
    asked = folder / "asked"
    for line in asked.read_text(encoding="utf-8").splitlines() if asked.exists() else ():
        _check_flags(*json.loads(line))
    asked.unlink(missing_ok=True)


@cache
def _programs() -> set[str]:
    """Programs that not every machine has, and this one does. Only OpenBSD's nc has the flag that the page gives it."""
    programs = {name for name in ("curl", "make", "nc") if shutil.which(name)}
    if (
        "nc" in programs
        and "OpenBSD" not in subprocess.run(["nc", "-h"], capture_output=True, text=True, timeout=60).stderr
    ):
        programs.remove("nc")
    return programs


def _shape(value: Any) -> Any:
    """What is left of JSON where numbers do not count."""
    if isinstance(value, dict):
        return {name: _shape(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_shape(one) for one in value]
    return "a number" if isinstance(value, (int, float)) and not isinstance(value, bool) else value


_HELP: dict[str, str] = {}


def _check_flags(module: str, *arguments: str) -> None:
    """Raises AssertionError for a flag that a module, or a command of `polarlm`, does not have."""
    words = [module, *(arguments[:1] if module == "polarlm" else ())]
    name = " ".join(words)
    if name not in _HELP:
        command = [sys.executable, "-m", *words, "--help"]
        _HELP[name] = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT).stdout
    for argument in arguments:
        if argument.startswith("-"):
            assert re.search(rf"(?<![\w-]){re.escape(argument)}(?![\w-])", _HELP[name]), f"{name} has no {argument}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    """Modules that are run, by their full names, which work in a checkout and installed; links; files."""
    text = page.read_text(encoding="utf-8")
    # Tables say what was run, which was in a checkout.
    for name in re.findall(
        r"python3? -m ([\w.]+)", re.sub(r"<!-- ([\w -]+) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    ):
        top = name.split(".")[0]
        if top in ("polarlm", "bench", "engine", "server", "scripts", "examples"):
            file = ROOT / name.replace(".", "/")
            assert file.with_suffix(".py").exists() or (file / "__main__.py").exists(), name
            assert top != "bench", f"{name} is polarlm.{name} where it is installed"
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        name, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = page if not name else (page.parent / name).resolve()
        assert file.exists(), target
        if anchor and file.suffix == ".md":  # a line of code is named by its number
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target
    folders = "bench|cuda|docs|engine|model_loaders|scripts|server|tests"
    added = {f"engine/codecs/{name}.py" for name in ("int8", "hex3")}  # in docs/adding.md, as is the next
    added |= {"engine/weight_formats/q1_0.py"}
    for name in {*re.findall(rf"`((?:{folders})/[\w./]*\.\w+)`", text)} - added:
        assert (ROOT / name).exists(), name
