"""The Dockerfile and the unit of systemd name commands, flags, extras and folders that there are; nginx takes what the
server takes."""

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
from polarlm.engine.config import parse_size
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from polarlm.server.config import GROUPS, ServerConfig, read_command_line
from polarlm.server.http.bodies import LARGER

ROOT = Path(__file__).resolve().parents[2]
IMAGE, UNIT = (ROOT / "examples" / "deploy" / name for name in ("Dockerfile", "polarlm.service"))
PROJECT = read_toml("", ROOT / "pyproject.toml")
FLAGS = parser(GROUPS, prog="", description="")._option_string_actions


def of(name: str) -> list[str]:
    """What follows each instruction of this name in the Dockerfile."""
    text = re.sub(r"^#.*\n|\\\n", "", IMAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)


def settings(key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE)


STARTS = [
    (IMAGE, json.loads(of("ENTRYPOINT")[0]), [word for line in of("ENV") for word in shlex.split(line)]),
    (UNIT, shlex.split(settings("ExecStart")[0]), settings("Environment")),
]


@pytest.mark.parametrize(("file", "command", "variables"), STARTS, ids=["image", "unit"])
def test_commands_variables_and_extras_exist(file: Path, command: list[str], variables: list[str]) -> None:
    program, name, *words = command
    assert (Path(program).name, name in COMMANDS) == ("polarlm", True)
    read_command_line(words, dict(one.split("=", 1) for one in variables))
    text = file.read_text(encoding="utf-8")
    named = {*re.findall("POLARLM_[A-Z_]+", text)} - {CACHE_VARIABLE}
    assert {f"--{variable[8:].lower().replace('_', '-')}" for variable in named} <= {*FLAGS}
    (extras,) = re.findall(r"'\.\[(.*)\]'", text)
    assert {*extras.split(",")} <= {*PROJECT["project"]["optional-dependencies"]}


def test_the_image_has_the_files_of_the_wheel_and_a_user_who_owns_the_cache() -> None:
    copied = {name for line in of("COPY") if not line.startswith("--from") for name in line.split()[:-1]}
    assert copied >= {*PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"], "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in copied)
    assert f"--home-dir {of('VOLUME')[0]} --create-home {of('USER')[0]}" in of("RUN")[-1]


@pytest.mark.parametrize("status", [200, 503])
def test_the_image_is_healthy_when_the_server_is(status: int) -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

    _, *words = json.loads(of("HEALTHCHECK")[0].partition("CMD ")[2])
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.handle_request).start()
        environment = {"POLARLM_PORT": str(server.server_port)}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, check=False, timeout=60)
    assert (done.returncode == 0) == (status == 200)


def test_nginx_lets_through_what_the_server_takes() -> None:
    """There is one configuration in the documents, whose limits are beyond those of a server as it starts."""
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    (config,) = re.findall(r"^```nginx\n(.*?)^```$", "".join(pages), re.MULTILINE | re.DOTALL)
    values = dict(re.findall(r"^ *(\w+) ([^;{]+);", config, re.MULTILINE))
    assert parse_size(values["client_max_body_size"].upper()) > LARGER * ServerConfig.max_body
    assert int(values["proxy_read_timeout"].removesuffix("s")) >= ServerConfig.request_seconds
    assert values["proxy_buffering"] == "off"


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("there is no systemd here")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/polarlm/bin/polarlm", shutil.which("true") or ""))
    done = subprocess.run([program, "verify", str(copy)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
