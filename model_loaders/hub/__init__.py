"""Downloads models and what belongs to them from the Hugging Face hub into the cache that its programs use."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.draft_heads import HEADS
from polarlm.model_loaders.files.folder import read_configuration
from polarlm.model_loaders.files.repository import (
    COMPANIONS,
    TEMPLATE,
    TOKENIZERS,
    RepositoryFile,
    Role,
    companion,
    quantization_of,
)
from polarlm.model_loaders.files.safetensors_source import INDEX, SINGLE, read_index, weight_files
from polarlm.model_loaders.files.weights import is_needed
from polarlm.model_loaders.hub.choice import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BESIDE_WEIGHTS,
    CONFIG,
    PREFIX,
    HubName,
    folders_of_models,
    has_safetensors,
    hub_name,
    parse,
    search_for,
    size_text,
)
from polarlm.model_loaders.hub.client import Client, Listing, has_size
from polarlm.model_loaders.hub.gguf_choice import GgufChoice
from polarlm.model_loaders.hub.problems import RESUMES, cannot_be_reached, sentence
from polarlm.model_loaders.hub.transfer import fetch_file, is_damaged, partial_file

__all__ = [
    "PREFIX",
    "Fits",
    "HubName",
    "fetch",
    "fetch_supplement",
    "hub_name",
    "parse",
    "pull",
    "quantization_of",
    "search_for",
    "size",
    "sizes",
]

T = TypeVar("T")
Supplement = Literal["adapter", "head", "pack"]
Kind = Supplement | Literal["model"]
Progress = Callable[[int, int], None]
"""Gets the bytes that have arrived, and the bytes of all files."""

Fits = Callable[[ModelConfig | None, int], bool]
"""Whether a model with this configuration (None: unknown) and this many bytes of files fits in memory here."""

_ADAPTER_FILES = {ADAPTER_CONFIG, ADAPTER_WEIGHTS}
_WORTH_SAYING = 1 << 20  # bytes; smaller downloads, such as configurations, are not announced


def fetch(
    name: HubName,
    fits: Fits | None = None,
    verbose: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Path:
    """The path of the model in the hub's cache, a folder or a .gguf file; the model is downloaded if need be.

    fits: chooses among GGUF files if `name` does not; None takes the best. verbose: gets lines of progress; with it, a
    terminal also shows a progress bar. progress: gets what has arrived of weights. Raises LoadError.
    """
    return _Download(name, fits, verbose, progress).run_with_load_errors(_Download.run)


def fetch_supplement(name: HubName, what: Supplement, verbose: Callable[[str], None] | None = None) -> Path:
    """The path of a supplement of a model in the hub's cache, downloaded if need be: of an adapter (LoRA) or a draft
    head, a folder or a .gguf file; of a pack, the one .pack file of the repository. Raises LoadError."""
    return _Download(name, verbose=verbose, what=what).run_with_load_errors(_Download.run)


def pull(name: HubName, fits: Fits | None = None, verbose: Callable[[str], None] | None = None) -> tuple[Path, Kind]:
    """The path of what a name on the hub means, as of `fetch` or `fetch_supplement`, and what it is. The checksums of
    files that are there are compared, too, and damaged ones are downloaded again. Raises LoadError."""
    return _Download(name, fits, verbose, what=None).run_with_load_errors(lambda one: (one.run(), one.what or "model"))


def sizes(name: HubName) -> tuple[ModelConfig, list[tuple[str, int]]]:
    """The configuration of a model on the hub, and its files, the best first: (quantization, bytes) for each GGUF file,
    or one ("", bytes) for safetensors. Downloads no weights. Raises LoadError."""
    return _Download(name).run_with_load_errors(_Download.sizes)


def size(name: HubName) -> int:
    """Bytes of the GGUF files that a name with a quantization means. Downloads nothing. Raises LoadError."""
    return _Download(name).run_with_load_errors(_Download.size)


class _Download:
    def __init__(
        self,
        name: HubName,
        fits: Fits | None = None,
        verbose: Callable[[str], None] | None = None,
        progress: Progress | None = None,
        *,
        what: Kind | None = "model",
    ) -> None:
        """what: None to find it out, and to compare checksums of files that are there."""
        self._client, self._name, self._fits = Client(), name, fits or (lambda config, size: True)
        self._say, self._is_silent = verbose or (lambda text: None), verbose is None
        self._progress, self.what, self._verifies = progress, what, what is None
        self._listing, self._is_cut_off = Listing(name.repo, "", {}), False

    def run_with_load_errors(self, work: Callable[[_Download], T]) -> T:
        """What `work` returns, with errors of the hub and of its cache as LoadErrors."""
        try:
            return work(self)
        except (self._client.http_error, OSError) as error:
            raise LoadError(sentence(self._client, self._name, error)) from error
        except KeyboardInterrupt:
            if self._client.has_begun(self._name.repo):
                self._say(RESUMES)
            raise

    def run(self) -> Path:
        """The path of the model."""
        try:
            self._listing = self._client.listing(self._name)
        except (self._client.http_error, OSError) as error:
            cached = self._client.cached_listing(self._name) if cannot_be_reached(self._client, error) else None
            if cached is None:
                raise
            self._listing, self._is_cut_off = cached, True
            why = "HF_HUB_OFFLINE is set" if self._client.is_offline else "The hub cannot be reached"
            self._say(f"{why}: using {self._name.repo} as it is in the cache (commit {cached.commit[:8]}).")
            try:
                return self._model()
            except LoadError as problem:
                raise LoadError(
                    f"{problem} This is about what the cache has; with a connection to the hub there may be more: "
                    f"polarlm pull {self._name}."
                ) from error
        if self._listing.repo.lower() != self._name.repo.lower():
            self._say(f"{self._name.repo} is called {self._listing.repo} today.")
        path = self._model()
        self._client.remember(self._name, self._listing.commit)
        return path

    def sizes(self) -> tuple[ModelConfig, list[tuple[str, int]]]:
        """What the module's `sizes` returns."""
        self._listing = self._client.listing(self._name)
        files = self._listing.files
        if self._name.quantization is None and has_safetensors(files):
            config = read_configuration(self._fetch([files[CONFIG]])[0].parent)
            return config, [("", sum(file.size for file in self._weights(config)))]
        if not (ggufs := self._ggufs()):
            raise LoadError(self._no_model())
        models = ggufs.models()
        sizes = next(filter(None, map(ggufs.configuration, models)), None)
        if sizes is None:
            raise LoadError(f"The files of {self._name.repo} do not say their sizes.")
        return sizes, [(model.label, model.size) for model in models]

    def size(self) -> int:
        """What the module's `size` returns."""
        self._listing = self._client.listing(self._name)
        return self._ggufs().size()

    def _pack(self) -> Path:
        packs = [file for path, file in self._listing.files.items() if path.endswith(".pack")]
        if len(packs) != 1:
            there = ", ".join(file.path for file in packs) or "none"
            raise LoadError(
                f"{self._name.repo} should have one .pack file, and has {there}: choose another repository, or give "
                "the path of a file."
            )
        return self._fetch(packs)[0]

    def _part(self, names: Sequence[str], role: Role) -> Path:
        """The folder with these two files, a configuration and weights, or a GGUF file of this role."""
        files = self._listing.files
        if self._name.quantization is None and set(names) <= files.keys():
            return self._fetch([files[name] for name in names])[0].parent
        if (one := self._ggufs().file_with_role(role)) is not None:
            return self._fetch(one.files)[0]
        raise LoadError(
            f"{self._name} has neither {names[1]} with {names[0]} nor a GGUF file of {role.value}: choose a repository "
            "that holds one."
        )

    def _find_what(self) -> Kind:
        """What the name means, by the list of files, a configuration, and the beginnings of GGUF files."""
        files, is_whole = self._listing.files, self._name.quantization is None
        if is_whole and has_safetensors(files):
            fields = Fields.read(self._fetch([files[CONFIG]])[0])
            return "head" if any(is_head(fields) for _, is_head, _ in HEADS.values()) else "model"
        role = self._ggufs().role()
        if role is Role.ADAPTER or (is_whole and role is not Role.MODEL and files.keys() >= _ADAPTER_FILES):
            return "adapter"
        if role is None and is_whole and any(path.endswith(".pack") for path in files):
            return "pack"
        return "head" if role is Role.HEAD else "model"

    def _model(self) -> Path:
        self.what = self.what or self._find_what()
        if self.what == "adapter":
            return self._part((ADAPTER_CONFIG, ADAPTER_WEIGHTS), Role.ADAPTER)
        if self.what == "pack":
            return self._pack()
        if self.what == "head":
            return self._part((CONFIG, SINGLE), Role.HEAD)
        if self._name.quantization is None and has_safetensors(self._listing.files):
            return self._folder()
        if (ggufs := self._ggufs()) and (ggufs.has_models or not has_safetensors(self._listing.files)):
            return self._gguf(ggufs)
        raise LoadError(self._no_model())

    def _ggufs(self) -> GgufChoice:
        reads_cache = self._is_cut_off or not self._verifies  # a damaged file may say anything of itself
        return GgufChoice(self._client, self._name, self._listing, self._say, reads_cache=reads_cache)

    def _no_model(self) -> str:
        files, name = self._listing.files, self._name
        if has_safetensors(files):
            return (
                f"{name.repo} has safetensors and no GGUF files: leave out :{name.quantization}; weights can be "
                "converted while they are loaded (--weight-type)."
            )
        if ADAPTER_CONFIG in files:
            return f"{name.repo} holds an adapter (LoRA), not a model: choose its base model, and give it with --lora."
        if inside := folders_of_models(files):
            return (
                f"{name.repo} holds models in folders ({', '.join(inside[:3])}), which are not fetched one by one: "
                "download it, and give the path of one of them."
            )
        if any(path.endswith((".bin", ".pth", ".pt")) for path in files):
            return (
                f"{name.repo} holds its weights as pickles, which can run any code when opened and are not read: "
                "choose a repository with safetensors or GGUF files."
            )
        return f"{name.repo} has neither {SINGLE} with a {CONFIG} nor GGUF files: choose a repository that has."

    def _folder(self) -> Path:
        """The path of a folder of safetensors. Downloads the configuration first, since it may not be supported."""
        files = self._listing.files
        folder = self._fetch([files[CONFIG]])[0].parent
        model = read_configuration(folder)
        weights = self._weights(model)
        companions = [companion(files, name) for name in COMPANIONS]
        if not any(companion(files, name) in files for name in TOKENIZERS):
            raise LoadError(
                f"{self._name.repo} has neither {' nor '.join(TOKENIZERS)}, without which its model reads no text: "
                "choose another repository of this model, or download it and put the tokenizer beside its weights."
            )
        size = sum(file.size for file in weights)
        if not self._fits(model, size) and not all(map(self._is_here, weights)):
            self._say(
                f"warning: the weights of {self._name} take {size_text(size)}, which leaves too little memory here for "
                "its KV store; choose a smaller model, a GGUF file of it, or another type of weights (--weight-type)"
            )
        self._fetch([*(files[path] for path in (*BESIDE_WEIGHTS, *companions) if path in files), *weights])
        return folder

    def _weights(self, model: ModelConfig) -> list[RepositoryFile]:
        """The files with the weights of a folder of safetensors. Raises LoadError if one that the model needs is
        missing."""
        files = self._listing.files
        has_index = INDEX in files and SINGLE not in files
        index = read_index(self._fetch([files[INDEX]])[0]) if has_index else {}
        names = weight_files({path: file.size for path, file in files.items()}, set(index.values()))
        missing_files = [name for name in names if name not in files]
        if missing_files and (
            not index or any(is_needed(model, tensor) for tensor in index if index[tensor] in missing_files)
        ):
            raise LoadError(
                f"{self._name.repo} lacks {missing_files[0]}, a part of its weights: choose another repository of "
                "this model."
            )
        return [files[name] for name in names if name in files]

    def _gguf(self, ggufs: GgufChoice) -> Path:
        """The path of a GGUF file. Reads the beginning of one first, since its model may not be supported."""
        choice = ggufs.choice() if self._name.quantization is not None else ggufs.best(self._fits)
        ggufs.check_vocabulary(choice)
        projector = ggufs.projector(choice, ggufs.configuration(choice))
        files = self._listing.files
        template = companion(files, TEMPLATE)  # for files without one
        more = [files[template]] if template in files else []
        return self._fetch([*choice.files, *projector, *more])[0]

    def _is_here(self, file: RepositoryFile) -> bool:
        return self._client.cached_file(self._name.repo, self._listing.commit, file) is not None

    def _fetch(self, files: Sequence[RepositoryFile]) -> list[Path]:
        """The paths of these files, in order; missing ones are downloaded. Raises LoadError if the disk is too full."""
        client, repo, commit = self._client, self._name.repo, self._listing.commit
        if self._verifies:
            self._drop_damaged(files)
        missing_files = [file for file in files if not self._is_here(file)]
        total, begun_bytes = 0, 0
        for file in missing_files:
            blob = client.blob(repo, file)
            if not has_size(blob, file):
                total += file.size
                partial = partial_file(blob)
                begun_bytes += min(partial.stat().st_size, file.size) if partial.exists() else 0
        self._check_disk(total - begun_bytes)
        bytes_done = begun_bytes

        def add_bytes(count: int) -> None:
            nonlocal bytes_done
            bytes_done += count
            bar.update(count)
            if self._progress is not None and total > _WORTH_SAYING:
                self._progress(bytes_done, total)

        if total > _WORTH_SAYING:
            rest = f", {size_text(begun_bytes)} of them already there" if begun_bytes else ""
            self._say(f"Downloading {self._name} ({size_text(total)}{rest}) to {client.repo_folder(repo)}")
        with self._bar("Downloading", files, total, begun_bytes) as bar:
            return [fetch_file(client, repo, commit, file, add_bytes, self._say) for file in files]

    def _drop_damaged(self, files: Sequence[RepositoryFile]) -> None:
        """Remove what the cache has with another checksum than the hub names. Raises LoadError without a connection."""
        client, repo, commit = self._client, self._name.repo, self._listing.commit
        # The content may be there of another commit.
        paths = {file: client.cached_file(repo, commit, file) or client.blob(repo, file) for file in files}
        here = [file for file, path in paths.items() if has_size(path, file)]
        total = sum(paths[file].stat().st_size for file in here)
        if total > _WORTH_SAYING:
            what = here[0].name if len(here) == 1 else f"{len(here)} files"
            self._say(f"Checking {what} of {repo} ({size_text(total)})")
        with self._bar("Checking", here, total) as bar:
            damaged = [file for file in here if is_damaged(paths[file], file, bar.update)]
        for file in damaged:
            if self._is_cut_off:
                raise LoadError(f"{file.name} of {repo} is damaged in the cache.")
            self._say(f"{file.name} of {repo} is damaged in the cache, and is downloaded again.")
            paths[file].resolve().unlink(missing_ok=True)  # files of one content share it
            paths[file].unlink(missing_ok=True)

    def _check_disk(self, size: int) -> None:
        cache = self._client.cache
        folder = next((one for one in (cache, *cache.parents) if one.exists()), cache)  # Windows may lack the drive
        if size > (free := shutil.disk_usage(folder).free):
            raise LoadError(
                f"{self._name} takes {size_text(size)} more on the disk, and {cache} has room for "
                f"{size_text(free)}: free some space, set HF_HOME to a folder elsewhere, or choose a smaller model."
            )

    def _bar(self, verb: str, files: Sequence[RepositoryFile], total: int, begun_bytes: int = 0) -> Any:
        """A progress bar over `total` bytes, `begun_bytes` of them already there; it is shown on a terminal."""
        from tqdm import tqdm  # imported only to download: it takes 2 MB

        return tqdm(
            total=total,
            initial=begun_bytes,
            desc=f"{verb} {files[-1].name if len(files) == 1 else self._name.short}",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            leave=False,
            delay=0.3,
            disable=self._is_silent or None,
        )
