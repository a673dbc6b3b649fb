"""Folders with stray or missing parts: they load what a user means, or say what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

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


class Case(NamedTuple):
    """What happens to the files of a model: text is written, "> …" moves, "@ …" links, None deletes."""

    model: str
    changes: dict[str, str | None]
    message: str | None = None  # words in it; None if the model loads
    path: str = "."  # that is given


CASES = {
    "other layouts beside": Case(SHARDED, {"consolidated.safetensors": "x", "original/consolidated.00.pth": "x"}),
    "an adapter beside": Case(ONE, {"adapter_config.json": "{}", "adapter_model.safetensors": "x"}),
    "macOS's files": Case(ONE, {f"._{name}": "\0" for name in (CONFIG, WHOLE, TOKENIZER)}),
    "a GGUF file beside": Case(ONE, {"a.gguf": "x", "mmproj.gguf": "x"}),
    "an index that is out of date": Case(ONE, {INDEX: '{"weight_map": {"x": "gone.safetensors"}}'}),
    "parts without an index": Case(SHARDED, {INDEX: None}),
    "a stray part": Case(SHARDED, {STRAY: "x"}),
    "a stray part, no index": Case(SHARDED, {INDEX: None, STRAY: "x"}),
    "a small file beside parts": Case(SHARDED, {WHOLE: "x"}),
    "another model's index": Case(SHARDED, {INDEX: '{"weight_map": {"x": "gone.safetensors"}}'}),
    "a part that nobody needs": Case(SHARDED, {INDEX: indexed("mtp.fc.weight", "gone.safetensors")}),
    "a tensor that nobody needs": Case(SHARDED, {INDEX: indexed("mtp.fc.weight", FIRST)}),
    "a tensor in another part": Case(SHARDED, {INDEX: indexed("model.norm.weight", FIRST)}),
    "a tensor in a part that is gone": Case(SHARDED, {INDEX: indexed("lm_head.weight", "gone.safetensors")}),
    "a tensor of a part that is gone": Case(
        SHARDED,
        {INDEX: indexed("lm_head.weight", "gone.safetensors"), FIRST: None},
        "gone.safetensors and 1 more of 4 parts are missing",
    ),
    "some parts, no index": Case(SHARDED, {INDEX: None, FIRST: None, SECOND: None}, f"{FIRST} and 1 more of 4 parts"),
    "parts missing": Case(SHARDED, {FIRST: None, SECOND: None}, f"{FIRST} and 1 more of 4 parts are missing"),
    "a part under way": Case(SHARDED, {FIRST: f"> {FIRST}.incomplete"}, f"not finished ({FIRST}"),
    "weights under way": Case(ONE, {WHOLE: f"> {WHOLE}.crdownload"}, f"({WHOLE}.crdownload): start it again"),
    "the hub's download": Case(ONE, {WHOLE: "> .cache/huggingface/download/a.incomplete"}, "(a.incomplete): start it"),
    "aria2's download": Case(ONE, {f"{WHOLE}.aria2": "x"}, f"{WHOLE} is not downloaded completely"),
    "another name": Case(ONE, {WHOLE: "> all.safetensors"}, "if all.safetensors holds all of its weights, call it so"),
    "Mistral's layout": Case(ONE, {WHOLE: "> consolidated.safetensors"}, "consolidated.safetensors is in Mistral's"),
    "no configuration": Case(ONE, {CONFIG: None}, "has weights but no config.json; put"),
    "no tokenizer": Case(ONE, {TOKENIZER: None, "vocab.json": "{}"}, "next to its weights (vocab.json cannot be read)"),
    "a pointer as weights": Case(ONE, {WHOLE: POINTER}, f"{WHOLE} is a pointer of Git LFS"),
    "a pointer as a part": Case(SHARDED, {SECOND: POINTER}, f"{SECOND} is a pointer of Git LFS"),
    "a pointer as its model": Case(ONE, {TOKENIZER: None, "tokenizer.model": POINTER}, "is a pointer of Git LFS"),
    "a pointer as GGUF": Case(ONE, {"a.gguf": POINTER}, "is a pointer of Git LFS", "a.gguf"),
    "a web page": Case(ONE, {WHOLE: PAGE}, f"{WHOLE} is a web page"),
    "GGUF beside config.json": Case(
        ONE, {WHOLE: None, "._a.gguf": "x", "b.gguf": "x", "a-mmproj.gguf": "x"}, "/b.gguf"
    ),
    "GGUF in parts": Case(
        ONE, {WHOLE: None, **{f"a-0000{n}-of-00002.gguf": "x" for n in (1, 2)}}, "00001-of-00002.gguf"
    ),
    "a projector alone": Case(
        ONE, {WHOLE: None, CONFIG: None, "mmproj-F16.gguf": "x"}, "reads images (mmproj-F16.gguf)"
    ),
    "a folder too high": Case(ONE, {CONFIG: f"> m/{CONFIG}", WHOLE: f"> m/{WHOLE}"}, "give one, such as {root}/m."),
    "GGUF in folders below": Case(ONE, {CONFIG: None, WHOLE: None, "Q8/a.gguf": "x"}, "such as {root}/Q8/a.gguf."),
    "a folder too deep": Case(ONE, {"original/a.pth": "x"}, "is only a part of the model in {root};", "original"),
    "a file of a folder": Case(ONE, {}, "give its folder, {root},", CONFIG),
    "a link to nothing": Case(ONE, {WHOLE: "@ blobs/gone"}, f"{WHOLE} is a link to a file that does not exist"),
    **{
        f"the hub's cache at {path}": Case(
            ONE,
            {CONFIG: f"> {SNAPSHOT}/{CONFIG}", WHOLE: f"> {SNAPSHOT}/{WHOLE}", "hub/models--x--y/blobs/a": "x"},
            "such as {root}/" + SNAPSHOT,
            path,
        )
        for path in ("hub", "hub/models--x--y/blobs")
    },
    "a link to no GGUF": Case(ONE, {"a.gguf": "@ blobs/gone"}, "a.gguf is a link to a file that does not", "a.gguf"),
    "a blob of the hub's cache": Case(ONE, {WHOLE: "> blobs/a1b2"}, "give one, or the folder of a model", "blobs/a1b2"),
    "a pickle": Case(ONE, {WHOLE: "> pytorch_model.bin"}, "pickle (pytorch_model.bin)"),
    "a pickle's file": Case(ONE, {WHOLE: "> a.bin"}, "a.bin is a pickle", "a.bin"),
    "a pickle alone": Case(ONE, {WHOLE: "> pytorch_model.bin", CONFIG: None}, "pickle (pytorch_model.bin)"),
    "weights without their folder": Case(ONE, {}, "give its folder, {root}", WHOLE),
    "an empty folder": Case(ONE, {CONFIG: None, WHOLE: None}, "no config.json"),
    "no weights": Case(ONE, {WHOLE: None}, "no weights"),
    "an index without a map": Case(SHARDED, {INDEX: "{}"}, "weight_map"),
    **{
        f"a configuration that is no JSON {number}": Case(
            ONE, {CONFIG: text}, f"{CONFIG} is {'not valid JSON' if text else 'empty'}"
        )
        for number, text in enumerate(("", "{", "[" * 100_000, '{"a": 1}}', "\xff", '{"a": ' + "9" * 5000 + "}"))
    },
    "a list as configuration": Case(ONE, {CONFIG: "[1]"}, "holds a list"),
    **{
        f"nothing at {path[:9]!r}": Case(ONE, {}, "does not exist", path)
        for path in ("nothing", "model.gguf", "x" * 5000, "a\0b")
    },
    "a path in quotation marks": Case(ONE, {}, "does not exist; give {root}.", "'{root}'"),
    "a path without its end": Case(ONE, {"a.gguf": "x"}, "does not exist; give {root}/a.gguf.", "a"),
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
    for number, (model, changes, message, given) in enumerate(CASES.values()):
        root = Path(shutil.copytree(MODELS / model, tmp_path / str(number) / "root"))
        (root / TOKENIZER).write_text(tokenizer_json(), encoding="utf-8")
        changed(root, changes)
        path = given.format(root=root) if "{root}" in given else root / given
        if message is None:
            loaded = load(path)
            assert loaded.tokenizer.vocab_size > 0
            loaded.weights.close()
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
