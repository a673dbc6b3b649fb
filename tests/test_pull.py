"""`polarlm pull`: a model of the hub is fetched, and nothing is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarlm import pull
from polarlm.model_loaders import hub as hub_package
from tests.model_loaders.hub_server import Hub, Repository
from tests.model_loaders.test_vision_encoders import write_gguf


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
    assert last == f"user/tiny:Q8_0 takes {mib:.1f} MiB on the disk. To talk to it: polarlm chat user/tiny:Q8_0"


def test_a_prepared_model_is_fitted_ahead(
    hub: Hub, small_ggufs: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLARLM_CACHE", str(tmp_path / "ours"))
    hub.repositories["user/tiny"] = Repository(small_ggufs)
    flags = ["--device", "cpu", "-c", "256"]
    assert pull.main(["user/tiny:Q8_0", *flags]) == 0
    assert not (tmp_path / "ours").exists()
    assert pull.main(["-hf", "user/tiny:Q8_0", "--prepare", *flags]) == 0
    kept = {file.relative_to(tmp_path / "ours").parts[0].partition("-")[0] for file in (tmp_path / "ours").rglob("*")}
    assert "encoding" in kept


def test_a_context_that_does_not_fit(
    hub: Hub, small_ggufs: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["user/tiny"] = Repository(small_ggufs)
    assert pull.main(["user/tiny", "--device", "cpu", "-c", str(1 << 40)]) == 2
    assert "error: Of user/tiny, no file fits in memory here" in capsys.readouterr().err


BESIDE = ("README.md", "optimizer.pt")  # which no part needs
ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"an adapter"}
KINDS = {  # what a repository has, and what is said of it
    "a folder of weights": "To talk to it: polarlm chat user/it\n",
    "GGUF files": "To talk to it: polarlm chat user/it:Q8_0\n",
    "what reads images": "To talk to it: polarlm chat user/it:Q8_0\n",
    "a folder of an adapter": "polarlm chat MODEL --lora hf:user/it\n",
    "an adapter's GGUF file": "polarlm chat MODEL --lora hf:user/it:F16\n",
    "a folder of a head": "--model-draft hf:user/it\n",
    "a head's GGUF file": "--model-draft hf:user/it:Q8_0\n",
    "a pack": "polarlm chat MODEL --pack hf:user/it\n",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_of_any_kind_is_mended(
    hub: Hub,
    small_ggufs: dict[str, bytes],
    small_folder: dict[str, bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    """One that is cut off by all who load it; one of other bytes by `polarlm pull`."""
    images = write_gguf(tmp_path / "m.gguf", "qwen3_vl_deepstack_tied").read_bytes()
    files, damaged, supplement = {
        "a folder of weights": (small_folder, "model.safetensors", None),
        "GGUF files": (small_ggufs, "tiny-Q8_0.gguf", None),
        "what reads images": ({"m-Q8_0.gguf": images, "mmproj-F16.gguf": b"GGUF of images"}, "mmproj-F16.gguf", None),
        "a folder of an adapter": (
            {**ADAPTER, **dict.fromkeys(BESIDE, b"x"), "tokenizer.json": b"{}"},
            "adapter_model.safetensors",
            "adapter",
        ),
        "an adapter's GGUF file": ({"adapter-F16.gguf": b"GGUF of one"}, "adapter-F16.gguf", "adapter"),
        "a folder of a head": (
            # Its configuration is of no model that is supported, and it needs no tokenizer.
            {
                **dict.fromkeys(BESIDE, b"x"),
                "config.json": b'{"draft_vocab_size": 8}',
                "model.safetensors": b"x",
            },
            "config.json",
            "head",
        ),
        "a head's GGUF file": (
            {"eagle3-m-Q8_0.gguf": b"GGUF of a head"},
            "eagle3-m-Q8_0.gguf",
            "head",
        ),
        "a pack": ({"a.pack": b"tokens", "README.md": b""}, "a.pack", "pack"),
    }[kind]
    hub.repositories["user/it"] = Repository(files)

    def load() -> Path:
        name = hub_package.parse("user/it")
        return hub_package.fetch_supplement(name, supplement) if supplement else hub_package.fetch(name)

    where, wanted = load(), files[damaged]
    file = (where if where.is_dir() else where.parent) / damaged
    assert not {*BESIDE} & {path.name for path in file.parent.iterdir()}
    for mend, content in ((load, wanted[:5]), (None, wanted[:5]), (None, wanted[::-1])):
        file.resolve().write_bytes(content)
        if mend is not None:
            mend()
        else:
            assert pull.main(["user/it", "--device", "cpu"]) == 0
            said = capsys.readouterr()
            assert said.out == f"{where}\n"
            assert said.err.endswith(KINDS[kind]), said.err
            assert ("is damaged in the cache" in said.err) == (content == wanted[::-1])
        assert file.read_bytes() == wanted


def test_what_lies_there_of_another_commit_is_checked(hub: Hub, small_folder: dict[str, bytes]) -> None:
    hub.repositories["user/it"] = Repository(small_folder)
    where = hub_package.fetch(hub_package.parse("user/it"))
    (where / "model.safetensors").resolve().write_bytes(small_folder["model.safetensors"][::-1])
    hub.repositories["user/it"].commit = "b" * 40
    assert pull.main(["user/it", "--device", "cpu"]) == 0
    assert (where.with_name("b" * 40) / "model.safetensors").read_bytes() == small_folder["model.safetensors"]


def test_only_a_model_is_prepared(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repositories["user/it"] = Repository(ADAPTER)
    assert pull.main(["user/it", "--prepare", "--device", "cpu"]) == 2
    assert "error: --prepare is for models, and user/it is of the kind adapter" in capsys.readouterr().err


WRONG = [
    ([], "MODEL is missing"),
    (["tiny"], "'tiny' does not name a model on the hub: write user/repo"),
    (["user/none"], "There is no model user/none on the hub"),
    (["user/none", "-c", "-1"], "--ctx-size -1: give a number of tokens"),
    (["user/none", "--device", "tpu"], "--device tpu: there are auto, cpu and cuda"),
]


def test_what_cannot_be_fetched_is_a_sentence(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, problem in WRONG:
        assert pull.main(argv) == 2
        assert f"error: {problem}" in capsys.readouterr().err


def test_ctrl_c_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub_package, "pull", stopped)
    assert pull.main(["user/tiny", "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "Stopped\n"
