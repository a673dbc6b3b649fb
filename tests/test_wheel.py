"""What is installed, and what of it works in an empty environment, in folders with modules of a user's own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from polarlm.command import COMMANDS
from tests.programs import ROOT, output_of

# Packages of the extras that measurements use.
_EXTRAS = ("httpx", "llvmlite", "starlette", "uvicorn", "prometheus_client", "huggingface_hub")


def build(out: Path, *flags: str, checkout: Path = ROOT) -> Path:
    """The wheel of a checkout; without --wheel, of a source distribution, which is made first."""
    output_of(sys.executable, "-m", "build", "--no-isolation", *flags, "--outdir", out, checkout)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), "--wheel")


@pytest.fixture(scope="module")
def members(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_every_file_of_the_code_is_there_below_one_name_and_nothing_else(members: list[str]) -> None:
    """No `engine` or `server` of ours meets another package's, no `cuda` hides NVIDIA's; no lab, no leftovers."""
    assert {name.split("/")[0] for name in members} == {"polarlm", "polarlm-0.1.0.dist-info"}
    inside = {name for name in members if name.startswith("polarlm/")}
    folders = [ROOT / name for name in ("engine", "model_loaders", "server", "bench", "cuda")]
    files = [path.relative_to(ROOT) for folder in folders for path in folder.rglob("*") if path.is_file()]
    code = {path for path in files if not {"lab", "results", "__pycache__"} & {*path.parts}}
    top = {path.relative_to(ROOT / "polarlm") for path in (ROOT / "polarlm").glob("*.*")}
    assert {f"polarlm/{path.as_posix()}" for path in code | top} == inside
    suffixes = ".py .typed .cu .cuh .html .css .js .woff2 .json .txt .md"
    licences = {name for name in inside if name.endswith("/LICENSE")}
    assert {Path(name).suffix for name in inside - licences} <= {*suffixes.split()}
    assert {f"polarlm-0.1.0.dist-info/licenses/{name.removeprefix('polarlm/')}" for name in licences} < {*members}
    assert "polarlm/py.typed" in inside  # for all that is in the package


@pytest.mark.slow
def test_the_source_distribution_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    assert contents(build(tmp_path)) == contents(wheel)
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert folders >= {"polarlm", "engine", "model_loaders", "server", "bench", "cuda", "tests", "docs", "scripts"}
    assert not [name for name in names if name.startswith("polarlm/") and name.count("/") > 1]
    assert {"Makefile", "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= names


class Installed:
    """An environment with the wheel, and the packages that it needs."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder, with_pip=False)
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.folder = folder
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, timeout=300)
        # The packages of this environment, without the checkout that may be installed there.
        (self.site,) = {path.parent for path in folder.rglob("polarlm-0.1.0.dist-info")}
        (self.site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    def run(self, folder: Path, program: str, *words: str) -> str:
        """What a program of the environment prints in `folder`."""
        variables = {"PYTHONPATH": None, "POLARLM_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1"}
        return output_of(self.bin / program, *words, folder=folder, **variables)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed") / "environment", wheel)


@pytest.mark.slow
def test_the_command_is_installed(installed: Installed, tmp_path: Path) -> None:
    assert installed.run(tmp_path, "polarlm", "--version") == "polarlm 0.1.0\n"
    for name in COMMANDS:
        assert installed.run(tmp_path, "polarlm", name, "--help").startswith(f"usage: polarlm {name} ")
    assert installed.run(tmp_path, "python", "-m", "polarlm.engine.chat", "--version") == "polarlm 0.1.0\n"


@pytest.mark.slow  # it imports them all; tests/test_snippets.py asks those that documents name for their flags
def test_every_measurement_explains_its_flags_without_the_extras(installed: Installed, tmp_path: Path) -> None:
    """Each says how it is called where it is installed: by its full name, or as a command."""
    files = [path.relative_to(ROOT) for path in (ROOT / "bench").rglob("*.py") if "lab" not in path.parts]
    names = [
        ".".join(["polarlm", *(part for part in file.with_suffix("").parts if part != "__main__")])
        for file in sorted(files)
        if "\ndef main(" in (ROOT / file).read_text(encoding="utf-8")
    ]
    program = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({_EXTRAS}))
for name in {names}:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print("end of", name, end.code)
"""
    commands = {module.removesuffix(".__main__"): name for name, (module, _) in COMMANDS.items()}
    helps = installed.run(tmp_path, "python", "-c", program)
    for name in names:
        text, _, helps = helps.partition(f"end of {name} 0\n")
        called = f"polarlm {commands[name]}" if name in commands else f"python -m {name}"
        assert text.startswith(f"usage: {called} "), f"{name}: {text[:200]}"
    assert not helps


@pytest.mark.slow
def test_a_model_answers_in_a_folder_with_modules_of_the_same_names(
    installed: Installed, tiny_path: Path, tmp_path: Path
) -> None:
    own_modules(tmp_path)
    words = ["chat", "--weights", str(tiny_path), "--device", "cpu", "--single-turn", "--prompt", "the end", "-n", "8"]
    answer = installed.run(tmp_path, "polarlm", *words, "--seed", "1", "--ignore-eos")
    assert answer.strip()
    assert installed.run(tmp_path, "python", "-m", "polarlm", *words, "--seed", "1", "--ignore-eos") == answer


@pytest.mark.slow
def test_measurements_run_and_go_to_the_current_folder(installed: Installed, tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the rain in the north and the other inn on the hill\n" * 9, encoding="utf-8")
    words = ["text.txt", "--model", str(tiny_path), "--types", "f16,balanced", "--device", "cpu", "--minutes", "0.1"]
    assert "| balanced " in installed.run(tmp_path, "polarlm", "quality", *words)
    (page,) = tmp_path.glob("quality-*.html")
    assert {file.suffix for file in tmp_path.iterdir()} == {".txt", ".html", ".json"}
    assert "What a cache type costs" in page.read_text(encoding="utf-8")
    flags = ["--types", "f16", "--peer-types", "none", "--prompt", "16", "--depth", "32", "--repeat", "1"]
    installed.run(tmp_path, "python", "-m", "polarlm.bench.speed", *flags, "-m", str(tiny_path))
    assert list(tmp_path.glob("speed-*.json"))


@pytest.mark.slow
def test_a_users_own_modules_are_theirs_and_kernels_and_page_are_found(installed: Installed, tmp_path: Path) -> None:
    own_modules(tmp_path)
    program = """
import engine, server
from polarlm import Engine
from polarlm.engine.backends.cuda.device.kernel_source import folder
from polarlm.server.http.page import _page
print(engine.mine, server.mine, Engine.__module__, len(list(folder().rglob("*.cu"))), "<html" in _page()[0])
"""
    kernels = len(list((ROOT / "cuda").rglob("*.cu")))
    expected = f"engine server polarlm.engine.engine {kernels} True\n"
    assert installed.run(tmp_path, "python", "-c", program) == expected


@pytest.mark.slow
def test_another_package_s_modules_are_its_own_and_uninstalling_leaves_them(wheel: Path, tmp_path: Path) -> None:
    """Such as a `server` that lies beside `polarlm` in site-packages."""
    own = Installed(tmp_path / "environment", wheel)
    (own.site / "server").mkdir()
    (own.site / "server" / "__init__.py").write_text("theirs = True\n", encoding="utf-8")
    program = "import polarlm, server, polarlm.server; print(server.theirs, hasattr(polarlm.server, 'theirs'))"
    assert own.run(tmp_path, "python", "-c", program) == "True False\n"
    own.run(tmp_path, "polarlm", "chat", "--version")  # compiles modules into __pycache__
    pip = [sys.executable, "-m", "pip", "--python", str(own.bin / "python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "polarlm"], check=True, timeout=300)
    left = [path for path in (tmp_path / "environment").rglob("*") if "polarlm" in path.name]
    assert not left
    assert {path.name for path in own.site.iterdir()} == {"requirements.pth", "server"}


def own_modules(folder: Path) -> None:
    for name in ("engine", "server"):
        (folder / f"{name}.py").write_text(f"mine = {name!r}\n", encoding="utf-8")
