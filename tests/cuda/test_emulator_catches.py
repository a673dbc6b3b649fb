"""The CUDA emulator finds planted bugs, and names the line of each.

A text has its bug and what belongs there as `@bug|right@`. In the text with the bug the line that goes wrong ends with
`// here` (either end of a race); the right text runs without an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from polarlm.engine.backends.cuda.device import Addresses
from polarlm.engine.backends.cuda.device.kernel_source import prelude
from tests.cuda_emulator import EmulatorError, Program
from tests.pairs import mostly_slow

SEEDS = [0, 1, 2, 3]


def program(body: str, arguments: str = "float *y, const float *x", defines: str = "") -> Program:
    kernel = f'extern "C" __global__ void planted({arguments}) {{{body}}}'
    return Program(f'{defines}{prelude()}\n#line 1 "cuda/planted.cu"\n{kernel}\n')


def arrays() -> tuple[np.ndarray, ...]:
    return np.zeros(64, np.float32), np.arange(128, dtype=np.float32)


def shared_sum() -> tuple[np.ndarray, ...]:
    """y (3, 64), the total of its rows (64,), a count of blocks, x (64,)."""
    return np.zeros((3, 64), np.float32), np.zeros(64, np.float32), np.zeros(1, np.int32), arrays()[1][:64]


def table() -> tuple[Addresses]:
    """Rows of addresses of two arrays: the first is written, the other only read."""
    y, x = arrays()
    return (Addresses([[y, x], [y, x]], written=1),)


ARGUMENTS: dict[Callable[[], tuple], str] = {
    arrays: "float *y, const float *x",
    shared_sum: "float *y, float *total, int *count, const float *x",
    table: "const unsigned long long *rows",
}


class Fault(NamedTuple):
    """words: a pattern of the message. shared: bytes of dynamic shared memory."""

    words: str
    body: str
    threads: int = 64
    blocks: int = 1
    shared: int = 0
    args: Callable[[], tuple] = arrays


REVERSE = """
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];  // here
    {barrier}
    y[threadIdx.x] = s[{last} - threadIdx.x];  // here
"""

CHANGED = """
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    const float v = s[63 - threadIdx.x] + s[0];  // here
    @|__syncthreads();@
    s[threadIdx.x] += v;  // here
    y[threadIdx.x] = s[threadIdx.x];
"""

COPY = """
    __shared__ __align__(16) float s[64];
    if (threadIdx.x < 16) cp_async<16>(s + 4 * threadIdx.x, x + 4 * threadIdx.x);
    cp_async_commit();
    cp_async_commit();
    cp_async_wait<@2|1@>();
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x];  // here
    cp_async_wait<0>();
"""

# A block that comes last has `last`; the others return.
ARRIVAL = """    {barrier}
    if (threadIdx.x == 0) {{
        {release}
        const int before = atomicAdd(count, 1);
        {acquire}
        last = before + 1 == gridDim.x;
    }}
    __syncthreads();
    if (!last) return;
"""
# The last block adds what all have stored.
LAST_BLOCK = f"""
    __shared__ int last;
    y[64 * blockIdx.x + threadIdx.x] = x[threadIdx.x];  // here
{ARRIVAL}    float sum = 0;
    for (int b = 0; b < gridDim.x; ++b) sum += y[64 * b + (threadIdx.x + 1) % 64];  // here
    total[threadIdx.x] = sum;
"""
# The last block stores where others have loaded.
LAST_STORES = f"""
    __shared__ int last;
    const float seen = y[64 * blockIdx.x + threadIdx.x];  // here
{ARRIVAL}    for (int b = 0; b < gridDim.x; ++b) y[64 * b + (threadIdx.x + 1) % 64] = seen;  // here
"""
RIGHT = {"barrier": "__syncthreads();", "release": "__threadfence();", "acquire": "__threadfence();"}


def last_block(missing: str, text: str = LAST_BLOCK, access: str = "load") -> Fault:
    body = text.format(**RIGHT | {missing: f"@|{RIGHT[missing]}@"})
    return Fault(f"race between blocks: {access}", body, blocks=3, args=shared_sum)


TABLES = "\nfloat *const *tables = reinterpret_cast<float *const *>(rows);\n{line}  // here\n"

FAULTS = {
    "a missing barrier": Fault("race: load|uninitialised", REVERSE.format(barrier="@|__syncthreads();@", last=63)),
    "a barrier of the warp alone": Fault(
        "race|uninitialised", REVERSE.format(barrier="@__syncwarp()|__syncthreads()@;", last=63)
    ),
    "a shuffle, which orders no memory": Fault(
        "race", REVERSE.format(barrier="@__shfl_sync(~0u, x[0], 0)|__syncwarp()@;", last=31), threads=32
    ),
    "a change of what others read": Fault("race: (load|store) of shared memory", CHANGED),
    "a race in global memory within a block": Fault(
        "race: (load|store|atomic) of global memory",
        """
    y[threadIdx.x] = x[threadIdx.x];  // here
    @|__syncthreads();@
    y[63 - threadIdx.x] += 1.0f;  // here
    """,
    ),
    "a race between blocks": Fault(
        "between blocks",
        "\nif (threadIdx.x == 0) @y[0] = y[0] + x[blockIdx.x]|atomicAdd(y, x[blockIdx.x])@;  // here\n",
        blocks=3,
    ),
    "the last block, without a barrier": last_block("barrier"),
    "the last block, without a fence before the atomic": last_block("release"),
    "the last block, without a fence after the atomic": last_block("acquire"),
    "the last block stores, without a barrier": last_block("barrier", LAST_STORES, "store"),
    "the last block stores, without a fence before the atomic": last_block("release", LAST_STORES, "store"),
    "the last block stores, without a fence after the atomic": last_block("acquire", LAST_STORES, "store"),
    "a misaligned load": Fault(
        "misaligned",
        """
    const float4 v = *reinterpret_cast<const float4 *>(x + @threadIdx.x + 1|4 * threadIdx.x@);  // here
    y[threadIdx.x] = v.x + v.w;
    """,
        threads=8,
    ),
    "an index past a buffer": Fault(
        "out of bounds: store of 4 bytes at byte 256 of a buffer of 256 bytes",
        "\ny[threadIdx.x + @1|0@] = x[threadIdx.x];  // here\n",
    ),
    "an index past a shared array": Fault(
        "out of bounds",
        """
    __shared__ float s[64];
    s[threadIdx.x + @1|0@] = x[threadIdx.x];  // here
    y[threadIdx.x] = s[threadIdx.x @+ 1|@];
    """,
    ),
    "an index past dynamic shared memory": Fault(
        "byte 256 of 256 bytes of dynamic shared memory",
        """
    DYNAMIC_SHARED(float, s);
    s[threadIdx.x + @1|0@] = x[threadIdx.x];  // here
    y[threadIdx.x] = s[threadIdx.x @+ 1|@];
    """,
        shared=256,
    ),
    "uninitialised shared memory": Fault(
        "uninitialised",
        """
    __shared__ float s[64];
    if (threadIdx.x < @63|64@) s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x];  // here
    """,
    ),
    "a copy that is not waited for": Fault("cp.async has not been waited for", COPY),
    "barriers in divergent code": Fault(
        "divergent barrier.* line [57], .* line [57]",
        """
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x < @32|64@)
        { __syncthreads(); y[threadIdx.x] = s[0]; }  // here
    else
        { __syncthreads(); y[threadIdx.x] = s[1]; }  // here
    """,
    ),
    "a barrier after some threads have returned": Fault(
        "divergent barrier|deadlock",
        "\nif (threadIdx.x >= @40|64@) return;\n__syncthreads();  // here\ny[threadIdx.x] = x[0];\n",
    ),
    "a shuffle in divergent code": Fault(
        "deadlock.*__shfl_xor_sync in line 3",
        """
    float v = x[threadIdx.x];
    if (threadIdx.x < 16) v += __shfl_xor_sync(@0xffffffffu|0xffffu@, v, 1);  // here
    y[threadIdx.x] = v;
    """,
        threads=32,
    ),
    "a store to a const argument": Fault(
        "declared const", "\nif (threadIdx.x == 0) @const_cast<float *>(x)|y@[0] = 1.0f;  // here\n"
    ),
    "a store to an array of a table that is only read": Fault(
        "declared const", TABLES.format(line="if (threadIdx.x == 0) tables[@3|2@][0] = 1.0f;"), args=table
    ),
    "an index past an array of a table": Fault(
        "out of bounds", TABLES.format(line="tables[0][threadIdx.x] = tables[1][threadIdx.x + @65|64@];"), args=table
    ),
    "an undefined shift": Fault("shift", "\ny[threadIdx.x] = 1 << (int)x[threadIdx.x @|% 16@];  // here\n"),
}


@mostly_slow("name", FAULTS, ["a missing barrier"])
def test_every_fault_is_caught_in_every_order_of_threads(name: str) -> None:
    """Each is found by a check of its own. Most are slow because g++ compiles two texts for each."""
    fault, pattern = FAULTS[name], re.compile(r"@([^@|]*)\|([^@]*)@")
    arguments = ARGUMENTS[fault.args]
    wrong, right = (program(pattern.sub(rf"\{number}", fault.body), arguments) for number in (1, 2))
    lines = [number for number, line in enumerate(fault.body.splitlines(), 1) if "// here" in line]
    places = tuple(f"planted: cuda/planted.cu:{line}: " for line in lines)
    for seed in SEEDS:
        launch = (fault.blocks,), (fault.threads,)
        right.launch("planted", *launch, *fault.args(), shared=fault.shared, seed=seed)
        with pytest.raises(EmulatorError, match=fault.words) as caught:
            wrong.launch("planted", *launch, *fault.args(), shared=fault.shared, seed=seed)
        assert str(caught.value).startswith(places), f"wanted {places}: {caught.value}"


# -- what a launch may not be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((np.zeros(4), np.zeros(4, np.float32), np.int32(4)), "argument 0 is an array of float64.*float32"),
        ((np.zeros(4, np.float32), np.zeros(4, np.float32), 4), "argument 2 is a Python int.*NumPy scalar int32"),
        ((np.zeros(4, np.float32), np.float32(4), np.int32(4)), "argument 1 is a NumPy scalar.*pointer"),
    ],
)
def test_arguments_that_do_not_fit_the_signature_are_refused(args: tuple[Any, ...], words: str) -> None:
    planted = program("y[0] = x[0];", "float *y, const float *x, int n")
    with pytest.raises(EmulatorError, match=words):
        planted.launch("planted", (1,), (1,), *args)


def test_more_threads_than_the_launch_bounds_are_refused() -> None:
    text = '#define MOST 64\nextern "C" __global__ void __launch_bounds__(MOST, 1) planted(float *y) {}\n'
    planted, y = Program(text), np.zeros(1, np.float32)
    planted.launch("planted", (1,), (64,), y)
    with pytest.raises(EmulatorError, match="96 threads in a block, its launch bounds are 64"):
        planted.launch("planted", (1,), (96,), y)


WAITS = """
    const float weight = x[threadIdx.x];  // here
    {wait}
    y[threadIdx.x] = weight;
"""


def overlapped(body: str, x: np.ndarray) -> None:
    """Launches a kernel that may begin before the launch before it has ended."""
    planted = program(body, defines="#define OVERLAPS 1\n")
    for seed in SEEDS:
        planted.launch("planted", (1,), (64,), arrays()[0], x, seed=seed)


def test_a_load_before_the_launch_before_has_ended() -> None:
    x = arrays()[1]
    message = r"planted.cu:2: .*load of global memory before the launch before has ended"
    with pytest.raises(EmulatorError, match=message):
        overlapped(WAITS.format(wait="wait_for_previous();"), x)
    overlapped("wait_for_previous();" + WAITS.format(wait=""), x)
    x.flags.writeable = False  # no launch writes it
    overlapped(WAITS.format(wait="wait_for_previous();"), x)


def test_a_store_of_a_thread_that_has_not_waited() -> None:
    x = arrays()[1]
    x.flags.writeable = False
    with pytest.raises(EmulatorError, match="store of global memory before the launch before has ended"):
        overlapped(WAITS.format(wait="if (threadIdx.x != 7) { wait_for_previous(); }"), x)


def test_a_launch_whose_threads_all_end_without_waiting() -> None:
    x = arrays()[1]
    with pytest.raises(EmulatorError, match="no thread waits for the launch before"):
        overlapped("if (blockIdx.x < 1) return;" + WAITS.format(wait="wait_for_previous();"), x)
