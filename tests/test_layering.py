"""The house has floors: a file may import only what stands below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Top-level folders, from the ground up; each may import those before it. Nothing imports tests, bench or scripts.
FLOORS = ["model_loaders", "engine", "server"]

# Rooms of `engine`, and what of `engine` each may import. A name stands for the module and everything inside it.
CODECS = {"engine.codecs"}
ENCODING = CODECS | {"engine.encoding"}
SAMPLING = {"engine.sampling", "engine.limits", "engine.config", "engine.errors", "engine.outputs"}
OPS = ENCODING | SAMPLING | {"engine.backends.ops"}
LAUNCH = {f"engine.backends.{name}" for name in ("device", "kernels", "records", "candidates", "cuda_launch")}
_CUDA_ROOMS = ("shapes", "memory", "rotation", "cache", "draws", "heads", "cache_ops")
CUDA = OPS | LAUNCH | {f"engine.backends.cuda_{name}" for name in _CUDA_ROOMS}
ROOMS = {
    "engine.errors": set(),
    "engine.limits": {"engine.errors"},
    "engine.config": {"engine.errors", "engine.limits"},
    "engine.outputs": set(),
    "engine.codecs": CODECS,
    "engine.conditioning": set(),
    "engine.kv.blocks": set(),
    "engine.encoding": CODECS,
    "engine.statistics": set(),
    "engine.backends.ops": ENCODING | SAMPLING,
    "engine.backends.numpy_attention": OPS | {"engine.conditioning"},
    "engine.backends.numpy_encoding": OPS | {"engine.conditioning", "engine.backends.numpy_attention"},
    "engine.backends.numpy_steps": OPS | {"engine.backends.numpy_attention"},
    "engine.backends.stored": OPS | {"engine.conditioning", "engine.backends.records"},
    "engine.backends.numpy_ops": OPS
    | {
        f"engine.backends.{name}"
        for name in (
            "cores",
            "host_memory",
            "numpy_attention",
            "numpy_encoding",
            "numpy_steps",
            "stored",
            "thread_choice",
        )
    },
    "engine.backends.cores": OPS,
    "engine.backends.thread_choice": OPS | {"engine.backends.cores"},
    "engine.backends.host_memory": set(),
    "engine.backends.records": CODECS,
    "engine.backends.candidates": set(),
    "engine.backends.kernels": {"engine.backends.records"},
    "engine.backends.device": set(),
    "engine.backends.cuda_launch": LAUNCH,
    "engine.backends.cuda_shapes": LAUNCH,
    "engine.backends.cuda_rotation": LAUNCH,
    "engine.backends.cuda_cache": OPS | LAUNCH,
    "engine.backends.cuda_memory": OPS | LAUNCH | {"engine.backends.cuda_cache", "engine.backends.cuda_shapes"},
    "engine.backends.cuda_draws": OPS | LAUNCH | {"engine.backends.cuda_cache"},
    "engine.backends.cuda_heads": CUDA,
    "engine.backends.cuda_cache_ops": CUDA | {"engine.backends.numpy_encoding", "engine.backends.stored"},
    "engine.backends.cuda_ops": CUDA,
    "engine.backends.cupy_recording": {"engine.backends.device"},
    "engine.backends.cupy_device": {"engine.errors"}
    | {f"engine.backends.{name}" for name in ("cupy_recording", "device", "kernels")},
    "engine.backends.select": {"engine.backends", "engine.errors"},
    "engine.kv.tables": {"engine.kv.blocks"},
    "engine.kv.plan": OPS | {"engine.conditioning", "engine.errors"},
    "engine.kv.snapshot": {"engine.kv"},
    "engine.kv.store": OPS | {"engine.conditioning", "engine.kv"},
    "engine.model": OPS | {"engine.kv"},
    "engine.weights": OPS | {"engine.model"},
    "engine.sampling": {"engine.config", "engine.errors", "engine.outputs"},
    "engine.repeats": set(),
    "engine.dry": SAMPLING | {"engine.repeats"},
    "engine.sealed_file": set(),
    "engine.magnitudes": OPS | {"engine.conditioning", "engine.model"},
    "engine.calibration": OPS
    | {f"engine.{name}" for name in ("conditioning", "kv", "magnitudes", "model")}
    | {f"engine.{name}" for name in ("sealed_file", "statistics", "weights")},
    "engine.detokenizer": set(),
    "engine.answers": {"engine.detokenizer", "engine.outputs"},
    "engine.sessions": {f"engine.{name}" for name in ("answers", "backends.stored", "errors", "kv", "model")}
    | {"engine.sealed_file", "engine.weights"},
    "engine.scheduler": {"engine.config", "engine.kv.blocks"},
}
PURE = {
    "engine.codecs": {"numpy"},
    "engine.encoding": {"numpy"},
    "engine.statistics": {"numpy"},
    "engine.conditioning": {"numpy"},
    "engine.repeats": {"numpy"},
    "engine.config": set(),
    "engine.kv.blocks": set(),
}
PURE |= {"engine.kv.tables": set(), "engine.scheduler": set(), "engine.errors": set(), "engine.limits": set()}


def modules(folder: str) -> dict[str, Path]:
    """Dotted name → file, for every Python file of a top-level folder."""
    found = {}
    for path in (ROOT / folder).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


ALL = {name: path for floor in FLOORS if (ROOT / floor).is_dir() for name, path in modules(floor).items()}


def imports(path: Path) -> set[str]:
    """Dotted names of modules that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in ALL else str(node.module))
    return found


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_floor_imports_only_floors_below(name: str) -> None:
    floor = name.split(".")[0]
    allowed = FLOORS[: FLOORS.index(floor) + 1]
    for imported in imports(ALL[name]):
        top = imported.split(".")[0]
        assert top not in {"tests", "bench", "scripts"}, f"{name} imports {imported}"
        assert top not in FLOORS or top in allowed, f"{name} imports {imported}"


@pytest.mark.parametrize("name", sorted(n for n in ALL if n.startswith("engine.")))
def test_a_room_imports_only_rooms_it_may(name: str) -> None:
    room = next((room for room in ROOMS if within(name, room)), None)
    if room is None:  # the rooms under the roof: engine.py and its parts, the chat
        return
    for imported in imports(ALL[name]):
        if imported.startswith("engine"):
            assert any(within(imported, one) for one in ROOMS[room] | {room}), f"{name} imports {imported}"


@pytest.mark.parametrize(("room", "allowed"), PURE.items())
def test_pure_rooms_need_almost_nothing(room: str, allowed: set[str]) -> None:
    import sys

    for name, path in ALL.items():
        if within(name, room):
            outside = {i.split(".")[0] for i in imports(path)} - set(sys.stdlib_module_names) - {"engine"}
            assert outside <= allowed, f"{name} imports {outside - allowed}"


def test_only_the_cuda_backend_imports_cupy() -> None:
    users = {name for name, path in ALL.items() if any(i.split(".")[0] == "cupy" for i in imports(path))}
    assert users <= {"engine.backends.cupy_device", "engine.backends.cupy_recording"}


def test_cuda_holds_no_python() -> None:
    assert not list((ROOT / "cuda").rglob("*.py"))


@pytest.mark.parametrize("name", sorted(ALL))
def test_files_are_small_rooms(name: str) -> None:
    """At 300 lines one asks whether a file has grown a second purpose; none should get far beyond without an answer."""
    assert len(ALL[name].read_text(encoding="utf-8").splitlines()) <= 340
