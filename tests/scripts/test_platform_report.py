"""The report of a machine that nobody here has."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import platform_report

pytest.importorskip("llvmlite")


def program(folder: Path, text: str) -> list[str]:
    """A command that runs this program in the place of a part."""
    (folder / "part.py").write_text(text, encoding="utf-8")
    return [sys.executable, str(folder / "part.py")]


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("raise ValueError('no kernel fits')", "exit code 1: ValueError: no kernel fits"),
        ("import os; os.kill(os.getpid(), 11)", "exit code -11: it said nothing"),
        (f"raise OSError('cannot open {Path.home()}/x.gguf')", "exit code 1: OSError: cannot open ~/x.gguf"),
    ],
)
def test_a_part_that_fails_is_a_line_without_folders_of_the_user(text: str, failure: str, tmp_path: Path) -> None:
    found = platform_report.run_part("levels", program(tmp_path, text))
    assert found["failure"] == failure
    assert "result" not in found


def test_a_part_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_report, "_SECONDS", 0.5)
    found = platform_report.run_part("levels", program(tmp_path, "import time; time.sleep(60)"))
    assert found["failure"] == "hangs: it was ended after 0.5 s"


def test_the_result_is_what_a_part_prints_last(tmp_path: Path) -> None:
    found = platform_report.run_part("levels", program(tmp_path, "print('noise'); print('{\"level\": 1}')"))
    assert found["result"] == {"level": 1}


def test_every_level_of_this_machine_is_tried() -> None:
    found = platform_report.levels()
    assert found["levels"]["generic"] == "right"
    assert set(found["levels"].values()) == {"right"}


def test_the_file_has_what_was_found_before_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is written after each part."""
    written = []
    path = tmp_path / "report.json"

    def run_part(name: str) -> dict[str, object]:
        written.append(list(json.loads(path.read_text())["parts"]) if path.exists() else [])
        return {"failure": "it broke", "seconds": 1.0} if name == "files" else {"result": {}, "seconds": 1.0}

    monkeypatch.setattr(platform_report, "run_part", run_part)
    assert platform_report.main(["--output", str(path)]) == 1
    names = list(platform_report.PARTS)
    assert written == [names[:number] for number in range(len(names))]
    report = json.loads(path.read_text())
    assert report["machine"]["system"] == f"{platform.system()} {platform.machine()}"
    assert report["parts"]["files"]["failure"] == "it broke"
    assert "files: it broke" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("part", [platform_report.answers, platform_report.files, platform_report.server])
def test_parts_work_here(part: Callable[[], dict[str, object]], demo_path: Path) -> None:
    assert part()
