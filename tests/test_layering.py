"""The house has floors: a file may import only what stands below it."""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Top-level folders, from the ground up; each may import those before it. Nothing imports NOT_IMPORTED.
FLOORS = ["model_loaders", "engine", "server"]
SHORT = {*FLOORS, "bench"}  # names that stand for packages inside `polarlm`
NOT_IMPORTED = {"tests", "bench", "scripts", "examples"}

# Rooms of `engine` that `server` leaves alone: it speaks to the engine.
BEHIND_THE_ENGINE = {
    "backends",
    "loading.calibration",
    "chat",
    "codecs",
    "images",
    "jit",
    "loading.encoding",
    "loading.fitting",
    "loading.placement",
    "loading.warm_up",
    "model",
    "quantization",
    "records",
    "weight_formats",
}

# Rooms of `engine`, and what of the others each may import. A name stands for the module and everything inside it.
TOLD = {"config", "params", "keywords", "limits", "errors", "outputs"}  # what users say and hear
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "data_urls": set(),
    "cli.progress": set(),
    "limits": {"errors"},
    "config": {"errors", "limits"},
    "params": {"config", "limits"},
    "outputs": set(),
    "keywords": set(),
    "version": set(),
    "storage.files": set(),
    "storage.objects": set(),
    "codecs": set(),
    "weight_formats": set(),
    "quantization": {"codecs"},
    "records": {"codecs"},
    "schemas": {"errors"},
    "sampling": {"schemas"} | TOLD,
    "jit": {"errors", "storage.files"},
    "backends": {"codecs", "jit", "quantization", "records", "sampling", "weight_formats"} | TOLD,
    "storage.payloads": {"backends.transfer", "state", "storage.objects"},
    "storage.copies": {"state", "storage.objects", "storage.payloads"},
    "storage.tiers": {"codecs", "state"}
    | {f"storage.{name}" for name in ("copies", "files", "objects", "payloads")}
    | TOLD,
    "state": {
        "backends.delta",
        "backends.kv",
        "backends.ops",
        "backends.transfer",
        "codecs",
        "quantization",
        "sampling",
    }
    | TOLD,
    "model": {
        "backends.delta",
        "backends.kv",
        "backends.ops",
        "state",
        "quantization",
        "sampling",
        "weight_formats",
    }
    | TOLD,
    "storage.sessions": {
        "state",
        "storage.copies",
        "storage.files",
        "storage.identity",
        "storage.objects",
        "storage.payloads",
    }
    | TOLD,
    "images": {"data_urls", "model", "state"} | TOLD,
    "requests": {
        "images",
        "state",
        "model",
        "sampling",
        "storage.copies",
        "storage.sessions",
        "storage.tiers",
        "backends.numpy.host_memory",
    }
    | TOLD,
}
ROOMS["loading.kept_arrays"] = {"storage.files", "storage.objects"}
ROOMS["loading.encoding"] = ROOMS["model"] | {"model"}
ROOMS["loading.sizes"] = ROOMS["loading.encoding"] | {"codecs", "loading.encoding"}
ROOMS["loading.calibration"] = ROOMS["loading.sizes"] | {"backends.numpy.blas", "loading.kept_arrays", "loading.sizes"}
ROOMS["storage.identity"] = {"model", "quantization", "state"}
ROOMS["cli.flags"] = {"config", "errors", "version"}
ROOMS["cli.commands"] = {"errors", "cli.flags"}
ROOMS["cli.sources"] = {"errors", "cli.flags"}
ROOMS["loading.encoding_file"] = (
    ROOMS["loading.calibration"]
    | {
        "loading.calibration",
        "storage.files",
        "storage.identity",
        "storage.objects",
        "storage.sessions",
        "storage.tiers",
    }
    | TOLD
)
ROOMS["loading.fitting"] = ROOMS["loading.encoding_file"] | {"loading.encoding", "loading.encoding_file"}
ROOMS["loading.placement"] = ROOMS["loading.sizes"] | {"backends.select", "loading.sizes"}
ROOMS["loading.checks"] = {
    "backends.ops",
    "backends.select",
    "loading.placement",
    "loading.sizes",
    "model",
    "state",
    "storage.tiers",
} | TOLD
ROOMS["loading.fit"] = ROOMS["loading.placement"] | {"loading.placement"}
ROOMS["loading.need"] = ROOMS["loading.placement"] | {"loading.placement"}
ROOMS["loading.warm_up"] = ROOMS["loading.sizes"] | {"loading.sizes"}
ROOMS["loading.parts"] = ROOMS["loading.placement"] | {"loading.placement", "storage.tiers"}
ROOMS["loading.assembly"] = ROOMS["loading.sizes"] | {
    "loading.checks",
    "loading.parts",
    "backends.select",
    "loading.placement",
    "loading.encoding_file",
    "loading.fitting",
    "cli.progress",
    "loading.warm_up",
    "loading.sizes",
    "storage.packs",
    "storage.tiers",
}
ROOMS["vectors"] = {"requests"} | TOLD
ROOMS["parsing"] = {"requests", "sampling", "schemas"} | TOLD
ROOMS["completions"] = {"parsing", "requests", "vectors"} | TOLD
ROOMS["replay"] = {"model", "requests", "version"} | TOLD
ROOMS["engine"] = {
    "replay",
    "completions",
    "loading.assembly",
    "loading.checks",
    "state",
    "model",
    "parsing",
    "requests",
    "sampling",
    "storage.identity",
    "storage.packs",
    "storage.sessions",
    "storage.tiers",
} | TOLD
ROOMS["storage.packs"] = {"state", "storage.files", "storage.sessions"} | TOLD
ROOMS["async_engine"] = {"completions", "engine", "requests", "sampling"} | TOLD
ROOMS["chat"] = {
    "loading.checks",
    "backends.select",
    "cli.commands",
    "engine",
    "cli.flags",
    "cli.sources",
    "sampling",
    "storage.files",
    "storage.sessions",
} | TOLD

# Rooms of `server`, from the ground up, and which of the others each may import; `__main__` may import all.
SERVER_ROOMS: dict[str, set[str]] = {
    "keys": set(),
    "config": {"keys"},
    "reading": set(),
    "running": {"config", "reading"},
    "answers": {"reading", "running"},
    "socket": {"reading", "running"},
    "mcp": {"config", "reading"},
    "http": {"config", "reading", "running", "answers", "mcp"},
}
SERVER_ROOMS["http.openai"] = SERVER_ROOMS["http"] | {"http"}
SERVER_ROOMS["http.plain"] = SERVER_ROOMS["http"] | {"http"}
SERVER_ROOMS["http.dialects"] = SERVER_ROOMS["http"] | {"http", "http.openai"}
SERVER_ROOMS["http.app"] = SERVER_ROOMS["http.dialects"] | {"http.plain", "http.dialects"}
SERVER_ROOMS["serving"] = {"config", "running", "mcp", "http", "http.app", "http.openai", "socket"}
SERVER_ROOMS["batch"] = {"config"}
SERVER_ROOMS["models"] = SERVER_ROOMS["serving"] | {"reading", "serving", "http.plain"}
MOST_FILES = 14  # Python files in a room
ONE_FILE_EACH = {"families", "weight_formats"}  # rooms with a file for each of a growing number of things

# What some rooms may not import of those that theirs may.
APART = {
    "engine.backends.numpy": {
        "engine.backends.cuda",
        "engine.backends.native",
        "engine.jit.compile",
        "engine.jit.isa",
        "engine.jit.lang",
    },
    "engine.backends.cuda": {"engine.backends.numpy", "engine.backends.native", "engine.jit"},
    "engine.backends.native": {"engine.backends.cuda"},
    "engine.codecs": {"engine.config", "engine.params", "engine.errors"},
    "engine.state.blocks": {"engine"},
    "engine.state.tables": {"engine.backends", "engine.codecs"},
}

# What the language of kernels imports of this project, and its parts: each imports only parts before it.
OF_THE_LANGUAGE = {"engine.errors", "engine.storage.files", "model_loaders.forks", "model_loaders.user_dirs"}
PARTS_OF_THE_LANGUAGE = ["lang", "isa", "compile", "run"]

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


ALL = {name: path for floor in FLOORS if (ROOT / floor).is_dir() for name, path in modules(floor).items()}


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


def test_a_floor_imports_only_floors_below() -> None:
    for name in sorted(ALL):
        floor = name.split(".")[0]
        allowed = FLOORS[: FLOORS.index(floor) + 1]
        for imported in imports(ALL[name]):
            top = imported.split(".")[0]
            assert top not in NOT_IMPORTED, f"{name} imports {imported}"
            assert top not in FLOORS or top in allowed, f"{name} imports {imported}"


def test_the_server_speaks_to_the_engine() -> None:
    for name in sorted(n for n in ALL if within(n, "server")):
        for imported in imports(ALL[name]):
            assert not any(within(imported, f"engine.{room}") for room in BEHIND_THE_ENGINE), (
                f"{name} imports {imported}"
            )


def server_room(name: str) -> str | None:
    """The innermost room of `server` that a module is in; None for `__main__` and the package itself."""
    return max((room for room in SERVER_ROOMS if within(name, f"server.{room}")), key=len, default=None)


def test_a_room_of_the_server_imports_only_rooms_it_may() -> None:
    for name in sorted(n for n in ALL if within(n, "server")):
        room = server_room(name)
        for imported in imports(ALL[name]) if room else ():
            if within(imported, "server"):
                assert server_room(imported) in {room, *SERVER_ROOMS[room]}, f"{name} imports {imported}"


def test_a_room_has_few_files() -> None:
    folders = {path.parent for path in ALL.values()}
    assert not [f for f in folders if f.name not in ONE_FILE_EACH and len(list(f.glob("*.py"))) > MOST_FILES]


DIALECTS = "server.http.dialects"


def test_a_dialect_is_a_file_by_itself() -> None:
    """It imports no other one, and only the application knows that there are any."""
    for name in sorted(n for n in ALL if n.startswith("server.")):
        for imported in imports(ALL[name]):
            if within(imported, DIALECTS):
                helper = imported.startswith(f"{DIALECTS}._") and name.startswith(f"{DIALECTS}.")
                assert helper or (name == "server.http.app" and imported == DIALECTS), f"{name} imports {imported}"


def test_a_room_imports_only_rooms_it_may() -> None:
    for name in sorted(n for n in ALL if n.startswith("engine.")):
        _, room, *inside = name.split(".")
        if inside and room not in ROOMS:  # a room of several parts, each with imports of its own
            room = f"{room}.{inside[0]}"
        allowed = {f"engine.{other}" for other in ROOMS.get(room, set()) | {room}}
        for imported in imports(ALL[name]):
            assert imported != "engine", f"{name} imports from the roof, which imports it"
            if imported.startswith("engine."):
                assert any(within(imported, one) for one in allowed), f"{name} imports {imported}"
            for inside, apart in APART.items():
                if within(name, inside) and not within(imported, inside):
                    assert not any(within(imported, one) for one in apart), f"{name} imports {imported}"


def test_no_import_goes_round() -> None:
    """Nor is one hidden in a function: those are counted as well."""
    graph = {name: {i for i in imports(path) if i in ALL} - {name} for name, path in ALL.items()}
    list(TopologicalSorter(graph).static_order())


def test_pure_rooms_need_almost_nothing() -> None:
    for name, path in ALL.items():
        outside = {i.split(".")[0] for i in imports(path)} - set(sys.stdlib_module_names) - {"engine"}
        for room in filter(lambda room: within(name, room), PURE):
            assert outside <= PURE[room], f"{name} imports {outside - PURE[room]}"


def test_only_the_cuda_backend_imports_cupy() -> None:
    users = {name for name, path in ALL.items() if any(i.split(".")[0] == "cupy" for i in imports(path))}
    names = ("cupy_device", "cupy_recording")
    assert users <= {f"engine.backends.cuda.device.{name}" for name in names}


def test_only_the_language_of_kernels_imports_llvmlite() -> None:
    users = {name for name, path in ALL.items() if any(i.split(".")[0] == "llvmlite" for i in imports(path))}
    assert users
    assert all(within(name, "engine.jit") for name in users)


def test_the_language_of_kernels_knows_nothing_of_models() -> None:
    for name in sorted(n for n in ALL if within(n, "engine.jit")):
        part = name.split(".")[2:3]
        below = PARTS_OF_THE_LANGUAGE[: PARTS_OF_THE_LANGUAGE.index(*part) + 1] if part else []
        allowed = {f"engine.jit.{one}" for one in below} | OF_THE_LANGUAGE
        for imported in imports(ALL[name]):
            if imported.split(".")[0] in FLOORS:
                assert any(within(imported, one) for one in allowed), f"{name} imports {imported}"


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
