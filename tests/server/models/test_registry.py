"""Which models a server has, and what they are called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from polarlm.engine.cli.flags import FlagError
from polarlm.engine.config import EngineConfig
from polarlm.model_loaders import demo
from polarlm.server.config import HUB, ServerConfig, read_command_line
from polarlm.server.models.process import _child_config
from polarlm.server.models.registry import Registry
from tests.server.models.running import common
from tests.tiny import make_model

PARTS = ("huge-Q4_K_M-00001-of-00002.gguf", "huge-Q4_K_M-00002-of-00002.gguf")

WRONG_FILES = {
    "": "has no models",
    "a = 1": r"\[a\]: a model is a table",
    "[a": "is not a TOML file: ",
    "[a]": "needs either path",
    '[a]\npath = "a.gguf"\nhf = "x/y"': "needs either path",
    '[a]\npath = "b.gguf"': "no such file or folder$",
    '[a]\npath = "C:\\Users\\a b\\m.gguf"': r"a TOML file: .*; write a path with backslashes in single quotes",
    '[a]\npath = "C:\\new\\base.gguf"': r"no such file or folder; write a path with backslashes in single quotes",
    "[a]\npath = 'C:\\Users\\a b\\m.gguf'": r"C:\\\\Users\\\\a b\\\\m.gguf': there is no such file or folder$",
    '[a]\nhf = "nobody"': "does not name a model on the hub",
    '[a]\npath = "a.gguf"\nctx-sise = 1': "there is no setting ctx-sise; did you mean ctx-size",
    '[a]\npath = "a.gguf"\nctx-size = "many"': "--ctx-size|ctx_size",
    '[a]\npath = "a.gguf"\npinned = 1': "pinned must be true or false",
    '[a]\npath = "a.gguf"\naliases = "b"': "aliases must be an array",
    '[a]\npath = "a.gguf"\n[b]\npath = "a.gguf"\naliases = ["a"]': "Two models are called a",
}


def names(registry: Registry) -> list[str]:
    return [model.name for model in registry.models()]


def in_folder(folder: Path, *files: str) -> Registry:
    for name in files:
        (folder / name).touch()
    (folder / "safe").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "safe" / name).touch()
    return Registry(common(), folder, (), ())


def test_models_of_a_folder_are_called_as_their_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FlagError, match=r"no \.gguf file"):
        Registry(common(), tmp_path, (), ())
    registry = in_folder(tmp_path, "a-Q8_0.gguf", *PARTS, "mmproj-a.gguf", ".b.gguf", "notes.txt")
    assert names(registry) == ["a-Q8_0", "huge-Q4_K_M", "safe"]
    model = registry.find("huge-Q4_K_M")
    assert model.path == tmp_path / PARTS[0]
    assert registry.find("later") is None
    (tmp_path / "later.gguf").touch()
    assert registry.find("later") is not None


def test_what_has_been_downloaded_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name on the hub, if it can be loaded, behind which the models of our own cache folder come."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("POLARLM_CACHE", str(tmp_path / "own"))
    with pytest.raises(FlagError, match="--models hub: no model has been downloaded yet"):
        Registry(common(), HUB, (), ())
    for name in ("user--tiny", "user--speech"):
        folder = tmp_path / "hub" / f"models--{name}" / "snapshots" / "1"
        folder.mkdir(parents=True)
        make_model(folder)
    (folder / "config.json").write_text('{"model_type": "whisper"}')
    registry = Registry(common(), HUB, (), ())
    assert names(registry) == ["user/tiny"]
    where = tmp_path / "hub" / "models--user--tiny" / "snapshots" / "1"
    assert registry.find("user/tiny").path == where
    weights = (where / "model.safetensors").read_bytes()
    for content, there in ((weights[:99], []), (weights, ["user/tiny"])):  # damaged and mended meanwhile
        (where / "model.safetensors").write_bytes(content)
        assert names(registry) == there
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / demo.FILE_NAME).touch()
    assert names(registry) == ["user/tiny", "SmolLM2-135M-Instruct.Q4_1"]
    assert registry.find(demo.NAME).path == tmp_path / "own" / demo.FILE_NAME


def test_models_of_the_hub_are_found_without_their_quantization_if_there_is_one_alone() -> None:
    registry = Registry(common(), None, ["user/one:Q4_K_M", "user/two:Q4_0", "user/two:Q8_0"], ["user/one"])
    one = registry.find("user/one")
    assert (one.name, one.path, one.config.weights, one.pinned) == (
        "user/one:Q4_K_M",
        None,
        "hf:user/one:Q4_K_M",
        True,
    )
    assert registry.find("user/two") is None
    for name in ("user/two:Q8_0:latest", "hf.co/user/two:Q8_0", "https://huggingface.co/user/two:Q8_0"):
        assert registry.find(name) == registry.find("user/two:Q8_0") is not None


def test_a_name_in_another_case_or_normal_form_means_the_only_model_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    tables = "".join(f'["{name}"]\npath = "a.gguf"\n' for name in ("both", "Both", "cafe\u0301", "Tiny-Q4_K_M"))
    (tmp_path / "models.toml").write_text(f'{tables}aliases = ["Gpt"]\nlora = {{a = "a.gguf"}}\n', encoding="utf-8")
    registry = Registry(common(), tmp_path / "models.toml", ["User/One-GGUF:q4_k_m"], ["tiny-q4_k_m"])
    for name, expected in {
        "both": "both",
        "Both": "Both",
        "BOTH": None,
        "CAF\u00c9:latest": "cafe\u0301",
        "gpt": "Tiny-Q4_K_M",
        "GPT:a": "Tiny-Q4_K_M",
        "GPT:A": None,
        "User/One-GGUF:Q4_K_M": "User/One-GGUF:q4_k_m",
        "hf.co/user/one-gguf": "User/One-GGUF:q4_k_m",
    }.items():
        model = registry.find(name)
        assert (None if model is None else model.name) == expected, name


def test_a_toml_file_names_models_and_their_settings(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "models.toml").write_text(
        '[chat]\npath = "a.gguf"\naliases = ["gpt", "default"]\npinned = true\nctx-size = 128\ncalibration = false\n'
        '["user/repo:Q8_0"]\nhf = "user/repo:Q8_0"\nidle-unload = 0.5\n'
    )
    registry = Registry(common(ctx_size=64), tmp_path / "models.toml", (), ())
    chat, other = registry.models()
    assert (chat.name, chat.path, chat.pinned, chat.config.ctx_size) == ("chat", tmp_path / "a.gguf", True, 128)
    assert registry.find("gpt") == registry.find("default:latest") == chat
    assert (other.name, other.idle_minutes, other.config.ctx_size) == ("user/repo:Q8_0", 0.5, 64)


def test_a_wrong_toml_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    file = tmp_path / "models.toml"
    for written, sentence in WRONG_FILES.items():
        file.write_text(written)
        with pytest.raises(FlagError, match=sentence):
            Registry(common(), file, (), ())


def test_the_flags_of_several_models(tmp_path: Path) -> None:
    where = str(tmp_path)
    engine, server = read_command_line(["--models", where, "-hf", "a/b", "--pin", "c", "--idle-unload", "0.5"], {})
    assert (server.several, server.models, server.hub_models, server.pin) == (True, where, ("a/b",), ("c",))
    assert (server.idle_unload, engine.hf_repo) == (0.5, None)
    engine, server = read_command_line(["-hf", "a/b", "--hf-repo=c/d", "-c", "64"], {})
    assert (server.several, server.hub_models, engine) == (True, ("a/b", "c/d"), EngineConfig(ctx_size=64))
    engine, server = read_command_line(["-hf", "a/b"], {})
    assert (server.several, engine.weights) == (False, "hf:a/b")


def test_flags_that_contradict_each_other() -> None:
    for words in (
        ["--models", "/no/such/folder"],
        ["--models", ".", "--weights", "a"],
        ["--models", ".", "--unix", "/tmp/s"],
        ["-hf", "a/b", "-hf", "c/d", "--socket-port", "0"],
        ["--models", ".", "--adapters-folder", "."],
        ["--models", ".", "--idle-unload", "0"],
        ["--models", ".", "--models-memory", "much"],
        ["--idle-unload", "5"],
        ["--allow-pull"],
        ["--pin", "a"],
    ):
        with pytest.raises(FlagError):
            read_command_line(words, {})


def test_a_name_may_end_with_that_of_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    registry = Registry(replace(common(), lora={"sql": "adapter"}), tmp_path, (), ())
    model = registry.find("a:sql")
    assert model.name == "a"
    assert registry.find("a:tone") is None


def test_each_model_has_a_folder_of_sessions_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a_b").mkdir()  # as an earlier server has made it for a.b

    def folder(name: str) -> str:
        sessions_of = _child_config(ServerConfig(sessions=str(tmp_path)), name, "key").sessions
        assert sessions_of is not None
        return sessions_of

    names = ("a.b", "a_b", "a b", "nul", "nul_", "../a")
    folders = {name: folder(name) for name in names}
    assert folders["a.b"] == str(tmp_path / "a_b")
    assert len(set(folders.values())) == len(names)
    assert {Path(each).parent for each in folders.values()} == {tmp_path}
    assert {name: folder(name) for name in reversed(names)} == folders
