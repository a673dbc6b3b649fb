"""`CupyDevice` on the stand-in for CuPy, with the emulator as its GPU: copies, launches, recordings, memory."""

from __future__ import annotations

import contextlib
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from polarlm.engine.backends.cuda import wide
from polarlm.engine.backends.cuda.device import PaddedInput, cublas_lt, overlap, packed_launch
from polarlm.engine.backends.cuda.device.kernel_source import source
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.ops import Load
from polarlm.engine.errors import DeviceLost, EngineError
from polarlm.engine.model.forward import Transformer
from polarlm.engine.params import SamplingParams
from polarlm.engine.sampling.sample import SamplerInput, resolve
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders.config import GenerationDefaults
from tests.cuda import fake_cupy, test_model_emulated
from tests.cuda.fake_cublas_lt import Library
from tests.cuda.fake_cupy import CUDADriverError, CUDARuntimeError, Machine
from tests.cuda.formats import STEP, read, store
from tests.cuda.some_passes import passes_of
from tests.cuda.test_model_emulated import model_from, model_of, talk
from tests.cuda.test_packed_model import mixed_model
from tests.cuda.test_sampler_inputs import stepped
from tests.cuda.test_schedules import compare_with_waiting
from tests.pairs import pairs
from tests.tiny import load_tiny
from tests.weights import random_matrix

SILU = source("activate_mul", ACTIVATION="silu")
DEFAULTS = GenerationDefaults()
FOLDER = "polarlm.engine.backends.cuda.device"
NAME = f"{FOLDER}.cupy_device"
RECORDING = f"{FOLDER}.cupy_recording"
LOAD_LIBRARY = cublas_lt.load_library
NAMES = NAME, RECORDING


@contextlib.contextmanager
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Machine, ModuleType]]:
    """A machine, and the module under test, imported anew. Its launches do not overlap."""
    monkeypatch.setenv(overlap.VARIABLE, "0")
    machine, modules = fake_cupy.make()
    monkeypatch.setattr(packed_launch, "load_driver", lambda: fake_cupy.Driver(machine))
    monkeypatch.setattr(cublas_lt, "load_library", lambda cuda: Library(machine))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield machine, importlib.import_module(NAME)
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Machine, ModuleType]]:
    with imported(monkeypatch) as both:
        yield both


@pytest.fixture
def machine(fake: tuple[Machine, ModuleType]) -> Machine:
    return fake[0]


@pytest.fixture
def device(fake: tuple[Machine, ModuleType]):
    return fake[1].CupyDevice()


def silu(device, y, gate_up) -> None:
    args = (y, gate_up, np.int32(gate_up.shape[1] // 2))
    device.launch("activate_mul_kernel", SILU, (1, len(gate_up)), (32,), args)


def silu_of(x: np.ndarray) -> np.ndarray:
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


# -- copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (600, 1000)])
def test_an_upload_reads_back(device, rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    x = rng.standard_normal(shape).astype(np.float32)
    before, y = x.copy(), device.from_host(x)
    x[...] = 0
    np.testing.assert_array_equal(device.to_host(y), before)
    np.testing.assert_array_equal(device.to_host(y[:, 1:3]), before[:, 1:3])


# -- launches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["3", True, np.float64(3), np.int8(3), np.zeros(3)])
def test_arguments_of_other_types_are_a_type_error(device, wrong: object) -> None:
    with pytest.raises(TypeError, match="a kernel takes device arrays"):
        device.launch("activate_mul_kernel", SILU, (1,), (32,), (None, wrong, 8))


@pytest.mark.parametrize(("place", "wrong"), [(0, 3), (1, 0.5), (2, np.int64(8)), (2, 8.0), (2, None)])
def test_every_launch_of_a_kernel_takes_the_same_types(device, machine: Machine, place: int, wrong: object) -> None:
    """It would read the bytes of another type as they are."""
    args = [device.empty((1, 8), np.float32), device.from_host(np.ones((1, 16), np.float32)), 8]
    for size in (8, np.int32(8)):
        device.launch("activate_mul_kernel", SILU, (1, 1), (32,), [*args[:2], size])
    args[place] = wrong
    with pytest.raises(TypeError, match="takes arguments of the types PPi, as before, not "):
        device.launch("activate_mul_kernel", SILU, (1, 1), (32,), args)
    assert len(machine.launches) == 2


def test_a_launch_that_the_driver_refuses_is_its_error(device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cupy.Driver, "cuLaunchKernelEx", lambda *_: 719)
    with pytest.raises(CUDADriverError, match="719"):
        silu(device, device.empty((1, 8), np.float32), device.empty((1, 16), np.float32))


def test_other_libraries_may_change_the_current_gpu_and_stream(fake: tuple[Machine, ModuleType]) -> None:
    machine, module = fake
    machine.devices = 2
    first, second = (module.CupyDevice(number) for number in range(2))
    y, x = first.empty((1, 8), np.float32), first.from_host(np.ones((1, 16), np.float32))
    for work in (lambda: first.empty((3,), np.int8), lambda: first.from_host(np.ones(3)), lambda: silu(first, y, x)):
        for change in (second.use, lambda: setattr(machine, "stream", None)):
            change()
            work()
            assert (machine.current, machine.stream) == (0, first._stream)


def test_the_limit_of_shared_memory_is_raised(device, machine: Machine) -> None:
    text = 'extern "C" __global__ void f(int *y) { DYNAMIC_SHARED(int, s); s[0] = 1; y[0] = s[0]; }'
    text = text.replace("void f", "void __launch_bounds__(32) f")
    y = device.from_host(np.zeros(1, np.int32))
    from polarlm.engine.backends.cuda.device.kernel_source import prelude

    for size in (1 << 10, 96 << 10, 64 << 10):
        device.launch("f", prelude() + text, (1,), (1,), (y,), size)
    assert machine.largest_shared == 96 << 10


@pytest.mark.parametrize("grid", [(0,), (2, 0)])
def test_an_empty_grid_is_refused(device, machine: Machine, grid: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="an empty grid"):
        device.launch("activate_mul_kernel", SILU, grid, (32,), (None, None, np.int32(8)))
    assert not machine.compiled


# -- products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["__half", "__nv_bfloat16"])
@pytest.mark.parametrize(("biased", "add"), pairs([False, True], [False, True]))
def test_gemm_is_the_product_recorded_or_not(
    device, rng: np.random.Generator, kind: str, biased: bool, add: bool
) -> None:
    """In columns of a wider array; a replay multiplies what its inputs are."""
    w, bias = store(rng.standard_normal((7, 24)), kind), rng.standard_normal(7).astype(np.float32)
    weight, on_device = device.from_host(w), device.from_host(bias)

    def work(x, before):
        y = device.empty(before.shape, np.float32)
        y[:] = before
        device.gemm(y[:, 3:10], x, weight, on_device if biased else None, add=add)
        return y

    for _ in range(3):
        x, before = store(rng.standard_normal((5, 24)), kind), rng.standard_normal((5, 12)).astype(np.float32)
        wanted = before.astype(np.float64)
        wanted[:, 3:10] = add * wanted[:, 3:10] + biased * bias + read(x, kind) @ read(w, kind).astype(np.float64).T
        result = device.to_host(device.run_graph("key", work, [x, before]))
        np.testing.assert_allclose(result, wanted, atol=24 * STEP["float"] * 24)


@pytest.fixture
def library(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library(machine)
    monkeypatch.setattr(cublas_lt, "load_library", lambda cuda: library)
    return library


def multiply(device, rows: int, out: int = 8) -> None:
    x, w = (device.from_host(np.ones((count, 8), np.float16)) for count in (rows, out))
    device.gemm(device.empty((rows, out), np.float32), x, w, add=False)


def test_an_algorithm_is_asked_for_once_while_its_shape_is_in_use(
    device, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the library has made for other shapes, it gets back."""
    monkeypatch.setattr(cublas_lt, "_MOST_PLANS", 2)
    asked = []
    for rows, out in [(3, 8), (3, 8), (19, 8), (3, 8), (5, 16), (3, 8), (17, 8)]:
        multiply(device, rows, out)
        asked.append(len(library.asked))
    assert asked == [1, 1, 2, 2, 3, 3, 3]
    assert len(library.structures) == 1 + 3 * 1 + 2 * 3  # a handle; descriptions of algorithms; layouts of plans


@pytest.mark.parametrize("serves", [True, False])
def test_an_algorithm_for_rows_in_sixteens_is_asked_for_once(device, library: Library, serves: bool) -> None:
    """If it serves; if not, one for these rows."""
    library.serves = serves
    for rows in (257, 258, 272, 273, 270, 258):
        multiply(device, rows)
    assert library.asked == ([272, 288] if serves else [272, 257, 258, 288, 273, 270])


def test_a_bias_may_be_aligned_less_than_the_matrices(device, rng: np.random.Generator) -> None:
    """As of a part of a matrix whose first part has an odd number of rows."""
    x, w, bias = rng.standard_normal((4, 8)), rng.standard_normal((8, 8)), rng.standard_normal(11).astype(np.float32)
    halves, biases = [device.from_host(a.astype(np.float16)) for a in (x, w)], device.from_host(bias)
    for first in (0, 1, 2, 3):
        y = device.empty((4, 8), np.float32)
        device.gemm(y, *halves, biases[first : first + 8], add=False)
        wanted = x.astype(np.float16).astype(float) @ w.astype(np.float16).astype(float).T + bias[first : first + 8]
        np.testing.assert_allclose(device.to_host(y), wanted, atol=1e-3)


@pytest.mark.parametrize(
    ("found", "loaded"),
    [
        ("nvidia/cu13/lib/libcublasLt.so.13", "nvidia/cublas/lib/libcublasLt.so.12"),  # CuPy's is of CUDA 12
        ("nvidia/cublas/lib/libcublasLt.so.12", "nvidia/cublas/lib/libcublasLt.so.12"),
        (None, "libcublasLt.so.12"),  # one that the system has loaded
    ],
)
def test_the_library_is_of_the_cuda_of_cupy(
    tmp_path: Path, found: str | None, loaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cu13/lib/libcublasLt.so.13", "cublas/lib/libcublasLt.so.12"):
        (tmp_path / "nvidia" / name).parent.mkdir(parents=True)
        (tmp_path / "nvidia" / name).touch()

    def load(name: str) -> str:
        if "/" not in name and found is not None:
            raise OSError("not on the loader's path")
        return name

    path = None if found is None else str(tmp_path / found)
    finder = SimpleNamespace(load_nvidia_dynamic_lib=lambda name: SimpleNamespace(abs_path=path))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", finder)
    monkeypatch.setattr(cublas_lt.ctypes, "CDLL", load)
    assert LOAD_LIBRARY(12040) == str(tmp_path / loaded if "/" in loaded else loaded)


@pytest.mark.parametrize(("status", "error"), [(3, MemoryError), (15, RuntimeError)])
def test_a_status_of_the_library_is_an_error(device, library: Library, status: int, error: type[Exception]) -> None:
    library.status = status
    with pytest.raises(error, match=f"cublasLtMatmulAlgoGetHeuristic: status {status}"):
        multiply(device, 3)


# -- recorded work -----------------------------------------------------------------------------------------------


def test_work_is_run_once_recorded_once_and_then_replayed(device, machine: Machine, rng: np.random.Generator) -> None:
    calls: list[int] = []

    def work(x, offset):
        calls.append(1)
        y = device.empty((len(x), 8), np.float32)
        silu(device, y, x)
        return y

    for turn in range(5):
        x = rng.standard_normal((2, 16)).astype(np.float32)
        result = device.run_graph("key", work, [x, np.arange(3, dtype=np.int32)])
        np.testing.assert_allclose(device.to_host(result), silu_of(x), rtol=1e-5)
        assert len(calls) == min(turn + 1, 2)
    assert machine.launches == ["activate_mul_kernel"] * 5


def test_other_keys_shapes_and_dtypes_have_their_own_recordings(device) -> None:
    calls: list[tuple] = []

    def work(x):
        calls.append((x.shape, x.dtype))
        return x

    for key, x in [("a", np.zeros(3)), ("b", np.zeros(3)), ("a", np.zeros(4)), ("a", np.zeros(3, np.int32))] * 3:
        device.run_graph(key, work, [x])
    assert len(calls) == 8


def test_a_replay_reads_the_inputs_of_its_call(device) -> None:
    """Inputs of all sizes share one buffer."""
    for _ in range(3):
        inputs = [np.arange(n, dtype=t) for n, t in [(1, np.int32), (100, np.float32), (3, np.uint8), (7, np.int32)]]
        seen: list[np.ndarray] = []
        device.run_graph("key", lambda *arrays, seen=seen: seen.extend(map(np.array, arrays)) or arrays[0], inputs)
        for x, array in zip(inputs, seen, strict=False):
            np.testing.assert_array_equal(array, x)


def test_an_error_while_recording_ends_the_recording(device, machine: Machine) -> None:
    fails = [False, True, False, False]

    def work(x):
        if fails.pop(0):
            raise ZeroDivisionError
        return x

    device.run_graph("key", work, [np.zeros(3)])
    with pytest.raises(ZeroDivisionError):
        device.run_graph("key", work, [np.zeros(3)])
    assert machine.recorded is None
    np.testing.assert_array_equal(device.run_graph("key", work, [np.ones(3)]), np.ones(3))


def doubled(device, calls: list[int] | None = None) -> Callable:
    """Work: x (T, 16) → silu of its halves, with twice as much memory as that takes in between."""

    def work(x):
        if calls is not None:
            calls.append(len(x))
        between = device.empty((2, *x.shape), np.float32)
        between[:] = x
        y = device.empty((len(x), 8), np.float32)
        silu(device, y, between[1])
        return y

    return work


def rows(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.standard_normal((count, 16)).astype(np.float32)


def test_the_least_recently_used_recording_is_dropped(
    device, machine: Machine, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[RECORDING], "MOST_RECORDINGS", 3)
    calls: list[int] = []
    work = doubled(device, calls)

    def run(count: int) -> None:
        x = rows(rng, count)
        np.testing.assert_allclose(device.to_host(device.run_graph("key", work, [x])), silu_of(x), rtol=1e-5)

    for count in (1, 1, 2, 2, 3, 3, 1):
        run(count)
    oldest = next(
        recording for recording in device._recordings._recordings_by_key.values() if len(recording.inputs[0]) == 2
    )
    run(4)
    run(4)  # instead of 2
    assert calls == [1, 1, 2, 2, 3, 3, 4, 4]
    assert oldest._copy_event.awaited  # its buffer on the host may still be read otherwise
    del oldest
    assert len(machine.graphs) == 3
    for count in (1, 3, 4, 2, 2, 2):  # 2 begins anew, instead of 1
        run(count)
    assert calls[8:] == [2, 2]
    assert len(device._recordings._recordings_by_key) == 3


def test_passes_and_other_work_have_limits_of_their_own(device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass is work in parts between which something is launched. None is dropped for the other."""
    monkeypatch.setattr(sys.modules[RECORDING], "MOST_RECORDINGS", 2)
    monkeypatch.setattr(sys.modules[RECORDING], "MOST_PASSES", 3)
    calls: list[str] = []

    def run(key: str) -> None:
        def work(x):
            calls.append(key)
            y = device.empty((1, 8), np.float32)
            silu(device, y, x)
            if key.isupper():
                device.run_between_graphs(lambda y: None, [y], is_last=key == "A")
            return y

        for _ in range(3):
            x = np.ones((1, 16), np.float32)
            np.testing.assert_allclose(device.to_host(device.run_graph(key, work, [x])), silu_of(x), rtol=1e-5)

    for key in ("a", "A", "B", "b", "C", "a", "b"):
        run(key)
    assert calls == [key for key in "aABbC" for _ in range(2)]
    parts = {whole[0]: len(one.parts) for whole, one in device._recordings._recordings_by_key.items()}
    assert parts == {"A": 2, "B": 3, "C": 3, "a": 1, "b": 1}
    run("D")  # in place of A
    run("c")  # in place of a
    calls.clear()
    for key in ("B", "C", "b"):
        run(key)
    assert not calls
    assert len(device._recordings._recordings_by_key) == 5


def test_what_is_launched_between_parts_takes_no_memory_of_recordings(device, machine: Machine) -> None:
    """Which is never given back; also not in the first call, which records nothing."""
    pool, sizes = device._recordings._memory, list[int]()

    def launch(y) -> None:
        before = pool.total_bytes()
        assert device.empty((1 << 20,), np.uint8).nbytes
        sizes.append(pool.total_bytes() - before)

    def work(x):
        y = device.empty((1, 8), np.float32)
        silu(device, y, x)
        device.run_between_graphs(launch, [y])
        return y

    for _ in range(3):
        device.run_graph("key", work, [np.ones((1, 16), np.float32)])
    assert sizes == [0, 0, 0]


def test_no_memory_is_freed_while_a_graph_is_recorded(device, machine: Machine, rng: np.random.Generator) -> None:
    """It is freed after that, and then the graph is recorded again."""
    calls: list[int] = []
    work, x = doubled(device, calls), rows(rng, 40)
    device.run_graph("key", work, [x])
    taken = []  # what the first call has given back
    pool = device._recordings._memory
    while size := pool.free_bytes():
        taken.append(pool.malloc(min(size, 512)))
    spare = device.empty((1 << 16,), np.uint8)
    del spare  # the common pool has it
    machine.room = machine.allocated
    np.testing.assert_allclose(device.to_host(device.run_graph("key", work, [x])), silu_of(x), rtol=1e-5)
    assert calls == [40] * 3


def test_what_is_forgotten_is_not_kept_alive(device, machine: Machine) -> None:
    """As the KV store of an engine that is closed; later calls begin anew."""
    held = device.zeros((1, 16), np.float32)
    alive = weakref.ref(held)

    def work(x, held=held):
        y = device.empty((1, 8), np.float32)
        silu(device, y, held)
        device.run_between_graphs(lambda y: held, [y])
        return y

    for _ in range(2):
        device.run_graph("key", work, [np.zeros(1)])
    del work, held
    assert alive() is not None
    machine.broken = 700  # nor by a GPU that works no more
    device.forget()
    assert alive() is None


def test_recordings_share_the_memory_set_aside(device, machine: Machine, rng: np.random.Generator) -> None:
    """Results and intermediates of all shapes take no more than the largest shape's."""
    device.reserve_workspace((32 + 8) * 4 * 40 + 20 * 512 * 6)
    before, work = machine.allocated, doubled(device)
    for count in (*range(1, 21), *range(40, 20, -1)):
        for _ in range(3):
            x = rows(rng, count % 20 + 1)
            result = device.to_host(device.run_graph(count, work, [x]))
            np.testing.assert_allclose(result, silu_of(x), rtol=1e-5)
    assert machine.allocated == before


def test_out_of_memory_does_not_free_the_memory_of_graphs(device, machine: Machine, rng: np.random.Generator) -> None:
    work, x = doubled(device), rows(rng, 2)
    for _ in range(2):
        device.run_graph("key", work, [x])
    spare = device.empty((1 << 16,), np.uint8)
    del spare  # the common pool has it
    machine.room = machine.allocated
    big = rows(rng, 100)
    np.testing.assert_allclose(device.to_host(device.run_graph("key", work, [big])), silu_of(big), rtol=1e-5)
    with pytest.raises(MemoryError):
        device.run_graph("key", work, [rows(rng, 10_000)])
    np.testing.assert_allclose(device.to_host(device.run_graph("key", work, [x])), silu_of(x), rtol=1e-5)


def test_a_result_is_carried_over_to_later_calls(device, rng: np.random.Generator) -> None:
    """Later calls have the same shape or another; their inputs and results may overwrite the result."""

    def work(ids, x):
        between = device.empty((2, *x.shape), np.float32)
        between[:] = x
        y = device.empty(ids.shape, np.int32)
        y[:] = ids
        return y

    ids = np.array([7, -1, 5], np.int32)
    result = device.run_graph("key", work, [ids, rows(rng, 2)])
    for turn in range(12):
        copy, wait = device.to_host_later(result[:3])
        carried = PaddedInput(np.zeros(3 + turn % 2, np.int32), copy, device)
        result = device.run_graph("key", work, [carried, rows(rng, 2 + turn % 3)])
        np.testing.assert_array_equal(wait(), ids)
        np.testing.assert_array_equal(device.to_host(result), [*ids, 0][: 3 + turn % 2])
    assert len(device._recordings._recordings_by_key) == 6


@pytest.mark.slow
def test_steps_that_begin_ahead_have_the_tokens_of_steps_that_wait(
    device, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_with_waiting(lambda: CudaOps(device), tiny_path, monkeypatch, sets=[range(5, 50), range(40, 90)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("llama_gqa_linear", 24),
        ("llama_gqa_linear", 1),
        ("lfm2_tied", 24),
        ("qwen3_5_tied", 24),
        ("granite_hybrid_tied", 24),
        ("nemotron_h_experts", 24),
    ],
)
def test_a_model_answers_the_same_recorded_or_not(
    device, machine: Machine, name: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps across a block end: everything that changes must reach a replay through its inputs."""
    monkeypatch.setattr(sys.modules[RECORDING], "MOST_RECORDINGS", kept)
    recorded = talk(model_of(CudaOps(device), name, ("ring4", "ring3.5")))
    device.run_graph = lambda key, work, inputs: work(*map(device.from_host, inputs))
    np.testing.assert_equal(recorded, talk(model_of(CudaOps(device), name, ("ring4", "ring3.5"))))


@pytest.mark.slow
def test_first_requests_run_what_was_warmed_up(device, tiny_path: Path) -> None:
    """A prompt and steps of one request record nothing, and the store's pool is as large as before."""
    settings = {"block_size": 16, "ctx_size": 128, "cache_type": "f16", "calibration": False, "parallel": 2}
    with load_tiny(tiny_path, ops=CudaOps(device), **settings) as engine:
        engine._parts.warm_up_timer.cancel()
        engine._parts.warm_up_timer.join()
        while engine.warm_up():
            pass
        recorded = {whole: [*one.parts] for whole, one in device._recordings._recordings_by_key.items()}
        assert all(recorded.values())
        before = device._recordings._memory.total_bytes()
        engine.generate([*range(5, 60)], temperature=0, ignore_eos=True, max_tokens=4)
        assert {whole: one.parts for whole, one in device._recordings._recordings_by_key.items()} == recorded
        assert device._recordings._memory.total_bytes() == before
    assert not device._recordings._recordings_by_key  # the engine is closed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_gqa_linear", "gemma4_shared_kv", "packed", "packed, by the library"])
def test_a_pass_answers_the_same_recorded_or_not(device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed with other numbers of rows, prompts and steps, and with rows that are not filled."""
    if "library" in name:
        monkeypatch.setattr(wide, "WIDE_ROWS", 16)

    def model() -> Transformer:
        ops, types, room = CudaOps(device), ("ring4", "ring3.5"), {"room": (256, 12), "more": 2560}
        return (
            model_from(ops, *mixed_model(), types, **room) if "packed" in name else model_of(ops, name, types, **room)
        )

    passed = model()
    recorded = passes_of(passed)
    (kept,) = device._recordings._recordings_by_key.values()
    assert len(kept.parts) == 2 * len(passed.config.layers)
    device.run_graph = lambda key, work, inputs: work(*map(device.from_host, inputs))
    np.testing.assert_equal(recorded, passes_of(model()))


@pytest.mark.slow
def test_recordings_hold_no_dequantized_weights(device, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in memory that products of all numbers of rows share, recorded or not."""
    monkeypatch.setattr(wide, "WIDE_ROWS", 16)
    ops, rng = CudaOps(device), np.random.default_rng(0)
    matrix = random_matrix(rng, "q8_0", 512, 256)
    weight, values = Linear(ops.load([matrix])), matrix.values
    multiply(device, 3)  # the library has its workspace
    for rows in (20, 30, 20, 30, 20):
        x = rng.standard_normal((rows, 256)).astype(np.float32)
        y = device.run_graph("key", lambda x: ops.linear(x, weight), [x])
        off = np.abs(device.to_host(y) - x @ values.T)
        assert (off <= 2.0**-9 * (np.abs(x) @ np.abs(values).T)).all()
    assert device._recordings._memory.total_bytes() < 512 * 256 * 2


def test_host_calls_share_pinned_memory(device) -> None:
    """In work of any number of rows, one after another, recorded or not."""
    parts = device._recordings

    def work(x):
        y = device.empty(x.shape, np.float32)
        device.call_host(lambda x: x + 1, y, [x])
        device.call_host(lambda x: 2 * x, y, [y])
        return y

    for rows in (8, 3, 8, 3, 8):
        x = np.full((rows, 4), rows, np.float32)
        np.testing.assert_array_equal(device.to_host(device.run_graph("key", work, [x])), 2 * x + 2)
    calls = [part for one in parts._recordings_by_key.values() for part in one.parts if hasattr(part, "_copies")]
    assert len(calls) == 4
    for call in calls:
        assert np.shares_memory(call._result, parts._pinned[0])
        assert np.shares_memory(call._copies[0], parts._pinned[1])


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2])
def test_a_step_with_experts_on_the_host_is_recorded_in_parts(
    device, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph more than there are such layers; replayed, they give what the ops give one by one."""
    pytest.importorskip("llvmlite")
    from polarlm.engine.backends.native.ops import NativeOps

    ops, load = CudaOps(device, NativeOps(1)), test_model_emulated.load_weights
    monkeypatch.setattr(test_model_emulated, "load_weights", partial(load, on_host=layers))
    recorded = talk(model_of(ops, "qwen3_moe_normed", ("f16", "f16")))
    kept = [recording for recording in device._recordings._recordings_by_key.values() if recording.parts]
    assert kept
    assert all(len(recording.parts) == 2 * layers + 1 for recording in kept)
    calls = [part for part in kept[-1].parts if hasattr(part, "_copies")]
    assert [len(call._copies) for call in calls] == [1] * layers  # a norm's weights are there already
    device.run_graph = lambda key, work, inputs: work(*map(device.from_host, inputs))
    np.testing.assert_equal(recorded, talk(model_of(ops, "qwen3_moe_normed", ("f16", "f16"))))


@pytest.mark.slow
@pytest.mark.parametrize("types", [("ring4", "ring3.5"), ("polarquant+dense", "f16")])
def test_recording_a_step_uploads_and_allocates_nothing(
    device, machine: Machine, types: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotations are uploaded with the model; all else that kernels read, by the first step of a shape."""
    model = model_of(CudaOps(device), "llama_gqa_linear", types)
    model.ops.reserve_workspace(Load(model.config, model.store.shape.format(0), 16, 4))
    recording, uploads, recorded = sys.modules[RECORDING]._Recording, [], []
    record, from_host = recording.record, device.from_host

    def watched(self, work: Callable) -> None:
        before = machine.allocated, len(uploads)
        record(self, work)
        recorded.append((machine.allocated, len(uploads)) == before)

    monkeypatch.setattr(recording, "record", watched)
    device.from_host = lambda x: uploads.append(x) or from_host(x)
    plain = SamplerInput(resolve(SamplingParams(temperature=0), DEFAULTS), [], 0.5, model.config.vocab_size)
    stepped(model, [plain])
    assert all(x.dtype == np.int32 and not x.any() for x in uploads)  # counts that start at zero, and no rotation
    for count in (1, 4, 4, 2, 2):
        stepped(model, [plain] * count)
    assert recorded == [True] * 3


# -- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (CUDARuntimeError(2), MemoryError),
        (CUDADriverError(2), MemoryError),
        (CUDARuntimeError(700), CUDARuntimeError),
    ],
)
def test_out_of_memory_is_a_memory_error(device, error: Exception, becomes: type[Exception]) -> None:
    def work(x):
        raise error

    with pytest.raises(becomes):
        device.run_graph("key", work, [np.zeros(3)])


@pytest.mark.parametrize("status", [700, 715, 717, 719, 214])
def test_an_error_that_repeats_is_a_lasting_one(device, machine: Machine, status: int) -> None:
    """Unlike the error of one launch, or a queue of work that is not done yet. While a graph is recorded, too."""
    assert device.lasting_error() is None
    ops = CudaOps(device)
    y, x = device.empty((1, 8), np.float32), device.empty((1, 16), np.float32)

    def work(x):
        machine.broken = status
        silu(device, y, x)
        return y

    for _ in range(2):
        machine.broken = 0
        with pytest.raises((CUDADriverError, CUDARuntimeError)):
            device.run_graph("key", work, [np.zeros((1, 16), np.float32)])
        assert f"status {status}" in str(device.lasting_error())
    with pytest.raises(
        DeviceLost, match=rf"Fake GPU has stopped with an error \(status {status}\): start this program"
    ):
        ops.check()
    machine.broken = 0
    silu(device, y, x)
    assert device.lasting_error() is None


def test_open_device_returns_a_working_gpu(fake: tuple[Machine, ModuleType]) -> None:
    machine, module = fake
    device = module.open_device()
    assert (device.name, device.processors, device.shared_memory) == ("Fake GPU", 4, 228 << 10)
    assert machine.launches == 2 * ["activate_mul_kernel"]


def test_open_device_tries_launches_that_overlap(
    fake: tuple[Machine, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what is recorded."""
    machine, module = fake
    monkeypatch.setenv(overlap.VARIABLE, "1")
    assert module.open_device().overlaps
    assert machine.overlapped == ["activate_mul_kernel"]


def broken(machine: Machine) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13\nand more")

    machine.do = fail  # type: ignore[method-assign]


def too_new(machine: Machine) -> None:
    machine.capability = 12, 0
    broken(machine)


def no_library(machine: Machine) -> None:
    def load(cuda: int) -> None:
        raise RuntimeError('Failure finding "libcublasLt.so"')

    cublas_lt.load_library = load  # type: ignore[assignment]


NO_GPU: list[tuple[Callable[[Machine], object], str]] = [
    (lambda machine: setattr(machine, "status", 35), "driver is older than the CUDA of the installed CuPy"),
    (lambda machine: setattr(machine, "status", 100), "shows no GPU: look at CUDA_VISIBLE_DEVICES"),
    (lambda machine: setattr(machine, "status", 999), r"CUDA does not start \(status 999\)"),
    (lambda machine: setattr(machine, "broken", 2), "Fake GPU has too little free memory to begin: nvidia-smi shows"),
    (lambda machine: setattr(machine, "broken", 46), r"cuda:0 does not start \(status 46\)"),
    (lambda machine: setattr(machine, "room", 1 << 20), r"Fake GPU has too little free memory .* \(0\.0 of 2\.0 GiB\)"),
    (lambda machine: setattr(machine, "capability", (7, 5)), "Fake GPU, has compute capability 7.5, and 8.0 is"),
    (too_new, r"NVRTC 12\.4, is too old for the GPU, Fake GPU, which has compute capability 12\.0: update it"),
    (broken, r"\(NVRTC 12\.4\) or libraries do not work with the GPU, Fake GPU, .* 9\.0 \(CuPy failed to load lib"),
    (no_library, r"libraries do not work with the GPU, Fake GPU, .* \(Failure finding \"libcublasLt\.so\"\)"),
    (
        lambda machine: setattr(machine, "do", lambda *_: None),
        r"libraries do not work .* \(a product of matrices is wrong",
    ),
]


@pytest.mark.parametrize(("spoil", "reason"), NO_GPU)
def test_open_device_says_why_a_gpu_cannot_be_used(
    fake: tuple[Machine, ModuleType], spoil: Callable, reason: str
) -> None:
    machine, module = fake
    spoil(machine)
    with pytest.raises(EngineError, match=reason) as caught:
        module.open_device()
    assert caught.value.code == "device_unavailable"
