"""The parent's end of `template_worker.py`: templates with a limit of time and memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from model_loaders.forks import renew_in_children

_WORKER = Path(__file__).with_name("template_worker.py")
# The worker has this process's path, without the folder of its own script.
_START = "import runpy, sys; worker, *sys.path = sys.argv[1:]; runpy.run_path(worker, run_name='__main__')"

# The worker's own limit counts processor time. These count seconds, for systems without that limit; they are generous,
# since the worker may have to wait on a busy machine.
_START_SECONDS = 60.0
_RENDER_SECONDS = 10.0
_EXIT_SECONDS = 5.0  # until a worker that has closed its pipe is gone


class TemplateFailed(Exception):
    """The template could not be rendered; the message says why, without naming the template."""


class TemplateProcess:
    """One template in its worker process, started at the first rendering and ended with this object."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        renew_in_children(self)

    def render(self, each: Sequence[Mapping[str, object]]) -> list[str | TemplateFailed]:
        """The text of a rendering with `each` of these variables, which must be JSON, or the error of the template.

        Raises TemplateFailed where a limit, which holds for all of them together, ends the process.
        """
        with self._lock:
            if self._worker is not None and self._worker.poll() is not None:  # it was killed while idle
                self._stop()
            if self._worker is None:
                self._start()
                answers = self._ask([self._source, each], _START_SECONDS)
            else:
                answers = self._ask([each], _RENDER_SECONDS)
        return [TemplateFailed(answer["error"]) if "error" in answer else answer["text"] for answer in answers]

    def renew(self) -> None:
        """Forget the parent's worker and its pipes in a forked child, which starts a worker of its own."""
        self._lock = threading.Lock()
        worker, self._worker = self._worker, None
        if worker is None:
            return
        self._end.detach()
        worker.returncode = 0  # it is not this process's child
        nothing = os.open(os.devnull, os.O_RDWR)
        for pipe in (worker.stdin, worker.stdout):
            # Not closed: that would send what another thread of the parent was about to write a second time.
            if pipe is not None and not pipe.closed:
                os.dup2(nothing, pipe.fileno(), inheritable=False)
        os.close(nothing)

    def _start(self) -> None:
        try:
            worker = subprocess.Popen(
                [sys.executable, "-c", _START, str(_WORKER), *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C goes to this process alone
            )
        except (OSError, ValueError, TypeError) as error:  # TypeError: a program without an interpreter's path
            raise TemplateFailed(f"no process could be started for it ({error})") from error
        self._end = weakref.finalize(self, _end, worker)
        self._worker = worker

    def _stop(self) -> None:
        self._end()
        self._worker = None

    def _ask(self, requests: Sequence[object], seconds: float) -> list[dict[str, str]]:
        """The answers to the last of `requests`, a "text" or an "error" each; a worker that sends none is ended."""
        worker = self._worker
        assert worker is not None
        assert worker.stdin is not None
        assert worker.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            worker.kill()

        deadline = threading.Timer(seconds, end)
        deadline.start()
        try:
            worker.stdin.write(b"".join(json.dumps(request).encode() + b"\n" for request in requests))
            worker.stdin.flush()
            line = worker.stdout.readline()
        except OSError:
            line = b""
        except BaseException:  # Ctrl-C: the next request must not read this one's answer
            self._stop()
            raise
        finally:
            deadline.cancel()
        if not line.endswith(b"\n"):
            reason = "it needs too much time" if late.is_set() else _reason(worker)
            self._stop()
            raise TemplateFailed(reason)
        answers: list[dict[str, str]] = json.loads(line)
        return answers


def _reason(worker: subprocess.Popen[bytes]) -> str:
    """The reason why a worker that this process did not kill has closed its pipe."""
    from model_loaders.template_worker import OUT_OF_MEMORY  # brings all of Jinja, which no other path here needs

    try:
        code = worker.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return "its process does not answer"
    if code == OUT_OF_MEMORY:
        return "it needs too much memory"
    if code == -getattr(signal, "SIGPROF", 0):
        return "it needs too much time"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
    return f"its process ended without an answer ({name})"


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # unwritten data is lost
                continue
    worker.wait()
