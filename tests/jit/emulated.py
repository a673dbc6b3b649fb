"""A plugin of pytest for an emulated process, in which everything takes 20 to 50 times as long.

Tests of every level take the highest one alone, so that each level is tested on the CPU that has no higher one. LLVM
runs on the machine itself, in a process that this one starts: it makes the same code for a level on any machine. The
code is linked, loaded and run in the emulated process.

TESTS_HOST_PYTHON is the command of the machine's own Python, which `python -m tests.jit.emulated` is run with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from polarlm.engine.jit.compile import compiler, target
from polarlm.engine.jit.isa.levels import LEVELS
from polarlm.engine.jit.lang import Level

HOST = "TESTS_HOST_PYTHON"


@cache
def _host() -> subprocess.Popen[bytes]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    command = [os.environ[HOST], "-m", "tests.jit.emulated", compiler._triple(target.levels()[-1])]
    folder = Path(__file__).resolve().parents[2]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder, env=environment)


def compile_object(kernel: compiler.Kernel[Any], level: Level) -> bytes:
    """What `compiler.compile_object` returns, by the machine's own LLVM."""
    host, source = _host(), compiler.source(kernel, level)
    with compiler._llvm_lock:
        host.stdin.write(json.dumps([level.name, source]).encode() + b"\n")
        host.stdin.flush()
        size = int(host.stdout.readline())
        code = host.stdout.read(size)
    if len(code) != size:
        raise RuntimeError("the machine's own LLVM has ended")
    return code


def patch() -> None:
    """Must come before other modules import what is replaced."""
    highest = target.levels()[-1:]
    target.levels = lambda: list(highest)
    compiler.compile_object = compile_object


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"highest level: {target.levels()[-1].name}")


def serve(triple: str) -> None:
    """Compile LLVM IR from standard input, a line of JSON each, for the system that LLVM calls `triple`: the size, a
    line, and the code are written."""
    llvm = compiler._binding()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    compiler._triple, compiler.machine = lambda level: triple, lambda: triple.split("-")[0]
    by_name = {level.name: level for level in LEVELS}
    for line in sys.stdin.buffer:
        name, source = json.loads(line)
        code = compiler._object(source, by_name[name])
        sys.stdout.buffer.write(b"%d\n" % len(code) + code)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
elif HOST in os.environ:
    patch()
