"""What the files of a repository are for: its model is found among all that lies beside it, on a hub or in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from huggingface_hub import constants

from polarlm import model_loaders
from polarlm.model_loaders import hub as hub_package
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.files.repository import Role, role_of_name
from polarlm.model_loaders.hub import local, parse
from polarlm.server.models.registry import Registry
from tests.model_loaders.checkpoints import finish
from tests.model_loaders.hub_server import Hub, Repository
from tests.model_loaders.test_vision_encoders import DEEP, write_gguf, write_mmproj
from tests.server.models.running import common

# What a repository holds, and for some names the file that is meant, or words of the refusal. "M" is a model, "O" one
# of an unknown family, the others say that they are something else; "?" says nothing.
Layout = tuple[dict[str, str], dict[str, str]]
LAYOUTS: dict[str, Layout] = {
    "heads beside": (
        {
            "m-Q8_0.gguf": "M",
            "m-Q4_K_M.gguf": "M",
            "mtp-m.gguf": "H",
            "MTP/mtp-m-Q8_0.gguf": "H",
            "MTP/m-BF16.gguf": "H",
        },
        {
            "": "m-Q8_0.gguf",
            ":q4_k_m": "m-Q4_K_M.gguf",
            ":m-Q8_0.gguf": "m-Q8_0.gguf",
            ":BF16": "MTP/m-BF16.gguf of user/repo is a draft head",
            ":mtp-m.gguf": "mtp-m.gguf of user/repo is a draft head",
        },
    ),
    "heads by their contents": (
        {"m-Q6_K.gguf": "M", "m-assistant-Q8_0.gguf": "H", "m-draft-Q8_0.gguf": "D"},
        {"": "m-Q6_K.gguf", ":Q8_0": "is a draft head"},
    ),
    "heads of which the name alone tells": ({"m-Q6_K.gguf": "M", "dflash-m-Q8_0.gguf": "?"}, {"": "m-Q6_K.gguf"}),
    "mtp in a model's name": (
        {"mtp-7b-Q8_0.gguf": "M", "x-mtp-Q4_0.gguf": "M", "mtp-x-mtp-Q4_0.gguf": "H"},
        {"": "x-mtp-Q4_0.gguf", ":Q8_0": "mtp-7b-Q8_0.gguf", ":Q4_0": "x-mtp-Q4_0.gguf"},
    ),
    "a model called like a head": ({"mtp-7b-Q8_0.gguf": "M"}, {"": "mtp-7b-Q8_0.gguf"}),
    "heads alone": ({"mtp-m-Q8_0.gguf": "H"}, {"": "mtp-m-Q8_0.gguf of user/repo is a draft head"}),
    "a projector, a matrix and an adapter": (
        {"m-imatrix-Q4_0.gguf": "M", "m-vision-F16.gguf": "P", "m-imatrix.gguf": "?", "m-tune-Q8_0.gguf": "A"},
        {
            "": "m-imatrix-Q4_0.gguf",
            ":Q8_0": "is an adapter",
            ":m-vision-F16.gguf": "is the part of a model that reads",
        },
    ),
    "a model of another family": (
        {"a-Q8_0.gguf": "O", "b-Q4_0.gguf": "M"},
        {"": "b-Q4_0.gguf", ":Q8_0": "'unheard-of'"},
    ),
    "a file of another format": ({"m-Q8_0.gguf": "<html>", "m-Q4_0.gguf": "M"}, {"": "m-Q4_0.gguf", ":Q8_0": "no"}),
    "parts in folders, and a stray one": (
        {f"Q8_0/m-0000{n}-of-00002.gguf": "M" for n in (1, 2)} | {"Q8_0/m-00003-of-00003.gguf": "M"},
        {"": "m-00001-of-00002.gguf", ":Q8_0": "m-00001-of-00002.gguf", ":Q8_0/m-00003-of-00003.gguf": "is not whole"},
    ),
    "one name in two folders": (
        {"a/m-Q8_0.gguf": "M", "b/m-Q8_0.gguf": "M"},
        {"": "user/repo:a/m-Q8_0.gguf", ":b/m-Q8_0.gguf": "b/m-Q8_0.gguf", ":b": "b/m-Q8_0.gguf"},
    ),
    "an index without weights": (
        {"m-Q8_0.gguf": "M", "config.json": "{}", "model.safetensors.index.json": "{}", "tokenizer.json": "{}"},
        {"": "m-Q8_0.gguf"},
    ),
}


@pytest.fixture(scope="session")
def contents(tmp_path_factory: pytest.TempPathFactory, small_ggufs: dict[str, bytes]) -> dict[str, bytes]:
    """What files say of themselves, by a letter."""
    folder = tmp_path_factory.mktemp("contents")

    def written(arch: str, kind: str, **more: int) -> bytes:
        writer = gguf.GGUFWriter(folder / "f.gguf", arch)
        writer.add_type(kind)
        for key, value in more.items():
            writer.add_uint32(f"{arch}.{key}", value)
        finish(writer)
        return (folder / "f.gguf").read_bytes()

    return {
        "M": small_ggufs["tiny-Q4_K_M.gguf"],
        "H": written("gemma4-assistant", "model"),
        "D": written("qwen35", "model", block_count=29, nextn_predict_layers=1)[:8]
        + (4).to_bytes(8, "little")
        + written("qwen35", "model", block_count=29, nextn_predict_layers=1)[16:],
        "P": written("clip", "mmproj"),
        "A": written("llama", "adapter"),
        "O": written("unheard-of", "model"),
        "?": b"GGUF",
    }


def files_of(layout: dict[str, str], contents: dict[str, bytes]) -> dict[str, bytes]:
    """The files, no two of which are alike, as the hub's cache keeps like ones once."""
    return {
        path: contents[kind] + bytes(number) if kind in contents else kind.encode()
        for number, (path, kind) in enumerate(layout.items())
    }


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_name_means_a_model(hub: Hub, contents: dict[str, bytes], layout: Layout) -> None:
    hub.repositories["user/repo"] = Repository(files_of(layout[0], contents))
    for name, meant in layout[1].items():
        try:
            found = hub_package.fetch(parse(f"user/repo{name}")).as_posix()
        except LoadError as refusal:
            found = str(refusal)
        assert meant in found
        if not name and Path(found).is_file():
            label = hub_package.quantization_of(Path(found))
            assert hub_package.fetch(parse(f"user/repo:{label}")) == Path(found)


def test_what_is_asked_for_is_read_and_nothing_else(hub: Hub, contents: dict[str, bytes]) -> None:
    layout = {"a-Q8_0.gguf": "O", "b-Q4_0.gguf": "M", "mtp-b-Q4_0.gguf": "H", "mmproj-F16.gguf": "P"}
    hub.repositories["user/repo"] = Repository(files_of(layout, contents))
    assert hub_package.fetch(parse("user/repo:b-Q4_0.gguf")).name == "b-Q4_0.gguf"
    assert [path for path in layout if hub.ranges_of(path)] == ["b-Q4_0.gguf"]


def test_folders_and_lists_sort_as_the_hub_does(
    contents: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = {"m-Q8_0.gguf": "M", "mtp-7b-Q4_0.gguf": "M", "mtp-m-Q8_0.gguf": "H", "m-assistant-F16.gguf": "H"}
    layout |= {"MTP/m-Q8_0.gguf": "H", "sub/n-BF16.gguf": "M", "sub/m-Q8_0.gguf": "M", "mmproj-F16.gguf": "P"}
    layout |= {"part-00001-of-00002.gguf": "M", "lora.gguf": "A", "odd.gguf": "P"}
    snapshot = tmp_path / "models--user--repo" / "snapshots" / "1"
    for path, content in files_of(layout, contents).items():
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path).write_bytes(content)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    listed = ["BF16", "Q4_0", "m-Q8_0.gguf", "sub/m-Q8_0.gguf"]
    assert [one.name.removeprefix("user/repo:") for one in local.models()] == listed
    served = [model.name for model in Registry(common(), snapshot, (), ()).models()]
    assert served == ["m-Q8_0", "mtp-7b-Q4_0", "n-BF16", "sub/m-Q8_0"]
    with pytest.raises(LoadError, match=r"holds GGUF files, .* such as .*/m-Q8_0.gguf\.$"):
        model_loaders.load(snapshot)
    with pytest.raises(LoadError, match=r"holds only a draft head .* \(m-Q8_0.gguf\); give the model's own"):
        model_loaders.load(snapshot / "MTP")
    for path, role in (("MTP/m-Q8_0.gguf", "a draft head"), ("lora.gguf", "an adapter"), ("odd.gguf", "the part of")):
        with pytest.raises(LoadError, match=rf"/{path} is {role}.*, not a model; give "):
            model_loaders.load(snapshot / path)


def test_the_roles_of_names() -> None:
    names = {
        Role.MODEL: ("m-mtp-Q8_0", "Qwen3.6-27B-MTP-Q4_K_M", "m-imatrix-Q4_0", "m-lora-merged-Q8_0", "drafts/m-Q4_0"),
        Role.HEAD: ("mtp-m", "m-Q8_0-MTP", "dflash-m-F16", "eagle3-m-Q8_0", "MTP/m-BF16", "draft/m-F16"),
        Role.PROJECTOR: ("mmproj-F16", "m.mmproj-f16", "mmproj/m-F16"),
        Role.MATRIX: ("imatrix", "m-imatrix", "imatrix_unsloth"),
        Role.ADAPTER: ("adapter-F16", "lora", "m-lora-F16"),
        Role.VOCABULARY: ("ggml-vocab-llama",),
    }
    for role, paths in names.items():
        assert {path: role_of_name(f"{path}.gguf") for path in paths} == dict.fromkeys(paths, role)


# -- companions ----------------------------------------------------------------------------------------------------

PLACES = {  # the model, its projector, and what lies elsewhere; whether the projector is the model's
    "beside": ("m-Q8_0.gguf", "mmproj-F32.gguf", {}, True),
    "in a folder": ("m-Q8_0.gguf", "mmproj/m-F32.gguf", {}, True),
    "above": ("Q8_0/m-Q8_0.gguf", "mmproj-F32.gguf", {}, True),
    "nearer": ("m-Q8_0.gguf", "mmproj-F32.gguf", {"old/mmproj-F16.gguf": DEEP}, True),
    "above and not aside": ("a/m-Q8_0.gguf", "mmproj-F32.gguf", {"b/mmproj-F16.gguf": DEEP}, True),
    "of two by name": ("a/m-Q8_0.gguf", "mmproj-m-F32.gguf", {"mmproj-n-F16.gguf": DEEP}, True),
    "of another model": ("m-Q8_0.gguf", "n/mmproj-F32.gguf", {"n/n-Q4_0.gguf": None}, False),
}


@pytest.mark.parametrize(("model", "projector", "others", "is_its"), PLACES.values(), ids=PLACES)
def test_the_part_that_reads_images_is_found_where_it_lies(
    hub: Hub, tmp_path: Path, model: str, projector: str, others: dict[str, str | None], is_its: bool
) -> None:
    folder = tmp_path / "files"
    for path in (model, projector, *others):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
    write_gguf(folder / model, DEEP)
    write_mmproj(folder / projector, DEEP)
    for path, name in others.items():
        write_gguf(folder / path, DEEP) if name is None else write_mmproj(folder / path, name)
        with (folder / path).open("ab") as file:
            file.write(b"\0")
    hub.repositories["user/repo"] = Repository(
        {path: (folder / path).read_bytes() for path in (model, projector, *others)}
    )
    said: list[str] = []
    fetched = hub_package.fetch(parse(f"user/repo:{model}"), verbose=said.append)
    in_folder = [model_loaders.load(folder / model)] if not model.startswith("a/") else []
    for loaded in (model_loaders.load(fetched), *in_folder):
        loaded.close()
        taken = [] if loaded.vision_weights is None else [path.name for path in loaded.vision_weights.files()]
        assert taken == [Path(projector).name] * is_its
    assert any("reads no images: it has no mmproj file" in line for line in said) is not is_its


def test_a_repository_without_a_tokenizer_is_refused_before_its_weights(
    hub: Hub, small_folder: dict[str, bytes]
) -> None:
    files = {name: content for name, content in small_folder.items() if not name.startswith("tokenizer")}
    hub.repositories["user/repo"] = Repository({**files, "vocab.json": b"{}"})
    with pytest.raises(LoadError, match=r"user/repo has neither tokenizer.json nor tokenizer.model"):
        hub_package.fetch(parse("user/repo"))
    assert hub.ranges_of("model.safetensors") == []


def test_a_vocabulary_that_is_not_known_is_told_before_the_weights(hub: Hub, contents: dict[str, bytes]) -> None:
    content = contents["M"].replace(b"smollm", b"sm0llm", 1)
    hub.repositories["user/repo"] = Repository({"m-Q8_0.gguf": content})
    with pytest.raises(LoadError, match=r"m-Q8_0.gguf of user/repo splits text into words as 'sm0llm' does"):
        hub_package.fetch(parse("user/repo"))
    assert len(hub.ranges_of("m-Q8_0.gguf")) == 1


def test_a_tokenizer_and_a_template_in_a_folder_inside_are_found(hub: Hub, small_folder: dict[str, bytes]) -> None:
    """Not those of another model, which has a configuration of its own."""
    files = {path: content for path, content in small_folder.items() if path != "tokenizer.json"}
    files |= {"tokenizer/tokenizer.json": small_folder["tokenizer.json"], "tokenizer/chat_template.jinja": b"there"}
    files |= {"draft/config.json": b"{}", "draft/tokenizer.json": b"{}"}
    hub.repositories["user/repo"] = Repository(files)
    model = model_loaders.load("user/repo")
    model.close()
    assert model.tokenizer.vocab_size > 0
    assert model.template.source == "there"


def test_a_gguf_file_without_a_template_takes_that_of_its_repository(hub: Hub, contents: dict[str, bytes]) -> None:
    hub.repositories["user/repo"] = Repository({"Q4_K_M/m.gguf": contents["M"], "chat_template.jinja": b"there"})
    model = model_loaders.load("user/repo")
    model.close()
    assert model.template.source == "there"
    assert model.path.name == "m.gguf"


def test_of_models_in_folders_the_repository_is_told_to_be_downloaded(hub: Hub) -> None:
    hub.repositories["user/repo"] = Repository({f"a/{name}": b"{}" for name in ("config.json", "model.safetensors")})
    with pytest.raises(LoadError, match=r"holds models in folders \(a\)"):
        hub_package.fetch(parse("user/repo"))


def test_an_adapter_and_a_head_beside_a_model_are_parts_alone(hub: Hub, contents: dict[str, bytes]) -> None:
    layout = {"m-Q8_0.gguf": "M", "m-tune-F16.gguf": "A", "eagle3-m-Q8_0.gguf": "H"}
    hub.repositories["user/repo"] = Repository(files_of(layout, contents))
    assert hub_package.fetch_supplement(parse("user/repo"), "adapter").name == "m-tune-F16.gguf"
    assert hub_package.fetch_supplement(parse("user/repo"), "head").name == "eagle3-m-Q8_0.gguf"
    assert hub_package.fetch(parse("user/repo")).name == "m-Q8_0.gguf"


def test_parts_without_an_index_are_fetched_and_a_stray_one_is_not(hub: Hub, small_folder: dict[str, bytes]) -> None:
    files = {path: content for path, content in small_folder.items() if path != "model.safetensors"}
    files["model-00001-of-00001.safetensors"] = small_folder["model.safetensors"]
    files |= {"model-00002-of-00004.safetensors": b"x", "consolidated.safetensors": b"x", "model.safetensors": b"x"}
    hub.repositories["user/repo"] = Repository(files)
    folder = hub_package.fetch(parse("user/repo"))
    assert [path.name for path in folder.glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    assert json.loads((folder / "config.json").read_text())
    model_loaders.load(folder).close()
