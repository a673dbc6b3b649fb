"""The house has floors: a file may import only what stands below it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = ("model_loaders", "engine", "server")
SHORT = {*PACKAGES, "bench"}  # names that stand for packages inside `polarlm`
NOT_IMPORTED = {"tests", "bench", "scripts", "examples"}

# Rooms of `engine` and of `server`, floor by floor from the ground up: each imports only rooms of the floors below it,
# and `server` all of `engine` that KNOWN_TO lets it. A name stands for the module and everything inside it that has no
# name of its own.
ENGINE = [
    "errors data_urls outputs keywords version codecs weight_formats cli.progress storage.files storage.objects "
    "state.blocks jit",
    "limits schemas quantization records loading.kept_arrays state.tables jit.lang",
    "config jit.isa",
    "params cli.flags jit.compile",
    "sampling cli.commands cli.sources jit.run",
    "backends",
    "state",
    "model storage.payloads",
    "images storage.copies storage.holes storage.identity loading.encoding",
    "storage.sessions storage.tiers loading.sizes",
    "requests storage.packs loading.calibration loading.placement loading.warm_up",
    "parsing loading.checks loading.fit loading.need loading.parts",
    "core loading.fitting",
    "preparation loading.assembly",
    "vectors",
    "engine",
    "async_engine chat",
]
SERVER = [
    "keys reading",
    "config",
    "running mcp batch",
    "answers socket",
    "http",
    "http.openai http.plain",
    "http.dialects",
    "http.app",
    "serving",
    "models",
]
FLOORS = [
    ["model_loaders"],
    *([f"engine.{name}" for name in names.split()] for names in ENGINE),
    ["engine"],
    *([f"server.{name}" for name in names.split()] for names in SERVER),
    ["server"],
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# Rooms, and who alone may import them. Nobody knows which backend it has; all import the ops.
KNOWN_TO = {
    "engine.jit": "engine.backends.native",
    "engine.jit.run": "engine.backends.native engine.backends.numpy",
    "engine.codecs": "engine.backends engine.loading engine.quantization engine.records engine.state",
    "engine.weight_formats": "engine.backends engine.loading engine.model",
    "engine.records": "engine.backends",
    "engine.schemas": "engine.parsing engine.sampling server",
    "engine.quantization": "engine.backends engine.loading engine.model engine.state engine.storage.identity "
    "engine.storage.packs",
    "engine.backends": "engine.loading engine.model engine.requests engine.state engine.storage.payloads",
    "engine.backends.select": "engine.chat engine.loading",
    "engine.backends.cuda": "engine.backends.select",
    "engine.backends.native": "engine.backends.select engine.backends.transfer",
    "engine.backends.numpy": "engine.backends.native engine.backends.select",
    "engine.backends.numpy.blas": "engine.backends.native engine.backends.numpy engine.loading.calibration",
    "engine.backends.numpy.host_memory": "engine.backends.native engine.backends.numpy engine.requests",
    "engine.model": "engine.core engine.images engine.loading engine.preparation engine.requests "
    "engine.storage.identity",
    "engine.images": "engine.requests",
    "engine.loading": "engine.core engine.engine",
    "engine.loading.checks": "engine.chat engine.engine engine.loading server",
    "engine.loading.need": "server",
    "engine.cli": "engine.chat engine.loading.assembly server",
    "engine.chat": "",
    "server.answers": "server.http",
    "server.socket": "server.serving",
}
MOST_FILES = 14  # Python files in a room
ONE_FILE_EACH = {"families", "weight_formats"}  # rooms with a file for each of a growing number of things

# What the language of kernels imports of this project.
OF_THE_LANGUAGE = {
    "engine.jit",
    "engine.errors",
    "engine.storage.files",
    "model_loaders.forks",
    "model_loaders.user_dirs",
}

# Rooms that need almost nothing from outside.
PURE: dict[str, set[str]] = {
    "engine.codecs": {"numpy"},
    "engine.quantization": {"numpy"},
    "engine.weight_formats": {"numpy", "gguf"},
    "engine.records": {"numpy"},
    "engine.sampling.repeats": {"numpy"},
    "engine.config": set(),
    "engine.params": set(),
    "engine.errors": set(),
    "engine.data_urls": set(),
    "engine.limits": set(),
    "engine.state.blocks": set(),
    "engine.state.tables": set(),
    "engine.requests.scheduler": set(),
}


def modules(folder: str) -> dict[str, Path]:
    """Dotted name → file, for every Python file of a top-level folder."""
    files = {}
    for path in (ROOT / folder).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


ALL = {name: path for one in PACKAGES if (ROOT / one).is_dir() for name, path in modules(one).items()}


@cache
def imports(path: Path) -> set[str]:
    """Dotted names of modules that a file imports anywhere in it, of this project without `polarlm.`."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
        else:
            continue
        for name in names:
            assert name.split(".")[0] not in SHORT, f"{path} imports {name} by its short name"
            short = name.removeprefix("polarlm.")
            module, _, last = short.rpartition(".")
            imported.add(short if short in ALL or isinstance(node, ast.Import) or not last else module)
    return imported


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


@cache
def arrows() -> list[tuple[str, str]]:
    """Every module, and each that it imports."""
    return [(name, imported) for name, path in sorted(ALL.items()) for imported in sorted(imports(path))]


def innermost(name: str, rooms: Iterable[str]) -> str | None:
    """The innermost of these rooms that a module is in."""
    return max((room for room in rooms if within(name, room)), key=len, default=None)


def test_a_room_imports_only_rooms_of_the_floors_below() -> None:
    for name, imported in arrows():
        assert imported.split(".")[0] not in NOT_IMPORTED, f"{name} imports {imported}"
        inside, room = innermost(name, FLOOR_OF), innermost(imported, FLOOR_OF)
        assert room in (None, inside) or FLOOR_OF[room] < FLOOR_OF[inside], f"{name} imports {imported}"


def test_a_room_is_imported_by_those_that_know_it() -> None:
    for name, imported in arrows():
        room = innermost(imported, KNOWN_TO)
        knows = room is None or within(name, room) or any(within(name, one) for one in KNOWN_TO[room].split())
        assert knows, f"{name} imports {imported}"


def test_only_tests_import_the_lab() -> None:
    for name, path in (modules("bench") | modules("scripts")).items():
        if not within(name, "bench.lab"):
            assert not any(within(imported, "bench.lab") for imported in imports(path)), name


def test_a_room_has_few_files() -> None:
    folders = {path.parent for path in ALL.values()}
    assert not [f for f in folders if f.name not in ONE_FILE_EACH and len(list(f.glob("*.py"))) > MOST_FILES]


DIALECTS = "server.http.dialects"


def test_a_dialect_is_a_file_by_itself() -> None:
    """It imports no other one, and only the application knows that there are any."""
    for name, imported in arrows():
        if within(imported, DIALECTS):
            helper = imported.startswith(f"{DIALECTS}._") and name.startswith(f"{DIALECTS}.")
            assert helper or (name == "server.http.app" and imported == DIALECTS), f"{name} imports {imported}"


def test_no_import_goes_round() -> None:
    """Nor is one hidden in a function: those are counted as well."""
    graph = {name: {i for i in imports(path) if i in ALL} - {name} for name, path in ALL.items()}
    list(TopologicalSorter(graph).static_order())


def test_pure_rooms_need_almost_nothing() -> None:
    for name, path in ALL.items():
        outside = {i.split(".")[0] for i in imports(path)} - set(sys.stdlib_module_names) - {"engine"}
        for room in filter(lambda room: within(name, room), PURE):
            assert outside <= PURE[room], f"{name} imports {outside - PURE[room]}"


def test_packages_of_one_room_are_imported_there_alone() -> None:
    for package, room in (("cupy", "engine.backends.cuda.device"), ("llvmlite", "engine.jit")):
        users = {name for name, path in ALL.items() if any(within(one, package) for one in imports(path))}
        assert users
        assert all(within(name, room) for name in users), package


def test_the_language_of_kernels_knows_nothing_of_models() -> None:
    for name, imported in arrows():
        if within(name, "engine.jit") and imported.split(".")[0] in PACKAGES:
            assert any(within(imported, one) for one in OF_THE_LANGUAGE), f"{name} imports {imported}"


def test_kernels_ask_what_a_level_can_do_and_not_which_it_is() -> None:
    which = ("level.lanes", "level.name", "level.needs", "level.features", ".level")
    for name in sorted(n for n in ALL if n.startswith("engine.") and not n.startswith("engine.jit.")):
        text = ALL[name].read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "level" in text else ():
            asked = [node.slice] if isinstance(node, ast.Subscript) else []
            asked += [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            asked += node.args[:1] if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" else []
            asks = any(ast.unparse(one).endswith(which) for one in asked)
            assert not asks, f"{name} asks which level it is in line {getattr(node, 'lineno', 0)}"


def test_cuda_holds_no_python() -> None:
    assert not list((ROOT / "cuda").rglob("*.py"))


def test_files_are_small_rooms() -> None:
    """A long file may have grown a second purpose."""
    for name in sorted(ALL):
        assert len(ALL[name].read_text(encoding="utf-8").splitlines()) <= 500, name
