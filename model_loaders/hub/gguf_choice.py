"""Chooses among the GGUF files of a repository: by name, or else the best model that fits.

Files are sorted by what they are for before anything is chosen: by their names, and by what the beginning of a file
says of itself once that is read. It is read of the file that is asked for, and of few others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.files.gguf_file import Beginning, beginning_of
from polarlm.model_loaders.files.gguf_source import sizes_from_beginning
from polarlm.model_loaders.files.repository import (
    BEGINNING_BYTES,
    GgufContent,
    RepositoryFile,
    Role,
    gguf_contents,
    projectors,
    role_in_metadata,
)
from polarlm.model_loaders.hub.choice import HubName, size_text
from polarlm.model_loaders.hub.client import Client, Listing
from polarlm.model_loaders.vision_encoders import may_belong, outputs_of, reads_images


class GgufChoice:
    """The GGUF files of a repository. Methods raise LoadError, and the client's errors where a file is read."""

    def __init__(
        self, client: Client, name: HubName, listing: Listing, say: Callable[[str], None], *, reads_cache: bool = True
    ) -> None:
        """reads_cache: whether beginnings of files are read from the cache, where they are there."""
        self._client, self._name, self._listing, self._say = client, name, listing, say
        self._reads_cache = reads_cache
        self._all = gguf_contents(listing.files.values())
        self._read: dict[str, Beginning] = {}  # by `GgufContent.kind`
        self._unreadable: dict[str, LoadError] = {}  # by path: files of another format
        self._problem: LoadError | None = None  # why the first that is not supported is not

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def has_models(self) -> bool:
        """Whether there are models, by the names of files."""
        return any(one.is_model for one in self._all)

    def size(self) -> int:
        """Bytes of the model that the name asks for, by the names of files alone."""
        return self._one_of([one for one in self._matches() if one.is_model]).size

    def choice(self) -> GgufContent:
        """The model that the name asks for."""
        return self._one_of(self._models(self._matches()))

    def best(self, fits: Callable[[ModelConfig | None, int], bool]) -> GgufContent:
        """The best model that fits in memory, those in the cache first."""
        for models in self._by_name():
            here_first = sorted(models, key=lambda one: not self.is_here(one.files))
            sound = filter(self._is_sound, here_first)
            choice = next((one for one in sound if fits(self.configuration(one), one.size)), None)
            if choice is not None:
                same_label = [one for one in models if one.label == choice.label and self._is_sound(one)]
                self._tell(self._one_of(same_label), len(models))
                return choice
            if large := [*filter(self._is_sound, models)]:
                raise LoadError(
                    f"Of {self._name.repo}, no file fits in memory here together with its KV store; there are "
                    f"{_list_models(large)}. Choose a smaller model or context, or name a file to load it all the "
                    f"same: {self._name.repo}:{large[-1].label}."
                )
        raise self._problem or self._refusal()

    def models(self) -> list[GgufContent]:
        """The model that the name asks for, or all models, the best first. At least one."""
        if self._name.quantization is not None:
            return [self.choice()]
        models_found = next(filter(None, ([*filter(self._is_sound, models)] for models in self._by_name())), [])
        if not models_found:
            raise self._problem or self._refusal()
        return models_found

    def role(self) -> Role | None:
        """What the name asks for: a model, if there is one, else a draft head, else an adapter; None for another."""
        candidates = sorted(self._candidates(), key=lambda one: not one.is_model)
        roles = (Role.MODEL, Role.HEAD, Role.ADAPTER)
        return next((role for role in roles if any(self._role(one) is role for one in candidates)), None)

    def file_with_role(self, role: Role) -> GgufContent | None:
        """What the name asks for among the files of a role, or the only one; None if there is none."""
        found = [one for one in self._candidates() if self._role(one) is role]
        return self._one_of(found) if found else None

    def projector(self, model: GgufContent, config: ModelConfig | None) -> tuple[RepositoryFile, ...]:
        """The file with the part of a model that reads images, wherever it lies; none without one of a known kind."""
        if config is not None and not reads_images(config):
            return ()
        contents = projectors(self._contents_read(), model)
        if config is None:
            return next((one.files for one in contents if self.is_here(one.files)), ())
        beginnings = {
            one: beginning for one in contents if not isinstance(beginning := self._beginning(one), LoadError)
        }
        fitting = [one for one in contents if one not in beginnings or may_belong(beginnings[one].metadata, config)]
        exact = [
            one for one in fitting if one in beginnings and outputs_of(beginnings[one].metadata) == config.hidden_size
        ]
        if fitting:
            return (exact or fitting)[0].files
        why = f"{contents[0].files[0].path} is of no kind that is supported" if contents else "it has no mmproj file"
        self._say(f"{self._name} reads no images: {why}.")
        return ()

    def configuration(self, one: GgufContent) -> ModelConfig | None:
        """The configuration in the beginning of a file; None if it is not there. Raises LoadError for a model that is
        not supported, and for a file of another format."""
        beginning = self._beginning(one)
        if isinstance(beginning, LoadError):
            raise beginning
        return sizes_from_beginning(beginning, self._where(one))

    def check_vocabulary(self, one: GgufContent) -> None:
        """Raises LoadError if the beginning of a file names a kind of vocabulary that is not known."""
        from polarlm.model_loaders.tokenizers.gguf_vocab import check_kind  # its libraries take memory

        beginning = self._beginning(one)
        if not isinstance(beginning, LoadError) and "tokenizer.ggml.model" in beginning.metadata:
            check_kind(beginning.metadata, self._where(one))

    def is_here(self, files: Iterable[RepositoryFile]) -> bool:
        """Whether these files are in the cache."""
        repo, commit = self._name.repo, self._listing.commit
        return all(self._client.cached_file(repo, commit, file) is not None for file in files)

    def _candidates(self) -> list[GgufContent]:
        """What the name may ask for, without what lacks parts."""
        contents = self._matches() if self._name.quantization is not None else self._all
        return [one for one in contents if one.is_whole]

    def _matches(self) -> list[GgufContent]:
        return [one for one in self._all if one.is_called(self._name.quantization or "")]

    def _by_name(self) -> tuple[list[GgufContent], list[GgufContent]]:
        """What its name calls a model, and what it calls something else; without what lacks parts."""
        whole = [one for one in self._all if one.is_whole]
        return [one for one in whole if one.is_model], [one for one in whole if not one.is_model]

    def _models(self, contents: Sequence[GgufContent]) -> list[GgufContent]:
        """The models among what is called by the name; those that are supported, if there are others."""
        whole = [one for one in contents if one.is_whole]
        models = [one for one in whole if one.is_model and self._role(one) is Role.MODEL]
        models = models or [one for one in whole if self._role(one) is Role.MODEL]
        return models if len(models) < 2 else [*filter(self._is_sound, models)] or models

    def _one_of(self, models: Sequence[GgufContent]) -> GgufContent:
        if not models:
            raise self._refusal()
        if len(models) > 1:
            repo, label = self._name.repo, self._name.quantization or models[0].label
            paths = [file.path for model in models for file in model.files]
            raise LoadError(
                f"{repo} has several files of {label}: name one of them, as in {repo}:{paths[0]}; there are "
                f"{', '.join(paths)}."
            )
        return models[0]

    def _tell(self, choice: GgufContent, count: int) -> None:
        if count > 1:
            why = "which is in the cache" if self.is_here(choice.files) else "the best that fits in memory here"
            self._say(f"Taking {choice.label} of {self._name.repo}, {why}; {self._name.repo}:NAME takes another.")

    def _refusal(self) -> LoadError:
        """Why nothing here is the model of the name."""
        repo, quantization = self._name.repo, self._name.quantization
        contents = self._contents_read()
        models = [one for one in contents if one.is_model]
        matches = contents if quantization is None else [one for one in contents if one.is_called(quantization)]
        if not matches:
            return LoadError(f"{repo} has no {quantization}; there are {_list_models(models)}.")
        what = f"{matches[0].files[0].path} of {repo} is {matches[0].why_no_model()}"
        if models:
            return LoadError(f"{what}; there are {_list_models(models)}.")
        other = "another repository of this model" if matches[0].role is Role.MODEL else "the repository of a model"
        return LoadError(f"{what}, and there is no other: choose {other}.")

    def _is_sound(self, one: GgufContent) -> bool:
        """Whether it is a model that is supported."""
        try:
            if self._role(one) is not Role.MODEL:
                return False
            self.configuration(one)
        except LoadError as problem:
            self._problem = self._problem or problem
            return False
        return True

    def _role(self, one: GgufContent) -> Role:
        """What it is for, as the file says, or else its name."""
        beginning = self._beginning(one)
        role = None if isinstance(beginning, LoadError) else role_in_metadata(beginning, one.files[0].path)
        return role or one.role

    def _contents_read(self) -> list[GgufContent]:
        """All, with the roles of those whose beginnings have been read."""
        return [replace(one, role=self._role(one)) if one.kind in self._read else one for one in self._all]

    def _beginning(self, one: GgufContent) -> Beginning | LoadError:
        """The beginning of one file of its kind; an error for a file of another format."""
        path = one.files[0].path
        if one.kind not in self._read and path not in self._unreadable:
            content = self._first_bytes(one.files[0])
            try:
                self._read[one.kind] = beginning_of(content, self._where(one))
            except LoadError as problem:
                self._unreadable[path] = problem
        return self._unreadable.get(path) or self._read[one.kind]

    def _first_bytes(self, file: RepositoryFile) -> bytes:
        repo, commit = self._name.repo, self._listing.commit
        if self._reads_cache and (cached := self._client.cached_file(repo, commit, file)) is not None:
            with cached.open("rb") as here:
                return here.read(BEGINNING_BYTES)
        head = bytearray()
        url = self._client.url(repo, commit, file.path)
        with self._client.stream(url, f"bytes=0-{BEGINNING_BYTES - 1}") as response:
            for part in response.iter_bytes(BEGINNING_BYTES):
                head += part
                if len(head) >= BEGINNING_BYTES:
                    break
        return bytes(head)

    def _where(self, one: GgufContent) -> str:
        return f"{one.files[0].name} of {self._name.repo}"


def _list_models(models: Sequence[GgufContent]) -> str:
    return ", ".join(f"{model.label} ({size_text(model.size)})" for model in models) or "none"
