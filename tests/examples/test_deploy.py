"""The Dockerfile and the unit of systemd name commands, flags, extras and folders that there are."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from polarlm.command import COMMANDS
from polarlm.engine.cli.flags import parser
from polarlm.engine.cli.sources import read_toml
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from polarlm.server.config import GROUPS, read_command_line

ROOT = Path(__file__).resolve().parents[2]
IMAGE, UNIT = (ROOT / "examples" / "deploy" / name for name in ("Dockerfile", "polarlm.service"))
PROJECT = read_toml("", ROOT / "pyproject.toml")
FLAGS = parser(GROUPS, prog="", description="", checks={})._option_string_actions


def instructions() -> list[tuple[str, str]]:
    """(name, rest) of each instruction of the Dockerfile."""
    lines = re.sub(r"^#.*\n|\\\n", "", IMAGE.read_text(encoding="utf-8"), flags=re.MULTILINE).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line]


def of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def settings(key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE)


IN_IMAGE = dict(word.split("=", 1) for line in of("ENV") for word in shlex.split(line))
IN_UNIT = dict(line.split("=", 1) for line in settings("Environment"))
STARTS = [(json.loads(of("ENTRYPOINT")[0]), IN_IMAGE), (shlex.split(settings("ExecStart")[0]), IN_UNIT)]


@pytest.mark.parametrize(("command", "variables"), STARTS, ids=["image", "unit"])
def test_the_server_starts_with_these_words_and_variables(command: list[str], variables: dict[str, str]) -> None:
    program, name, *words = command
    assert (Path(program).name, name in COMMANDS) == ("polarlm", True)
    read_command_line(words, variables)
    ours = {variable for variable in variables if variable.startswith("POLARLM_")} - {CACHE_VARIABLE}
    assert {f"--{variable[8:].lower().replace('_', '-')}" for variable in ours} <= {*FLAGS}


def test_the_image_has_every_package_that_the_wheel_has() -> None:
    copied = [line.split()[:-1] for line in of("COPY") if not line.startswith("--from")]
    names = {name for line in copied for name in line}
    assert names >= {
        *PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"],
        PROJECT["project"]["readme"],
    }
    assert all((ROOT / name).exists() for name in names)


@pytest.mark.parametrize("file", [IMAGE, UNIT], ids=lambda file: file.name)
def test_the_extras_and_variables_that_are_named_exist(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    (extras,) = re.findall(r"'\.\[(.*)\]'", text)
    assert {*extras.split(",")} <= {*PROJECT["project"]["optional-dependencies"]}
    named = {*re.findall("POLARLM_[A-Z_]+", text)} - {CACHE_VARIABLE}
    assert {f"--{variable[8:].lower().replace('_', '-')}" for variable in named} <= {*FLAGS}


def test_the_image_has_a_user_who_owns_the_cache() -> None:
    (user,), (volume,) = of("USER"), of("VOLUME")
    assert f"--home-dir {volume} --create-home {user}" in of("RUN")[-1]
    assert IN_IMAGE[CACHE_VARIABLE].startswith(f"{volume}/")
    assert of("EXPOSE") == [IN_IMAGE["POLARLM_PORT"]]


@pytest.mark.parametrize("status", [200, 503])
def test_the_image_is_healthy_when_the_server_is(status: int) -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    _, *words = json.loads(of("HEALTHCHECK")[0].partition("CMD ")[2])
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.handle_request).start()
        environment = {"POLARLM_PORT": str(server.server_port)}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, check=False, timeout=60)
    assert (done.returncode == 0) == (status == 200)


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("there is no systemd here")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/polarlm/bin/polarlm", shutil.which("true") or ""))
    done = subprocess.run([program, "verify", str(copy)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
