"""The parent's end of `template_worker.py`: renders templates with limits of time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from polarlm.model_loaders.limited_process import LimitedProcess, ProcessFailed

_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateFailed(Exception):
    """The template could not be rendered; the message says why, without naming the template."""


class TemplateProcess(LimitedProcess):
    """One template in its worker process."""

    def __init__(self, source: str) -> None:
        super().__init__(_WORKER, source)

    def render(self, each: Sequence[Mapping[str, object]]) -> list[str | TemplateFailed]:
        """For each set of variables, which must be JSON: the rendered text, or the template's error.

        Raises TemplateFailed if a limit, which holds for all renderings together, ends the process.
        """
        try:
            answers = self.ask(each)
        except ProcessFailed as error:
            raise TemplateFailed(str(error)) from error.__cause__
        return [TemplateFailed(answer["error"]) if "error" in answer else answer["text"] for answer in answers]
