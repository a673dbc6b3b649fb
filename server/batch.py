"""`polarlm batch FILE`: answers a file of requests, without a server's port."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from polarlm.engine.cli.commands import note, with_flags
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.cli.progress import counting
from polarlm.engine.config import EngineConfig, setting
from polarlm.engine.errors import EngineError, counted
from polarlm.engine.loading.checks import settle
from polarlm.model_loaders import first_model


@dataclass(frozen=True)
class BatchConfig:
    file: str = setting(MISSING, "FILE", help="requests, a JSON object on each line, as OpenAI's batches have them")
    output: str | None = setting(
        None, "-o", "--output", metavar="FILE", help="gets a line for each; those that it has are not computed again"
    )


GROUPS: Mapping[str, type] = {"Batch": BatchConfig, "Model": EngineConfig}


@with_flags(
    GROUPS,
    "polarlm batch",
    "Answer a file of requests in the format of OpenAI's batches. A call that was stopped goes on.",
)
def main(batch: BatchConfig, model: EngineConfig) -> int:
    """Returns 1 if every request failed."""
    if not Path(batch.file).expanduser().exists():
        raise FlagError(f"{batch.file}: there is no such file")
    if batch.output is None:
        raise FlagError("-o: say where the answers are written, such as -o answers.jsonl")
    model = settle(None, model, {})
    output = Path(batch.output).expanduser()
    serving = import_serving()
    files = serving.LineFiles(Path(batch.file).expanduser(), output, output)
    try:
        files.open()
        output.open("ab").close()  # before a model is loaded
        if left := sum(1 for _ in files.unanswered_lines()):
            if lines := files.counts["completed"] + files.counts["failed"]:
                note(f"{output}: {counted(lines, 'line')} of an earlier call; {counted(left, 'request')} to answer")
            model = replace(model, weights=model.weights or first_model.remembered_name())
            serving.answer_files(model, files, counting("Answering", "line", left))
    except OSError as error:
        raise EngineError(f"{error.filename or output}: {error.strerror}", "storage") from None
    completed, failed = files.counts["completed"], files.counts["failed"]
    print(f"{output}: {counted(completed, 'answer')}, and {counted(failed, 'request')} that failed")
    return int(failed > completed == 0)


def import_serving() -> Any:
    """Return the module `server.serving`. Raises EngineError if a package is missing."""
    try:
        return import_module("polarlm.server.serving")
    except ImportError as error:
        raise EngineError(f"{error}: this needs more packages: pip install 'polarlm[serve]'") from None
