"""The CUDA emulator finds planted bugs, and names the line of each.

In every text the line that goes wrong ends with `// here` (of a race, either end); the same lines without the bug are
run as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.cuda.device import Addresses
from polarlm.engine.backends.cuda.device.kernel_source import prelude, source
from tests.cuda.emulated import EmulatedDevice
from tests.cuda_emulator import EmulatorError, Program

SEEDS = [0, 1, 2, 3]


def program(body: str, arguments: str = "float *y, const float *x") -> tuple[Program, list[int]]:
    """A kernel `planted` with this body, and the numbers of its lines that say `here`."""
    text = f'{prelude()}\n#line 1 "cuda/planted.cu"\nextern "C" __global__ void planted({arguments}) {{{body}}}\n'
    after = text.split('"cuda/planted.cu"\n')[1]
    return Program(text), [number for number, line in enumerate(after.splitlines(), 1) if "// here" in line]


def assert_caught(body: str, words: str, *args: Any, arguments: str = "", **launch: Any) -> None:
    """`words` is a pattern of the message; it is found in every order of threads."""
    planted, lines = program(body, *([arguments] if arguments else []))
    size = {"grid": (1,), "block": (64,), **launch}
    for seed in SEEDS:
        with pytest.raises(EmulatorError) as caught:
            planted.launch("planted", size["grid"], size["block"], *args, shared=size.get("shared", 0), seed=seed)
        message = str(caught.value)
        assert re.search(words, message), message
        places = [f"planted: cuda/planted.cu:{line}: " for line in lines]
        assert message.startswith(tuple(places)), f"wanted {places}: {message}"


def assert_passes(body: str, *args: Any, arguments: str = "", **launch: Any) -> None:
    planted, _ = program(body, *([arguments] if arguments else []))
    size = {"grid": (1,), "block": (64,), **launch}
    for seed in SEEDS:
        planted.launch("planted", size["grid"], size["block"], *args, shared=size.get("shared", 0), seed=seed)


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """y (64,), x (128,) float32."""
    return np.zeros(64, np.float32), np.arange(128, dtype=np.float32)


REVERSE = """
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];  // here
    {barrier}
    y[threadIdx.x] = s[63 - threadIdx.x];  // here
"""


def test_a_missing_block_barrier_is_caught() -> None:
    y, x = arrays()
    assert_caught(REVERSE.format(barrier=""), "race: load of shared memory|uninitialised", y, x)
    assert_passes(REVERSE.format(barrier="__syncthreads();"), y, x)
    np.testing.assert_array_equal(y, x[:64][::-1])


def test_a_barrier_of_the_warp_is_not_one_of_the_block() -> None:
    y, x = arrays()
    assert_caught(REVERSE.format(barrier="__syncwarp();"), "race|uninitialised", y, x)
    assert_passes(REVERSE.format(barrier="__syncwarp();").replace("63 -", "31 -"), y, x, block=(32,))


def test_a_shuffle_does_not_order_memory() -> None:
    y, x = arrays()
    body = REVERSE.format(barrier="__shfl_sync(~0u, x[0], 0);").replace("63 -", "31 -")
    assert_caught(body, "race", y, x, block=(32,))


def test_a_missing_barrier_before_reuse_of_shared_memory_is_caught() -> None:
    body = """
    __shared__ float s[64];
    for (int i = 0; i < 2; ++i) {
        s[threadIdx.x] = x[threadIdx.x + i];  // here
        __syncthreads();
        y[threadIdx.x] = s[63 - threadIdx.x];  // here
        BARRIER
    }
    """
    y, x = arrays()
    assert_caught(body.replace("BARRIER", ""), "race: (load|store) of shared memory", y, x)
    assert_passes(body.replace("BARRIER", "__syncthreads();"), y, x)


@pytest.mark.parametrize(("barrier", "threads", "other"), [("__syncthreads()", 64, 63), ("__syncwarp()", 32, 31)])
def test_a_thread_may_change_what_others_read_before_a_barrier(barrier: str, threads: int, other: int) -> None:
    body = f"""
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    {barrier};
    const float v = s[{other} - threadIdx.x] + s[0];  // here
    BARRIER
    s[threadIdx.x] += v;  // here
    y[threadIdx.x] = s[threadIdx.x];
    """
    y, x = arrays()
    assert_passes(body.replace("BARRIER", f"{barrier};"), y, x, block=(threads,))
    np.testing.assert_array_equal(y[:threads], other)
    assert_caught(body.replace("BARRIER", ""), "race: (load|store) of shared memory", y, x, block=(threads,))


def test_a_race_in_global_memory_within_a_block_is_caught() -> None:
    body = """
    y[threadIdx.x] = x[threadIdx.x];  // here
    BARRIER
    y[63 - threadIdx.x] += 1.0f;  // here
    """
    y, x = arrays()
    assert_caught(body.replace("BARRIER", ""), "race: (load|store|atomic) of global memory", y, x)
    assert_passes(body.replace("BARRIER", "__syncthreads();"), y, x)


def test_a_race_between_blocks_is_caught() -> None:
    y, x = arrays()
    assert_caught("\nif (threadIdx.x == 0) y[0] = y[0] + x[blockIdx.x];  // here\n", "between blocks", y, x, grid=(3,))
    assert_passes("if (threadIdx.x == 0) atomicAdd(y, x[blockIdx.x]);", y, x, grid=(3,))
    assert y[0] == len(SEEDS) * (0 + 1 + 2)


LAST_BLOCK = """
    __shared__ int last;
    y[64 * blockIdx.x + threadIdx.x] = x[threadIdx.x];  // here
    BARRIER
    if (threadIdx.x == 0) {
        RELEASE
        const int before = atomicAdd(count, 1);
        ACQUIRE
        last = before + 1 == gridDim.x;
    }
    __syncthreads();
    if (!last) return;
    float sum = 0;
    for (int b = 0; b < gridDim.x; ++b) sum += y[64 * b + (threadIdx.x + 1) % 64];  // here
    __syncthreads();
    total[threadIdx.x] = sum;
    if (threadIdx.x == 0) atomicExch(count, 0);
"""


@pytest.mark.parametrize("missing", ["BARRIER", "RELEASE", "ACQUIRE", ""])
def test_the_last_block_reads_what_others_have_stored_before_a_fence_and_an_atomic(missing: str) -> None:
    lines = {"BARRIER": "__syncthreads();", "RELEASE": "__threadfence();", "ACQUIRE": "__threadfence();"}
    body = LAST_BLOCK
    for name, line in lines.items():
        body = body.replace(name, "" if name == missing else line)
    x = np.arange(64, dtype=np.float32)
    y, total, count = np.zeros((3, 64), np.float32), np.zeros(64, np.float32), np.zeros(1, np.int32)
    arguments = "float *y, float *total, int *count, const float *x"
    if missing:
        words = "race between blocks: load"
        assert_caught(body, words, y, total, count, x, arguments=arguments, grid=(3,))
        return
    assert_passes(body, y, total, count, x, arguments=arguments, grid=(3,))
    np.testing.assert_array_equal(total, 3 * np.roll(x, -1))
    assert count == 0


@pytest.mark.parametrize("missing", ["RELEASE", ""])
def test_every_thread_may_have_a_fence_of_its_own(missing: str) -> None:
    """Before the barrier that orders it before the atomic of one thread."""
    body = """
    y[64 * blockIdx.x + threadIdx.x] = x[threadIdx.x];  // here
    RELEASE
    __syncthreads();
    if (threadIdx.x > 0) return;
    if (atomicAdd(count, 1) + 1 < gridDim.x) return;
    __threadfence();
    for (int i = 0; i < 64 * gridDim.x; ++i) total[0] += y[i];  // here
    atomicExch(count, 0);
    """.replace("RELEASE", "" if missing else "__threadfence();")
    x = np.arange(64, dtype=np.float32)
    y, total, count = np.zeros((3, 64), np.float32), np.zeros(1, np.float32), np.zeros(1, np.int32)
    check = assert_caught if missing else assert_passes
    words = ["race between blocks: load"] if missing else []
    check(body, *words, y, total, count, x, arguments="float *y, float *total, int *count, const float *x", grid=(3,))


def test_a_store_after_the_fence_is_not_passed_on() -> None:
    body = """
    if (threadIdx.x) return;
    const int ORDER;
    if (before + 1 < gridDim.x) return;
    __threadfence();
    for (int b = 0; b < gridDim.x; ++b) total[0] += y[b];  // here
    """
    store = "y[blockIdx.x] = x[blockIdx.x];"
    atomic = "before = atomicAdd(count, 1)"
    x = np.arange(64, dtype=np.float32)
    arguments = "float *y, float *total, int *count, const float *x"
    for late in (True, False):
        order = f"__threadfence(); {store}" if late else f"{store} __threadfence();"
        text = body.replace("const int ORDER", f"{order} const int {atomic}")
        y, total, count = np.zeros(3, np.float32), np.zeros(1, np.float32), np.zeros(1, np.int32)
        planted, _ = program(text, arguments)
        if late:
            with pytest.raises(EmulatorError, match="race between blocks: load"):
                planted.launch("planted", (3,), (64,), y, total, count, x)
        else:
            planted.launch("planted", (3,), (64,), y, total, count, x)
            assert total == 0 + 1 + 2


def test_a_misaligned_vector_load_is_caught() -> None:
    body = """
    const float4 v = *reinterpret_cast<const float4 *>(x + threadIdx.x + OFFSET);  // here
    y[threadIdx.x] = v.x + v.w;
    """
    y, x = arrays()
    assert_caught(body.replace("OFFSET", "1"), "misaligned", y, x, block=(8,))
    assert_passes(body.replace("threadIdx.x + OFFSET", "4 * threadIdx.x"), y, x, block=(8,))


def test_an_index_past_a_buffer_is_caught() -> None:
    y, x = arrays()
    body = "\ny[threadIdx.x + 1] = x[threadIdx.x];  // here\n"
    assert_caught(body, r"out of bounds: store of 4 bytes at byte 256 of a buffer of 256 bytes", y, x)


def test_an_index_past_a_shared_array_is_caught() -> None:
    body = """
    __shared__ float s[64];
    s[threadIdx.x + 1] = x[threadIdx.x];  // here
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x];
    """
    y, x = arrays()
    assert_caught(body, "out of bounds", y, x)


def test_an_index_past_dynamic_shared_memory_is_caught() -> None:
    body = """
    DYNAMIC_SHARED(float, s);
    s[threadIdx.x] = x[threadIdx.x];  // here
    y[threadIdx.x] = s[threadIdx.x];
    """
    y, x = arrays()
    assert_caught(body, "byte 252 of 252 bytes of dynamic shared memory", y, x, shared=252)
    assert_passes(body, y, x, shared=256)


def test_reading_uninitialised_shared_memory_is_caught() -> None:
    body = """
    __shared__ float s[64];
    if (threadIdx.x < COUNT) s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x];  // here
    """
    y, x = arrays()
    assert_caught(body.replace("COUNT", "63"), "uninitialised", y, x)
    assert_passes(body.replace("COUNT", "64"), y, x)


COPY = """
    __shared__ __align__(16) float s[64];
    if (threadIdx.x < 16) cp_async<16>(s + 4 * threadIdx.x, x + 4 * threadIdx.x);
    cp_async_commit();
    if (threadIdx.x < 16) cp_async<16>(s + 4 * threadIdx.x, x + 64 + 4 * threadIdx.x);
    cp_async_commit();
    cp_async_wait<LEFT>();
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x];  // here
    cp_async_wait<0>();
"""


def test_reading_before_a_copy_is_waited_for_is_caught() -> None:
    y, x = arrays()
    once = "\n".join(line for line in COPY.splitlines() if "x + 64" not in line)
    assert_caught(once.replace("LEFT", "2"), "cp.async has not been waited for", y, x)
    assert_passes(once.replace("LEFT", "1"), y, x)
    np.testing.assert_array_equal(y, x[:64])


def test_a_copy_without_a_barrier_is_caught() -> None:
    y, x = arrays()
    once = "\n".join(line for line in COPY.splitlines() if "x + 64" not in line and "syncthreads" not in line)
    assert_caught(once.replace("LEFT", "0"), "race|has not been waited for|uninitialised", y, x)


def test_a_barrier_in_divergent_code_is_caught() -> None:
    body = """
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x < 32)
        { __syncthreads(); y[threadIdx.x] = s[0]; }
    else
        { __syncthreads(); y[threadIdx.x] = s[1]; }
    """
    y, x = arrays()
    planted, _ = program(body)
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=r"planted\.cu:[57]: .*divergent barrier.* line [57], .* line [57]"):
            planted.launch("planted", (1,), (64,), y, x, seed=seed)


def test_a_barrier_after_some_threads_have_returned_is_caught() -> None:
    y, x = arrays()
    planted, _ = program("\nif (threadIdx.x >= 40) return;\n__syncthreads();\ny[threadIdx.x] = x[0];\n")
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=r"planted\.cu:3: .*(divergent barrier|deadlock)"):
            planted.launch("planted", (1,), (64,), y, x, seed=seed)


def test_a_shuffle_in_divergent_code_is_caught() -> None:
    y, x = arrays()
    body = "\nfloat v = x[threadIdx.x];\nif (threadIdx.x < 16) v += __shfl_xor_sync(MASK, v, 1);\ny[threadIdx.x] = v;\n"
    planted, _ = program(body.replace("MASK", "0xffffffffu"))
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=r"planted\.cu:3: .*deadlock.*__shfl_xor_sync in line 3"):
            planted.launch("planted", (1,), (32,), y, x, seed=seed)
    assert_passes(body.replace("MASK", "0xffffu"), y, x, block=(32,))


def test_a_store_to_a_const_argument_is_caught() -> None:
    y, x = arrays()
    assert_caught("\nconst_cast<float *>(x)[0] = 1.0f;  // here\n", "declared const", y, x)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tables[3][0] = 1.0f;", "declared const"),
        ("tables[0][threadIdx.x] = tables[1][threadIdx.x + 65];", "out of bounds"),
        ("tables[2][64 + threadIdx.x] = 1.0f;", "out of bounds"),
    ],
)
def test_arrays_of_a_table_of_addresses_are_checked(line: str, words: str) -> None:
    """As those that are arguments themselves: one array is written, the other only read."""
    y, x = arrays()
    body = "\nfloat *const *tables = reinterpret_cast<float *const *>(rows);\n{line}  // here\n"
    table, arguments = Addresses([[y, x], [y, x]], written=1), "const unsigned long long *rows"
    assert_caught(body.format(line=line), words, table, arguments=arguments)
    line = "tables[2][threadIdx.x] = tables[1][threadIdx.x + 64];"
    assert_passes(body.format(line=line), table, arguments=arguments)
    np.testing.assert_array_equal(y, x[64:])


def test_an_undefined_shift_is_caught() -> None:
    y, x = arrays()
    assert_caught("\ny[threadIdx.x] = 1 << (int)x[threadIdx.x];  // here\n", "shift", y, x)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            (np.zeros(4, np.float64), np.zeros(4, np.float32), np.int32(4)),
            r"argument 0 is an array of float64.*float32",
        ),
        ((np.zeros(4, np.float32), np.zeros(4, np.float32), 4), "argument 2 is a Python int.*NumPy scalar int32"),
        ((np.zeros(4, np.float32), np.zeros(4, np.float32), np.int64(4)), "argument 2 is a NumPy scalar int64"),
        ((np.zeros(4, np.float32), np.float32(4), np.int32(4)), "argument 1 is a NumPy scalar.*pointer"),
        ((np.zeros(4, np.float32), np.zeros(4, np.float32)), "takes 3 arguments, not 2"),
        ((np.zeros((4, 4), np.float32).T, np.zeros(4, np.float32), np.int32(4)), "not next to each other"),
    ],
)
def test_arguments_that_do_not_fit_the_signature_are_refused(args: tuple[Any, ...], words: str) -> None:
    planted, _ = program("y[0] = x[0];", "float *y, const float *x, int n")
    with pytest.raises(EmulatorError, match=words):
        planted.launch("planted", (1,), (1,), *args)


def test_a_text_that_does_not_compile_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"planted\.cu:1:.*nonsense"):
        program("nonsense;")


def test_more_threads_than_the_launch_bounds_are_refused() -> None:
    text = '#define MOST 64\nextern "C" __global__ void __launch_bounds__(MOST, 1) planted(float *y) {}\n'
    planted, y = Program(text), np.zeros(1, np.float32)
    planted.launch("planted", (1,), (64,), y)
    with pytest.raises(EmulatorError, match="96 threads in a block, its launch bounds are 64"):
        planted.launch("planted", (1,), (96,), y)


OVERLAPPED = "#define OVERLAPS 1\n"
WAITS = """
    const float weight = x[threadIdx.x];  // here
    {wait}
    y[threadIdx.x] = weight;
"""


def overlapped(body: str, x: np.ndarray) -> None:
    """Launches a kernel that may begin before the launch before it has ended."""
    arguments = 'extern "C" __global__ void planted(float *y, const float *x)'
    text = f'{OVERLAPPED}{prelude()}\n#line 1 "cuda/planted.cu"\n{arguments} {{{body}}}\n'
    for seed in SEEDS:
        Program(text).launch("planted", (1,), (64,), arrays()[0], x, seed=seed)


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


@pytest.mark.parametrize("number", range(3))
def test_a_missing_barrier_in_a_kernel_of_the_engine_is_caught(number: int) -> None:
    """`logprobs` without one of its barriers."""
    text, barrier = source("logprobs"), "__syncthreads();"
    own = text.index('"cuda/sampling/logprobs.cu"')
    places = [place.start() for place in re.finditer(re.escape(barrier), text) if place.start() > own]
    assert len(places) == 3
    broken = text[: places[number]] + text[places[number] + len(barrier) :]
    logits = np.random.default_rng(0).standard_normal((2, 300), np.float32)
    asked = np.array([[0, 5, 20], [1, 7, 3]], np.int32)

    def launch(text: str) -> None:
        out = np.zeros((2, 44), np.int32)
        sizes = np.int32(300), np.int64(300), np.int32(44)
        Program(text).launch("logprobs_kernel", (2,), (128,), out, logits, asked, *sizes)

    launch(text)
    with pytest.raises(EmulatorError, match=r"logprobs\.cu"):
        launch(broken)


def test_arrays_of_the_host_and_of_the_device_are_not_mixed() -> None:
    """What CuPy refuses."""
    device, host = EmulatedDevice(), np.zeros((2, 2), np.float32)
    uses: list[Callable[..., Any]] = [
        lambda device, x, host: device.to_host(host),
        lambda device, x, host: device.to_host_later(host),
        lambda device, x, host: device.from_device(host, device),
        lambda device, x, host: device.gemm(x, x, host, add=False),
        lambda device, x, host: device.launch("kernel", "", (1,), (32,), (x, host)),
        lambda device, x, host: device.launch("kernel", "", (1,), (32,), (Addresses([[x, host]], 1),)),
        lambda device, x, host: device.launch("kernel", "", (1,), (32,), (x, 1)),
        lambda device, x, host: np.asarray(x),
        lambda device, x, host: np.ascontiguousarray(x),
        lambda device, x, host: np.concatenate([x, host]),
        lambda device, x, host: np.square(x),
        lambda device, x, host: host + x,
        lambda device, x, host: float(x[0, 0]),
        lambda device, x, host: x.__setitem__(0, host[0]),
        lambda device, x, host: host.__setitem__(0, x[0]),
    ]
    for use in uses:
        with pytest.raises(TypeError):
            use(device, device.zeros((2, 2), np.float32), host)
