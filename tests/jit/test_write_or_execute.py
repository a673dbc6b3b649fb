"""No page of memory is writable and executable at once, as macOS and hardened systems demand: the system refuses such
pages to this process, and kernels are compiled, linked in both ways, and run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.programs import ROOT

UNAVAILABLE = 77  # exit code of a process that cannot have system calls refused

# A filter of system calls (seccomp): mmap, mprotect and pkey_mprotect fail if their third argument asks for both.
PROGRAM = """
import ctypes, mmap, platform, struct, sys

def refuse():
    of_machines = {"x86_64": ((9, 10, 329), 0xC000003E), "aarch64": ((222, 226, 288), 0xC00000B7)}
    calls, audit = of_machines[platform.machine()]
    load, equal, both, give = 0x20, 0x15, 0x54, 0x06
    code = [(load, 0, 0, 4), (equal, 0, 1 + len(calls), audit), (load, 0, 0, 0)]
    for number, call in enumerate(calls):
        code.append((equal, len(calls) - number, 0, call))
    code.append((give, 0, 0, 0x7FFF0000))  # another call: allowed
    code += [(load, 0, 0, 32), (both, 0, 0, 6), (equal, 0, 1, 6), (give, 0, 0, 0x00050001), (give, 0, 0, 0x7FFF0000)]
    memory = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in code))
    program = struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(memory))
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(38, 1, 0, 0, 0) or library.prctl(22, 2, ctypes.c_char_p(program), 0, 0):
        sys.exit(UNAVAILABLE)
    return memory

kept = refuse()
try:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    sys.exit("the system gives such pages")
except PermissionError:
    pass

import numpy as np
from polarlm.engine.jit.compile.compiler import LoadedObject, compile_object
from polarlm.engine.jit.compile.library import Library
from polarlm.engine.jit.compile.target import best
from polarlm.engine.jit.run.workers import CommandBuffer, Launch, workers
from tests.jit.test_images import CONSTANTS, is_right

compiled, out = Library(best(), cache=None), np.ones(64, np.int32)
arguments = CONSTANTS.pack(CONSTANTS.arguments(out))
workers().run(CommandBuffer([Launch(compiled.address(CONSTANTS), arguments.ctypes.data, units=1, grain=1)]), threads=2)
assert out[5] == 1 + 5 + 1005
assert is_right(LoadedObject(compile_object(CONSTANTS, best()), best()))
rights = [line.split()[1] for line in open("/proc/self/maps")]
print(sum("x" in one for one in rights), sum("w" in one and "x" in one for one in rights))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the filter of system calls is Linux's")
def test_kernels_run_where_no_page_is_writable_and_executable() -> None:
    program = f"UNAVAILABLE = {UNAVAILABLE}\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == UNAVAILABLE:
        pytest.skip("this system does not let a process refuse system calls to itself")
    assert done.returncode == 0, done.stderr
    executable, both = map(int, done.stdout.split())
    assert executable > 0
    assert both == 0
