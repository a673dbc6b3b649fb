"""`CupyDevice` on the stand-in for CuPy, with the emulator as its GPU: what found an error once, or guards against one.

Whole models, recorded or not, run on the stand-in where `tests.test_bare_machine` rehearses the tests of a GPU.
"""

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
from polarlm.engine.backends.cuda.device import PaddedInput, PeerCopy, cublas_lt, overlap, packed_launch
from polarlm.engine.backends.cuda.device.kernel_source import prelude, source
from polarlm.engine.backends.cuda.multi_device.ops import MultiDeviceOps
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.ops import Load
from polarlm.engine.errors import DeviceLost, EngineError
from polarlm.engine.params import SamplingParams
from polarlm.engine.sampling.sample import SamplerInput, resolve
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders.config import GenerationDefaults
from tests.cuda import fake_cupy, test_model_emulated
from tests.cuda.fake_cublas_lt import Library
from tests.cuda.fake_cupy import CUDADriverError, CUDARuntimeError, Machine
from tests.cuda.formats import STEP, read, store
from tests.cuda.test_model_emulated import model_of, talk
from tests.cuda.test_sampler_inputs import stepped
from tests.tiny import load_tiny
from tests.weights import random_matrix

SILU = source("activate_mul", ACTIVATION="silu")
DEFAULTS = GenerationDefaults()
FOLDER = "polarlm.engine.backends.cuda.device"
NAME = f"{FOLDER}.cupy_device"
RECORDING = f"{FOLDER}.cupy_recording"
LOAD_LIBRARY = cublas_lt.load_library
NAMES = NAME, RECORDING
TYPES = "ring4", "ring3.5"


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


@pytest.fixture
def two(fake: tuple[Machine, ModuleType]):
    """The devices of a machine with two GPUs."""
    fake[0].devices = 2
    return [fake[1].CupyDevice(number) for number in range(2)]


def silu(device, y, gate_up) -> None:
    args = (y, gate_up, np.int32(gate_up.shape[1] // 2))
    device.launch("activate_mul_kernel", SILU, (1, len(gate_up)), (32,), args)


def silu_of(x: np.ndarray) -> np.ndarray:
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


# -- copies and launches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 4), (600, 1000)])
def test_an_upload_reads_back(device, rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    x = rng.standard_normal(shape).astype(np.float32)
    before, y = x.copy(), device.from_host(x)
    x[...] = 0
    np.testing.assert_array_equal(device.to_host(y), before)
    np.testing.assert_array_equal(device.to_host(y[:, 1:3]), before[:, 1:3])


@pytest.mark.parametrize(
    ("place", "wrong", "words"),
    [
        *((1, wrong, "a kernel takes device arrays") for wrong in ("3", True, np.float64(3), np.int8(3), np.zeros(3))),
        *((place, wrong, "takes arguments of the types PPi, as before, not ") for place, wrong in [(0, 3), (1, 0.5)]),
        *((2, wrong, "takes arguments of the types PPi, as before, not ") for wrong in (np.int64(8), 8.0, None)),
    ],
)
def test_a_kernel_takes_the_same_types_at_every_launch(
    device, machine: Machine, place: int, wrong: object, words: str
) -> None:
    """It would read the bytes of another type as they are."""
    args = [device.empty((1, 8), np.float32), device.from_host(np.ones((1, 16), np.float32)), 8]
    for size in (8, np.int32(8)):
        device.launch("activate_mul_kernel", SILU, (1, 1), (32,), [*args[:2], size])
    args[place] = wrong
    with pytest.raises(TypeError, match=words):
        device.launch("activate_mul_kernel", SILU, (1, 1), (32,), args)
    assert len(machine.launches) == 2


def test_other_libraries_may_change_the_current_gpu_and_stream(two, machine: Machine) -> None:
    first, second = two
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
    for size in (1 << 10, 96 << 10, 64 << 10):
        device.launch("f", prelude() + text, (1,), (1,), (y,), size)
    assert machine.largest_shared == 96 << 10


# -- products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "biased", "add"), [("__half", True, False), ("__nv_bfloat16", False, True)])
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


@pytest.mark.parametrize("serves", [True, False])
def test_an_algorithm_for_rows_in_sixteens_is_asked_for_once(device, library: Library, serves: bool) -> None:
    """If it serves; if not, one for these rows."""
    library.serves = serves
    for rows in (257, 258, 272, 273, 270, 258):
        multiply(device, rows)
    assert library.asked == ([272, 288] if serves else [272, 257, 258, 288, 273, 270])


def test_what_the_library_has_made_for_shapes_that_are_not_in_use_it_gets_back(
    device, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublas_lt, "_MOST_PLANS", 2)
    for rows, out in [(3, 8), (3, 8), (19, 8), (3, 8), (5, 16), (3, 8), (17, 8)]:
        multiply(device, rows, out)
    assert len(library.structures) == 1 + 3 * 1 + 2 * 3  # a handle; descriptions of algorithms; layouts of plans


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


# -- recorded work -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_are_recorded_replayed_and_dropped(
    device, machine: Machine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some keys, shapes and dtypes, each with a recording of its own: the results are those of the inputs of the
    call. Work in parts, between which something is launched, has a limit of its own. What has been recorded lately is
    not run again; what is dropped reads its buffer on the host no more. All recordings share the memory set aside, of
    which what is launched between parts takes nothing, and the pinned memory of their host calls."""
    most = {False: 2, True: 3}  # whether something is launched between parts
    monkeypatch.setattr(sys.modules[RECORDING], "MOST_RECORDINGS", most[False])
    monkeypatch.setattr(sys.modules[RECORDING], "MOST_BATCHES", most[True])
    rng, kept, calls = np.random.default_rng(seed), device._recordings, list[object]()
    recorded: dict[bool, list[object]] = {False: [], True: []}  # last used last
    fails = False

    def work(key: str, x, first):
        calls.append(key)
        between = device.empty((2, *x.shape), np.float32)
        between[:] = x
        y = device.empty((len(x), 8), np.float32)
        if "launches" not in key:
            silu(device, y, between[1])
        else:
            device.run_between_graphs(partial(launch, x), [y, between[1]], is_last=key == "launches at its end")
        if key == "calls the host":
            device.call_host(lambda y: y + 1, y, [y])
            device.call_host(lambda y: 2 * y, y, [y])
        elif key != "launches at its end":
            y[0] = first
        if fails:
            raise ZeroDivisionError
        return y

    def launch(x, y, between) -> None:
        assert device.empty((1 << 20,), np.uint8).nbytes
        silu(device, y, between)

    def run(key: str, count: int, dtype: str) -> None:
        nonlocal fails
        which, is_batch = (key, count, dtype), "launches" in key
        for turn in range(int(rng.integers(1, 5))):
            x = rng.standard_normal((count, 16)).astype(np.float32)
            first, before, ran = rng.standard_normal(8).astype(dtype), dict(kept._recordings_by_key), len(calls)
            is_recent = which in recorded[is_batch][-most[is_batch] :]
            fails = turn < 2 and rng.random() < 0.2
            try:
                result = device.to_host(device.run_graph(key, partial(work, key), [x, first]))
            except ZeroDivisionError:
                assert machine.recorded is None
                return
            wanted = silu_of(x)
            if key == "calls the host":
                wanted = 2 * (wanted + 1)
            elif key != "launches at its end":
                wanted[0] = first
            np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)
            assert len(calls) == ran or not is_recent
            dropped = [one for whole, one in before.items() if whole not in kept._recordings_by_key]
            assert all(one._copy_event.awaited for one in dropped)
            if next(reversed(kept._recordings_by_key.values())).parts:
                recorded[is_batch] = [one for one in recorded[is_batch] if one != which] + [which]
            assert turn == 0 or recorded[is_batch][-1] == which

    device.reserve_workspace(11 * 512)  # no more than that
    size = kept._memory.total_bytes()
    for key in ("calls the host", *rng.choice(["plain", "launches", "launches at its end", "calls the host"], 60)):
        run(str(key), 3 if not calls else int(rng.integers(1, 4)), str(rng.choice(["f4", "f8"])))
    assert kept._memory.total_bytes() == size
    recordings = kept._recordings_by_key.values()
    for is_batch, limit in most.items():
        assert sum(one.is_batch is is_batch for one in recordings) <= limit
    held = {part for one in recordings for part in (*one.parts, *one._captured_parts)}
    assert set(machine.graphs) == {part for part in held if not hasattr(part, "make")}
    for call in [part for part in held if hasattr(part, "_copies")]:
        assert np.shares_memory(call._result, kept._pinned[0])
        assert np.shares_memory(call._copies[0], kept._pinned[1])


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


@pytest.mark.slow
def test_a_step_with_experts_on_the_host_is_recorded_in_parts(device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph more than there are such layers; replayed, they give what the ops give one by one."""
    pytest.importorskip("llvmlite")
    from polarlm.engine.backends.native.ops import NativeOps

    ops, load, layers = CudaOps(device, NativeOps(1)), test_model_emulated.load_weights, 2
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
@pytest.mark.parametrize("types", [TYPES, ("polarquant+dense", "f16")])
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


# -- two GPUs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("can_reach", [True, False])
def test_a_copy_waits_for_its_source_and_the_source_for_the_copy(
    two, machine: Machine, rng: np.random.Generator, can_reach: bool
) -> None:
    machine.can_reach, (first, second) = can_reach, two
    assert [first.name, second.name] == ["Fake GPU (cuda:0)", "Fake GPU (cuda:1)"]
    x = rng.standard_normal((3, 5)).astype(np.float32)
    for _ in range(2):
        y = second.from_device(first.from_host(x), first)
        np.testing.assert_array_equal(second.to_host(y), x)
    assert machine.order == 2 * [("wait", 1, 0), ("copy", 1, 0), ("wait", 0, 1)]
    assert machine.reached == ({(1, 0)} if can_reach else set())


def test_rows_of_another_gpu_are_an_input_of_recorded_work(two, rng: np.random.Generator) -> None:
    """Rows that they do not fill are finite; beside them, only the inputs on the host are uploaded."""
    first, second = two

    def work(x, shift):
        y = second.empty(x.shape, np.float32)
        y[:] = x
        y[0] = shift
        return y

    def other(x):
        y = second.empty((4, 64), np.float32)
        y[...] = np.nan
        return y

    for _ in range(2):  # its memory is free again, and part of what is allocated next
        second.run_graph("other", other, [np.zeros(1)])
    for rows in (2, 4, 1, 3):
        second.run_graph("other", other, [np.zeros(1)])
        x, shift = rng.standard_normal((rows, 6)).astype(np.float32), rng.standard_normal(6).astype(np.float32)
        result = second.to_host(second.run_graph("key", work, [PeerCopy(first.from_host(x), first, 4), shift]))
        np.testing.assert_array_equal(result[:rows], [shift, *x[1:]])
        assert np.isfinite(result).all()
    (recording,) = [one for one in second._recordings._recordings_by_key.values() if len(one.inputs) == 2]
    assert len(recording.parts) == 1
    assert recording._pinned.nbytes == 256


@pytest.mark.slow
def test_a_model_answers_the_same_recorded_on_each_gpu(two) -> None:
    """Whatever is done on a GPU is done with its own arrays, on its own stream."""
    wanted = talk(model_of(CudaOps(two[0]), "qwen3_5_tied", TYPES))
    two[0].forget()
    np.testing.assert_equal(talk(model_of(MultiDeviceOps([*map(CudaOps, two)], (2, 2)), "qwen3_5_tied", TYPES)), wanted)
    recorded = [sum(bool(one.parts) for one in device._recordings._recordings_by_key.values()) for device in two]
    assert recorded[0] == recorded[1] > 0


# -- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (CUDARuntimeError(2), MemoryError),
        (CUDADriverError(2), MemoryError),
        (CUDARuntimeError(700), CUDARuntimeError),
        (3, MemoryError),  # statuses of cuBLASLt
        (15, RuntimeError),
    ],
)
def test_out_of_memory_is_a_memory_error(device, library: Library, error: Exception | int, becomes: type) -> None:
    def work(x):
        if isinstance(error, Exception):
            raise error
        library.status = error
        multiply(device, 3)

    with pytest.raises(becomes):
        device.run_graph("key", work, [np.zeros(3)])


def test_an_error_that_repeats_is_a_lasting_one(device, machine: Machine) -> None:
    """Unlike the error of one launch, or a queue of work that is not done yet. While a graph is recorded, too."""
    assert device.lasting_error() is None
    ops, status = CudaOps(device), 719
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


@pytest.mark.parametrize("overlaps", [False, True])
def test_open_device_returns_a_working_gpu(
    fake: tuple[Machine, ModuleType], overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries launches that overlap, where they do, in what is recorded."""
    machine, module = fake
    monkeypatch.setenv(overlap.VARIABLE, str(int(overlaps)))
    device = module.open_device()
    assert (device.name, device.processors, device.shared_memory) == ("Fake GPU", 4, 228 << 10)
    assert device.overlaps == overlaps
    assert machine.launches == 2 * ["activate_mul_kernel"]
    assert machine.overlapped == ["activate_mul_kernel"] * overlaps


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


def test_a_gpu_that_is_not_there_is_an_error(fake: tuple[Machine, ModuleType]) -> None:
    machine, module = fake
    machine.devices = 2
    with pytest.raises(EngineError, match="There is no cuda:2: the NVIDIA driver shows cuda:0 to cuda:1"):
        module.open_device(2)
