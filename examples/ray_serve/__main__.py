"""`python -m examples.ray_serve [FILE]`: serve what a configuration of Ray Serve says, until Ctrl-C.

Exit codes: 0 after Ctrl-C; 1 if the replicas do not start; 2 for a sentence about the configuration.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import ray
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema
from ray.serve.scripts import cli

from examples.ray_serve.settings import RAY_ON_ONE_MACHINE, read
from polarlm.engine import EngineError
from polarlm.engine.cli.flags import FlagError
from polarlm.model_loaders import LoadError
from polarlm.model_loaders.demo import demo_model

_DEFAULT = Path(__file__).with_name("two_replicas.yaml")
_FAILED, _BAD_REQUEST = 1, 2
_POLL_SECONDS = 0.5

_READY = """\
Listening at {url}, with {replicas} replicas. For example:

curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "Hi!"}}], "max_tokens": 32}}'

The header x-replica of a response names the replica. Ctrl-C ends them all."""


def main(argv: Sequence[str]) -> int:
    """Serves until Ctrl-C, and returns the exit code."""
    file = Path(argv[0]) if argv else _DEFAULT
    try:
        config = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
        for application in config.applications:
            model, _ = read(application.args)
            if model.weights is None:
                demo_model(_note)  # once, before several replicas need it
    except OSError as error:
        return _complain(f"{file} cannot be read: {error.strerror or error}")
    except (ValueError, yaml.YAMLError) as error:  # pydantic's errors are ValueErrors
        return _complain(f"{file} is no configuration of Ray Serve: {error}")
    except (FlagError, EngineError, LoadError) as error:
        return _complain(f"{file}: {error}")
    os.environ.update(RAY_ON_ONE_MACHINE | os.environ)
    ray.init()
    ended, failed = threading.Event(), threading.Event()
    url = f"http://{config.http_options.host or '127.0.0.1'}:{config.http_options.port}"
    announcing = threading.Thread(target=_announce, args=(url, ended, failed), daemon=True)
    announcing.start()
    try:
        cli(["run", str(file)], standalone_mode=False)
    except SystemExit:
        pass
    finally:
        ended.set()
        announcing.join()
        ray.shutdown()
    return _FAILED if failed.is_set() else 0


def _announce(url: str, ended: threading.Event, failed: threading.Event) -> None:
    """Say when the applications run; end the process, as Ctrl-C does, if they cannot. Returns then, or at `ended`."""
    while not ended.wait(_POLL_SECONDS):
        applications = serve.status().applications
        states = [application.status for application in applications.values()]
        if "DEPLOY_FAILED" in states:
            for application in applications.values():
                _note(f"error: {application.message} The last error above says why.")
            failed.set()
            os.kill(os.getpid(), signal.SIGINT)
            return
        if states and set(states) == {"RUNNING"}:
            found = [application.deployments["Replica"].replica_states for application in applications.values()]
            replicas = sum(count for counts in found for state, count in counts.items() if state == "RUNNING")
            print(_READY.format(url=url, replicas=replicas), flush=True)
            return


def _note(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _complain(sentence: str) -> int:
    _note(f"error: {sentence}")
    return _BAD_REQUEST


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
