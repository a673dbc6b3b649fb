"""`polarlm batch FILE`: answers a file of requests, without a server's port."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from importlib import import_module
from pathlib import Path

from polarlm.engine import EngineError
from polarlm.engine.cli.commands import command
from polarlm.engine.cli.flags import FlagError, parse
from polarlm.engine.cli.progress import counting
from polarlm.engine.config import EngineConfig, setting
from polarlm.engine.loading.checks import settle
from polarlm.model_loaders import first_model
from polarlm.server.config import ServerConfig

_NO_LIMIT = 1 << 30  # bytes of a request, and seconds of an answer


@dataclass(frozen=True)
class BatchConfig:
    file: str = setting(MISSING, "FILE", help="requests, a JSON object on each line, as OpenAI's batches have them")
    output: str | None = setting(
        None, "-o", "--output", metavar="FILE", help="gets a line for each; those that it has are not computed again"
    )


GROUPS: Mapping[str, type] = {"Batch": BatchConfig, "Model": EngineConfig}


@command
def main(argv: Sequence[str]) -> None:
    batch, model = parse(
        argv,
        GROUPS,
        prog="polarlm batch",
        description="Answer a file of requests in the format of OpenAI's batches. A call that was stopped goes on.",
    )
    if batch.output is None:
        raise FlagError("-o: say where the answers are written, such as -o answers.jsonl")
    settle(None, model, {})
    output = Path(batch.output).expanduser()
    try:
        serving, lines = (import_module(f"polarlm.server.{name}") for name in ("serving", "http.openai.lines"))
    except ImportError as error:
        raise EngineError(f"{error}: this needs more packages: pip install 'polarlm[serve]'") from None
    files = lines.LineFiles(Path(batch.file).expanduser(), output, output)
    try:
        files.open()
        output.open("ab").close()  # before a model is loaded
        if left := sum(1 for _ in files.unanswered()):
            model = replace(model, weights=model.weights or first_model.remembered_name())
            limits = ServerConfig(max_body=_NO_LIMIT, request_seconds=_NO_LIMIT)
            with serving.load_driver(model, limits) as driver, counting("Answering", "line", left) as say:
                asyncio.run(serving.answer_files(driver, files, lambda: say("")))
    except OSError as error:
        raise EngineError(f"{error.filename or output}: {error.strerror}", "storage") from None
    print(f"{output}: {files.counts['completed']:,} answers, and {files.counts['failed']:,} requests that failed")
