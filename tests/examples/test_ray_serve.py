"""examples/ray_serve on a Ray of its own, with two replicas of the tiny model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from polarlm.engine.cli.flags import FlagError
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.compiled import share_kernels
from tests.lazily import Lazily
from tests.ports import free_port
from tests.server.lines import PATIENCE, eventually

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")

ray, serve, app = Lazily("ray"), Lazily("ray.serve"), Lazily("examples.ray_serve.app")
yaml, schema = Lazily("yaml"), Lazily("ray.serve.schema")

ROOT = Path(__file__).resolve().parents[2]
# Ray asks nobody, needs no token, says little, and waits for what a busy machine starts late.
QUIET = {
    "RAY_ADDRESS": "local",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # seconds, 5 otherwise; Ray then kills the proxy
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}


def test_the_configuration_is_valid() -> None:
    text = (ROOT / "examples" / "ray_serve" / "replicas.yaml").read_text(encoding="utf-8")
    config = schema.ServeDeploySchema.model_validate(yaml.safe_load(text))
    (application,) = config.applications
    app.read(application.args)
    assert application.import_path == "examples.ray_serve.app:build"
    assert [deployment.name for deployment in application.deployments] == [app.Replica.name]


def test_settings_are_flags_without_dashes() -> None:
    settings = {"ctx-size": 512, "no-calibration": True, "log-prompts": False, "allowed-host": ["a", "b"]}
    model, config = app.read(settings)
    assert (model.ctx_size, model.calibration) == (512, False)
    assert (config.log_prompts, config.allowed_host) == (False, ("a", "b"))
    for wrong, words in (({"contxt": 1}, "--contxt"), ({"port": 9000}, "--port cannot be set here: Ray listens")):
        with pytest.raises(FlagError, match=words):
            app.read(wrong)


@pytest.fixture
def http(tmp_path: Path, tiny_path: Path) -> Iterator[httpx.Client]:
    """A client of two replicas that share a folder of blocks."""
    port = free_port()
    environment = {CACHE_VARIABLE: str(share_kernels(tmp_path / "cache")), "OMP_NUM_THREADS": "1"}
    settings = {"weights": str(tiny_path), "no-calibration": True, "cache-type": "f16"}
    settings |= {"cache-disk": "1G", "cache-disk-folder": str(tmp_path / "blocks")}
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,  # sockets need a short path
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client,
    ):
        for name, value in {**QUIET, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        ray.init(
            "local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), **environment}},
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(app.Replica.options(num_replicas=2).bind(settings), name="polarlm")
            yield client
        finally:
            serve.shutdown()
            ray.shutdown()


def ask(http: httpx.Client, session: str, *turns: str) -> httpx.Response:
    """The response to a conversation: messages of a user and of an assistant in turns."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return http.post("/v1/chat/completions", json=body, headers={"X-Session-Id": session})


@pytest.mark.slow
def test_a_conversation_stays_at_its_replica_and_continues_at_another_when_that_dies(
    http: httpx.Client, tmp_path: Path
) -> None:
    """Slow: Ray takes ten seconds to start its processes."""
    question = "a long question about many things, " * 3
    first = ask(http, "talk", question)
    dying, answer = first.headers["x-replica"], first.json()["choices"][0]["message"]["content"]
    # On a busy machine Ray may find a replica slow, and take the other one for a while.
    eventually(lambda: {ask(http, "talk", question).headers["x-replica"] for _ in range(4)} == {dying})
    assert len({ask(http, f"talk {number}", "who?").headers["x-replica"] for number in range(20)}) == 2

    eventually(lambda: len([file for file in (tmp_path / "blocks").rglob("*") if file.is_file()]) >= 2)
    ray.kill(ray.get_actor(f"SERVE_REPLICA::polarlm#Replica#{dying}", namespace="serve"))
    responses: list[httpx.Response] = []

    def continued() -> bool:  # Ray notices the death by a request that fails
        responses.append(ask(http, "talk", question, answer, "go on"))
        return responses[-1].status_code == 200

    eventually(continued)
    assert responses[-1].headers["x-replica"] != dying
    cached = responses[-1].json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first.json()["usage"]["prompt_tokens"] > 64, "the blocks of the dead replica were read"
    eventually(lambda: len({ask(http, f"talk {number}", "who?").headers.get("x-replica") for number in range(20)}) == 2)
