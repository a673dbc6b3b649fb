"""Loads a model from a path: configuration, weights, tokenizer and chat template, whatever the file format."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polarlm.model_loaders.chat import generation
from polarlm.model_loaders.config import GenerationDefaults, ModelConfig
from polarlm.model_loaders.errors import LoadError, close_on_error
from polarlm.model_loaders.fields import read_json, usable
from polarlm.model_loaders.files.draft_heads import HEADS, head_beside
from polarlm.model_loaders.files.folder import open_folder
from polarlm.model_loaders.files.gguf_file import GgufFile
from polarlm.model_loaders.files.gguf_source import open_gguf
from polarlm.model_loaders.files.pooling import (
    NO_PROMPTS,
    Prompts,
    pooling_of_folder,
    pooling_of_gguf,
    prompts_of_folder,
)
from polarlm.model_loaders.files.repository import (
    GgufContent,
    RepositoryFile,
    Role,
    companion_in,
    files_of,
    gguf_contents,
    projectors,
    quantization_of,
    repository_of,
    role_of_file,
)
from polarlm.model_loaders.files.tensors import StoredWeights
from polarlm.model_loaders.files.weights import WeightSource, main_dtype
from polarlm.model_loaders.forks import cached_property
from polarlm.model_loaders.hub import Fits, Progress, fetch, fetch_supplement, hub_name, local, search_for
from polarlm.model_loaders.vision_encoders import VisionEncoder, belongs, open_mmproj, reads_images, vision_encoder_of

if TYPE_CHECKING:
    from polarlm.model_loaders.chat.templates import ChatTemplate
    from polarlm.model_loaders.tokenizers import Tokenizer

_LOG = logging.getLogger(__name__)
NO_VISION_ENCODER = "none"  # instead of a file with the part that reads images
_DTYPE_SUFFIX = re.compile(r"[.-]((I?Q\d\w*)|B?F16|F32)(-\d{5}-of-\d{5})?$", re.IGNORECASE)


@dataclass(frozen=True)
class Model:
    """A model's configuration, weights, tokenizer and chat template."""

    name: str  # short, for the user: the folder's name, or the file's without its quantization
    path: Path
    config: ModelConfig
    weights: WeightSource
    read_tokenizer: Callable[[], Tokenizer]  # waits until it is read; raises LoadError
    template: ChatTemplate  # the model's own or a default
    generation: GenerationDefaults
    dtype: str  # how most of the weights are stored, for the user: "Q4_1", "BF16", ...
    pooling: str | None = None  # how states become a vector, if the files say so: "mean", "cls" or "last"
    prompts: Prompts = NO_PROMPTS  # what precedes texts to embed
    vision_encoder: VisionEncoder | None = None  # the part that reads images, if there is one
    vision_weights: WeightSource | None = None

    @cached_property  # a future has a lock, which could stay locked in a forked child
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, once it is read. Raises LoadError."""
        return self.read_tokenizer()

    @property
    def vocabulary(self) -> range:
        """The ids that have both a text and an embedding; a file may have more of either."""
        return range(min(self.config.vocab_size, self.tokenizer.vocab_size))

    def close(self) -> None:
        """Close the files of the weights."""
        for weights in filter(None, (self.weights, self.vision_weights)):
            weights.close()

    def left_out(self) -> str | None:
        """A sentence for users about ids of the tokenizer that the embedding has no rows for; None if there are none.
        Raises LoadError."""
        pieces, special = self.tokenizer.left_out
        count, first = len(pieces) + len(special), [*pieces[:3], *sorted(special)][:3]
        if not count:
            return None
        examples = ", ".join(map(str, first)) + (", …" if count > 3 else "")
        advice = ": is it this model's tokenizer?" if 9 * count > self.tokenizer.vocab_size else ""
        return (
            f"warning: the embedding of {self.name} has no rows for {count:,} of its tokenizer's ids ({examples}), "
            f"which are left out{advice}"
        )


def load(
    path: str | Path | None,
    *,
    verbose: Callable[[str], None] | None = None,
    fits: Fits | None = None,
    template: str | None = None,
    mmproj: str | None = None,
    mtp: bool = False,
    head: tuple[str, str] | None = None,
) -> Model:
    """Loads a folder in Hugging Face's layout, a .gguf file, "user/repo" or "hf:user/repo" from the hub, or (None, or
    its name) the demonstration model.

    Weights are not read yet: `Model.weights.read_into` converts them one at a time. The tokenizer is read by a thread
    while the caller loads the weights. `verbose` receives lines of progress. `fits` chooses among GGUF files on the
    hub. template: a file with a chat template in place of the model's own. mmproj: a file of llama.cpp's with the part
    that reads images; None: the folder's, or the one next to a .gguf file; "none": leave it out. mtp: whether
    `ModelConfig.mtp` is wanted. head: the kind of a draft head for the model, and its path or its name on the hub;
    empty: the one beside it. Raises LoadError.
    """
    from polarlm.model_loaders.demo import DEMO_GENERATION, DEMO_SYSTEM, is_demo

    where = locate(path, fits, verbose)
    with _pull_named(where):
        model = _load(where, mtp, head and (head[0], _head(where, *head, verbose)))
    with close_on_error(model.weights):
        vision_encoder, vision_weights = load_vision_encoder(where, model.config, mmproj) or (None, None)
    model = replace(model, vision_encoder=vision_encoder, vision_weights=vision_weights)
    if path is None or is_demo(where):
        model = replace(model, generation=DEMO_GENERATION, template=model.template.with_text(*DEMO_SYSTEM))
    if template is not None:
        model = replace(model, template=model.template.with_file(Path(template).expanduser()))
    return model


def locate(
    path: str | Path | None,
    fits: Fits | None = None,
    verbose: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder or file of what `load` takes, which is downloaded if need be. progress: as of `hub.fetch`. Raises
    LoadError."""
    from polarlm.model_loaders import demo

    if path is None or (path == demo.NAME and not os.path.exists(path)):
        return demo.demo_model(verbose)
    name = hub_name(path)
    return _existing_path(path) if name is None else fetch(name, fits, verbose, progress)


def load_vision_encoder(
    where: Path, config: ModelConfig, mmproj: str | None
) -> tuple[VisionEncoder, WeightSource] | None:
    """The part of the model at `where` that reads images, and its weights; None if there is none, or if `mmproj` is
    "none". Raises LoadError."""
    if mmproj == NO_VISION_ENCODER:
        return None
    if mmproj is not None:
        encoder, weights = open_mmproj(_existing_path(mmproj))
        if not belongs(encoder, config):
            weights.close()
            raise LoadError(
                f"{mmproj} is the part of another model: it gives images rows of {encoder.outputs} numbers for "
                f"{encoder.kind}, and {where} is {config.family} with {config.hidden_size}; give the mmproj file "
                "of this model."
            )
        return encoder, weights
    if where.is_dir():
        return vision_encoder_of(where)
    for file in _projectors(where) if reads_images(config) else ():
        pair = usable(partial(open_mmproj, file))
        if pair is not None and belongs(pair[0], config):
            return pair
        if pair is not None:
            pair[1].close()
            _LOG.warning("%s is the part of another model: it is left out", file)
    return None


def _projectors(file: Path) -> list[Path]:
    """The files with the part that reads images of the model in a GGUF file, wherever they lie in its repository."""
    folder = repository_of(file)
    files = files_of(folder, ("*.gguf", "*/*.gguf")).values()
    contents = gguf_contents(files, lambda one: role_of_file(folder / one.path))
    file_here = RepositoryFile(file.relative_to(folder).as_posix(), 0)
    content_here = next((one for one in contents if file_here.path in (part.path for part in one.files)), None)
    model = content_here or GgufContent("", file_here.path, Role.MODEL, 1, (file_here,))
    return [folder / one.files[0].path for one in projectors(contents, model)]


def _head(model: Path, kind: str, path: str, verbose: Callable[[str], None] | None = None) -> Path:
    """The folder or file of a draft head, as `load` takes it."""
    if path:
        name = hub_name(path)
        return _existing_path(path) if name is None else fetch_supplement(name, "head", verbose)
    if (found := head_beside(kind, model)) is None:
        what = HEADS[kind][0]
        raise LoadError(f"There is no {what} beside {model}; give one with model_draft, or another spec_type.")
    return found


def load_weights(
    path: str | Path, *, mtp: bool = False, head: tuple[str, str] | None = None
) -> tuple[ModelConfig, WeightSource, str]:
    """Configuration, weights and the type of most of them; reads no tokenizer. mtp, head: as for `load`. Raises
    LoadError."""
    where = locate(path)
    config, weights, _ = _open(where, mtp, head and (head[0], _head(where, *head)))
    return config, weights, main_dtype(weights)


def _open(where: Path, mtp: bool, head: tuple[str, Path] | None) -> tuple[ModelConfig, StoredWeights, GgufFile | None]:
    """The configuration and weights of a model, with those of a draft head, and its file if it is one."""
    with ExitStack() as files:
        gguf = None if where.is_dir() else files.enter_context(closing(GgufFile(where)))
        config, weights = open_folder(where, mtp=mtp) if gguf is None else open_gguf(gguf, mtp=mtp)
        files.callback(weights.close)
        if head is not None:
            config, weights = HEADS[head[0]][2](config, weights, head[1])
        files.pop_all()
    return config, weights, gguf


def _load(where: Path, mtp: bool, head: tuple[str, Path] | None) -> Model:
    """The model in a folder or a GGUF file, without the part that reads images."""
    from polarlm.model_loaders import tokenizers
    from polarlm.model_loaders.chat import templates

    config, weights, gguf = _open(where, mtp, head)
    with close_on_error(weights):
        of_model = partial(Model, path=where, config=config, weights=weights, dtype=main_dtype(weights))
        if gguf is not None:
            return of_model(
                name=_DTYPE_SUFFIX.sub("", where.stem),
                read_tokenizer=_in_thread(where, config.vocab_size, tokenizers.load_for_gguf, gguf),
                template=templates.for_gguf(gguf),
                generation=generation.defaults_of_gguf(gguf, config.vocab_size),
                pooling=pooling_of_gguf(gguf),
            )
        return of_model(
            name=_folder_name(where.resolve()),
            read_tokenizer=_in_thread(
                where,
                config.vocab_size,
                tokenizers.load_for_folder,
                where,
                read_json(where / "config.json"),
                read_json(where / "generation_config.json", required=False),
            ),
            template=templates.for_folder(
                where, read_json(companion_in(where, "tokenizer_config.json"), required=False)
            ),
            generation=generation.defaults_of_folder(where, config.vocab_size),
            pooling=pooling_of_folder(where),
            prompts=prompts_of_folder(where),
        )


@contextmanager
def _pull_named(where: Path) -> Iterator[None]:
    """A context in which errors that ask for a download name the command, if the model lies in the hub's cache."""
    try:
        yield
    except LoadError as problem:
        cache = next((one.name for one in where.parents if one.name.startswith("models--")), None)
        if cache is None or "download" not in str(problem):
            raise
        name = cache.removeprefix("models--").replace("--", "/")
        name += f":{quantization_of(where)}" if where.is_file() else ""
        raise LoadError(f"{problem} polarlm pull {name} does that.") from problem


def _folder_name(folder: Path) -> str:
    """The folder's name; the repository's if it lies in the hub's cache, where it is named after a commit."""
    repository = folder.parents[1].name if folder.parent.name == "snapshots" else ""
    return repository.rpartition("--")[2] if repository.startswith("models--") else folder.name


def _in_thread(where: Path, rows: int, read: Callable[..., Tokenizer], *arguments: Any) -> Callable[[], Tokenizer]:
    """Return a function that returns what `read(*arguments)` does, which a thread calls now, with the ids of `rows`."""
    future: Future[Tokenizer] = Future()

    def run() -> None:
        try:
            with _pull_named(where):
                tokenizer = read(*arguments)
            tokenizer.keep_rows(rows)
            future.set_result(tokenizer)
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="tokenizer").start()
    except RuntimeError:  # the system refuses another thread
        run()
    return future.result


def _existing_path(path: str | Path) -> Path:
    """The path of a folder or file that exists. Raises LoadError with advice for anything else."""
    text = os.path.expanduser(os.fspath(path))
    if not text:
        raise LoadError(
            "The model's path is empty; give a folder with config.json and safetensors files, or a .gguf file."
        )
    where = Path(text)
    if os.path.isdir(where):
        return where
    if not os.path.exists(where):  # never raises, unlike Path.exists
        if os.path.islink(where):
            raise LoadError(f"{text} is a link to a file that does not exist; download the model again.")
        plain_text = text.strip().strip("\"'").removeprefix("file://")
        suggestion = next((one for one in (plain_text, f"{plain_text}.gguf") if one and os.path.exists(one)), None)
        hub_address = search_for(plain_text)
        suggestion = suggestion or (local.find_similar(plain_text) if hub_address else None)
        advice = "a folder with config.json and safetensors files, or a .gguf file"
        if hub_address is not None:
            advice = (
                f"USER/REPO of the Hugging Face hub, such as Qwen/Qwen3-0.6B-GGUF, {advice}: polarlm list shows what "
                f"is here, and {hub_address} what there is"
            )
        raise LoadError(f"{text} does not exist; give {suggestion or advice}.")
    if where.suffix in {".bin", ".pt", ".pth", ".pkl", ".ckpt"}:
        raise LoadError(
            f"{where} is a pickle checkpoint, which can run any code when opened and is not read; "
            "give a folder with safetensors files, or a .gguf file."
        )
    if where.suffix in {".safetensors", ".json", ".jinja", ".model"}:
        raise LoadError(
            f"{where} is only a part of a model; give its folder, {where.parent}, with config.json and weights in it."
        )
    return where
