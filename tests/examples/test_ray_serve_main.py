"""`python -m examples.ray_serve`: the configurations, and a process that serves one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from examples.ray_serve.settings import read
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.compiled import share_kernels
from tests.examples.quiet import QUIET
from tests.lazily import Lazily
from tests.ports import free_port
from tests.server.lines import PATIENCE

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")

yaml, schema, command = Lazily("yaml"), Lazily("ray.serve.schema"), Lazily("examples.ray_serve.__main__")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "ray_serve"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.name)
def test_configurations_are_valid(file: Path) -> None:
    config = schema.ServeDeploySchema.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    (application,) = config.applications
    read(application.args)
    assert application.import_path == "examples.ray_serve.app:build"
    assert {deployment.name for deployment in application.deployments} == {"Replica", "Ingress"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        ("applications: [", "is no configuration of Ray Serve"),
        ("applications: 7", "is no configuration of Ray Serve"),
        ("applications: [{name: a, import_path: 'a:b', args: {contxt: 1}}]", "--contxt"),
        ("applications: [{name: a, import_path: 'a:b', args: {port: 80}}]", "--port cannot be set here"),
    ],
)
def test_a_wrong_configuration_is_answered_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_text(text)
    assert command.main([str(file)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_two_replicas_answer_until_ctrl_c(tmp_path: Path, tiny_path: Path) -> None:
    port = free_port()
    config = yaml.safe_load((FOLDER / "two_replicas.yaml").read_text(encoding="utf-8"))
    config["http_options"]["port"] = port
    config["applications"][0]["args"] = {"weights": str(tiny_path), "no-calibration": True}
    file, errors = tmp_path / "config.yaml", tmp_path / "stderr"
    file.write_text(yaml.safe_dump(config))
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder, errors.open("w") as written:
        environment = {**os.environ, **QUIET, "RAY_TMPDIR": folder, CACHE_VARIABLE: str(share_kernels(tmp_path))}
        process = subprocess.Popen(
            [sys.executable, "-m", "examples.ray_serve", str(file)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=written,
            text=True,
            start_new_session=True,
        )
        try:
            said = []
            while "Ctrl-C" not in (line := process.stdout.readline()):
                assert line, errors.read_text()
                said.append(line)
            assert f"Listening at http://127.0.0.1:{port}, with 2 replicas." in "".join(said)
            body = {"messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 4}
            response = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=PATIENCE)
            assert response.status_code == 200, response.text
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, errors.read_text()
        finally:
            process.kill()
            process.communicate()
