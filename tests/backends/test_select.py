"""The backend of each --device on machines with and without driver, CuPy and GPU, and its note."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest

from polarlm.engine.backends import select as module
from polarlm.engine.backends.cuda import device as devices
from polarlm.engine.backends.select import driver_version, ops_per_device, select
from polarlm.engine.errors import EngineError
from tests.cuda.several_devices import LimitedDevice


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Sets what the machine has: the CUDA version of its driver, whether CuPy is installed, what opening a GPU does."""

    def has(driver: int | None, cupy: bool = True, opens=None) -> None:
        monkeypatch.setattr(module, "driver_version", lambda: driver)
        find = importlib.util.find_spec
        fake = SimpleNamespace() if cupy else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: fake if name == "cupy" else find(name))
        device = ModuleType("polarlm.engine.backends.cuda.device.cupy_device")
        if opens is not None:
            device.open_device = opens
        monkeypatch.setitem(sys.modules, "polarlm.engine.backends.cuda.device.cupy_device", device)
        monkeypatch.setattr(devices, "cupy_device", device, raising=False)  # there, if another test has imported it

    return has


def no_gpu() -> None:
    raise EngineError("The NVIDIA driver shows no GPU", "device_unavailable")


REASONS = [
    ({"driver": 11080}, "The NVIDIA driver is older than CUDA 12: update it"),
    (
        {"driver": 12040, "cupy": False},
        "An NVIDIA driver is here, but CuPy is not installed (pip install 'polarlm[cuda12]')",
    ),
    (
        {"driver": 14000, "cupy": False},
        "An NVIDIA driver is here, but CuPy is not installed (pip install 'polarlm[cuda13]')",
    ),
    ({"driver": 13000}, "CuPy does not find its libraries (cannot import name 'open_device'"),
    ({"driver": 13000, "opens": no_gpu}, "The NVIDIA driver shows no GPU"),
]


@pytest.mark.parametrize(("machine_has", "reason"), REASONS)
def test_auto_says_why_it_does_not_use_a_gpu(machine, machine_has: dict, reason: str) -> None:
    machine(**machine_has)
    ops, sentence = select("auto", 0)
    assert ops.name == "cpu"
    assert sentence.startswith(reason)
    assert sentence.endswith(": running on the CPU.")
    assert "\n" not in sentence


@pytest.mark.parametrize(("device", "driver"), [("auto", None), ("cpu", 13000)])
def test_the_cpu_is_taken_without_a_note(machine, device: str, driver: int | None) -> None:
    machine(driver=driver, opens=no_gpu)
    ops, sentence = select(device, 0)
    assert ops.name == "cpu"
    assert sentence == ""


@pytest.mark.parametrize(("machine_has", "reason"), [({"driver": None}, "No NVIDIA driver found"), *REASONS])
def test_cuda_without_a_usable_gpu_is_an_error(machine, machine_has: dict, reason: str) -> None:
    machine(**machine_has)
    with pytest.raises(EngineError) as caught:
        select("cuda", 0)
    assert caught.value.code == "device_unavailable"
    assert str(caught.value).startswith(f"device=cuda: {reason}")
    assert str(caught.value).endswith("; device=cpu needs none of this")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_usable_gpu_is_selected(machine, device: str) -> None:
    gpu = SimpleNamespace(name="NVIDIA H200", overlaps=False, processors=132, memory=lambda: (1 << 30, 1 << 40))
    machine(driver=13000, opens=lambda: gpu)
    ops, sentence = select(device, 0)
    assert ops.name == "NVIDIA H200"
    assert sentence == ""


@pytest.mark.parametrize(
    ("device", "opened"), [("cuda:1", [1]), ("cuda:0,1", [0, 1]), ("cuda:2,0", [2, 0]), ("cuda", [0, 1, 2])]
)
def test_gpus_are_selected_by_number(machine, device: str, opened: list[int]) -> None:
    """Where none is named, the others help if they can be used."""

    def opens(number: int = 0) -> LimitedDevice:
        if number == 3:
            raise EngineError("too old", "device_unavailable")
        return LimitedDevice(number)

    machine(driver=13000, opens=opens)
    sys.modules["polarlm.engine.backends.cuda.device.cupy_device"].device_count = lambda: 4
    ops, sentence = select(device, 0)
    assert [device.name for device in ops_per_device(ops, with_others=True)] == [
        LimitedDevice(number).name for number in opened
    ]
    assert sentence == ""


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", "cuda:0,", "cuda:1,1", "cpu:0"])
def test_an_unknown_device_is_an_error(device: str) -> None:
    with pytest.raises(EngineError, match=f"device={device}: (there are auto, cpu and cuda, and|a GPU is named twice)"):
        select(device, 0)


def test_driver_version_is_none_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert driver_version() is None
