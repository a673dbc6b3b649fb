"""The application of examples/ray_serve on a Ray of its own, with replicas of the tiny model whose steps are slow."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest

from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.compiled import share_kernels
from tests.examples.quiet import QUIET
from tests.lazily import Lazily
from tests.ports import free_port
from tests.server.http_server import serving
from tests.server.lines import PATIENCE, eventually
from tests.tiny import load_tiny, make_model

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")

ray, serve = Lazily("ray"), Lazily("ray.serve")
app, routing = Lazily("examples.ray_serve.app"), Lazily("examples.ray_serve.router")

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = {"temperature": 0, "ignore_eos": True}
STEP_SECONDS = 0.02


def slow_replica(hangs: Path) -> type:
    """A replica whose steps take their time, so that tests can do something while an answer comes.

    Those of the replica that the file `hangs` names take forever.

    The class is made here for Ray to send it to its processes, which need not import this module.
    """

    class SlowReplica(app.EngineReplica):
        async def __init__(self, settings: dict[str, Any]) -> None:
            from polarlm.engine.model.forward import Transformer
            from tests.patience import be_patient

            be_patient()
            step = Transformer.step

            def slow(*arguments: Any) -> Any:
                time.sleep(STEP_SECONDS)
                while hangs.exists() and hangs.read_bytes() == getattr(self, "_name", None):  # none while it loads
                    time.sleep(STEP_SECONDS)
                return step(*arguments)

            Transformer.step = slow
            await super().__init__(settings)

    return SlowReplica


@dataclass
class Cluster:
    """A running application, and a client of it."""

    http: httpx.Client
    settings: dict[str, Any]
    disk: Path  # where replicas keep conversations for each other
    hangs: Path  # a file, with the name of a replica that shall hang

    def written(self) -> int:
        """How many files the replicas have written there."""
        return sum(file.is_file() and not file.name.startswith(".") for file in self.disk.rglob("*"))

    def written_at_rest(self) -> int:
        """The same, when they write no more: a writer pauses for half a second at most."""
        counts = list(range(15))
        while len(set(counts[-15:])) > 1:
            time.sleep(0.1)
            counts.append(self.written())
        return counts[-1]

    def deploy(self, settings: dict[str, Any] | None = None, **options: Any) -> None:
        """Start replicas with these options of a deployment; they take the place of those that are there.

        settings: of the engine, in the place of some of the cluster's.
        """
        slow = app.Replica.options(func_or_class=slow_replica(self.hangs), graceful_shutdown_wait_loop_s=0.2, **options)
        serve.run(app.Ingress.bind(slow.bind({**self.settings, **(settings or {})}), 1 << 20), name="polarlm")

    def ask(self, *turns: str, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
        """The response to a conversation: a user's and an assistant's messages in turns."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
        response = self.http.post(path, json={"messages": messages, "max_tokens": 4, **ALWAYS, **more})
        assert response.status_code == 200, response.text
        return response

    def conversations(self) -> dict[str, str]:
        """For each replica, two at most, the first question of a conversation that it answers."""
        found: dict[str, str] = {}
        for number in range(100):
            question = f"what about {number}"
            found.setdefault(self.ask(question, max_tokens=1).headers["x-replica"], question)
            if len(found) == 2:
                break
        return found

    def outcomes(self, replica: str, outcome: str) -> float:
        """How many requests of a replica have ended so. The replica is asked until it is the one that answers."""
        for _ in range(1000):
            response = self.http.get("/metrics")
            if response.headers["x-replica"] == replica:
                name = f'polarlm_requests_total{{outcome="{outcome}"}} '
                return sum(float(line[len(name) :]) for line in response.text.splitlines() if line.startswith(name))
        raise AssertionError("the replica is gone")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Iterator[Cluster]:
    port = free_port()
    cache = share_kernels(tmp_path_factory.mktemp("cache"))
    workers = {"PYTHONPATH": str(ROOT), CACHE_VARIABLE: str(cache), "OMP_NUM_THREADS": "1"}
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,  # sockets need a short path
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http,
    ):
        for name, value in {**QUIET, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        ray.init(
            "local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": workers},
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        disk = tmp_path_factory.mktemp("disk")
        settings = {"weights": str(tiny_path), "no-calibration": True, "cache-type": "f16"}
        settings |= {"cache-disk": "1G", "cache-disk-folder": str(disk)}
        found = Cluster(http, settings, disk, tmp_path_factory.mktemp("trouble") / "hangs")
        found.deploy(num_replicas=2)
        yield found
        serve.shutdown()
        ray.shutdown()


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream as they come; fails unless it ends as it should."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):  # others end an event, or are signs of life
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has no end")


# -- where requests go -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_turns_of_a_conversation_meet_the_same_replica(cluster: Cluster) -> None:
    conversations = cluster.conversations()
    assert len(conversations) == 2
    for replica, question in conversations.items():
        turns = [question]
        for _ in range(3):
            response = cluster.ask(*turns)
            assert response.headers["x-replica"] == replica
            usage = response.json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] > (usage["prompt_tokens"] // 64 - 1) * 64
            turns += [response.json()["choices"][0]["message"]["content"], "go on"]


@pytest.mark.slow
def test_more_requests_than_a_replica_should_have_go_to_the_next_one(cluster: Cluster) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = pool.map(lambda _: cluster.ask("the same question", max_tokens=20), range(20))
        replicas = [answer.headers["x-replica"] for answer in answers]
    assert len(set(replicas)) == 2


@pytest.mark.slow
def test_requests_without_a_conversation_are_shared_out_equally(cluster: Cluster) -> None:
    def ask(number: int) -> str:
        body = {"prompt": f"{number} is", "max_tokens": 60, **ALWAYS}
        return cluster.http.post("/v1/completions", json=body).raise_for_status().headers["x-replica"]

    with ThreadPoolExecutor(12) as pool:
        replicas = list(pool.map(ask, range(12)))
    assert min(replicas.count(name) for name in {*replicas}) >= 5  # one may come when others have ended
    assert len({*replicas}) == 2


class Name(NamedTuple):
    """A replica's, as the router sees it."""

    unique_id: str


def router_of(requests: dict[str, int]) -> Any:
    """A router that knows how many requests some replicas have."""
    router = object.__new__(routing.PrefixRouter)
    router._replica_queue_len_cache = {Name(name): number for name, number in requests.items()}
    router._use_replica_queue_len_cache = False
    router.initialize_state(slack=3)
    return router


def pending(key: str) -> SimpleNamespace:
    return SimpleNamespace(args=[key, {}, b""], routing_context=SimpleNamespace(should_backoff=False))


def order(key: str, names: str, requests: dict[str, int] | None = None) -> str:
    """The replicas for a key, the best one first; requests: how many some of them have."""
    candidates = [SimpleNamespace(replica_id=Name(name)) for name in names]
    ranks = asyncio.run(router_of(requests or {}).choose_replicas(candidates, pending(key)))
    return "".join(replica.replica_id.unique_id for (replica,) in ranks)


def test_a_new_replica_takes_keys_from_others_and_moves_none_between_them() -> None:
    before = {key: order(key, "abcd") for key in map(str, range(400))}
    after = {key: order(key, "abecd") for key in before}
    moved = [key for key in before if before[key][0] != after[key][0]]
    assert {after[key][0] for key in moved} == {"e"}
    assert 400 / 5 / 2 < len(moved) < 400 / 5 * 2
    assert all(after[key].replace("e", "") == before[key] for key in before)
    assert {first[0] for first in before.values()} == set("abcd")


def test_a_replica_with_much_to_do_comes_after_others() -> None:
    best, second, third = order("key", "abc")
    assert order("key", "abc", {best: 5, second: 2, third: 2}) == best + second + third
    assert order("key", "abc", {best: 6, second: 2, third: 3}) == second + third + best
    assert order("", "abc", {"a": 2, "b": 1, "c": 3}) == "bac"
    assert {order("", "ab") for _ in range(100)} == {"ab", "ba"}


def test_requests_that_come_together_are_shared_out_equally() -> None:
    """Also before any replica has said how many it has; and those that have ended count no more."""
    router = router_of({})
    candidates = [SimpleNamespace(replica_id=Name(name)) for name in "abc"]

    async def send() -> Name:
        ((best,), *_) = await router.choose_replicas(candidates, pending(""))
        router.on_send_request(best.replica_id)
        return best.replica_id

    async def burst() -> list[Name]:
        return await asyncio.gather(*(send() for _ in range(30)))

    sent = asyncio.run(burst())
    assert {name: sent.count(name) for name in sent} == dict.fromkeys(map(Name, "abc"), 10)
    for _ in range(10):
        router.on_request_completed(Name("a"), "id")
    assert [asyncio.run(send()) for _ in range(9)] == [Name("a")] * 9


def test_a_request_that_no_replica_takes_waits_a_little() -> None:
    request = pending("key")
    asyncio.run(router_of({}).choose_replicas([SimpleNamespace(replica_id=Name("a"))], request))
    assert request.routing_context.should_backoff


# -- what clients see --------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "the end"}]
REQUESTS: dict[str, tuple[str, str, Any]] = {
    "chat": ("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 9, **ALWAYS}),
    "completion": ("POST", "/v1/completions", {"prompt": "the end", "max_tokens": 9, "logprobs": 2, **ALWAYS}),
    "Messages": ("POST", "/v1/messages", {"messages": MESSAGES, "max_tokens": 9, "temperature": 0}),
    "Responses": ("POST", "/v1/responses", {"input": "the end", "max_output_tokens": 9, "temperature": 0}),
    "Ollama": ("POST", "/api/chat", {"messages": MESSAGES, "stream": False, "options": {"num_predict": 3, "seed": 1}}),
    "llama-server": ("POST", "/completion", {"prompt": "the end", "n_predict": 9, "temperature": 0}),
    "embedding": ("POST", "/v1/embeddings", {"input": "the end"}),
    "tokens": ("POST", "/tokenize", {"content": "the end"}),
    "page": ("GET", "/", None),
    "a wrong field": ("POST", "/v1/chat/completions", {"messages": "x"}),
    "a wrong field for Messages": ("POST", "/v1/messages", {"messages": MESSAGES, "max_tokens": "x"}),
    "a wrong field for Ollama": ("POST", "/api/chat", {"messages": "x"}),
    "no path": ("GET", "/v1/nothing", None),
    "a wrong method": ("GET", "/v1/chat/completions", None),
    "a long prompt": ("POST", "/v1/completions", {"prompt": "the end " * 200}),
    "a long body": ("POST", "/v1/completions", {"prompt": "x" * (1 << 20)}),
    "a long body for Messages": ("POST", "/v1/messages", {"messages": "x" * (1 << 20)}),
    "no JSON": ("POST", "/v1/completions", b"{"),
}
CHANGES = {"id", "created", "created_at", "completed_at", "timings", "system_fingerprint", "usage"}
CHANGES |= {"tokens_cached"}  # of the same prompt by another request


def lasting(value: Any) -> Any:
    """What is the same in every response to a request."""
    if isinstance(value, dict):
        kept = {name: one for name, one in value.items() if name not in CHANGES and "duration" not in name}
        return {name: lasting(one) for name, one in kept.items()}
    return [lasting(one) for one in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def plain(tiny_path: Path) -> Iterator[httpx.Client]:
    """A client of a server without Ray."""
    settings = {"device": "cpu", "threads": 1, "cache_type": "f16", "calibration": False}
    with load_tiny(tiny_path, **settings) as engine, serving(engine) as running:
        yield running.http


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_responses_are_those_of_a_server_without_ray(cluster: Cluster, plain: httpx.Client, name: str) -> None:
    method, path, body = REQUESTS[name]
    content = body if isinstance(body, bytes) or body is None else json.dumps(body)
    headers = {"Content-Type": "application/json"} if method == "POST" else {}
    here, there = (http.request(method, path, content=content, headers=headers) for http in (cluster.http, plain))
    assert here.status_code == there.status_code
    for header in ("content-type", "content-security-policy", "allow", "retry-after"):
        assert here.headers.get(header) == there.headers.get(header)
    if here.headers["content-type"] == "application/json":
        assert lasting(here.json()) == lasting(there.json())
    else:
        assert here.content == there.content


@pytest.mark.slow
def test_streams_arrive_token_by_token(cluster: Cluster) -> None:
    """The first text arrives before a step is complete."""
    replica = cluster.ask(MESSAGES[0]["content"]).headers["x-replica"]
    body = {"messages": MESSAGES, "max_tokens": 40, "stream": True, **ALWAYS}
    cluster.hangs.write_text(replica)
    try:
        with cluster.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.headers["x-replica"] == replica
            parts = events(response)
            begun = text_in(next(parts))
            while not begun:
                begun = text_in(next(parts))
            cluster.hangs.unlink()
            assert len(list(parts)) > 10
    finally:
        cluster.hangs.unlink(missing_ok=True)


def text_in(event: dict[str, Any]) -> str:
    return event["choices"][0]["delta"].get("content") or ""


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_cancels_its_request(cluster: Cluster, stream: bool) -> None:
    """The answer may end before: then another client tries."""
    question, outcome = f"is {stream} known", ""
    replica = cluster.ask(question, max_tokens=1).headers["x-replica"]
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 150, "stream": stream, **ALWAYS}
    for _ in range(5):
        before = {name: cluster.outcomes(replica, name) for name in ("cancelled", "length")}
        with httpx.Client(base_url=cluster.http.base_url, timeout=PATIENCE if stream else 1) as client:
            if stream:
                with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    next(events(response))
            else:
                with suppress(httpx.ReadTimeout):
                    client.post("/v1/chat/completions", json=body)

        def ended(before: dict[str, float] = before) -> list[str]:
            return [name for name, count in before.items() if cluster.outcomes(replica, name) > count]

        eventually(ended)
        (outcome,) = ended()
        if outcome == "cancelled":
            break
    assert outcome == "cancelled"


# -- replicas that come and go -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_both_replicas_work_at_once(cluster: Cluster) -> None:
    """One answer may end before the other begins: then others are asked for."""
    assert any(work_at_once(cluster) for _ in range(5))


def work_at_once(cluster: Cluster) -> bool:
    """Whether the replicas compute an answer each at the same time."""
    streams = []
    with ExitStack() as open_streams:
        for question in cluster.conversations().values():
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 150, "stream": True, **ALWAYS}
            response = open_streams.enter_context(cluster.http.stream("POST", "/v1/chat/completions", json=body))
            streams.append((response.headers["x-replica"], events(response)))
        assert len({replica for replica, _ in streams}) == 2
        begun = [next(stream) for _, stream in streams]
        assert not any(event["choices"][0]["finish_reason"] for event in begun)
        return [cluster_running(cluster, replica) for replica, _ in streams] == [1, 1]


def cluster_running(cluster: Cluster, replica: str) -> int:
    """How many requests take part in a replica's steps."""
    for _ in range(1000):
        response = cluster.http.get("/stats")
        if response.headers["x-replica"] == replica:
            return int(response.json()["running"])
    raise AssertionError("the replica is gone")


def kill(replica: str) -> None:
    """End a replica's process at once."""
    ray.kill(ray.get_actor(f"SERVE_REPLICA::polarlm#Replica#{replica}", namespace="serve"))


@pytest.mark.slow
def test_conversations_of_a_replica_that_dies_go_on_at_another(cluster: Cluster) -> None:
    (dying, question), (other, _) = cluster.conversations().items()
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 150, **ALWAYS}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cluster.ask, question, max_tokens=150)
        with cluster.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            assert response.headers["x-replica"] == dying
            stream = events(response)
            next(stream)
            cluster.hangs.write_text(dying)  # so that it does not end before it dies
            kill(dying)
            cluster.hangs.unlink()
            with pytest.raises((httpx.RemoteProtocolError, AssertionError)):  # a stream that has begun is lost
                list(stream)
        assert waiting.result().headers["x-replica"] == other  # a response that has not is not
    eventually(lambda: dying not in (found := cluster.conversations()) and len(found) == 2)


@pytest.mark.slow
def test_what_a_replica_has_written_is_read_by_the_one_that_goes_on(cluster: Cluster) -> None:
    question = "a long question about many things, " * 3
    before = cluster.written_at_rest()
    first = cluster.ask(question)
    eventually(lambda: cluster.written() >= before + 2)  # a block, and what is left of the prompt
    kill(first.headers["x-replica"])
    second = cluster.ask(question, first.json()["choices"][0]["message"]["content"], "go on")
    assert second.headers["x-replica"] != first.headers["x-replica"]
    usage = second.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first.json()["usage"]["prompt_tokens"] > 64


@pytest.mark.slow
def test_a_hybrid_goes_on_at_another_replica(cluster: Cluster, tmp_path: Path) -> None:
    """After another answer from the snapshot at the end of the prompt's last block, and after its own answer.

    Nothing is coded, so the text is that of a server without Ray, whatever either finds.
    """
    exact = {"cache-type": "f16", "state-type": "f32"}
    folder = {"weights": str(make_model(tmp_path, "qwen3_5_tied")), "cache-disk-folder": str(cluster.disk / "hybrid")}
    cluster.deploy({**exact, **folder}, num_replicas=2)
    eventually(lambda: running_replicas() == 2)
    question, before = "a long question about many things, " * 4, cluster.written_at_rest()
    settings: dict[str, Any] = {name.replace("-", "_"): value for name, value in exact.items()}
    with load_tiny(tmp_path, device="cpu", threads=1, **settings) as engine, serving(engine) as running:
        plain = Cluster(running.http, {}, cluster.disk, cluster.hangs)
        no_control = {str(token): -100 for token in range(5)}  # which no text becomes
        answers = [one.ask(question, max_tokens=70, logit_bias=no_control) for one in (cluster, plain)]
        eventually(lambda: cluster.written() >= before + 6)  # 3 blocks, a snapshot, the current block, the answer's ids
        replica, own = answers[0].headers["x-replica"], text_of(answers[0])
        assert own == text_of(answers[1])
        kill(replica)
        for said in ("nothing", own):
            found, wanted = (one.ask(question, said, "go on") for one in (cluster, plain))
            assert found.headers["x-replica"] != replica
            assert text_of(found) == text_of(wanted)
            details, plainly = (one.json()["usage"]["prompt_tokens_details"] for one in (found, wanted))
            assert details["cached_tokens"] == plainly["cached_tokens"] >= 128
            assert details["cached_from"]["disk"] > 0


def text_of(response: httpx.Response) -> str:
    return response.json()["choices"][0]["message"]["content"]


SCALING = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 1}
SCALING |= {"metrics_interval_s": 0.2, "look_back_period_s": 1, "upscale_delay_s": 0.5, "downscale_delay_s": 0.5}


@pytest.mark.slow
def test_scaling_up_and_down_loses_no_request(cluster: Cluster) -> None:
    """The new application takes the place of the old one; it then grows with the number of clients, and shrinks."""
    left, answers = [threading.Event() for _ in range(5)], []

    def client(number: int) -> None:
        """Asks until it has left."""
        while not left[number].is_set():
            messages = [{"role": "user", "content": f"client {number} asks {len(answers)}"}]
            body = {"messages": messages, "max_tokens": 30, "stream": number % 2 == 0, **ALWAYS}
            with cluster.http.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.status_code == 200, response.read()
                if number % 2:
                    assert json.loads(response.read())["usage"]["completion_tokens"] == 30
                else:
                    *_, last = events(response)
                    assert last["choices"][0]["finish_reason"] == "length"
            answers.append(response.headers["x-replica"])

    with ThreadPoolExecutor(len(left)) as pool:
        clients = [pool.submit(client, number) for number in range(len(left))]
        try:
            cluster.deploy(autoscaling_config=SCALING)
            eventually(lambda: running_replicas() == 3 or any(one.done() for one in clients))
            grown = len(answers)
            eventually(lambda: len(set(answers[grown:])) >= 3 or any(one.done() for one in clients))
            for one in left[1:]:
                one.set()
            eventually(lambda: running_replicas() == 1 or clients[0].done())
            shrunk = len(answers)
            eventually(lambda: len(answers) > shrunk + 1 or clients[0].done())
        finally:
            for one in left:
                one.set()
        for one in clients:
            one.result()


@pytest.mark.slow
def test_a_replica_whose_engine_hangs_is_replaced(cluster: Cluster) -> None:
    soon = {"health_check_period_s": 0.5, "health_check_timeout_s": 1, "graceful_shutdown_timeout_s": 1}
    cluster.deploy(num_replicas=1, **soon)
    eventually(lambda: running_replicas() == 1)
    hanging = cluster.ask("who is there").headers["x-replica"]
    cluster.hangs.write_text(hanging)
    answer = cluster.ask("who is there")  # waits for the other replica
    assert answer.headers["x-replica"] != hanging


def running_replicas() -> int:
    """How many replicas there are, without those that start or end."""
    states = serve.status().applications["polarlm"].deployments["Replica"].replica_states
    return states.get("RUNNING", 0) if set(states) == {"RUNNING"} else 0
