"""Two GPUs of `CupyDevice` on the stand-in for CuPy: copies between them, what waits for what, recordings of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from polarlm.engine.backends.cuda.device import PeerCopy
from polarlm.engine.backends.cuda.multi_device.ops import MultiDeviceOps
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.errors import EngineError
from tests.cuda.fake_cupy import Machine
from tests.cuda.test_cupy_device import imported
from tests.cuda.test_model_emulated import model_of, talk
from tests.cuda.test_schedules import compare_with_waiting

TYPES = "ring4", "ring3.5"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Machine, ModuleType]]:
    with imported(monkeypatch) as (machine, module):
        machine.devices = 2
        yield machine, module


@pytest.mark.parametrize("can_reach", [True, False])
def test_a_copy_waits_for_its_source_and_the_source_for_the_copy(
    fake: tuple[Machine, ModuleType], rng: np.random.Generator, can_reach: bool
) -> None:
    machine, module = fake
    machine.can_reach = can_reach
    first, second = (module.CupyDevice(number) for number in range(2))
    assert [first.name, second.name] == ["Fake GPU (cuda:0)", "Fake GPU (cuda:1)"]
    x = rng.standard_normal((3, 5)).astype(np.float32)
    for _ in range(2):
        y = second.from_device(first.from_host(x), first)
        np.testing.assert_array_equal(second.to_host(y), x)
    assert machine.order == 2 * [("wait", 1, 0), ("copy", 1, 0), ("wait", 0, 1)]
    assert machine.reached == ({(1, 0)} if can_reach else set())


def test_rows_of_another_gpu_are_an_input_of_recorded_work(
    fake: tuple[Machine, ModuleType], rng: np.random.Generator
) -> None:
    """Rows that they do not fill are finite; beside them, only the inputs on the host are uploaded."""
    _, module = fake
    first, second = (module.CupyDevice(number) for number in range(2))

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
@pytest.mark.parametrize(
    ("name", "counts"),
    [("llama_gqa_linear", (1, 1)), ("qwen3_moe_normed", (1, 1)), ("qwen3_5_tied", (2, 2)), ("lfm2_tied", (2, 2))],
)
def test_a_model_answers_the_same_recorded_on_each_gpu(
    fake: tuple[Machine, ModuleType], name: str, counts: tuple[int, int]
) -> None:
    """Whatever is done on a GPU is done with its own arrays, on its own stream."""
    _, module = fake
    wanted = talk(model_of(CudaOps(module.CupyDevice()), name, TYPES))
    devices = [module.CupyDevice(number) for number in range(2)]
    logits = talk(model_of(MultiDeviceOps([*map(CudaOps, devices)], counts), name, TYPES))
    np.testing.assert_equal(logits, wanted)
    recorded = [sum(bool(one.parts) for one in device._recordings._recordings_by_key.values()) for device in devices]
    assert recorded[0] == recorded[1] > 0


@pytest.mark.slow
def test_steps_that_begin_ahead_have_the_tokens_of_steps_that_wait(
    fake: tuple[Machine, ModuleType], tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens go from the last GPU to the first one, and do not pass the host."""
    device_ops = [CudaOps(fake[1].CupyDevice(number)) for number in range(2)]
    compare_with_waiting(lambda: MultiDeviceOps(device_ops), tiny_path, monkeypatch)


def test_a_gpu_that_is_not_there_is_an_error(fake: tuple[Machine, ModuleType]) -> None:
    with pytest.raises(EngineError, match="There is no cuda:2: the NVIDIA driver shows cuda:0 to cuda:1"):
        fake[1].open_device(2)
