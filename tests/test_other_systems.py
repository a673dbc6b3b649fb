"""macOS and Windows, as far as Linux can be made to look like them: a process without what these systems lack.

What kernels of another operating system do is not simulated. docs/install.md says what that leaves untried.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiled import share_kernels
from tests.programs import ROOT, output_of

pytest.importorskip("llvmlite")
pytestmark = pytest.mark.slow

WORKER = ROOT / "engine" / "sampling" / "grammar_worker.py"
# What this program's own modules see of the standard library. Other packages see this system, which they know.
_SHOWN = """
import builtins, os, pathlib, re, signal, socket, sys, types

MODULES = {"os": os, "signal": signal, "socket": socket, "sys": sys}

class Shown(types.ModuleType):
    def __getattr__(self, name):
        if name in LACKING.get(self.__name__, ()):
            raise AttributeError(name)
        return getattr(MODULES[self.__name__], name)

def is_ours(frame):
    return frame.f_globals.get("__name__", "").startswith("polarlm")

def importing(name, *rest, **more):
    if is_ours(sys._getframe(1)):
        if name in ABSENT:
            raise ImportError(name)
        if name in shown and not (len(rest) > 2 and rest[2]):
            return shown[name]
    return imported(name, *rest, **more)

def opening(function):
    def call(path, *rest, **more):
        if str(path).startswith(("/proc", "/sys")) and is_ours(sys._getframe(1)):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *rest, **more)
    return call

# Files that Windows cannot have, and links, for which it wants rights.
def refusing(event, arguments):
    if event == "os.symlink":
        raise OSError(1314, "A required privilege is not held by the client")
    made = {"open": lambda path, mode, flags: flags & os.O_CREAT and path, "os.mkdir": lambda path, *_: path,
            "os.rename": lambda source, target, *_: target}.get(event)
    path = made(*arguments) if made else None
    if isinstance(path, (str, bytes, os.PathLike)):
        name = os.path.basename(os.fsdecode(path))
        if re.search(r'[<>:"\\\\|?*\\x00-\\x1f]|[. ]$', name) or re.fullmatch(DEVICES, name):
            raise OSError(22, "Invalid argument", name)

if PLATFORM == "win32":
    sys.addaudithook(refusing)
shown = {name: Shown(name) for name in MODULES}
shown["sys"].platform = PLATFORM
imported, builtins.__import__ = builtins.__import__, importing
builtins.open, pathlib.Path.open = opening(builtins.open), opening(pathlib.Path.open)
"""
_LINUX_ALONE = "sched_getaffinity", "memfd_create", "posix_fadvise"
_POSIX_ALONE = "fork", "register_at_fork", "getuid", "O_NOFOLLOW", "O_NONBLOCK", "killpg"
_DEVICES = r"(?i:con|prn|aux|nul|com\d|lpt\d)(\..*)?"
# System → what modules lack there, and which modules do not exist.
SYSTEMS: dict[str, tuple[dict[str, tuple[str, ...]], tuple[str, ...]]] = {
    "darwin": ({"os": _LINUX_ALONE}, ()),
    "win32": (
        {"os": (*_LINUX_ALONE, *_POSIX_ALONE), "socket": ("AF_UNIX",), "signal": ("SIGHUP", "SIGKILL", "setitimer")},
        ("fcntl", "resource"),
    ),
}


def prelude(system: str) -> str:
    """Python that makes a process look like one of another system."""
    lacking, absent = SYSTEMS[system]
    names = f"PLATFORM, LACKING, ABSENT, DEVICES = {system!r}, {lacking!r}, {absent!r}, {_DEVICES!r}"
    return f"{names}\n{_SHOWN}"


PROGRAM = """
import pathlib, sys
from polarlm import Engine, SamplingParams
from polarlm.engine.jit.compile import images
folder, model = pathlib.Path(sys.argv[1]), sys.argv[2]
settings = {"device": "cpu", "threads": 1, "cache_disk": "1G", "cache_disk_folder": str(folder / "kept blocks")}
engine = Engine.load(model, **settings)
assert engine.status().threads.kernels, "NumPy computes"
print(images.sys.platform, "images" if images.AVAILABLE else "LLVM")
ids = [3 + number % 90 for number in range(200)]
greedy = SamplingParams(temperature=0, max_tokens=12)
print(*engine.generate(ids, greedy).token_ids)
saved = engine.save_session(folder / "a session")
engine.close()
again = Engine.load(model, **settings)
print(again.generate(ids, greedy).usage.cached_from.get("disk", 0) > 0)
again.close()
third = Engine.load(model, **{**settings, "cache_disk": None, "cache_disk_folder": None})
print(len(third.load_session(folder / "a session").token_ids) == saved)
third.close()
import polarlm.server.running.driver, polarlm.server.running.listening, polarlm.server.socket.connection
"""


def run(folder: Path, words: list[str], program: str) -> str:
    """What a program writes, which gets `words`."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    variables = {"PYTHONPATH": str(ROOT), "POLARLM_CACHE": str(share_kernels(folder / "user's cache"))}
    command = [sys.executable, folder / "program.py", *words]
    return output_of(*command, folder=folder, OMP_NUM_THREADS="1", **variables)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_model_answers_as_on_linux(system: str, tiny_path: Path, tmp_path: Path) -> None:
    """With compiled kernels, which LLVM links there; blocks on a disk, a session and packed weights, in folders whose
    names have spaces."""
    outputs = []
    for number, start in enumerate(("", prelude(system))):
        folder = tmp_path / f"a folder {number}"
        folder.mkdir()
        outputs.append(run(folder, [str(folder), str(tiny_path)], start + PROGRAM))
    (here, *wanted), (there, *got) = (text.splitlines() for text in outputs)
    assert (here.split()[0], there) == (sys.platform, f"{system} LLVM")
    assert got == wanted
    assert wanted[1:] == ["True", "True"]


def test_grammars_are_compiled_without_fork() -> None:
    """By the process that is started for them, in which a system without `fork` has no other one."""
    pytest.importorskip("llguidance")
    lacking = "del os.fork, signal.setitimer\nsys.platform, sys.modules['resource'] = 'win32', None"
    program = f"import os, runpy, signal, sys\n{lacking}\nrunpy.run_path({str(WORKER)!r}, run_name='__main__')"
    tokens = {"tokens": [*map(chr, range(256)), "<end>"], "special": [256], "ends": [256]}
    requests = [{"grammar": grammar, "seconds": 1.0} for grammar in ("start: /a+/", "start: nothing", "start: /b+/")]
    lines = "".join(f"{json.dumps(line)}\n" for line in (tokens, *requests))
    done = subprocess.run([sys.executable, "-c", program], input=lines, capture_output=True, text=True, timeout=60)
    first, wrong, third = map(json.loads, done.stdout.splitlines())
    assert (first, third) == ("", "")
    assert "nothing" in wrong


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_command_line_answers(system: str, tiny_path: Path, tmp_path: Path) -> None:
    words = ["chat", "-m", str(tiny_path), "--single-turn", "--prompt", "Once", "-n", "8", "--temp", "0"]
    command = "\nimport sys\nfrom polarlm.command import main\nsys.exit(main(sys.argv[1:]))\n"
    text = run(tmp_path, words, prelude(system) + command)
    assert text == run(tmp_path, words, command)
    assert text.strip()
