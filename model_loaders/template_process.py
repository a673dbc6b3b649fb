"""The parent's end of `template_worker.py`: a template that can neither hang this process nor eat its memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

_WORKER = Path(__file__).with_name("template_worker.py")
# The worker sees the same packages, and no folder that only a script of its own would have on the path.
_START = "import runpy, sys; worker, *sys.path = sys.argv[1:]; runpy.run_path(worker, run_name='__main__')"

# The worker's own limit counts processor time. These count seconds, for systems without that limit; they are generous,
# as a busy machine may let the worker wait.
_START_SECONDS = 60.0
_RENDER_SECONDS = 10.0


class TemplateFailed(Exception):
    """The template could not be rendered; the message says why, without naming the template."""


class TemplateProcess:
    """One template in its worker process, started at the first rendering and ended with this object."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None

    def render(self, variables: Mapping[str, object]) -> str:
        """Renders with `variables`, which must be JSON. Raises TemplateFailed."""
        with self._lock:
            if self._worker is None:
                self._start()
            return self._ask(variables, _RENDER_SECONDS)

    def _start(self) -> None:
        try:
            worker = subprocess.Popen(
                [sys.executable, "-c", _START, str(_WORKER), *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the user's word to this process alone
            )
        except (OSError, ValueError, TypeError) as error:  # TypeError: a program without an interpreter's path
            raise TemplateFailed(f"no process could be started for it ({error})") from error
        self._worker = worker
        self._end = weakref.finalize(self, _end, worker)
        try:
            self._ask(self._source, _START_SECONDS)
        except TemplateFailed:
            self._stop()
            raise

    def _stop(self) -> None:
        self._end()
        self._worker = None

    def _ask(self, request: object, seconds: float) -> str:
        """Sends one line and waits for its answer; a worker that fails to answer is ended."""
        worker = self._worker
        assert worker is not None
        assert worker.stdin is not None
        assert worker.stdout is not None
        deadline = threading.Timer(seconds, worker.kill)
        deadline.start()
        try:
            worker.stdin.write(json.dumps(request).encode() + b"\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except OSError:
            line = b""
        except BaseException:  # Ctrl-C: the answer still to come must not be taken for that of the next question
            self._stop()
            raise
        finally:
            deadline.cancel()
        if not line.endswith(b"\n"):
            self._stop()
            raise TemplateFailed("it needs too much time or memory")
        answer = json.loads(line)
        if "error" in answer:
            raise TemplateFailed(answer["error"])
        return answer["text"]


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what was still to be written has nowhere to go
                continue
    worker.wait()
