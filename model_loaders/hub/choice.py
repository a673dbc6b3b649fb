"""Names of models on the hub, `user/repo` with a revision and a quantization if wanted, and the files they mean."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.files.safetensors_source import INDEX, SINGLE, weight_files

PREFIX = "hf:"
_PAGE = "https://huggingface.co"
_HOSTS = {"huggingface.co", "hf.co"}
_LATEST = "latest"  # the tag that Ollama's clients add to a name
_REPO = r"(?P<repo>\w[\w.-]*/\w[\w.-]*)"
_NAME = re.compile(rf"{_REPO}(@(?P<revision>[^\s:@]+))?(:(?P<quantization>\w[^\s:\\]*))?", re.ASCII)
_FILE = re.compile(rf"{_REPO}/(?P<quantization>[^\s:\\]+\.gguf)", re.ASCII | re.IGNORECASE)
# The path in the address of a page of the hub.
_PAGE_PATH = re.compile(
    rf"{_REPO}/(blob|resolve|raw|tree)/(?P<revision>refs/\w+/[^/]+|[^/]+)(/(?P<path>.+))?", re.ASCII
)
_OTHER_PAGE = re.compile(rf"(?!datasets/|spaces/|collections/|api/){_REPO}/.*", re.ASCII)
# Names of other programs.
_FOREIGN_NAME = re.compile(r"(\w[\w.-]*/){0,2}(?P<words>\w[\w.-]{0,99}(:\w[\w.-]*)?)", re.ASCII)
CONFIG = "config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BESIDE_WEIGHTS = (  # the small files of a folder of safetensors; only the configuration is required
    CONFIG,
    "generation_config.json",
    "modules.json",  # this and all that follow belong to embedding models
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    *(f"{folder}_Dense/{name}" for folder in (2, 3) for name in (CONFIG, SINGLE)),
)


@dataclass(frozen=True)
class HubName:
    """A model on the hub. Without a revision, the newest is meant; without a quantization, one is chosen."""

    repo: str  # "user/repo"
    revision: str | None = None  # a branch, a tag or a commit
    quantization: str | None = None  # a GGUF file's quantization, its name or path, or its folder

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}" + (f":{self.quantization}" if self.quantization else "")

    @property
    def short(self) -> str:
        """The repository's name without its owner."""
        return self.repo.partition("/")[2]


def parse(text: str) -> HubName:
    """The model that `user/repo[@revision][:quantization]` or `user/repo/file.gguf` names, with "hf:" or the hub's name
    in front if wanted, or the address of a page of the hub. Raises LoadError.

    >>> parse("hf:user/repo@v1:Q4_K_M")
    HubName(repo='user/repo', revision='v1', quantization='Q4_K_M')
    >>> parse("https://huggingface.co/user/repo/blob/main/m-Q8_0.gguf")
    HubName(repo='user/repo', revision=None, quantization='m-Q8_0.gguf')
    """
    bare = text if text.startswith(f"{PREFIX}//") else text.removeprefix(PREFIX)
    address = _path_in_address(bare)
    name = bare if address is None else address
    if (match := _PAGE_PATH.fullmatch(name)) is not None:
        revision, path = match["revision"], match["path"] or ""
        is_folder = match[2] == "tree" or path.endswith(".gguf")
        folder = path if is_folder else path.rpartition("/")[0]
        return HubName(match["repo"], None if revision == "main" else revision, folder or None)
    if (match := _NAME.fullmatch(name) or _FILE.fullmatch(name)) is not None:
        hub_name_parsed = HubName(**match.groupdict())
        return (
            HubName(hub_name_parsed.repo, hub_name_parsed.revision)
            if hub_name_parsed.quantization == _LATEST
            else hub_name_parsed
        )
    if address is not None and (match := _OTHER_PAGE.fullmatch(name)) is not None:
        return HubName(match["repo"])
    found_at = search_for(text)
    raise LoadError(
        f"{text!r} does not name a model on the hub: write user/repo, user/repo:Q4_K_M for one of its GGUF files, or "
        f"user/repo@main for one of its revisions{f'; look at {found_at}' if found_at else ''}."
    )


def hub_name(path: str | os.PathLike[str]) -> HubName | None:
    """The model on the hub that a path means: one with "hf:" or the hub's name in front, or user/repo, or a file of it,
    where neither it nor the folder `user` exists. None for any other path. Raises LoadError for another name after
    "hf:" or the hub's name."""
    if not isinstance(path, str) or os.path.exists(path):
        return None
    if path.startswith(PREFIX) or _path_in_address(path) is not None:
        return parse(path)
    match = _NAME.fullmatch(path)
    is_name = _FILE.fullmatch(path) if match is None else not match["repo"].endswith(".gguf")
    return parse(path) if is_name and not os.path.isdir(path.split("/")[0]) else None


def search_for(text: str) -> str | None:
    """Where to look on the hub for what another program may call `text`; None for a path."""
    match = _FOREIGN_NAME.fullmatch(text.removesuffix(f":{_LATEST}"))
    if match is None or text.endswith(".gguf") or ("/" in text and os.path.isdir(text.split("/")[0])):
        return None
    return f"{_PAGE}/models?library=gguf&search={match['words'].replace(':', '+')}"


def _path_in_address(text: str) -> str | None:
    """The path in an address of the hub, or after its name; None for any other text."""
    scheme, _, rest = text.strip().rpartition("://")
    host, _, path = rest.partition("/")
    if scheme.lower() == "hf":
        path = rest
    elif scheme.lower() not in ("", "http", "https"):
        return None
    else:
        own = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc
        if host.lower().removeprefix("www.") not in _HOSTS | ({own} - {""}):
            return None
    page = urlsplit(f"{_PAGE}/{path}")
    file = parse_qs(page.query).get("show_file_info")  # the file that a page tells about
    return f"{unquote(page.path).strip('/')}{f'/{file[0]}' if file else ''}"


def has_safetensors(files: Collection[str]) -> bool:
    """Whether these files are a folder of safetensors that the loader can read; an index alone is none."""
    weights = [path for path in files if path.endswith(".safetensors") and "/" not in path and path != ADAPTER_WEIGHTS]
    return CONFIG in files and (bool(weights and INDEX in files) or bool(weight_files(dict.fromkeys(weights, 0))))


def folders_of_models(files: Collection[str]) -> list[str]:
    """The folders inside a repository that are such folders."""
    folders = sorted({path.rpartition("/")[0] for path in files if path.endswith(f"/{CONFIG}")})
    inside = {
        folder: [path.removeprefix(f"{folder}/") for path in files if path.startswith(folder)] for folder in folders
    }
    return [folder for folder, paths in inside.items() if has_safetensors(paths)]


def size_text(size: int) -> str:
    """Bytes as text.

    >>> size_text(5 << 30), size_text(300_000)
    ('5.00 GiB', '0.3 MiB')
    """
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
