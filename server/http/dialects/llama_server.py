"""llama-server's own endpoints: /completion, /infill, and endpoints about the server."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm.engine import SamplingParams, TokenLogprob, Usage
from polarlm.engine.params import OPTIONS
from polarlm.engine.parsing.pieces import Answer, Piece
from polarlm.engine.requests.prompts import chat_text
from polarlm.engine.sampling.sample import CHAIN, FALLBACKS, resolve
from polarlm.engine.version import release
from polarlm.model_loaders import Model
from polarlm.server.http.bodies import Endpoints
from polarlm.server.http.errors import TOO_LONG, ApiError
from polarlm.server.http.generation import Endpoint, Generation, ModelInfo, Writer
from polarlm.server.http.openai.chat import ChatCompletions
from polarlm.server.http.openai.completions import read_raw, text_of
from polarlm.server.http.openai.logprobs import ChatLogprobs
from polarlm.server.http.openai.shapes import prompt_progress
from polarlm.server.http.streams import Event, while_connected
from polarlm.server.http.warnings import warn
from polarlm.server.reading.fields import FIELDS, requested_fields, unknown_fields
from polarlm.server.reading.infill import with_infill_prompts
from polarlm.server.reading.parameters import ParsedRequest
from polarlm.server.reading.prompts import read_salt
from polarlm.server.reading.sampling import EXTENSIONS
from polarlm.server.reading.values import BadRequest, array, check_at_most, flag, mapping, one_of, text
from polarlm.server.running import journal
from polarlm.server.running.driver import ANY_SLOT, Driver
from polarlm.server.running.sessions import read_name

PATHS = ("/completion", "/infill", "/props", "/slots", "/apply-template", "/lora-adapters")


def routes(driver: Driver) -> list[Route]:
    server = _Server(driver)
    count = Generation(driver, ChatCompletions(), {"object": "response.input_tokens"}).count
    return [
        Route("/completion", Generation(driver, CompletionEndpoint()).serve, methods=["POST"]),
        Route("/infill", Generation(driver, Infilling()).serve, methods=["POST"]),
        Route("/props", server.props),
        _refusing_route("/props", "global properties cannot be changed"),
        Route("/slots", server.slots),
        Route("/slots/{slot}", server.change_slot, methods=["POST"]),
        Route("/apply-template", server.apply_template, methods=["POST"]),
        *(Route(f"{prefix}/chat/completions/input_tokens", count, methods=["POST"]) for prefix in ("/v1", "")),
        Route("/lora-adapters", server.adapters),
        _refusing_route("/lora-adapters", "each request names its adapter, by model or lora"),
    ]


class _Server(Endpoints):
    async def props(self, _request: Request) -> Response:
        engine = self._driver.engine
        settings = generation_settings(engine.model, SamplingParams(), engine.context)
        properties = {
            "default_generation_settings": {"n_ctx": engine.context, "params": settings},
            "total_slots": engine.config.parallel,
            "model_alias": engine.model.name,
            "model_path": engine.model.path.name,
            "chat_template": engine.model.template.source,
            "chat_template_is_default": engine.model.template.is_default,  # whether the model has none of its own
            "chat_template_caps": {},
            "modalities": {"vision": engine.reads_images, "audio": False},
            "build_info": f"polarlm {release()}".rstrip(),
            "is_sleeping": False,
        }
        return JSONResponse(properties)

    async def slots(self, request: Request) -> Response:
        """One slot for each request that may be computed at the same time."""
        engine, status = self._driver.engine, await self._driver.status()
        busy_slots = min(status.running + status.waiting, engine.config.parallel)
        if request.query_params.get("fail_on_no_slot") and busy_slots == engine.config.parallel:
            raise ApiError(503, "Every slot is in use: try again a little later", "busy")
        slot = {"id_task": -1, "n_ctx": engine.context, "speculative": engine.config.drafts}
        numbers = range(engine.config.parallel)
        return JSONResponse([{"id": number, **slot, "is_processing": number < busy_slots} for number in numbers])

    async def change_slot(self, request: Request) -> Response:
        """?action=save, restore or erase, {"filename", "cache_salt"}: what was computed last in a slot, or last of all
        if no request has named the slot, becomes a session or is forgotten; a session is loaded."""
        start, driver, entry, body = time.monotonic(), self._driver, journal.current(), await self._body(request)
        action = one_of("action", request.query_params.get("action"), ("save", "restore", "erase"))
        slot, most = request.path_params["slot"], driver.engine.config.parallel
        if slot not in map(str, range(most)):
            raise BadRequest("slot", f"slot must be a number below {most}, which --parallel gives, not {slot!r}")
        number = int(slot)
        places = [((entry and entry.key) or "", place) for place in (number, ANY_SLOT)]
        name = "" if action == "erase" else read_name("filename", body.get("filename"))
        found = next(filter(None, map(driver.slots.get, places)), None)
        if action == "restore":
            load = driver.load_session(name, read_salt(body.get("cache_salt")))
            counts = {"n_restored": await while_connected(request.receive, load)}
        elif found is None:
            raise BadRequest("slot", f"slot {number} is empty: this server has answered nothing in it")
        elif action == "save":
            counts = {"n_saved": await while_connected(request.receive, driver.save_session(name, *found))}
        else:
            work = partial(driver.engine.prompt_ids, *found)
            counts = {"n_erased": len(await self._run_counted(request, "tokenized", work, found[0]))}
        if action != "save":  # the slot has what is loaded, which the next request takes, or nothing
            for place in places:
                driver.slots.drop(place)
        fields: dict[str, Any] = {"id_slot": number} | ({} if driver.config.hide_cached_tokens else counts)
        if name:
            size = os.stat(driver.session_folder.file(name)).st_size
            fields |= {"filename": name, "n_written" if action == "save" else "n_read": size}
            fields["timings"] = {f"{action}_ms": 1000 * (time.monotonic() - start)}
        return warn(JSONResponse(fields), unknown_fields(body, ("filename", "cache_salt", "model")))

    async def apply_template(self, raw_request: Request) -> Response:
        """{"messages"} → {"prompt"}: the messages as the model's template writes them, with marks of images."""
        engine, body = self._driver.engine, await self._body(raw_request)
        request, _ = (chat := ChatCompletions()).read(body, self._driver.model_info)
        messages = _mark_images(request.prompt)
        work = partial(chat_text, messages, engine.model, request.options)
        response = JSONResponse({"prompt": await self._run_counted(raw_request, "templated", work, messages)})
        return warn(response, [*request.sentences, *chat.warnings(body)])

    async def adapters(self, _request: Request) -> Response:
        """The adapters (LoRA), with the numbers that `lora` gives, and their scales in requests that name none."""
        numbers = self._driver.engine.adapters.numbers
        return JSONResponse([{"id": id, "path": name, "scale": 0.0} for id, name in numbers.items()])


def _mark_images(prompt: Any) -> list[dict[str, Any]]:
    """Messages with llama-server's mark in place of each image."""

    def text_of_content(content: Any) -> str:
        return content if isinstance(content, str) else "".join(part.get("text", "<__media__>") for part in content)

    return [message | {"content": text_of_content(message["content"])} for message in prompt]


def _refusing_route(path: str, why: str) -> Route:
    """The route of one of llama-server's endpoints, which refuses requests."""

    async def refuse(_request: Request) -> Response:
        raise ApiError(501, f"This server does not do this: {why}", "not_supported")

    return Route(path, refuse, methods=["POST"])


_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_MOST_FILES = 256
_INFILL_FIELDS = ("input_prefix", "input_suffix", "prompt")  # in the order of `Infill.prompt`


def error_body(error: ApiError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    if error.code == TOO_LONG:
        kind = "exceed_context_size_error"
    fields = {"code": error.status, "message": error.message_for("llama-server"), "type": kind, "param": error.param}
    return {"error": {**fields, **error.numbers}}


class CompletionEndpoint(Endpoint):
    def read(self, body: dict[str, Any], info: ModelInfo) -> tuple[ParsedRequest, CompletionWriter]:
        body = requested_fields(body)
        more = _own_fields(body)
        request = read_raw(body, info)
        several = request.n > 1 or (isinstance(body["prompt"], list) and bool(request.more_prompts))
        return request, CompletionWriter(info, request, several, **more)


class Infilling(Endpoint):
    known = (*FIELDS, *_INFILL_FIELDS, "input_extra")

    def read(self, body: dict[str, Any], info: ModelInfo) -> tuple[ParsedRequest, CompletionWriter]:
        body = requested_fields(body)
        more = _own_fields(body)
        texts = {name: text(name, body.get(name, "")) for name in _INFILL_FIELDS}
        files = _files(body.pop("input_extra", []))
        request = read_raw({**body, "prompt": "-"}, info)
        request = with_infill_prompts("input_suffix", request, info.model.tokenizer, [(*texts.values(), files)])
        return request, CompletionWriter(info, request, request.n > 1, **more)


def _files(value: Any) -> list[tuple[str, str]]:
    """(name, text) of each file in `input_extra`. Raises BadRequest."""
    files = []
    check_at_most(_MOST_FILES, "input_extra", len(array("input_extra", value, "an array of files")), "files")
    for index, file in enumerate(value):
        at = f"input_extra[{index}]"
        file = mapping(at, file, "an object with a filename and a text")
        name = "tmp" if file.get("filename") is None else text(f"{at}.filename", file["filename"])
        files.append((name, text(f"{at}.text", file.get("text"))))
    return files


def _own_fields(body: dict[str, Any]) -> dict[str, Any]:
    """The fields that only llama-server's own shape has, removed from `body`. Raises BadRequest."""
    return {name: flag(name, body.pop(name, False)) for name in ("return_tokens", "timings_per_token")}


@dataclass(frozen=True)
class CompletionWriter(Writer):
    error_body = error_body

    model_info: ModelInfo
    request: ParsedRequest
    several: bool  # whether the body of a response that is not streamed is an array
    return_tokens: bool
    timings_per_token: bool
    _start_time: float = field(default_factory=time.monotonic)
    _first_token_times: dict[int, float] = field(default_factory=dict)  # answer → when its first token was generated
    _counts: dict[int, int] = field(default_factory=dict)  # answer → number of tokens so far

    def whole(self, answers: Sequence[Answer]) -> Any:
        objects = [
            self._end(index, answer, answer.text, answer.token_ids if self.return_tokens else (), answer.logprobs)
            for index, answer in enumerate(answers)
        ]
        return objects if self.several else objects[0]

    def events(self, index: int, piece: Piece, *, first: bool) -> Iterator[Event]:
        now = time.monotonic()
        if piece.token_ids:
            self._first_token_times.setdefault(index, now)
        if piece.progress is not None:
            progress = prompt_progress(piece.progress, self._start_time)
            yield self._part(index, piece, 0) | {"prompt_progress": progress}
            return
        count = self._counts[index] = self._counts.get(index, 0) + len(piece.token_ids)
        if piece.text or piece.token_ids:
            part = self._part(index, piece, count)
            if piece.logprobs:
                part["completion_probabilities"] = self._probabilities(piece.logprobs)
            if self.timings_per_token:
                first_at = self._first_token_times.get(index, now)
                rates = _rates("predicted", count, now - first_at)
                part["timings"] = {"prompt_ms": 1000 * (first_at - self._start_time), **rates}
            yield part
        if piece.finish_reason is not None:
            yield self._end(index, piece, "", (), ())

    def _part(self, index: int, piece: Piece, count: int) -> dict[str, Any]:
        """An event before the last one. count: tokens so far."""
        return {
            "index": index,
            "content": piece.text,
            "tokens": list(piece.token_ids),
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": count,
        }

    def _end(
        self, index: int, last: Answer | Piece, content: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        """A whole answer, or the last event of a streamed one."""
        usage, one = last.usage, self.request.each()[index // self.request.n]
        assert usage is not None
        word = last.stopped_by or ""
        is_full = usage.prompt_tokens + usage.completion_tokens >= self.model_info.context
        fields: dict[str, Any] = {
            "index": index,
            "content": content,
            "tokens": list(tokens),
            "id_slot": -1,
            "stop": True,
            "model": self.model_info.name,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": generation_settings(self.model_info.model, one.params, self.model_info.context),
            "prompt": text_of(one.prompt, self.model_info.model.tokenizer),
            "truncated": last.finish_reason == "length" and is_full,
            "stop_type": "limit" if last.finish_reason == "length" else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": usage.cached_tokens if self.model_info.tells_cached else None,
            "timings": _timings(usage, self.model_info.tells_cached),
        }
        if logprobs:
            fields["completion_probabilities"] = self._probabilities(logprobs)
        return fields

    def _probabilities(self, tokens: Sequence[TokenLogprob]) -> Any:
        return ChatLogprobs(self.model_info.model.tokenizer, with_ids=True).write(tokens)["content"]


def _timings(usage: Usage, tells_cached: bool) -> dict[str, Any]:
    prefilled_tokens = usage.prompt_tokens - (usage.cached_tokens if tells_cached else 0)
    drafts = {"draft_n": usage.drafted_tokens, "draft_n_accepted": usage.accepted_tokens}
    return {
        "cache_n": usage.prompt_tokens - prefilled_tokens,
        **_rates("prompt", prefilled_tokens, usage.prefill_seconds),
        **_rates("predicted", usage.completion_tokens, usage.generation_seconds),
        **(drafts if usage.drafted_tokens else {}),
    }


def _rates(name: str, count: int, seconds: float) -> dict[str, float]:
    """Count, milliseconds and rate of tokens. The rate is 0 if `seconds` is: the prefill yields the first token."""
    return {
        f"{name}_n": count,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / max(count, 1),
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }


def generation_settings(model: Model, params: SamplingParams, context: int) -> dict[str, Any]:
    """The sampling parameters, with the model's defaults filled in, under llama-server's names."""
    sampling = resolve(params, model.generation)
    return {
        "n_ctx": context,
        **{name: getattr(sampling if name in FALLBACKS else params, name) for name in EXTENSIONS if name in OPTIONS},
        **dict.fromkeys(("n_predict", "max_tokens"), sampling.max_tokens),
        "logit_bias": [[token, bias if abs(bias) < 1e9 else False] for token, bias in params.logit_bias.items()],
        "n_probs": params.logprobs or 0,
        "samplers": list(CHAIN),
    }
