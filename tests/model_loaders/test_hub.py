"""Models of the hub: which files are fetched, how a transfer goes on, and a sentence for everything that goes wrong."""

from __future__ import annotations

import json
import random
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants, utils
from tqdm import tqdm

from polarlm import model_loaders, pull
from polarlm.model_loaders import hub as hub_package
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.files.repository import RepositoryFile, gguf_contents
from polarlm.model_loaders.hub import parse, transfer
from tests.model_loaders.checkpoints import MODELS, finish, gguf_header
from tests.model_loaders.hub_server import COMMIT, Hub, Repository, git_hash, sha256
from tests.model_loaders.test_vision_encoders import write_gguf
from tests.ports import free_port
from tests.random_model import random_model, write_in_parts
from tests.small_disk import small_disk
from tests.tiny import make_model

BEGINNING = "bytes=0-262143"  # the beginning of a GGUF file, which has its sizes


def fetch(name: str, **settings: object) -> Path:
    return hub_package.fetch(parse(name), **settings)


def refusal(name: str, **settings: object) -> str:
    with pytest.raises(LoadError) as caught:
        fetch(name, **settings)
    return str(caught.value)


@pytest.fixture
def folders(hub: Hub, small_folder: dict[str, bytes]) -> Hub:
    """A hub with a folder of safetensors, user/tiny."""
    hub.repositories["user/tiny"] = Repository(small_folder, tags={"v1": f"{COMMIT}0"})
    return hub


@pytest.fixture
def ggufs(hub: Hub, small_ggufs: dict[str, bytes]) -> Hub:
    """A hub with two quantizations of a model, user/tiny."""
    hub.repositories["user/tiny"] = Repository(small_ggufs)
    return hub


def test_what_is_no_name_is_refused() -> None:
    assert parse("user/repo@refs/pr/1").revision == "refs/pr/1"
    wrong = ("hf:", "repo", "hf:a/b/c", "a/b:", "a/b@", "../b", "a/b:c:d", "https://hub/a/b", "hf.co/a", "hf://")
    for text in (*wrong, "https://huggingface.co/datasets/a/b", "ftp://hf.co/a/b", "hf.co/a/b:c:d"):
        with pytest.raises(LoadError, match="user/repo:Q4_K_M"):
            parse(text)


ELSEWHERE = {  # names as other programs and the hub's pages write them, and ours
    "hf.co/user/repo": "user/repo",
    "HuggingFace.co/user/repo:Q4_K_M": "user/repo:Q4_K_M",
    "hf.co/user/repo:latest": "user/repo",
    "hf://user/repo@v1": "user/repo@v1",
    "hf:hf.co/user/repo:Q8_0": "user/repo:Q8_0",
    "user/repo/m-Q8_0.gguf": "user/repo:m-Q8_0.gguf",
    "user/repo/sub/m-Q8_0.gguf": "user/repo:sub/m-Q8_0.gguf",
    "user/repo:sub/m.gguf": "user/repo:sub/m.gguf",
    "hf.co/user/repo/m-Q8_0.gguf": "user/repo:m-Q8_0.gguf",
    "https://huggingface.co/user/repo/": "user/repo",
    "https://www.huggingface.co/user/repo?library=gguf#readme": "user/repo",
    "https://huggingface.co/user/repo/tree/main": "user/repo",
    "https://huggingface.co/user/repo/tree/v1/Q8_0": "user/repo@v1:Q8_0",
    "https://huggingface.co/user/repo/blob/main/sub/m-Q8_0.gguf": "user/repo:sub/m-Q8_0.gguf",
    "https://huggingface.co/user/repo/resolve/refs%2Fpr%2F1/m.gguf?download=true": "user/repo@refs/pr/1:m.gguf",
    "https://huggingface.co/user/repo/resolve/main/model.safetensors": "user/repo",
    "https://huggingface.co/user/repo?show_file_info=m-Q8_0.gguf": "user/repo:m-Q8_0.gguf",
    "https://huggingface.co/user/repo/discussions/3": "user/repo",
    "http://127.0.0.1:5000/user/repo:Q8_0": "user/repo:Q8_0",
}


def test_names_of_other_places_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:5000")
    assert {text: str(hub_package.hub_name(text)) for text in ELSEWHERE} == ELSEWHERE
    assert {text: str(parse(text)) for text in ELSEWHERE} == ELSEWHERE
    assert [hub_package.hub_name(text) for text in ("user/m.gguf", "./user/repo/m.gguf", "llama3", "qwen3:0.6b")] == [
        None
    ] * 4


def test_a_folder_gets_the_files_that_it_is_read_with_and_no_others(hub: Hub, small_folder: dict[str, bytes]) -> None:
    others = ("pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors", "onnx/model.onnx")
    more = dict.fromkeys(("README.md", *others, "model-Q8_0.gguf"), b"not needed")
    hub.repositories["user/tiny"] = Repository({**small_folder, **more})
    where = fetch("user/tiny")
    assert {path.name for path in where.iterdir()} == set(small_folder) & {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    assert all((where / path.name).read_bytes() == small_folder[path.name] for path in where.iterdir())
    assert not [request for request in hub.requests if request.path.endswith(tuple(more))]
    assert len([request for request in hub.requests if request.path.startswith("/api/")]) == 1
    assert not [request for request in hub.requests if request.path == "/no-xet"]


def test_it_lies_in_the_cache_as_the_hubs_own_client_puts_it_and_stays(
    folders: Hub, small_folder: dict[str, bytes]
) -> None:
    where = fetch("user/tiny")
    assert where == Path(constants.HF_HUB_CACHE, "models--user--tiny", "snapshots", f"{COMMIT}1")
    assert (where / "config.json").resolve().name == git_hash(small_folder["config.json"])
    assert (where / "model.safetensors").resolve().name == sha256(small_folder["model.safetensors"])
    cached = huggingface_hub.try_to_load_from_cache("user/tiny", "model.safetensors")
    assert cached == str(where / "model.safetensors")

    def times() -> dict[Path, int]:
        return {path: path.lstat().st_mtime_ns for path in Path(constants.HF_HUB_CACHE).rglob("*")}

    before, count = times(), len(folders.requests)
    fetch("user/tiny")
    assert times() == before
    assert [request.path for request in folders.requests[count:]] == ["/api/models/user/tiny"]


def test_an_index_says_which_shards_there_are(hub: Hub, small_folder: dict[str, bytes]) -> None:
    weights = small_folder["model.safetensors"]
    places = {"model.embed_tokens.weight": 1, "model.norm.weight": 2, "mtp.fc.weight": 9}  # 9: a part that nobody needs
    index = {"weight_map": {name: f"model-0000{part}-of-00002.safetensors" for name, part in places.items()}}
    files = {path: content for path, content in small_folder.items() if path != "model.safetensors"}
    shards = {"model-00001-of-00002.safetensors": weights[:1000], "model-00002-of-00002.safetensors": weights[1000:]}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    hub.repositories["user/tiny"] = Repository({**files, **shards, "model-00003-of-00003.safetensors": b"another"})
    where = fetch("user/tiny")
    assert {path.name for path in where.glob("*.safetensors")} == set(shards)
    del hub.repositories["user/tiny"].files["model-00002-of-00002.safetensors"]
    hub.repositories["user/tiny"].commit = f"{COMMIT}2"
    assert "lacks model-00002-of-00002.safetensors" in refusal("user/tiny")


def test_all_files_are_of_one_commit(folders: Hub) -> None:
    assert fetch("user/tiny").name == f"{COMMIT}1"
    assert fetch("user/tiny@v1").name == f"{COMMIT}0"
    resolved = {request.path.split("/")[4] for request in folders.requests if "/resolve/" in request.path}
    assert resolved == {f"{COMMIT}0", f"{COMMIT}1"}


def test_the_model_is_named_after_the_repository_or_the_file(
    hub: Hub, small_folder: dict[str, bytes], small_ggufs: dict[str, bytes]
) -> None:
    hub.repositories["user/Tiny-Chat"] = Repository(small_folder)
    hub.repositories["user/tiny-GGUF"] = Repository(small_ggufs)
    for name, shown in (("hf:user/Tiny-Chat", "Tiny-Chat"), ("hf:user/tiny-GGUF:q4_k_m", "tiny")):
        model = model_loaders.load(name)
        model.weights.close()
        assert model.name == shown


def test_a_path_stays_a_path(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(Path("hf:user").joinpath("repo").mkdir(parents=True) or Path("hf:user/repo"))
    model_loaders.load("hf:user/repo").weights.close()
    assert hub.requests == []


# -- the quantization ----------------------------------------------------------------------------------------------


def test_the_part_that_reads_images_comes_with_a_gguf_file_of_a_model_that_has_one(
    hub: Hub, small_ggufs: dict[str, bytes], tmp_path: Path
) -> None:
    parts = dict.fromkeys(("mmproj-F32.gguf", "mmproj-BF16.gguf", "old/mmproj-F16.gguf"), b"GGUF")
    of_images = write_gguf(tmp_path / "m.gguf", "qwen3_vl_deepstack_tied").read_bytes()
    for name, content in (("images", of_images), ("text", small_ggufs["tiny-Q8_0.gguf"])):
        hub.repositories[f"user/{name}"] = Repository({"m-Q8_0.gguf": content, **parts})
    there = {name: {path.name for path in fetch(f"user/{name}").parent.iterdir()} for name in ("images", "text")}
    assert there == {"images": {"m-Q8_0.gguf", "mmproj-BF16.gguf"}, "text": {"m-Q8_0.gguf"}}


def test_without_a_wish_the_best_one_that_fits_is_fetched(ggufs: Hub, small_ggufs: dict[str, bytes]) -> None:
    models = []

    def fits(config: model_loaders.ModelConfig | None, size: int) -> bool:
        models.append((len(config.layers), config.attention.kv_heads, config.attention.head_dim, size))
        return size < len(small_ggufs["tiny-Q8_0.gguf"])

    said: list[str] = []
    assert fetch("user/tiny", fits=fits, verbose=said.append).name == "tiny-Q4_K_M.gguf"
    assert models == [(2, 2, 64, len(small_ggufs[name])) for name in ("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf")]
    assert said[0] == "Taking Q4_K_M of user/tiny, the best that fits in memory here; user/tiny:NAME takes another."
    # A file in the cache is taken before a better one.
    assert fetch("user/tiny", verbose=said.append).name == "tiny-Q4_K_M.gguf"
    assert said[-1] == "Taking Q4_K_M of user/tiny, which is in the cache; user/tiny:NAME takes another."
    large = len(small_ggufs["tiny-Q8_0.gguf"])
    assert fetch("user/tiny", fits=lambda config, size: size == large).name == "tiny-Q8_0.gguf"


def test_weights_that_do_not_fit_are_warned_about_before_they_are_fetched(
    folders: Hub, small_folder: dict[str, bytes]
) -> None:
    said: list[str] = []

    def fits(config: model_loaders.ModelConfig | None, size: int) -> bool:
        assert config is not None
        assert size == len(small_folder["model.safetensors"])
        assert folders.ranges_of("model.safetensors") == []
        return False

    where = fetch("user/tiny", fits=fits, verbose=said.append)
    assert said[0].startswith("warning: the weights of user/tiny take 0.")
    assert (where / "model.safetensors").is_file()
    assert fetch("user/tiny", fits=lambda config, size: False, verbose=said.append) == where
    assert len(said) == 1


def test_what_cannot_be_chosen_is_told_with_what_there_is(ggufs: Hub, small_ggufs: dict[str, bytes]) -> None:
    sizes = [len(small_ggufs[f"tiny-{label}.gguf"]) / (1 << 20) for label in ("Q8_0", "Q4_K_M")]
    listed = f"there are Q8_0 ({sizes[0]:.1f} MiB), Q4_K_M ({sizes[1]:.1f} MiB)."
    assert refusal("user/tiny:Q5_K_M") == f"user/tiny has no Q5_K_M; {listed}"
    problem = refusal("user/tiny", fits=lambda config, size: False)
    assert "no file fits in memory" in problem
    assert listed in problem
    assert problem.endswith("user/tiny:Q4_K_M.")
    assert set(ggufs.ranges_of("tiny-Q8_0.gguf")) == {BEGINNING}
    assert ggufs.ranges_of("tiny-Q4_K_M.gguf") == []
    ggufs.repositories["user/tiny"] = Repository({f"{name}-Q8_0.gguf": small_ggufs["tiny-Q8_0.gguf"] for name in "ab"})
    assert "user/tiny:a-Q8_0.gguf" in refusal("user/tiny:Q8_0")
    assert "user/tiny:a-Q8_0.gguf" in refusal("user/tiny")
    assert fetch("user/tiny:b-Q8_0.gguf").name == "b-Q8_0.gguf"


def test_quantizations_come_in_the_order_of_preference() -> None:
    names = ["m-F16", "m-Q2_K", "m-Q4_K_M", "m-q8_0", "m-Q6_K", "m-UD-Q4_K_XL", "m-IQ4_XS", "m-Q4_1", "sub/m-Q5_K_M"]
    files = [RepositoryFile(f"{name}.gguf", 100 + len(name)) for name in [*names, "mmproj-m-F16", "m-imatrix", "odd"]]
    parts = [RepositoryFile(f"big/m-BF16-0000{part}-of-00002.gguf", 1000) for part in (2, 1)]
    parts.append(RepositoryFile("big/m-Q8_0-00001-of-00002.gguf", 1000))  # without its second part
    found = gguf_contents([*files, *parts, RepositoryFile("config.json", 1), RepositoryFile("m.imatrix", 1)])
    models = [one for one in found if one.is_model]
    labels = ["q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q2_K", "UD-Q4_K_XL", "Q4_1", "odd", "BF16", "F16"]
    assert [model.label for model in models] == labels
    assert [file.path[-19:-5] for model in models if model.label == "BF16" for file in model.files] == [
        "00001-of-00002",
        "00002-of-00002",
    ]


def test_a_model_in_parts_is_fetched_with_all_of_them(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parts").mkdir()
    first = write_in_parts(tmp_path / "parts" / "tiny-Q8_0.gguf", random_model(tmp_path), 8)
    parts = {path.name: path.read_bytes() for path in first.parent.iterdir()}
    assert len(parts) > 2
    hub.repositories["user/tiny"] = Repository(parts)
    for name in ("user/tiny", "user/tiny:q8_0"):
        path = fetch(name)
        assert path.name == first.name
        assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == parts
    assert pull.main(["user/tiny", "--device", "cpu"]) == 0
    assert f"takes {sum(map(len, parts.values())) / (1 << 20):.1f} MiB on the disk" in capsys.readouterr().err
    model = model_loaders.load("hf:user/tiny")
    model.weights.close()
    assert model.name == "tiny"
    del hub.repositories["user/tiny"].files[max(parts)]
    hub.repositories["user/tiny"].commit = f"{COMMIT}2"
    assert "is not whole, as 1 of its" in refusal("user/tiny")
    assert "is not whole, as 1 of its" in refusal("user/tiny:Q8_0")


# -- transfers that are interrupted --------------------------------------------------------------------------------

CONTENT = random.Random(0).randbytes(3 << 20)


@pytest.fixture
def large(hub: Hub, small_folder: dict[str, bytes]) -> Hub:
    """A hub with a model whose weights are 3 MiB of noise."""
    hub.repositories["user/large"] = Repository({**small_folder, "model.safetensors": CONTENT})
    return hub


@pytest.mark.parametrize("no_ranges", [False, True])
def test_a_transfer_goes_on_behind_the_bytes_that_came(large: Hub, no_ranges: bool) -> None:
    """A server that knows no ranges sends the whole file again."""
    large.trouble.drop["model.safetensors"] = 2_000_000
    large.trouble.no_ranges = no_ranges
    assert (fetch("user/large") / "model.safetensors").read_bytes() == CONTENT
    assert large.ranges_of("model.safetensors") == [None, "bytes=2000000-"]


def test_a_later_attempt_goes_on_behind_the_bytes_that_came(large: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    large.trouble.drop["model.safetensors"] = 2_000_000
    large.trouble.then.append(("cdn", 404, {}))
    assert "answers with an error (404)" in refusal("user/large")
    (partial,) = Path(constants.HF_HUB_CACHE).rglob("*.incomplete")
    begun = partial.stat().st_size
    assert begun == 2_000_000
    bars = []
    monkeypatch.setattr("tqdm.tqdm", lambda **settings: bars.append(settings) or tqdm(disable=True))
    said: list[str] = []
    assert (fetch("user/large", verbose=said.append) / "model.safetensors").read_bytes() == CONTENT
    assert large.ranges_of("model.safetensors")[-1] == f"bytes={begun}-"
    assert any("of them already there" in sentence for sentence in said)
    assert max((bar["total"], bar["initial"]) for bar in bars) == (len(CONTENT), begun)
    assert not partial.exists()


def test_trouble_of_the_server_that_passes_is_waited_for(large: Hub) -> None:
    large.trouble.refuse = [("cdn", 503, {}), ("cdn", 502, {})]
    assert (fetch("user/large") / "model.safetensors").read_bytes() == CONTENT


def test_a_connection_that_always_breaks_is_given_up(large: Hub) -> None:
    large.trouble.drop_always.add("model.safetensors")
    problem = refusal("user/large")
    assert "cannot be reached" in problem
    assert "is not in the cache as a whole" in problem
    assert len(large.ranges_of("model.safetensors")) == 3  # the first attempt, and one after each wait


@pytest.mark.parametrize("path", ["model.safetensors", "tokenizer.json"])
def test_wrong_bytes_are_noticed_and_deleted(large: Hub, path: str) -> None:
    large.trouble.wrong.add(path)
    assert f"{path} of user/large arrived with another checksum" in refusal("user/large")
    assert utils.scan_cache_dir(constants.HF_HUB_CACHE).size_on_disk < len(CONTENT)
    large.trouble.wrong.clear()
    content = large.repositories["user/large"].files[path]
    assert (fetch("user/large") / path).read_bytes() == content
    assert large.ranges_of(path) == [None, None]


def test_wrong_bytes_of_an_earlier_attempt_are_noticed(large: Hub) -> None:
    blob = Path(constants.HF_HUB_CACHE, "models--user--large", "blobs", sha256(CONTENT))
    blob.parent.mkdir(parents=True)
    transfer.partial_file(blob).write_bytes(b"x" * 1000)
    assert "another checksum" in refusal("user/large")
    assert (fetch("user/large") / "model.safetensors").read_bytes() == CONTENT
    assert large.ranges_of("model.safetensors") == ["bytes=1000-", None]


def test_ctrl_c_keeps_what_came_and_says_so(large: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    append = transfer._ReceivedBytes.append

    def interrupted(content: transfer._ReceivedBytes, part: bytes) -> None:
        append(content, part)
        if content.file.path == "model.safetensors":
            raise KeyboardInterrupt

    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(transfer._ReceivedBytes, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch("user/large", verbose=said.append)
    assert said[-1] == "The next attempt continues from what has been downloaded."
    fetch("user/large")
    assert (large.ranges_of("model.safetensors")[-1] or "").startswith("bytes=")


def test_two_at_once_fetch_it_once(large: Hub) -> None:
    go_on = large.trouble.hold["model.safetensors"] = threading.Event()
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool, ExitStack() as at_the_end:
        at_the_end.callback(go_on.set)
        first = pool.submit(fetch, "user/large")
        assert large.trouble.held.wait(60)

        def note(sentence: str) -> None:
            said.append(sentence)
            if sentence.startswith("Waiting"):
                go_on.set()

        second = pool.submit(fetch, "user/large", verbose=note)
        assert first.result(60) == second.result(60)
    assert large.ranges_of("model.safetensors") == [None]
    assert "Waiting for another process, which downloads model.safetensors." in said


# -- files that are not what the hub has -----------------------------------------------------------------------------


def without_links(cache: Path) -> None:
    """Make a cache one as on Windows: files in place of links, and nothing else."""
    for link in [path for path in cache.rglob("*") if path.is_symlink()]:
        content = link.read_bytes()
        link.unlink()
        link.write_bytes(content)
    for blobs in cache.glob("models--*/blobs"):
        shutil.rmtree(blobs)


def test_files_of_another_size_are_fetched_again_where_there_are_no_links(large: Hub) -> None:
    large.repositories["user/adapter"] = Repository(
        {"adapter_config.json": b"{}", "adapter_model.safetensors": CONTENT}
    )
    folder, adapter = fetch("user/large"), hub_package.fetch_supplement(parse("user/adapter"), "adapter")
    without_links(Path(constants.HF_HUB_CACHE))
    files = [folder / "model.safetensors", folder / "tokenizer.json", adapter / "adapter_model.safetensors"]
    wanted = [file.read_bytes() for file in files]
    for broken in (b"", CONTENT[:1000]):
        for file in files:
            file.resolve().write_bytes(broken)
        assert fetch("user/large") == folder
        assert hub_package.fetch_supplement(parse("user/adapter"), "adapter") == adapter
        assert [file.read_bytes() for file in files] == wanted


def test_files_of_another_checksum_are_fetched_again_if_asked_for(large: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    file = fetch("user/large") / "model.safetensors"
    file.resolve().write_bytes(CONTENT[::-1])
    said: list[str] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match="safetensors of user/large is damaged in the cache"):
        hub_package.pull(parse("user/large"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub_package.pull(parse("user/large"), verbose=said.append)
    assert said[0] == "Checking 4 files of user/large (3.0 MiB)"
    assert said[1] == "model.safetensors of user/large is damaged in the cache, and is downloaded again."
    assert file.read_bytes() == CONTENT


def test_an_empty_file_of_the_cache_is_told_with_the_command_that_mends_it(folders: Hub) -> None:
    folder = fetch("user/tiny")
    (folder / "tokenizer.json").resolve().write_bytes(b"")
    with (
        closing(model_loaders.load(folder)) as model,
        pytest.raises(
            LoadError, match=r"tokenizer.json is empty; download it again\. polarlm pull user/tiny does that"
        ),
    ):
        model.tokenizer  # noqa: B018
    (folder / "model.safetensors").resolve().write_bytes(CONTENT[:9])
    with pytest.raises(LoadError, match=r"is truncated .* polarlm pull user/tiny does that"):
        model_loaders.load(folder)


# -- sentences -----------------------------------------------------------------------------------------------------


def test_a_gated_repository(hub: Hub, small_folder: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["meta/llama"] = Repository(small_folder, gated=True)
    problem = refusal("meta/llama")
    assert f"accept them at {hub.url}/meta/llama, then run `hf auth login`, or set HF_TOKEN" in problem
    hub.tokens |= {"stranger", "reader"}
    hub.readers.add("reader")
    monkeypatch.setenv("HF_TOKEN", "stranger")
    assert "with the account that your token belongs to" in refusal("meta/llama")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "does not accept your token" in refusal("meta/llama")
    monkeypatch.setenv("HF_TOKEN", "reader")
    assert (fetch("meta/llama") / "config.json").is_file()
    assert {request.token for request in hub.requests if request.server == "cdn"} == {None}  # tokens stay with the hub


def test_the_token_of_hf_auth_login_is_used(hub: Hub, small_folder: dict[str, bytes]) -> None:
    hub.repositories["user/private"] = Repository(small_folder, private=True)
    hub.tokens.add("stored")
    hub.readers.add("stored")
    Path(constants.HF_TOKEN_PATH).write_text("stored")
    assert (fetch("user/private") / "config.json").is_file()


def test_a_repository_that_was_renamed(hub: Hub, small_folder: dict[str, bytes]) -> None:
    hub.repositories["user/new"] = Repository(small_folder)
    hub.renamed["user/old"] = "user/new"
    said: list[str] = []
    assert (fetch("user/old", verbose=said.append) / "config.json").is_file()
    assert said[0] == "user/old is called user/new today."


OTHER: list[tuple[dict[str, bytes], str]] = [  # what a repository has, and the sentence
    ({"pytorch_model.bin": b""}, "as pickles"),
    ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "an adapter (LoRA)"),
    ({"README.md": b""}, "neither model.safetensors with a config.json nor GGUF files"),
]
# How the next request is refused (server, status, headers), the name, and the sentence; {page} is the model's page.
PROBLEMS: list[tuple[tuple[str, int, dict[str, str]] | None, str, str]] = [
    (None, "user/none", "There is no model user/none on the hub ({page}), nor is there such a folder"),
    (None, "user/tiny@v9", "user/tiny has no revision 'v9': choose one of those at {page}"),
    (None, "user/tiny:Q4_K_M", "leave out :Q4_K_M"),
    (("hub", 429, {}), "user/tiny", "too many requests (429): try again in some"),
    (("hub", 429, {"Retry-After": "17"}), "user/tiny", "in 17 seconds; with a"),
    (("cdn", 429, {"RateLimit": '"a";r=0;t=55'}), "user/tiny", "in 55 seconds"),
    (("hub", 500, {}), "user/tiny", "an error (500) about user/tiny: try again"),
    (("cdn", 403, {}), "user/tiny", "refuses access to user/tiny"),
]


def test_a_problem_is_a_sentence(folders: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for refused, name, sentence in PROBLEMS:
        folders.trouble.refuse = [refused] if refused else []
        assert sentence.format(page=f"{folders.url}/{name.partition('@')[0]}") in refusal(name)
    for files, sentence in OTHER:
        folders.repositories["user/other"] = Repository(files)
        assert sentence in refusal("user/other")
    folders.tokens.add("token")
    monkeypatch.setenv("HF_TOKEN", "token")
    assert "it may be private for another account" in refusal("user/none")


def test_an_architecture_is_refused_before_the_weights_are_fetched(hub: Hub, small_folder: dict[str, bytes]) -> None:
    config = {**json.loads(small_folder["config.json"]), "model_type": "mamba"}
    hub.repositories["user/mamba"] = Repository({**small_folder, "config.json": json.dumps(config).encode()})
    assert "a model of type 'mamba', which has recurrent layers" in refusal("user/mamba")
    assert not [request for request in hub.requests if request.server == "cdn"]


def test_an_architecture_in_gguf_is_refused_before_the_file_is_fetched(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "mamba-Q8_0.gguf"
    config = model_loaders.load_weights(MODELS / "llama_mha")[0]
    config = replace(config, layers=config.layers[:1])
    writer = gguf_header(path, "mamba", config)
    writer.add_tensor("token_embd.weight", np.zeros((1 << 18, 4), np.float32))
    finish(writer)
    hub.repositories["user/mamba"] = Repository({path.name: path.read_bytes()})
    assert "mamba-Q8_0.gguf of user/mamba holds a model of architecture 'mamba', which has" in refusal("user/mamba")
    assert hub.ranges_of(path.name) == [BEGINNING]


def test_a_disk_without_room_is_told_before_the_weights_are_fetched(
    large: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(hub_package.shutil, "disk_usage", lambda folder: usage._replace(free=1 << 20))
    problem = refusal("user/large")
    assert "takes 3.0 MiB more on the disk" in problem
    assert "has room for 1.0 MiB" in problem
    assert large.ranges_of("model.safetensors") == []


def test_a_disk_that_becomes_full(large: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(disk / "cache"))
    monkeypatch.setattr(hub_package._Download, "_check_disk", lambda self, size: None)
    with small_disk(disk, 2 << 20):
        problem = refusal("user/large")
        assert f"The disk with {disk / 'cache'} is full: free some space" in problem


def test_a_cache_that_cannot_be_written(large: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    assert "set HF_HOME to another folder" in refusal("user/large")


def test_without_the_package_it_is_told_what_to_install(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "huggingface_hub", None)
        assert "pip install 'polarlm[hub]'" in refusal("user/tiny")
    monkeypatch.setattr(huggingface_hub, "__version__", "0.36.0")
    assert "this is version 0.36.0" in refusal("user/tiny")


# -- without a connection ------------------------------------------------------------------------------------------


@pytest.fixture(params=["no connection", "offline mode"])
def cut_off(request: pytest.FixtureRequest, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def cut() -> None:
        if request.param == "offline mode":
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        else:
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")

    return cut


def test_a_folder_in_the_cache_is_used(folders: Hub, cut_off: Callable[[], None]) -> None:
    where, tagged = fetch("user/tiny"), fetch("user/tiny@v1")
    cut_off()
    said: list[str] = []
    assert fetch("user/tiny", verbose=said.append) == where
    assert f"using user/tiny as it is in the cache (commit {COMMIT[:8]})" in said[0]
    assert fetch("user/tiny@v1") == tagged
    assert fetch(f"user/tiny@{COMMIT}0") == tagged


def test_a_file_in_the_cache_is_used(ggufs: Hub, cut_off: Callable[[], None]) -> None:
    where = fetch("user/tiny:Q4_K_M")
    cut_off()
    assert fetch("user/tiny") == fetch("user/tiny:Q4_K_M") == where
    problem = refusal("user/tiny:Q8_0")
    assert "has no Q8_0; there are Q4_K_M" in problem
    assert "with a connection to the hub there may be more" in problem


def test_what_is_not_in_the_cache_as_a_whole_needs_a_connection(large: Hub, cut_off: Callable[[], None]) -> None:
    large.trouble.drop["model.safetensors"] = 2_000_000
    large.trouble.then.append(("cdn", 404, {}))
    refusal("user/large")
    cut_off()
    for name in ("user/large", "user/tiny"):
        problem = refusal(name)
        assert any(part in problem for part in ("network connection", "HF_HUB_OFFLINE is set", "try again later"))


@pytest.mark.parametrize(
    ("kind", "says"), [("adapter", "neither adapter_model"), ("head", "nor a GGUF file of a draft head ")]
)
def test_a_repository_without_the_part_is_refused(hub: Hub, kind: str, says: str) -> None:
    hub.repositories["user/none"] = Repository({"README.md": b""})
    with pytest.raises(LoadError, match=says):
        hub_package.fetch_supplement(parse("hf:user/none"), kind)
