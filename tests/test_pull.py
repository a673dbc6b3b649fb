"""`polarlm pull`: a model of the hub is fetched, and nothing is loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from polarlm import pull
from tests.model_loaders.hub_server import Hub, Repository
from tests.random_model import random_model, write_in_parts

ROOT = Path(__file__).resolve().parents[1]


def test_the_path_is_printed_and_how_to_talk_to_the_model(
    hub: Hub, small_ggufs: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["user/tiny"] = Repository(small_ggufs)
    assert pull.main(["user/tiny", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    path = Path(said.out.strip())
    assert path.read_bytes() == small_ggufs["tiny-Q8_0.gguf"]
    assert "Taking Q8_0 of user/tiny" in said.err
    mib = path.stat().st_size / (1 << 20)
    last = said.err.splitlines()[-1]
    assert last == f"user/tiny:Q8_0 takes {mib:.1f} MiB on the disk. To talk to it: polarlm chat -hf user/tiny:Q8_0"


def test_the_size_of_a_model_in_parts_is_that_of_all(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parts").mkdir()
    first = write_in_parts(tmp_path / "parts" / "tiny-Q8_0.gguf", random_model(tmp_path), 8)
    parts = {path.name: path.read_bytes() for path in first.parent.iterdir()}
    hub.repositories["user/tiny"] = Repository(parts)
    assert pull.main(["user/tiny", "--device", "cpu"]) == 0
    mib = sum(map(len, parts.values())) / (1 << 20)
    assert f"takes {mib:.1f} MiB on the disk" in capsys.readouterr().err


def test_a_folder_of_a_revision(hub: Hub, small_folder: dict[str, bytes], capsys: pytest.CaptureFixture[str]) -> None:
    hub.repositories["user/tiny"] = Repository(small_folder, tags={"v1": "b" * 40})
    assert pull.main(["hf:user/tiny@v1", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert said.err.endswith("polarlm chat -hf user/tiny@v1\n")
    assert {path.name for path in Path(said.out.strip()).iterdir()} <= set(small_folder)


def test_a_context_that_does_not_fit(
    hub: Hub, small_ggufs: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["user/tiny"] = Repository(small_ggufs)
    assert pull.main(["user/tiny", "--device", "cpu", "-c", str(1 << 40)]) == 2
    assert "error: Of user/tiny, no file fits in memory here" in capsys.readouterr().err


WRONG = [
    ([], "MODEL is missing"),
    (["tiny"], "'tiny' does not name a model on the hub: write user/repo"),
    (["user/none"], "There is no model user/none on the hub"),
    (["user/none", "-c", "-1"], "--ctx-size -1: give a number of tokens"),
    (["user/none", "--device", "tpu"], "--device: invalid choice: 'tpu'"),
]


def test_what_cannot_be_fetched_is_a_sentence(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, problem in WRONG:
        assert pull.main(argv) == 2
        assert f"error: {problem}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has another Ctrl-C")
def test_a_process_that_is_stopped_is_gone_on_with_by_another(
    hub: Hub, small_ggufs: dict[str, bytes], tmp_path: Path
) -> None:
    """Two processes are started, which import all of the loader."""
    name = "tiny-Q8_0.gguf"
    hub.repositories["user/tiny"] = Repository(small_ggufs)
    hub.trouble.hold[name] = threading.Event()
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT)}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", "import sys; from polarlm.pull import main; sys.exit(main())", "user/tiny:q8_0"]
    with subprocess.Popen([*command, "--device", "cpu"], env=environment, stderr=subprocess.PIPE, text=True) as first:
        assert hub.trouble.held.wait(120)
        (partial,) = _when_it_has_bytes(tmp_path)
        first.send_signal(signal.SIGINT)
        _, said = first.communicate(timeout=120)
        hub.trouble.hold.pop(name).set()
    assert first.returncode == 130
    assert said.splitlines()[-2:] == ["The next attempt continues from what has been downloaded.", "Stopped"]
    begun = partial.stat().st_size
    assert begun > 0
    done = subprocess.run(
        [*command, "--device", "cpu"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert tmp_path / "home" / "hub" in path.parents
    assert path.read_bytes() == small_ggufs[name]
    assert hub.fetched(name)[-1] == f"bytes={begun}-"


def _when_it_has_bytes(folder: Path) -> list[Path]:
    """The part of the file that has been written, once there is one."""
    for _ in range(1200):
        found = [path for path in folder.rglob("*.incomplete") if path.stat().st_size]
        if found:
            return found
        threading.Event().wait(0.05)
    raise AssertionError("nothing was written within a minute")
