"""What `polarlm quality` is told: its flags, a model's files and a text, and where the page goes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from polarlm import model_loaders
from polarlm.bench import result
from polarlm.bench.command import LAYERS_HELP, TYPES_HELP, model_files, model_named
from polarlm.bench.quality.types import DEFAULT_TYPES
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.config import AS_STORED, hub_setting, model_setting, setting
from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.files.weights import WeightSource

PROGRAM = ("polarlm", "quality")
LEAST_TOKENS = 64
ENOUGH_TOKENS = 4096  # two windows
TOO_SHORT = (
    f"TEXT has {{}} tokens, and at least {LEAST_TOKENS} are needed: give a longer text, such as some pages of what the "
    "model will read"
)
_MOST_CHARACTERS = 4_000_000  # characters of the text to read: more than any budget scores


@dataclass(frozen=True)
class QualityConfig:
    """The flags: the text, the model, the cache types and the time for them."""

    text: str | None = setting(
        None,
        "TEXT",
        bare=None,
        help="UTF-8 text like what the model will read; - is standard input. Of several with commas between them, such "
        "as prose.txt,code.py, there are figures of each, too",
    )
    weights: str | None = model_setting()
    hf_repo: str | None = hub_setting()
    types: str = setting(DEFAULT_TYPES, "--types", metavar="TYPES", help=TYPES_HELP + LAYERS_HELP)
    codec: str | None = setting(
        None,
        "--codec",
        metavar="FILE.py",
        help="a codec of a file outside of this package, as docs/adding.md shows one: its names are cache types",
    )
    minutes: float = setting(
        5.0,
        "--minutes",
        metavar="M",
        help="how long it may take, loading included; where that is short, the last types are left out, then speed",
    )
    ablate: str | None = setting(
        None, "--ablate", metavar="TYPE", help="one type with parts of its encoding switched off, each alone and all"
    )
    every_token_coded: bool = setting(
        False, "--every-token-coded", help="score each type also with all blocks but the first read as codes"
    )
    windows: int = setting(
        0,
        "--windows",
        metavar="N",
        help="score exactly so many windows with all types in float32, however long that takes, and measure no speed; "
        "0 scores as many as there is time for",
    )
    window: int = setting(
        0, "--window", metavar="N", help="tokens of a window; 0 takes 2,048, or fewer where there is no time for that"
    )
    weight_type: str = setting(
        AS_STORED,
        "--weight-type",
        metavar="TYPE",
        help="convert the weights, as the engine does",
    )
    output: str | None = setting(
        None,
        "--output",
        "-o",
        metavar="FILE",
        help="where the page goes, and its figures as JSON beside it; else quality-<model>-<text>-<date>.html in the "
        "current folder",
    )
    device: str = setting(
        "auto", "--device", choices=("auto", "cpu", "cuda"), help="where speed is measured; auto as in the chat"
    )
    threads: int = setting(
        0, "-t", "--threads", metavar="N", help="CPU threads; 0 follows OMP_NUM_THREADS or the cores"
    )


class Model(NamedTuple):
    """An open model. digest: of its weights."""

    path: str
    name: str
    config: ModelConfig
    source: WeightSource
    dtype: str
    digest: dict[str, str]


@contextmanager
def open_model(weights: str | None, hf_repo: str | None) -> Iterator[Model]:
    """A context with the model of these two flags. Raises LoadError or EngineError."""
    path, name = model_files(model_named(weights, hf_repo))
    config, source, dtype = model_loaders.load_weights(path)
    try:
        short = name.removesuffix(f".{dtype}")  # of a file that is named by its weights, too
        yield Model(path, short, config, source, dtype, result.digest_of_model(source.files()))
    finally:
        source.close()


def page_file(output: str | None, subject: str) -> Path:
    """The path of the JSON, next to which the page goes. Raises FlagError if it cannot be written."""
    if output is None:
        output = str(Path.cwd() / f"quality-{result.slug(subject)}-{result.today()}.json")
    return result.Output(output).path("", "").with_suffix(".json")


def read_texts(files: str) -> dict[str, str]:
    """The name and the beginning of each text of TEXT, by turns the same number of characters. Raises FlagError."""
    texts: dict[str, str] = {}
    for file in files.split(",") if not Path(files).exists() else [files]:
        if (name := "standard input" if file == "-" else Path(file).name) in texts:
            raise FlagError(f"TEXT: two texts are called {name}, which their figures go by: rename one")
        texts[name] = read_text(file)
    return texts


def read_text(file: str) -> str:
    """The first 4 million characters of the text, with line ends as LF. Raises FlagError."""
    try:
        if file == "-":
            return sys.stdin.read(_MOST_CHARACTERS)
        with Path(file).open(encoding="utf-8-sig") as text:  # universal newlines: CRLF becomes LF
            return text.read(_MOST_CHARACTERS)
    except OSError as error:
        raise FlagError(f"TEXT: {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FlagError(f"TEXT: {file} is not UTF-8 text") from None
