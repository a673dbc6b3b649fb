"""Folders with stray or missing parts: they load what a user means, or say what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from polarlm.model_loaders import LoadError, load
from tests.model_loaders.checkpoints import MODELS
from tests.tiny import tokenizer_json

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
PAGE = "\n<!DOCTYPE html><html>" + " " * 600
ONE, SHARDED = "llama_mha", "mistral_window_sharded"
WHOLE, INDEX, CONFIG, TOKENIZER = "model.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"
FIRST, SECOND = (f"model-0000{number}-of-00004.safetensors" for number in (1, 2))
STRAY = "model-00002-of-00007.safetensors"
SNAPSHOT = f"hub/models--x--y/snapshots/{'a' * 40}"


def indexed(tensor: str, file: str) -> str:
    """The index of the parts, which places a tensor in another file."""
    places = json.loads((MODELS / SHARDED / INDEX).read_text())["weight_map"]
    return json.dumps({"weight_map": {**places, tensor: file}})


# The model, what happens to its files (text is written, "> …" moves, "@ …" links, None deletes), the path that is
# given, and words in the message; None if the model loads.
Case = tuple[str, dict[str, str | None], str, str | None]
CASES: dict[str, Case] = {
    "other layouts beside": (
        SHARDED,
        {"consolidated.safetensors": "x", "original/consolidated.00.pth": "x"},
        ".",
        None,
    ),
    "an adapter beside": (ONE, {"adapter_config.json": "{}", "adapter_model.safetensors": "x"}, ".", None),
    "macOS's files": (ONE, {f"._{name}": "\0" for name in (CONFIG, WHOLE, TOKENIZER)}, ".", None),
    "a GGUF file beside": (ONE, {"a.gguf": "x", "mmproj.gguf": "x"}, ".", None),
    "an index that is out of date": (ONE, {INDEX: '{"weight_map": {"x": "gone.safetensors"}}'}, ".", None),
    "parts without an index": (SHARDED, {INDEX: None}, ".", None),
    "a stray part": (SHARDED, {STRAY: "x"}, ".", None),
    "a stray part, no index": (SHARDED, {INDEX: None, STRAY: "x"}, ".", None),
    "a small file beside parts": (SHARDED, {WHOLE: "x"}, ".", None),
    "another model's index": (SHARDED, {INDEX: '{"weight_map": {"x": "gone.safetensors"}}'}, ".", None),
    "a part that nobody needs": (SHARDED, {INDEX: indexed("mtp.fc.weight", "gone.safetensors")}, ".", None),
    "a tensor that nobody needs": (SHARDED, {INDEX: indexed("mtp.fc.weight", FIRST)}, ".", None),
    "a tensor in another part": (SHARDED, {INDEX: indexed("model.norm.weight", FIRST)}, ".", None),
    "a tensor in a part that is gone": (SHARDED, {INDEX: indexed("lm_head.weight", "gone.safetensors")}, ".", None),
    "a tensor of a part that is gone": (
        SHARDED,
        {INDEX: indexed("lm_head.weight", "gone.safetensors"), FIRST: None},
        ".",
        "gone.safetensors and 1 more of 4 parts are missing",
    ),
    "some parts, no index": (SHARDED, {INDEX: None, FIRST: None, SECOND: None}, ".", f"{FIRST} and 1 more of 4 parts"),
    "parts missing": (SHARDED, {FIRST: None, SECOND: None}, ".", f"{FIRST} and 1 more of 4 parts are missing"),
    "a part under way": (SHARDED, {FIRST: f"> {FIRST}.incomplete"}, ".", "not finished (" + FIRST),
    "weights under way": (ONE, {WHOLE: f"> {WHOLE}.crdownload"}, ".", f"({WHOLE}.crdownload): start it again"),
    "the hub's download": (ONE, {WHOLE: "> .cache/huggingface/download/a.incomplete"}, ".", "(a.incomplete): start it"),
    "aria2's download": (ONE, {f"{WHOLE}.aria2": "x"}, ".", f"{WHOLE} is not downloaded completely"),
    "another name": (ONE, {WHOLE: "> all.safetensors"}, ".", "if all.safetensors holds all of its weights, call it so"),
    "Mistral's layout": (ONE, {WHOLE: "> consolidated.safetensors"}, ".", "consolidated.safetensors is in Mistral's"),
    "no configuration": (ONE, {CONFIG: None}, ".", "has weights but no config.json; put"),
    "no tokenizer": (
        ONE,
        {TOKENIZER: None, "vocab.json": "{}"},
        ".",
        "next to its weights (vocab.json cannot be read)",
    ),
    "a pointer as weights": (ONE, {WHOLE: POINTER}, ".", f"{WHOLE} is a pointer of Git LFS"),
    "a pointer as a part": (SHARDED, {SECOND: POINTER}, ".", f"{SECOND} is a pointer of Git LFS"),
    "a pointer as its model": (ONE, {TOKENIZER: None, "tokenizer.model": POINTER}, ".", "is a pointer of Git LFS"),
    "a pointer as GGUF": (ONE, {"a.gguf": POINTER}, "a.gguf", "is a pointer of Git LFS"),
    "a web page": (ONE, {WHOLE: PAGE}, ".", f"{WHOLE} is a web page"),
    "GGUF beside config.json": (
        ONE,
        {WHOLE: None, "._a.gguf": "x", "b.gguf": "x", "a-mmproj.gguf": "x"},
        ".",
        "/b.gguf",
    ),
    "GGUF in parts": (
        ONE,
        {WHOLE: None, **{f"a-0000{n}-of-00002.gguf": "x" for n in (1, 2)}},
        ".",
        "00001-of-00002.gguf",
    ),
    "a projector alone": (
        ONE,
        {WHOLE: None, CONFIG: None, "mmproj-F16.gguf": "x"},
        ".",
        "reads images (mmproj-F16.gguf)",
    ),
    "a folder too high": (ONE, {CONFIG: f"> m/{CONFIG}", WHOLE: f"> m/{WHOLE}"}, ".", "give one, such as {root}/m."),
    "GGUF in folders below": (ONE, {CONFIG: None, WHOLE: None, "Q8/a.gguf": "x"}, ".", "such as {root}/Q8/a.gguf."),
    "a folder too deep": (ONE, {"original/a.pth": "x"}, "original", "is only a part of the model in {root};"),
    "a file of a folder": (ONE, {}, CONFIG, "give its folder, {root},"),
    "a link to nothing": (ONE, {WHOLE: "@ blobs/gone"}, ".", f"{WHOLE} is a link to a file that does not exist"),
    **{
        f"the hub's cache at {place}": (
            ONE,
            {CONFIG: f"> {SNAPSHOT}/{CONFIG}", WHOLE: f"> {SNAPSHOT}/{WHOLE}", "hub/models--x--y/blobs/a": "x"},
            place,
            "such as {root}/" + SNAPSHOT,
        )
        for place in ("hub", "hub/models--x--y/blobs")
    },
    "a link to no GGUF": (ONE, {"a.gguf": "@ blobs/gone"}, "a.gguf", "a.gguf is a link to a file that does not exist"),
    "a blob of the hub's cache": (ONE, {WHOLE: "> blobs/a1b2"}, "blobs/a1b2", "give one, or the folder of a model"),
    "a pickle": (ONE, {WHOLE: "> pytorch_model.bin"}, ".", "pickle (pytorch_model.bin)"),
    "a pickle's file": (ONE, {WHOLE: "> pytorch_model.bin"}, "pytorch_model.bin", "pytorch_model.bin is a pickle"),
    "a pickle alone": (ONE, {WHOLE: "> pytorch_model.bin", CONFIG: None}, ".", "pickle (pytorch_model.bin)"),
    "weights without their folder": (ONE, {}, WHOLE, "give its folder, {root}"),
    "an empty folder": (ONE, {CONFIG: None, WHOLE: None}, ".", "no config.json"),
    "no weights": (ONE, {WHOLE: None}, ".", "no weights"),
    "an index without a map": (SHARDED, {INDEX: "{}"}, ".", "weight_map"),
    **{
        f"a configuration that is no JSON {number}": (
            ONE,
            {CONFIG: text},
            ".",
            f"{CONFIG} is {'not valid JSON' if text else 'empty'}",
        )
        for number, text in enumerate(("", "{", "[" * 100_000, '{"a": 1}}', "\xff", '{"a": ' + "9" * 5000 + "}"))
    },
    "a list as configuration": (ONE, {CONFIG: "[1]"}, ".", "holds a list"),
    **{
        f"nothing at {path[:9]!r}": (ONE, {}, path, "does not exist")
        for path in ("nothing", "model.gguf", "x" * 5000, "a\0b")
    },
    "a path in quotation marks": (ONE, {}, "'{root}'", "does not exist; give {root}."),
    "a path without its end": (ONE, {"a.gguf": "x"}, "a", "does not exist; give {root}/a.gguf."),
}


def changed(folder: Path, changes: dict[str, str | None]) -> None:
    for name, change in changes.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if change is None:
            file.unlink()
        elif change.startswith("> "):
            (folder / change[2:]).parent.mkdir(parents=True, exist_ok=True)
            file.rename(folder / change[2:])
        elif change.startswith("@ "):
            file.unlink(missing_ok=True)
            file.symlink_to(folder / change[2:])
        else:
            file.write_text(change, encoding="latin-1")


def test_a_folder_loads_or_the_advice_helps(tmp_path: Path) -> None:
    for number, (name, changes, place, message) in enumerate(CASES.values()):
        root = Path(shutil.copytree(MODELS / name, tmp_path / str(number) / "root"))
        (root / TOKENIZER).write_text(tokenizer_json(), encoding="utf-8")
        changed(root, changes)
        path = place.format(root=root) if "{root}" in place else root / place
        if message is None:
            model = load(path)
            assert model.tokenizer.vocab_size > 0
            model.weights.close()
            continue
        with pytest.raises(LoadError) as caught:
            _ = load(path).tokenizer
        assert message.format(root=root) in str(caught.value)
        assert str(caught.value).endswith(".")


def test_of_two_sets_of_weights_the_whole_file_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As transformers does; a line in the log says so."""
    root = Path(shutil.copytree(MODELS / ONE, tmp_path / "root"))
    (root / INDEX).write_text("{}")
    load(root).weights.close()
    assert caplog.messages == [f"{root} has both {WHOLE} and {INDEX}: the weights are read from the first"]


def test_what_of_a_folder_is_not_as_it_seems_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = Path(shutil.copytree(MODELS / SHARDED, tmp_path / "root"))
    (root / STRAY).write_text("x")
    (root / INDEX).write_text(indexed("mtp.fc.weight", FIRST))
    load(root).weights.close()
    assert caplog.messages == [
        f"{root} has {STRAY} beside the parts of its weights: it is not read",
        f"{root} has no file with the tensor 'mtp.fc.weight', which {INDEX} names: the model does without",
    ]
