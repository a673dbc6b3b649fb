"""`polarlm list`, `show`, `rm`, `cache` and `ps`: what is on this machine, and removing it by name."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from polarlm import cache, ps, pull, show
from polarlm import list as listing
from polarlm import rm as removing
from polarlm.command import main as command_line
from polarlm.engine.config import format_bytes
from polarlm.model_loaders import LoadError, demo, first_model
from polarlm.model_loaders import model as model_files
from tests.model_loaders.hub_server import Hub, Repository

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command with an empty cache folder; gives its exit code, standard output and standard error."""
    monkeypatch.setenv("POLARLM_CACHE", str(tmp_path / "ours"))

    def call(main: Callable[..., int], *argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(argv)
        return code, *capsys.readouterr()

    return call


def names(run: Run) -> list[str]:
    return [one["name"] for one in json.loads(run(listing.main, "--json")[1])]


def test_models_are_listed_and_removed_by_name(
    run: Run, hub: Hub, small_ggufs: dict[str, bytes], small_folder: dict[str, bytes], tmp_path: Path
) -> None:
    assert "There are no models here yet" in run(listing.main)[2]
    hub.repositories = {"user/tiny": Repository(small_ggufs), "user/folder": Repository(small_folder)}
    for name in ("user/tiny:Q8_0", "user/tiny:Q4_K_M", "user/folder"):
        assert run(pull.main, name, "--device", "cpu")[0] == 0
    assert names(run) == ["user/folder", "user/tiny:Q4_K_M", "user/tiny:Q8_0"]
    size = format_bytes(len(small_ggufs["tiny-Q8_0.gguf"]))
    assert ["user/tiny:Q8_0", *size.split()] in [line.split()[:3] for line in run(listing.main)[1].splitlines()]
    blobs = tmp_path / "cache" / "models--user--tiny" / "blobs"
    (blob,) = (one for one in blobs.iterdir() if one.read_bytes() == small_ggufs["tiny-Q8_0.gguf"])
    blob.write_bytes(small_ggufs["tiny-Q8_0.gguf"][:-1])
    assert [one["damaged"] for one in json.loads(run(listing.main, "--json")[1])] == [False, False, True]
    assert "damaged: polarlm pull user/tiny:Q8_0" in run(listing.main)[1]
    assert run(pull.main, "user/tiny:Q8_0", "--device", "cpu")[0] == 0
    assert "damaged" not in run(listing.main)[1]
    assert run(removing.main, "user/tiny:Q8_0")[::2] == (0, f"user/tiny:Q8_0 is removed: {size}.\n")
    assert [blob.stat().st_size for blob in blobs.iterdir()] == [len(small_ggufs["tiny-Q4_K_M.gguf"])]
    assert names(run) == ["user/folder", "user/tiny:Q4_K_M"]
    first_model._write("model", "user/folder")
    assert run(removing.main, "user/folder", "user/tiny")[0] == 0
    assert first_model.remembered_name() is None
    assert names(run) == []
    assert not blobs.parent.exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("user/none", "user/none is not on this machine: polarlm list shows what is"),
        ("user/tiny:F16", "user/tiny:F16 is not on this machine; of user/tiny there is user/tiny:Q8_0"),
        ("/etc/passwd", "/etc/passwd is not on this machine: polarlm list shows what is"),
        ("nothing", "nothing is not on this machine: polarlm list shows what is"),
    ],
)
def test_nothing_else_is_removed(run: Run, hub: Hub, small_ggufs: dict[str, bytes], name: str, sentence: str) -> None:
    hub.repositories["user/tiny"] = Repository(small_ggufs)
    run(pull.main, "user/tiny:Q8_0", "--device", "cpu")
    code, _, err = run(removing.main, name)
    assert (code, err.startswith(f"error: {sentence}")) == (2, True), err
    assert names(run) == ["user/tiny:Q8_0"]


def test_each_name_that_is_listed_goes_to_every_command(
    run: Run,
    hub: Hub,
    small_ggufs: dict[str, bytes],
    small_folder: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to the place where a model's files are opened, which says which ones."""
    hub.repositories = {"user/tiny": Repository(small_ggufs), "user/folder": Repository(small_folder)}
    demo_content = small_ggufs["tiny-Q8_0.gguf"]
    monkeypatch.setattr(demo, "FILE_BYTES", len(demo_content))
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / demo.FILE_NAME).write_bytes(demo_content)
    for name in ("user/tiny:Q8_0", "user/folder", demo.NAME):
        assert run(pull.main, name, "--device", "cpu")[0] == 0
    models = json.loads(run(listing.main, "--json")[1])
    assert len(models) == 3
    (tmp_path / "text.json").write_text('{"messages": [{"role": "user", "content": "x"}]}')
    (tmp_path / "line").write_text("{}\n")
    (tmp_path / "answer").write_text('{"object": "chat.completion", "system_fingerprint": "x", "choices": []}')
    file, line, answer = (str(tmp_path / one) for one in ("text.json", "line", "answer"))
    words = {
        **{"chat": ["-st", "-p", "x"], "serve": ["--port", "0"], "batch": [line, "-o", f"{line}.out"]},
        **{"pack": [file, "-o", f"{file}.pack"], "verify": [file, answer], "quality": [file, "--types", "f16"]},
        **{"show": [], "fit": ["--device", "cpu"], "speed": ["--minutes", "1"]},
    }

    def found(where: Path, *_: object) -> None:
        raise LoadError(f"found {where}")

    monkeypatch.setattr(model_files, "_open", found)
    monkeypatch.setattr(first_model, "remembered_name", lambda: "user/another")  # takes no place of one that is named
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for model in models:
        for name, others in words.items():
            flag = "-m" if model["name"] == demo.NAME else "-hf"
            code, _, err = run(command_line, name, *others, flag, model["name"])
            if name == "fit" and model["name"] != demo.NAME:  # which asks the hub, and opens no weights
                assert code == 0, err
            else:
                assert (code, err.splitlines()[-1:]) == (2, ["error: found " + model["path"]]), (name, model)
        assert run(pull.main, model["name"], "--device", "cpu")[:2] == (0, f"{model['path']}\n")
        assert run(removing.main, model["name"])[0] == 0
    assert names(run) == []


def test_a_model_is_shown_from_its_files(run: Run, demo_path: Path) -> None:
    shown = dict(line.split(maxsplit=1) for line in run(show.main, str(demo_path))[1].splitlines()[1:])
    assert shown["family"] == "llama"
    assert shown["parameters"] == "134,515,008"
    assert shown["context"] == "8,192 tokens"
    assert shown["heads"] == "9 for queries, 3 for keys and values, of 64"
    assert shown["path"] == str(demo_path)


def test_the_cache_folder_is_counted_and_pruned_by_kind(run: Run, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    for name in (
        "kernels/a/b",
        "kernels/a/c",
        f"encoding-{'0' * 32}",
        f"calibration-{'f' * 32}",
        "tiles/x",
        "mine.txt",
    ):
        (ours / name).parent.mkdir(parents=True, exist_ok=True)
        (ours / name).write_bytes(bytes(1024))
    lines = run(cache.main)[1].splitlines()
    assert [line.split()[-3:] for line in lines if line.startswith(("kernels", "fits"))] == [["2", "2.0", "KiB"]] * 2
    assert run(cache.main, "--prune", "junk")[2].startswith(
        "error: --prune: there is no kind 'junk'; there are kernels"
    )
    assert "fits: 2.0 KiB removed." in run(cache.main, "--prune", "fits,kernels")[2]
    assert sorted(str(file.relative_to(ours)) for file in ours.rglob("*") if file.is_file()) == ["mine.txt", "tiles/x"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/usr/bin/polarlm chat -m x.gguf", ["chat", "-m", "x.gguf"]),
        ("python3 /venv/bin/polarlm serve --port 1", ["serve", "--port", "1"]),
        ("python3 -m polarlm run x", ["run", "x"]),
        ("python3 -m polarlm.server --port 1", ["serve", "--port", "1"]),
        ("python3 -m polarlm pull user/repo", None),
        ("vim polarlm chat.txt", None),
        ("", None),
    ],
)
def test_which_processes_are_ours(line: str, words: list[str] | None) -> None:
    assert ps._words(line.split()) == words


def test_nothing_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "process_iter", lambda: [psutil.Process()])
    assert run(ps.main) == (0, "", "No chat and no server runs here.\n")


def test_a_server_that_does_not_answer_yet_loads(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(
        pid=7,
        cmdline=lambda: [sys.executable, "-m", "polarlm", "serve", "--port", "1"],
        children=lambda recursive: [],
        memory_info=lambda: SimpleNamespace(rss=3 << 20),
        create_time=lambda: 0.0,
        net_connections=lambda kind: [],
    )
    monkeypatch.setattr(psutil, "process_iter", lambda: [process])
    (line,) = run(ps.main)[1].splitlines()[1:]
    assert line.split()[:4] == ["serve", "--port", "1", "7"]
    assert line.endswith("loading")
