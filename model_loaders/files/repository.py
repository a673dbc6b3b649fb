"""What the files of a repository or a folder are for: models, and what belongs to models.

A file's own words count for more than its name, where its beginning can be read: `role_said`, and `role_of_name`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path, PurePosixPath

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.families import gguf_layouts
from polarlm.model_loaders.files.gguf_file import Beginning, beginning_of

BEGINNING_BYTES = 1 << 18  # the beginning of a GGUF file has its sizes, before its vocabulary
# The best first. Others, such as Q4_1 or UD-Q4_K_XL, follow, the largest first; weights of 16 bits or more are last.
_PREFERRED = (
    *("Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q4_K_M", "Q4_K_S", "IQ4_XS", "IQ4_NL"),
    *("Q4_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K"),
)
_WIDE = ("F16", "FP16", "BF16", "F32", "FP32")
_OF_IMAGES = ("F16", "BF16", "Q8_0", "F32")  # the best first
_GGUF = re.compile(r"(?P<stem>.+?)(-(?P<part>\d{5})-of-(?P<parts>\d{5}))?\.gguf", re.IGNORECASE)
_QUANTIZATION = r"(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|B?F16|FP16|F32|FP32|MXFP4\w*|NVFP4)"
_LABEL = re.compile(rf"(?:^|[._-])({_QUANTIZATION})$", re.IGNORECASE | re.ASCII)
# Small files next to the weights, which may lie in a subfolder.
TOKENIZERS, TEMPLATE = ("tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model"), "chat_template.jinja"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # for requests with tools
COMPANIONS = (
    *("tokenizer_config.json", *TOKENIZERS, TEMPLATE, TOOL_TEMPLATE, "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
_WORD = re.compile(r"[a-z]+|\d+")
_HEADS = r"mtp|dflash|eagle3?"
_OF_HEADS = re.compile(r"(?:^|[-_])(?:assistant|mtp|nextn|dflash|draft|medusa|eagle3?)(?:$|[-_])")  # architectures
_LEAST_OF_A_LAYER = 3  # tensors of a layer of the smallest kind


class Role(Enum):
    """What a file is for, in words that follow "is"."""

    MODEL = "a model"
    PROJECTOR = "the part of a model that reads images"
    HEAD = "a draft head (it drafts tokens for a model)"
    ADAPTER = "an adapter (LoRA)"
    MATRIX = "an importance matrix"
    VOCABULARY = "a vocabulary without weights"


# In a name without folders, part and ending. Elsewhere in a name, and before a quantization, such words belong to a
# model.
_NAMES = {
    Role.PROJECTOR: re.compile(r"mmproj"),
    Role.MATRIX: re.compile(r"^imatrix|imatrix$"),
    Role.VOCABULARY: re.compile(r"^ggml-vocab"),
    Role.HEAD: re.compile(rf"^(?:{_HEADS})[-_.]|[._-]{_QUANTIZATION}[-_.](?:{_HEADS})$", re.IGNORECASE),
    Role.ADAPTER: re.compile(r"^(?:adapter|lora)(?:[-_.]|$)|[-_.](?:adapter|lora)(?:[-_.](?:b?f16|fp16|f32))?$"),
}
_FOLDERS = {**dict.fromkeys(("mtp", "dflash", "eagle", "eagle3", "draft"), Role.HEAD), "mmproj": Role.PROJECTOR}
_TYPES = {"adapter": Role.ADAPTER, "mmproj": Role.PROJECTOR, "imatrix": Role.MATRIX, "vocab": Role.VOCABULARY}


@dataclass(frozen=True)
class RepositoryFile:
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
class GgufContent:
    """What one GGUF file holds, or several parts, in order; some may be missing."""

    label: str  # as in the file's name, or else its folder's: "Q4_K_M"; the whole name if there is none
    kind: str  # the path without quantization and part: files of one kind have one role and one configuration
    role: Role
    parts: int
    files: tuple[RepositoryFile, ...]  # at least one

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(file.size for file in self.files)

    @property
    def folder(self) -> str:
        """Where its files lie, without the names of files; empty for the repository itself."""
        return self.files[0].path.rpartition("/")[0]

    @property
    def is_whole(self) -> bool:
        return len(self.files) == self.parts

    @property
    def is_model(self) -> bool:
        """Whether it is a model with all its parts."""
        return self.role is Role.MODEL and self.is_whole

    def is_called(self, name: str) -> bool:
        """Whether a user may call it so: by quantization, name, path or folder, in any case."""
        names = {self.label, self.folder, *(one for file in self.files for one in (file.name, file.path))}
        return name.lower() in {one.lower() for one in names}

    def words(self) -> frozenset[str]:
        """The words of its name, without the quantization."""
        return frozenset(_WORD.findall(self.kind.rpartition("/")[2].lower()))

    def why_no_model(self) -> str:
        """Why it is no model to load: text that follows "is"."""
        if self.role is not Role.MODEL:
            return f"{self.role.value}, not a model"
        return f"not whole, as {self.parts - len(self.files)} of its {self.parts} parts are missing"


def gguf_contents(
    files: Iterable[RepositoryFile], role_of: Callable[[RepositoryFile], Role | None] = lambda file: None
) -> list[GgufContent]:
    """What the GGUF files among `files` hold, the best first.

    role_of: what the (first) file says of itself; None where its name decides.
    """
    groups: dict[tuple[str, int], dict[int, RepositoryFile]] = {}
    for file in files:
        match = _GGUF.fullmatch(file.path)
        if match is None or file.name.startswith("."):  # macOS leaves a "._name" next to each name
            continue
        part, parts = int(match["part"] or 1), int(match["parts"] or 1)
        if 1 <= part <= parts:
            groups.setdefault((match["stem"], parts), {})[part] = file
    contents = []
    for (stem, parts), group in groups.items():
        label, kind = _label(stem)
        first = group[min(group)]
        role = (role_of(first) if min(group) == 1 else None) or role_of_name(first.path)
        contents.append(GgufContent(label, kind, role, parts, tuple(group[part] for part in sorted(group))))
    return sorted(contents, key=_rank)


def models_in(folder: Path, files: Iterable[RepositoryFile]) -> list[GgufContent]:
    """The models among `files` of a folder on this machine, as the files themselves say, the best first."""
    contents = gguf_contents(files, lambda file: role_of_file(folder / file.path))
    return [one for one in contents if one.is_model]


def files_of(folder: Path, steps: tuple[str, ...] = ("**/*",)) -> dict[str, RepositoryFile]:
    """The files of a folder and of those inside it, by their paths. steps: patterns of paths."""
    paths = [path for step in steps for path in sorted(folder.glob(step)) if path.is_file()]
    files = [RepositoryFile(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths]
    return {file.path: file for file in files}


def companion(paths: Collection[str], name: str) -> str:
    """The path of a small file that belongs to the model in a folder: there, or else in a folder inside it that is no
    model itself. `name` if there is none. paths: of the folder's files."""
    inside = [path for path in paths if path.endswith(f"/{name}") and path.count("/") == 1]
    others = [path for path in inside if f"{path.partition('/')[0]}/config.json" not in paths]
    return min(others, default=name) if name not in paths else name


def companion_in(folder: Path, name: str) -> Path:
    """`companion` in a folder on this machine."""
    return folder / companion(files_of(folder, (name, f"*/{name}", "*/config.json")), name)


def projectors(contents: Sequence[GgufContent], model: GgufContent) -> list[GgufContent]:
    """The files with the part of `model` that reads images, the most fitting first: the nearest, then those with the
    most words of its name, then the best. Those in the folder of another model are left out."""
    words, path = model.words(), _steps(model.folder)
    theirs = {one.folder for one in contents if one.is_model} - {one.folder for one in contents if one.words() == words}

    def rank(one: GgufContent) -> tuple[int, int, int, str]:
        label = one.label.upper().replace("FP", "F")
        best = _OF_IMAGES.index(label) if label in _OF_IMAGES else len(_OF_IMAGES)
        return len(path ^ _steps(one.folder)), -len(words & one.words()), best, one.files[0].path

    projector_contents = [one for one in contents if one.role is Role.PROJECTOR and one.is_whole]
    return sorted(
        (one for one in projector_contents if one.folder in ("", model.folder) or one.folder not in theirs), key=rank
    )


def _steps(folder: str) -> set[str]:
    """A folder and those that it is in, up to the repository's."""
    return {folder or ".", *map(str, PurePosixPath(folder).parents)}


def repository_of(file: Path) -> Path:
    """The folder of the repository that a GGUF file lies in: its own folder, or the one above if that is called like a
    quantization; in the hub's cache that of the commit."""
    snapshots = next((one for one in file.parents if one.parent.name == "snapshots"), None)
    if snapshots is not None and snapshots.parents[1].name.startswith("models--"):
        return snapshots
    return file.parent.parent if _LABEL.fullmatch(file.parent.name) else file.parent


def quantization_of(file: Path) -> str:
    """The quantization of a GGUF file in a repository, by its name or else its folder's; its path there if there is
    none."""
    path = file.relative_to(repository_of(file)).as_posix()
    match = _GGUF.fullmatch(path)
    label = _label(match["stem"])[0] if match else path
    return label if _LABEL.fullmatch(label) else path


def role_of_name(path: str) -> Role:
    """What a GGUF file is for, by its path."""
    match = _GGUF.fullmatch(path)
    *folders, name = (match["stem"] if match else path).lower().split("/")
    name_role = next((role for role, pattern in _NAMES.items() if pattern.search(name)), None)
    folder_role = next((_FOLDERS[folder] for folder in folders if folder in _FOLDERS), None)
    return name_role or folder_role or Role.MODEL


def role_in_metadata(beginning: Beginning, path: str) -> Role | None:
    """What the GGUF file at `path` is for, by what it says of itself; None if that leaves it open."""
    metadata = beginning.metadata
    kind, arch = metadata.get("general.type"), metadata.get("general.architecture")
    if isinstance(kind, str) and kind in _TYPES:
        return _TYPES[kind]
    if not isinstance(arch, str):
        return None
    if arch == "clip":
        return Role.PROJECTOR
    if arch not in gguf_layouts():
        return Role.HEAD if _OF_HEADS.search(arch.lower()) else None
    match = _GGUF.fullmatch(path)
    if match is not None and match["parts"]:  # the first part may have few tensors, or none
        return Role.MODEL
    if not beginning.tensors:
        return Role.VOCABULARY
    depth, mtp_layers = (_count(metadata, f"{arch}.{key}") for key in ("block_count", "nextn_predict_layers"))
    if beginning.tensors >= _LEAST_OF_A_LAYER * (depth - mtp_layers):
        return Role.MODEL
    # The head has the model's own architecture and sizes, and the tensors of one layer.
    return Role.HEAD if mtp_layers else None


def role_of_file(path: Path) -> Role | None:
    """What a GGUF file on this machine is for, as it says itself; None if it does not."""
    try:
        state = path.stat()
        return _role_of_file(path, state.st_size, state.st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=1024)
def _role_of_file(path: Path, size: int, time: int) -> Role | None:
    with suppress(LoadError), path.open("rb") as file:
        return role_in_metadata(beginning_of(file.read(BEGINNING_BYTES), path.name), path.name)
    return None


def _count(metadata: Mapping[str, object], key: str) -> int:
    value = metadata.get(key, 0)
    return value if isinstance(value, int) else 0


def _label(stem: str) -> tuple[str, str]:
    """The quantization and the kind of a path without part and ending."""
    *folders, name = stem.split("/")
    match = _LABEL.search(name)
    in_folders = [folder for folder in folders if _LABEL.fullmatch(folder)]
    others = [folder for folder in folders if folder not in in_folders]
    kind = "/".join((*others, name[: match.start()] if match else name))
    return match[1] if match else in_folders[-1] if in_folders else name, kind


def _rank(one: GgufContent) -> tuple[int, int, str]:
    label = one.label.upper()
    if label in _PREFERRED:
        return _PREFERRED.index(label), 0, one.files[0].path
    return len(_PREFERRED) + (label in _WIDE), -one.size, one.files[0].path
