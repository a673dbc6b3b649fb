"""What is available on the host: within the limits of the process's cgroups, and on systems without any."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from polarlm.engine import Engine, EngineError
from polarlm.engine.backends.numpy import host_memory
from polarlm.engine.backends.numpy.host_memory import cgroup_room
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.state.plan import plan_for_tokens
from tests.tiny import CONTEXT

MIB, GIB = 1 << 20, 1 << 30


def tree(root: Path, groups: str, files: dict[str, object]) -> Path:
    """`root` with a /proc/self/cgroup, and files below /sys/fs/cgroup."""
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(groups, encoding="utf-8")
    for name, content in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n", encoding="utf-8")
    return root


def v2(folder: str, limit: object, used: int, cached: int = 0) -> dict[str, object]:
    statistics = f"anon 1\ninactive_file {cached // 2}\nactive_file {cached - cached // 2}"
    return {f"{folder}memory.max": limit, f"{folder}memory.current": used, f"{folder}memory.stat": statistics}


def v1(folder: str, limit: object, used: int, cached: int = 0) -> dict[str, object]:
    folder = f"memory/{folder}"
    statistics = f"inactive_file 7\ntotal_inactive_file {cached // 2}\ntotal_active_file {cached - cached // 2}"
    return {
        f"{folder}memory.limit_in_bytes": limit,
        f"{folder}memory.usage_in_bytes": used,
        f"{folder}memory.stat": statistics,
    }


V1_LINES = "5:cpu,cpuacct:/a\n4:hugetlb,memory:/docker/abc\n1:name=systemd:/\n"


@pytest.mark.parametrize(
    ("groups", "files", "room"),
    [
        ("0::/\n", v2("", 700 * MIB, 200 * MIB), 500 * MIB),
        ("0::/\n", v2("", 700 * MIB, 200 * MIB, cached=150 * MIB), 650 * MIB),  # the page cache gives way
        ("0::/\n", v2("", "max", 200 * MIB), None),
        ("0::/\n", {**v2("", "max", 100 * MIB), "memory.high": 300 * MIB}, 200 * MIB),
        ("0::/user/app\n", {**v2("user/app/", "max", 10), **v2("user/", 2 * GIB, GIB)}, GIB),  # its parent's limit
        ("0::/user/app\n", {**v2("user/app/", 900, 100), **v2("user/", 700, 500)}, 200),  # the tightest one
        ("0::/host/path\n", v2("", 700, 200), 500),  # only the container's own part is mounted
        ("0::/\n", v2("", 700, 900), 0),  # the limit was lowered since
        ("0::/\n", {"memory.max": 700}, None),
        ("0::/\n", {**v2("", 700, 200), "memory.stat": "damaged"}, 500),
        ("1:name=systemd:/\n0::/\n", v2("unified/", 700, 200), 500),  # both versions are mounted
        (V1_LINES, v1("docker/abc/", 700, 200, cached=100), 600),
        (V1_LINES, v1("", 700, 200), 500),
        (V1_LINES, {**v1("docker/abc/", 9223372036854771712, 200), **v1("", 700, 300)}, 400),
        (V1_LINES, {}, None),
        ("", {}, None),
        ("no such line\n::\n", v2("", 700, 200), None),
    ],
)
def test_cgroup_room_is_the_tightest_limit_less_what_is_used(
    tmp_path: Path, groups: str, files: dict[str, object], room: int | None
) -> None:
    assert cgroup_room(tree(tmp_path, groups, files)) == room


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine whose memory can be set; it has no cgroups until they are."""
    numbers = SimpleNamespace(total=16 * GIB, available=8 * GIB, swap=0, limit=None)
    memory = lambda: SimpleNamespace(total=numbers.total, available=numbers.available)  # noqa: E731
    monkeypatch.setattr(psutil, "virtual_memory", memory)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=numbers.swap))
    monkeypatch.setattr(host_memory, "cgroup_room", lambda: numbers.limit)
    return numbers


def test_the_store_gets_half_of_the_memory_left_by_the_weights(machine: SimpleNamespace) -> None:
    assert NumpyOps().memory_left(0) == 4 * GIB
    assert NumpyOps().memory_left(4 * GIB) == 2 * GIB
    machine.limit = 3 * GIB
    assert NumpyOps().memory_left(GIB) == GIB


def test_weights_fit_with_swap_or_are_an_error_with_both_sizes(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(EngineError, match=r"10\.0 GiB as float32, and 8\.0 GiB .*smaller model") as raised:
        NumpyOps().memory_left(10 * GIB)
    assert (raised.value.code, raised.value.numbers) == ("out_of_memory", {"lacking": 2 * GIB})
    machine.swap = 4 * GIB
    assert NumpyOps().memory_left(10 * GIB) == 0
    machine.swap = 0
    monkeypatch.setattr(sys, "platform", "darwin")  # where other programs are pushed to disk
    assert NumpyOps().memory_left(10 * GIB) == 0
    with pytest.raises(EngineError, match=r"20\.0 GiB .* 16\.0 GiB"):
        NumpyOps().memory_left(20 * GIB)


def test_weights_that_cannot_fit_are_not_read(
    tiny_path: Path, machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.available = 100
    monkeypatch.setattr("polarlm.engine.loading.assembly.load_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(EngineError, match="weights take"):
        Engine.load(tiny_path, device="cpu")


def test_a_context_reduced_for_lack_of_memory_is_a_warning(tiny_path: Path, machine: SimpleNamespace) -> None:
    def load(available: int) -> tuple[int, list[str]]:
        machine.available, said = available, []
        with Engine.load(tiny_path, device="cpu", block_size=8, verbose=said.append) as engine:
            return engine.context, [line for line in said if "warning" in line]

    with Engine.load(tiny_path, device="cpu", block_size=8) as engine:
        weights = engine._model.weights.bytes
        half = plan_for_tokens(engine.cache_shape, CONTEXT // 2, 1).bytes  # and slots of one sequence
    assert load(GIB) == (CONTEXT, [])
    context, (warning,) = load(weights + 2 * half)
    assert CONTEXT // 2 <= context < CONTEXT
    assert f"of the {CONTEXT} tokens of context that the model has, {context} fit in memory" in warning
