"""What the commands that write a page about a model read: its files and a text, and where the page goes."""

from __future__ import annotations

import sys
from pathlib import Path

from polarlm.bench import report
from polarlm.engine.backends.select import select
from polarlm.engine.cli.commands import note
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.config import EngineConfig
from polarlm.engine.loading.encoding import WHOLE
from polarlm.engine.loading.sizes import fits_beside
from polarlm.model_loaders import hub
from polarlm.model_loaders.demo import demo_model

LEAST_TOKENS = 64
TOO_SHORT = (
    f"TEXT has {{}} tokens, and at least {LEAST_TOKENS} are needed: give a longer text, such as some pages of what the "
    "model will read"
)
_MOST_CHARACTERS = 4_000_000  # characters of the text to read: more than any budget scores


def model_files(path: str | None) -> tuple[str, str]:
    """The path of a model's files, which are downloaded if necessary, and its name. Raises LoadError."""
    if path is None:
        path = str(demo_model(note))
    where = Path(path)
    if path.startswith(hub.PREFIX) and not where.exists():
        name = hub.parse(path)
        ops = select("auto", 0)[0]
        where = hub.fetch(name, fits_beside(EngineConfig(), WHOLE, ops), note)
        return str(where), name.short if where.is_dir() else where.stem
    return path, where.resolve().name if where.is_dir() else where.stem


def page_file(output: str | None, model: str) -> Path:
    """The path of the page. Raises FlagError if it cannot be written."""
    if output is None:
        return report.Output(str(Path.cwd() / f"quality-{report.slug(model)}-{report.today()}.html")).path("", "")
    path = report.Output(output).path("", "")
    return path.with_suffix(".html")


def read_text(file: str) -> str:
    """The first 4 million characters of the text, with line ends as LF. Raises FlagError."""
    try:
        if file == "-":
            return sys.stdin.read(_MOST_CHARACTERS)
        with Path(file).open(encoding="utf-8") as text:  # universal newlines: CRLF becomes LF
            return text.read(_MOST_CHARACTERS)
    except OSError as error:
        raise FlagError(f"TEXT: {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FlagError(f"TEXT: {file} is not UTF-8 text") from None
