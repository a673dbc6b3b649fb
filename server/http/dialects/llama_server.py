"""llama-server's own endpoints: /completion, /infill, and endpoints about the server."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm.engine import SamplingParams
from polarlm.engine.cli.flags import release
from polarlm.engine.requests.prompts import chat_text
from polarlm.server.http.bodies import read_body
from polarlm.server.http.dialects._llama_answers import Completion, Infilling, error_body, generation_settings
from polarlm.server.http.errors import ApiError
from polarlm.server.http.generation import Counting, Generation
from polarlm.server.http.openai.chat import ChatCompletions
from polarlm.server.http.streams import while_there
from polarlm.server.http.warnings import warn
from polarlm.server.reading.parameters import ParsedRequest, read
from polarlm.server.running.driver import Driver

__all__ = ["PATHS", "error_body", "routes"]

PATHS = ("/completion", "/infill", "/props", "/slots", "/apply-template", "/lora-adapters")


def routes(driver: Driver) -> list[Route]:
    server = _Server(driver)
    counting = Counting(driver, ChatCompletions(), {"object": "response.input_tokens"})
    return [
        Route("/completion", Generation(driver, Completion()).serve, methods=["POST"]),
        Route("/infill", Generation(driver, Infilling()).serve, methods=["POST"]),
        Route("/props", server.props),
        Route("/props", _not_here("global properties cannot be changed"), methods=["POST"]),
        Route("/slots", server.slots),
        Route("/slots/{slot}", _not_here("sessions are saved and loaded at /sessions"), methods=["POST"]),
        Route("/apply-template", server.apply_template, methods=["POST"]),
        *(Route(f"{prefix}/chat/completions/input_tokens", counting.serve, methods=["POST"]) for prefix in ("/v1", "")),
        Route("/lora-adapters", server.adapters),
        Route(
            "/lora-adapters",
            _not_here("a request chooses its adapter, in lora or by its name as model"),
            methods=["POST"],
        ),
    ]


class _Server:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def props(self, _request: Request) -> Response:
        """The model, its template, and the default sampling parameters."""
        engine = self._driver.engine
        defaults = {
            "n_ctx": engine.context,
            "params": generation_settings(engine.model, SamplingParams(), engine.context),
        }
        return JSONResponse(
            {
                "default_generation_settings": defaults,
                "total_slots": engine.config.parallel,
                "model_alias": engine.model.name,
                "model_path": engine.model.path.name,
                "chat_template": engine.model.template.source,
                "chat_template_is_default": engine.model.template.is_default,  # whether the model has none of its own
                "chat_template_caps": {},
                "modalities": {"vision": False, "audio": False},
                "build_info": f"polarlm {release()}".rstrip(),
                "is_sleeping": False,
            }
        )

    async def slots(self, request: Request) -> Response:
        """One slot for each request that may be computed at the same time."""
        engine, now = self._driver.engine, await self._driver.status()
        busy = min(now.running + now.waiting, engine.config.parallel)
        if request.query_params.get("fail_on_no_slot") and busy == engine.config.parallel:
            raise ApiError(503, "Every slot is in use: try again a little later", "busy")
        return JSONResponse(
            [
                {
                    "id": slot,
                    "id_task": -1,
                    "n_ctx": engine.context,
                    "speculative": engine.config.drafts,
                    "is_processing": slot < busy,
                }
                for slot in range(engine.config.parallel)
            ]
        )

    async def apply_template(self, request: Request) -> Response:
        """{"messages"} → {"prompt"}: the messages as text, as the model's template writes them."""
        asked = await self._asked(request)
        work = self._driver.counted(
            "templated", lambda: chat_text(asked.prompt, self._driver.engine.model, asked.options)
        )
        shown = JSONResponse({"prompt": await while_there(request.receive, work)})
        return warn(shown, [sentence for _, sentence in asked.warnings])

    async def _asked(self, request: Request) -> ParsedRequest:
        config = self._driver.config
        body = await read_body(request, config.max_body)
        tokenize = self._driver.engine.tokenize
        return read(body, tokenize, ("messages",), switched_logprobs=True, parse_special=config.parse_special)

    async def adapters(self, _request: Request) -> Response:
        """The adapters (LoRA), with the numbers that `lora` gives. Their scales are 0: a request chooses its own."""
        return JSONResponse(
            [
                {"id": number, "path": name, "scale": 0.0}
                for number, name in enumerate(self._driver.engine.adapters.by_name)
            ]
        )


def _not_here(why: str) -> Any:
    """An endpoint that refuses requests to one of llama-server's."""

    async def refuse(_request: Request) -> Response:
        raise ApiError(501, f"This server does not do this: {why}", "not_supported")

    return refuse
