"""`polarlm batch FILE`: answers a file of requests, without a server's port, or by a server that runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from polarlm.engine.cli.commands import note, with_flags
from polarlm.engine.cli.flags import FlagError, check_that
from polarlm.engine.cli.progress import counting
from polarlm.engine.config import EngineConfig, setting
from polarlm.engine.errors import EngineError, counted
from polarlm.engine.loading.checks import settle
from polarlm.model_loaders import first_model
from polarlm.server.config import CHECKS, KEY_VARIABLE


@dataclass(frozen=True)
class BatchConfig:
    file: str = setting(MISSING, "FILE", help="requests, a JSON object on each line, as OpenAI's batches have them")
    output: str | None = setting(
        None, "-o", "--output", metavar="FILE", help="gets a line for each; those that it has are not computed again"
    )
    url: str | None = setting(
        None,
        "--url",
        metavar="URL",
        help="send the requests to this server, as many at a time as --parallel says, in place of loading a model; "
        "they give way to its other requests",
    )
    api_key: str | None = setting(
        None,
        "--api-key",
        metavar="KEY",
        help=f"key of that server; the environment variable {KEY_VARIABLE} keeps it out of the process list",
    )


GROUPS: Mapping[str, type] = {"Batch": BatchConfig, "Model": EngineConfig}


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        return False


@with_flags(
    GROUPS,
    "polarlm batch",
    "Answer a file of requests in the format of OpenAI's batches. A call that was stopped goes on.",
    {
        "url": check_that(_is_address, "write an address such as http://127.0.0.1:8080"),
        "api_key": CHECKS["api_key"],
    },
)
def main(batch: BatchConfig, model: EngineConfig) -> int:
    """Returns 1 if every request failed."""
    if not Path(batch.file).expanduser().exists():
        raise FlagError(f"{batch.file}: there is no such file")
    if batch.output is None:
        raise FlagError("-o: say where the answers are written, such as -o answers.jsonl")
    _check_url(batch, model)
    model = settle(None, model, {})
    output = Path(batch.output).expanduser()
    lines = import_room("http.openai.lines")
    try:
        with lines.LineFiles(Path(batch.file).expanduser(), output) as files:
            if left := sum(1 for _ in files.unanswered_lines()):
                if done := files.completed + files.failed:
                    note(f"{output}: {counted(done, 'line')} of an earlier call; {counted(left, 'request')} to answer")
                progress = counting("Answering", "line", left)
                if batch.url is not None:
                    key = batch.api_key or os.environ.get(KEY_VARIABLE, "").strip()
                    lines.send_lines(batch.url, key, files, model.parallel, progress)
                else:
                    model = replace(model, weights=model.weights or first_model.remembered_name())
                    import_room("serving").answer_files(model, files, progress)
    except OSError as error:
        raise EngineError(f"{error.filename or output}: {error.strerror}", "storage") from None
    print(f"{output}: {counted(files.completed, 'answer')}, and {counted(files.failed, 'request')} that failed")
    return int(files.failed > files.completed == 0)


def _check_url(batch: BatchConfig, model: EngineConfig) -> None:
    """Raises FlagError for flags that say nothing with --url, or without it."""
    if batch.url is None:
        if batch.api_key is not None:
            raise FlagError("--api-key is the key of a server: give its --url as well")
        return
    default = EngineConfig(parallel=model.parallel)
    names = [field.name for field in fields(model) if getattr(model, field.name) != getattr(default, field.name)]
    if names:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise FlagError(f"{flags}: a server that --url names has its model already; leave it out")


def import_room(name: str) -> Any:
    """Return a module of the server. Raises EngineError if a package is missing."""
    try:
        return import_module(f"polarlm.server.{name}")
    except ImportError as error:
        raise EngineError(f"{error}: this needs more packages: pip install 'polarlm[serve]'") from None
