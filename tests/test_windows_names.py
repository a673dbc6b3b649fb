"""Paths of Windows become names of models, and names become files that Windows can have: what Linux can check of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace

import pytest

from polarlm import fit
from polarlm.bench.result import slug
from polarlm.engine import EngineError
from polarlm.engine.loading import kept_arrays
from polarlm.engine.loading.checks import settle
from polarlm.engine.storage.files import is_device
from polarlm.engine.storage.tiers import names
from polarlm.model_loaders import hub, model
from polarlm.server.config import ServerConfig
from polarlm.server.models import process, registry, supervisor
from polarlm.server.running.sessions import SessionFile, read_name

MODEL = r"C:\Users\a b\SmolLM2-135M.Q4_1.gguf"
ODD = ["user/repo:Q8_0", "a?*<b>|c", 'say "hi"', "con", "NUL.txt", "ends in a dot.", "ends in a space ", "tab\t", "C:x"]


def is_portable(name: str) -> bool:
    """Whether Windows can have a file of this name in any folder."""
    return re.search(r'[<>:"/\\|?*\0-\x1f]|[. ]$|^$', name) is None and not is_device(name)


def test_a_path_stays_what_it_is_and_is_no_name_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (MODEL, PureWindowsPath(MODEL)):
        assert settle(path, None, {}).weights == MODEL  # type: ignore[arg-type]
    assert hub.hub_name(MODEL) is hub.hub_name(MODEL.removesuffix(".gguf")) is None
    monkeypatch.setattr(registry, "Path", PureWindowsPath)
    assert registry.NamedModel("smollm2", settle(MODEL, None, {})).path == PureWindowsPath(MODEL)
    assert registry.NamedModel("smollm2", settle("hf:user/repo:Q4_K_M", None, {})).path is None


def test_a_model_is_named_after_its_file_on_every_drive() -> None:
    for path in (MODEL, MODEL.replace("\\", "/"), r"\\server\share\SmolLM2-135M.Q4_1.gguf", "D:SmolLM2-135M.Q4_1.gguf"):
        assert model._DTYPE_SUFFIX.sub("", PureWindowsPath(path).stem) == "SmolLM2-135M"


def test_clients_see_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor.os, "sep", "\\")
    error = EngineError(f"{MODEL} is damaged")
    assert str(supervisor.without_folder(error, PureWindowsPath(MODEL))) == "SmolLM2-135M.Q4_1.gguf is damaged"  # type: ignore[arg-type]


@pytest.mark.parametrize(("system", "quote"), [("win32", '"'), ("linux", "'")])
def test_an_advised_command_is_quoted_as_a_shell_of_the_system_reads_it(
    system: str, quote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit.sys, "platform", system)
    advice = SimpleNamespace(settings={"ctx_size": 4096})
    command = fit._command(advice, SimpleNamespace(device="auto", tensor_split=None, lora={}), MODEL, "chat")  # type: ignore[arg-type]
    assert command == f"polarlm chat {quote}{MODEL}{quote} --ctx-size 4096"


def kernel_file(name: str, folder: Path) -> str:
    pytest.importorskip("llvmlite")
    from polarlm.engine.jit.compile.object_cache import ObjectCache

    return ObjectCache(folder, "key")._file(name).name


def sessions_of(model: str, folder: Path) -> Path:
    sessions = process._child_config(replace(ServerConfig(), sessions=str(folder)), model, "key").sessions
    assert sessions is not None
    return Path(sessions)


@pytest.mark.parametrize(
    "made",
    [
        kernel_file,
        lambda name, folder: kept_arrays._file("calibration", kept_arrays.digest_key(name)).name,
        lambda name, folder: names._note(folder / name, folder).name,
        lambda name, folder: f"speed-{slug(name)}-2026-11-24.json",
        lambda name, folder: sessions_of(name, folder).name,
    ],
    ids=["a kernel", "what is computed once", "the digest of weights", "results", "sessions of a model"],
)
def test_any_name_becomes_a_file_that_windows_can_have(made: Callable[[str, Path], str], tmp_path: Path) -> None:
    assert [name for name in ODD if not is_portable(made(name, tmp_path))] == []


@pytest.mark.parametrize("name", ["talk", "console", "a.b"])
def test_names_that_are_accepted_are_portable(name: str, tmp_path: Path) -> None:
    assert is_portable(Path(SessionFile(tmp_path, read_name("name", name))).name)
