"""Names of models on the hub, `hf:user/repo` with a revision and a quantization if wanted, and the files they mean."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.files.safetensors_source import INDEX, SINGLE

PREFIX = "hf:"
_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^\s:@]+))?(:(?P<quantization>\w[\w.-]*))?", re.ASCII)
CONFIG = "config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BESIDE_WEIGHTS = (  # the small files of a folder of safetensors; only the configuration is required
    CONFIG,
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",  # this and all that follow belong to embedding models
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    *(f"{folder}_Dense/{name}" for folder in (2, 3) for name in (CONFIG, SINGLE)),
)
# The best first. Others, such as Q4_1 or UD-Q4_K_XL, follow, the largest first; weights of 16 bits or more are last.
_PREFERRED = (
    *("Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q4_K_M", "Q4_K_S", "IQ4_XS", "IQ4_NL"),
    *("Q4_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K"),
)
_WIDE = ("F16", "FP16", "BF16", "F32", "FP32")
_PROJECTORS = ("F16", "BF16", "Q8_0", "F32")  # the best first
_NO_MODEL = re.compile(r"mmproj|imatrix|ggml-vocab", re.IGNORECASE)
_GGUF = re.compile(r"(?P<stem>.+?)(-(?P<part>\d{5})-of-(?P<parts>\d{5}))?\.gguf", re.IGNORECASE)
_LABEL = re.compile(
    r"(?:^|[._-])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|B?F16|FP16|F32|FP32|MXFP4\w*|NVFP4))$", re.IGNORECASE | re.ASCII
)
T = TypeVar("T")


@dataclass(frozen=True)
class HubName:
    """A model on the hub. Without a revision, the newest is meant; without a quantization, one is chosen."""

    repo: str  # "user/repo"
    revision: str | None = None  # a branch, a tag or a commit
    quantization: str | None = None  # a GGUF file's quantization, or its name

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}" + (f":{self.quantization}" if self.quantization else "")

    @property
    def short(self) -> str:
        """The repository's name without its owner."""
        return self.repo.partition("/")[2]


def parse(text: str) -> HubName:
    """The model that `[hf:]user/repo[@revision][:quantization]` names. Raises LoadError.

    >>> parse("hf:user/repo@v1:Q4_K_M")
    HubName(repo='user/repo', revision='v1', quantization='Q4_K_M')
    """
    match = _NAME.fullmatch(text.removeprefix(PREFIX))
    if match is None:
        raise LoadError(
            f"{text!r} does not name a model on the hub: write user/repo, user/repo:Q4_K_M for one of its GGUF files, "
            "or user/repo@main for one of its revisions."
        )
    return HubName(**match.groupdict())


def named(path: str | os.PathLike[str]) -> HubName | None:
    """The model on the hub that a path means: one with "hf:", or user/repo where neither it nor the folder `user`
    exists. None for any other path. Raises LoadError for another name after "hf:"."""
    if not isinstance(path, str) or os.path.exists(path):
        return None
    if path.startswith(PREFIX):
        return parse(path)
    is_name = _NAME.fullmatch(path) and not path.endswith(".gguf") and not os.path.isdir(path.split("/")[0])
    return parse(path) if is_name else None


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. digest: its SHA-256 with `lfs`, else Git's hash; empty if not known."""

    path: str
    size: int  # bytes
    digest: str = ""
    lfs: bool = False

    @property
    def name(self) -> str:
        """The name without folders."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Quantization:
    """A model as GGUF: one file, or several parts, in order."""

    label: str  # as in the file's name: "Q4_K_M"; the whole name if it has none
    files: tuple[HubFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(file.size for file in self.files)


def quantizations(files: Iterable[HubFile]) -> list[Quantization]:
    """The models among `files`, the best first, without image projectors, importance matrices and incomplete models."""
    groups: dict[tuple[str, int], list[HubFile]] = {}
    for file in files:
        match = _GGUF.fullmatch(file.path)
        if match is not None and not _NO_MODEL.search(file.name):
            groups.setdefault((match["stem"], int(match["parts"] or 1)), []).append(file)
    made = [
        Quantization(_label(stem), tuple(sorted(group, key=lambda file: file.path)))
        for (stem, parts), group in groups.items()
        if len(group) == parts
    ]
    return sorted(made, key=_rank)


def projectors(files: Iterable[T], name_of: Callable[[T], str]) -> list[T]:
    """The files with the part of a model that reads images, the best first. name_of: a file's name, without folders."""

    def rank(file: T) -> tuple[int, str]:
        label = quantization_of(name_of(file)).upper().replace("FP", "F")
        return _PROJECTORS.index(label) if label in _PROJECTORS else len(_PROJECTORS), name_of(file)

    found = [file for file in files if "mmproj" in name_of(file).lower() and name_of(file).endswith(".gguf")]
    return sorted(found, key=rank)


def quantization_of(file_name: str) -> str:
    """The quantization in the name of a GGUF file; the whole name if there is none.

    >>> quantization_of("SmolLM2-1.7B-Instruct-Q4_K_M.gguf"), quantization_of("model.gguf")
    ('Q4_K_M', 'model.gguf')
    """
    match = _GGUF.fullmatch(file_name)
    stem = match["stem"] if match else file_name
    return file_name if (label := _label(stem)) == stem else label


def _label(stem: str) -> str:
    name = stem.rpartition("/")[2]
    match = _LABEL.search(name)
    return match[1] if match else name


def _rank(model: Quantization) -> tuple[int, int, str]:
    label = model.label.upper()
    if label in _PREFERRED:
        return _PREFERRED.index(label), 0, model.files[0].path
    return len(_PREFERRED) + (label in _WIDE), -model.size, model.files[0].path


def has_safetensors(files: Mapping[str, HubFile]) -> bool:
    """Whether these files are a folder of safetensors that the loader can read."""
    return CONFIG in files and (SINGLE in files or INDEX in files)


def choose_gguf(
    name: HubName,
    files: Iterable[HubFile],
    fits: Callable[[int], bool],
    is_here: Callable[[HubFile], bool] = lambda file: False,
) -> Quantization:
    """The quantization that `name` asks for, else the best one that fits, those in the cache first.

    fits: whether a file of so many bytes fits in memory. is_here: whether a file is in the cache. Raises LoadError that
    lists the available quantizations.
    """
    models = quantizations(files)
    listed = ", ".join(f"{model.label} ({size_text(model.size)})" for model in models)
    if name.quantization is not None:
        wanted = name.quantization.lower()
        matches = [m for m in models if wanted in (m.label.lower(), *(file.name.lower() for file in m.files))]
        if not matches:
            raise LoadError(f"{name.repo} has no {name.quantization}; there are {listed}.")
    else:
        matches = [model for model in models if fits(model.size)]
        matches = [model for model in matches if all(map(is_here, model.files))] or matches
        if not matches:
            raise LoadError(
                f"Of {name.repo}, no file fits in memory here together with its KV store; there are {listed}. Choose a "
                f"smaller model or context, or name a file to load it all the same: {name.repo}:{models[-1].label}."
            )
        matches = [model for model in models if model.label == matches[0].label]
    if len(matches) > 1:
        names = ", ".join(file.name for model in matches for file in model.files)
        raise LoadError(
            f"{name.repo} has several files of {matches[0].label}: name one of them, as in "
            f"{name.repo}:{matches[0].files[0].name}; there are {names}."
        )
    return matches[0]


def size_text(size: int) -> str:
    """Bytes as text.

    >>> size_text(5 << 30), size_text(300_000)
    ('5.00 GiB', '0.3 MiB')
    """
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
