"""/tokenize and /detokenize: convert text to ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm.engine import EngineError
from polarlm.model_loaders.tokenizers import Tokenizer
from polarlm.server.http.bodies import Endpoints
from polarlm.server.http.warnings import warn
from polarlm.server.reading.fields import FIELDS, requested_fields, unknown_fields
from polarlm.server.reading.prompts import read_continues, read_options, read_prompt
from polarlm.server.reading.values import LARGEST, Body, FieldWarnings, array, count, flag, is_empty, text

MOST_TOKENS = 1 << 18  # in a response; as JSON, a token takes several times its bytes
MOST_PIECES = 1 << 15
_VLLM_FIELDS = {*FIELDS, "return_token_strs"} - {"tools"}  # a chat's body, whose tools are not counted here


class Tokens(Endpoints):
    @property
    def _tokenizer(self) -> Tokenizer:
        return self._driver.engine.model.tokenizer

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """{"content": text} → {"tokens": [ids]}

        "add_special" adds the token with which every text begins, if the model requires one. With "parse_special",
        names of control tokens become these tokens, as in raw prompts. "with_pieces": {"id", "piece"} in place of ids.
        """
        fields_sent = await self._body(request)
        body = requested_fields(fields_sent)
        if is_empty(body.get("content")) and any(fields_sent.get(name) is not None for name in ("prompt", "messages")):
            return await self._tokenize_as_vllm(request, fields_sent)
        content = text("content", body.get("content"))
        defaults = {"add_special": False, "parse_special": self._driver.config.parse_special, "with_pieces": False}
        options = {name: flag(name, body.get(name, value)) for name, value in defaults.items()}
        work = partial(self._ids, content, **options)
        tokens = JSONResponse({"tokens": await self._run_counted(request, "tokenized", work, content)})
        return warn(tokens, unknown_fields(fields_sent, ("content", "model", *defaults)))

    async def _tokenize_as_vllm(self, request: Request, fields_sent: Body) -> Response:
        """{"prompt": text} or {"messages"} → {"tokens": [ids], "count", "max_model_len", "token_strs"}. Without
        "add_special_tokens", a text gets no token at its beginning. "return_token_strs" asks for "token_strs"."""
        body, fields = requested_fields(fields_sent), FieldWarnings()
        with_strings = flag("return_token_strs", body.get("return_token_strs", False))
        special = flag("add_special_tokens", body.get("add_special_tokens", True))
        prompt = read_prompt(body, field_warnings=fields, reads_images=self._driver.engine.reads_images)
        options = read_options(body, self._driver.model_info)
        options = replace(options, continue_final_message=read_continues(body, prompt))

        warnings: list[str] = []

        def work() -> dict[str, Any]:
            engine, most = self._driver.engine, MOST_PIECES if with_strings else MOST_TOKENS
            if isinstance(prompt, str) and not special:
                ids = engine.tokenize(prompt, control=options.parse_special)
            else:
                ids = engine.prompt_ids(prompt, options, warnings.append)
            if len(ids) > most:
                raise EngineError(f"the prompt has {len(ids)} tokens, but at most {most} are returned")
            names = [self._tokenizer.token_name(i) for i in ids] if with_strings else None
            return {"count": len(ids), "max_model_len": engine.context, "tokens": ids, "token_strs": names}

        response = JSONResponse(await self._run_counted(request, "tokenized", work, prompt))
        return warn(
            response, [*(sentence for _, sentence in fields), *unknown_fields(fields_sent, _VLLM_FIELDS), *warnings]
        )

    def _ids(self, content: str, *, add_special: bool, parse_special: bool, with_pieces: bool) -> list[Any]:
        ids = self._tokenizer.tokenize(content, control=parse_special)
        if add_special and self._tokenizer.bos_id is not None:
            ids.insert(0, self._tokenizer.bos_id)
        most = MOST_PIECES if with_pieces else MOST_TOKENS
        if len(ids) > most:
            raise EngineError(f"content has {len(ids)} tokens, but at most {most} are returned: send it in parts")
        return [{"id": i, "piece": _piece(self._tokenizer, i)} for i in ids] if with_pieces else ids

    async def detokenize(self, request: Request) -> Response:
        """{"tokens": [ids]} → {"content": text}, with names of control tokens, as at llama-server."""
        body = await self._body(request)
        tokens = array("tokens", body.get("tokens"), "an array of token ids")
        ids = [count(f"tokens[{index}]", token, 0, LARGEST) for index, token in enumerate(tokens)]
        content = await self._run_counted(request, "detokenized", lambda: self._text(ids), ids)
        return warn(JSONResponse({"content": content}), unknown_fields(body, ("tokens", "model")))

    def _text(self, tokens: Sequence[int]) -> str:
        """The text of the tokens. Raises EngineError if it is longer than a request's body: tokens can be long."""
        most = room = self._driver.config.max_body
        names = {token: len(name.encode()) for name, token in self._tokenizer.control_tokens().items()}
        for token in tokens:
            if token >= self._tokenizer.vocab_size:
                break
            room -= names.get(token) or len(self._tokenizer.token_bytes(token))
            if room < 0:
                raise EngineError(f"tokens are the ids of more than {most} bytes of text: send fewer at a time")
        return self._driver.engine.detokenize(tokens, control=True)


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """A token's text, or a control token's name; a list of bytes if these are not whole characters."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode() or tokenizer.token_name(token)
    except UnicodeDecodeError:
        return list(data)
