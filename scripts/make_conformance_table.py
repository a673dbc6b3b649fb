"""Writes the table of what llama-server's documentation promises into docs/api.md, and how this server keeps it.

Each promise is *held*, which names tests, *different*, with the reason, or *refused* by a field's name or an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.make_quality_table import with_tables

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "api.md"
_OWN, _TEXTS, _CHATS = "test_http_llama_server.py", "test_http_completions.py", "test_http_continued.py"
_PLAIN, _OPENAI, _FIELDS = "test_http_plain.py", "test_http_openai.py", "test_http_fields.py"


@dataclass(frozen=True)
class Promise:
    """A behaviour that llama-server's documentation describes, in our words."""

    endpoint: str
    says: str
    standing: str  # "held", "different" or "refused"
    why: str = ""  # of what is different or refused
    tests: tuple[str, ...] = ()  # file in tests/server, "::", name
    fields: tuple[str, ...] = ()  # of requests: those that `server.fields` refuses


def _held(says: str, *tests: str) -> tuple[str, str, str, tuple[str, ...], tuple[str, ...]]:
    return says, "held", "", tests, ()


def _different(says: str, why: str, *tests: str) -> tuple[str, str, str, tuple[str, ...], tuple[str, ...]]:
    return says, "different", why, tests, ()


def _refused(says: str, *fields: str) -> tuple[str, str, str, tuple[str, ...], tuple[str, ...]]:
    return says, "refused", f"a 400 names the field: {', '.join(f'`{one}`' for one in fields)}", (), fields


def _error(says: str, why: str, *tests: str) -> tuple[str, str, str, tuple[str, ...], tuple[str, ...]]:
    return says, "refused", why, tests, ()


_PROMISES = {
    "all": [
        _held(
            "paths of OpenAI's endpoints work without `/v1` as well",
            f"{_PLAIN}::test_paths_without_v1_are_those_with_it",
            f"{_PLAIN}::test_a_client_may_leave_v1_out_of_its_base_url",
        ),
        _held("with a key, requests without it get 401", f"{_OPENAI}::test_a_wrong_key_is_an_authentication_error"),
        _different(
            'errors are `{"error": {"code": status, "message", "type"}}`',
            "so at llama-server's own endpoints; OpenAI's have OpenAI's shape, where `code` is a word",
            f"{_OWN}::test_a_wrong_field_is_named_in_llama_servers_shape",
        ),
        _held(
            "a prompt that is too long is `exceed_context_size_error`, with `n_prompt_tokens` and `n_ctx`",
            f"{_OWN}::test_a_prompt_that_is_too_long_has_its_numbers",
            f"{_CHATS}::test_a_prompt_that_is_too_long_has_its_numbers_in_both_forms",
        ),
        _different(
            "any Origin may use the API",
            "none may, unless `--cors-origin` names it: a page could use a server without a key",
            "test_http_guard.py::test_pages_of_other_origins_get_no_permission",
        ),
        _error(
            "images, audio and video",
            "a 400 names the part of the message: this server takes text alone",
            f"{_OPENAI}::test_unsupported_requests_are_refused_by_name",
        ),
    ],
    "GET /health": [
        _held(
            '200 and `{"status": "ok"}`, without a key, also at `/v1/health`',
            f"{_PLAIN}::test_health_needs_no_key_with_v1_either",
        ),
        _different(
            "503 while the model is loaded",
            "the connection waits until it is; 503 while the server ends",
            f"{_PLAIN}::test_a_server_is_healthy_until_it_is_about_to_end",
        ),
    ],
    "POST /completion": [
        _held(
            '`prompt` is a string, ids, both mixed, `{"prompt_string"}`, or an array of these: several answers',
            f"{_OWN}::test_every_form_of_a_prompt_is_taken",
        ),
        _error("`multimodal_data`", "a 400 names the field", f"{_OWN}::test_a_prompt_of_another_form_is_refused"),
        _held(
            "a string at the beginning gets the token that begins every text, where the model wants it",
            "../test_prompt_options.py::test_a_text_at_the_beginning_of_ids_begins_a_sequence",
        ),
        _held(
            "names of control tokens in a prompt are these tokens", f"{_FIELDS}::test_a_raw_prompt_has_control_tokens"
        ),
        _held(
            "`temperature`, `top_k`, `top_p`, `min_p`, penalties, DRY, `seed`, `stop`, `ignore_eos`",
            "test_fields.py::test_honoured_fields_reach_the_engine",
            f"{_OPENAI}::test_an_answer_ends_before_a_stop_string",
        ),
        _different(
            "their defaults",
            "the model's own come first; `repeat_penalty` is 1, and DRY looks at the whole context",
            f"{_OWN}::test_props_tell_the_defaults_and_the_template",
        ),
        _different(
            "`repeat_last_n` may be any number", "0 to 64", "test_fields.py::test_honoured_fields_reach_the_engine"
        ),
        _held(
            "`logit_bias` as pairs or an object, of ids or texts, and false",
            f"{_OWN}::test_settings_are_those_that_were_used",
            f"{_FIELDS}::test_a_bias_is_for_texts_too",
        ),
        _held("`grammar` in GBNF, `json_schema`", "test_http_constraints.py::test_several_answers_of_one_form"),
        _held(
            "`n_predict`; 0 reads the prompt into the cache",
            f"{_OWN}::test_no_tokens_read_the_prompt_into_the_cache",
            f"{_FIELDS}::test_every_name_of_max_tokens_is_honoured",
        ),
        _different(
            "`n_predict` may be exceeded for the rest of a character",
            "it is never exceeded; half a character is U+FFFD",
        ),
        _held("`n_cmpl` answers to each prompt", f"{_OWN}::test_every_form_of_a_prompt_is_taken"),
        _held("`cache_prompt`", f"{_OWN}::test_no_tokens_read_the_prompt_into_the_cache"),
        _different(
            "`id_slot`, `n_cache_reuse`",
            "they change nothing: every request finds what any other has left in the cache",
            "test_fields.py::test_harmless_fields_are_ignored",
        ),
        _different(
            "`n_keep`, and going on when the context is full",
            "the answer ends there, with `truncated`",
            f"{_OWN}::test_an_answer_that_fills_the_context_is_truncated",
        ),
        _held(
            "`n_probs`: `completion_probabilities` with `id`, `token`, `bytes`, `logprob`, `top_logprobs`",
            f"{_OWN}::test_probabilities_of_the_most_likely_tokens",
        ),
        _held("`return_tokens`", f"{_OWN}::test_tokens_are_returned_on_request"),
        _different(
            "`timings_per_token`",
            "events have the figures of the answer so far, those of the prompt come in the last event",
            f"{_OWN}::test_timings_count_and_time_both_parts",
        ),
        _different(
            "`return_progress`, `sse_ping_interval`",
            "nothing is sent before the first token",
            "test_fields.py::test_harmless_fields_are_ignored",
        ),
        _refused(
            "other samplers and limits",
            "dynatemp_range",
            "typical_p",
            "xtc_probability",
            "mirostat",
            "top_n_sigma",
            "adaptive_target",
            "min_keep",
            "samplers",
            "n_indent",
            "t_max_predict_ms",
        ),
        _refused("other forms of the answer, adapters", "post_sampling_probs", "response_fields", "lora"),
        _held(
            "`content`, `tokens`, `stop`, `model`, `prompt`, `truncated`; `tokens_predicted`, `_evaluated`, `_cached`",
            f"{_OWN}::test_an_answer_has_llama_servers_fields",
        ),
        _held(
            "streamed events have `content`, `tokens`, `stop`; the last one has the rest",
            f"{_OWN}::test_a_streamed_answer_is_the_whole_one",
        ),
        _held(
            "`stop_type` is `eos`, `limit` or `word`, with `stopping_word`",
            f"{_OWN}::test_the_reason_for_the_end_is_told",
        ),
        _different("`stop_type` is `none` in events before the last", "it is not there"),
        _held("`timings`", f"{_OWN}::test_timings_count_and_time_both_parts"),
        _different(
            "`generation_settings` with `n_ctx` and `model`",
            "`model` stands beside it",
            f"{_OWN}::test_settings_are_those_that_were_used",
        ),
        _held("a client that hangs up ends its request", f"{_OWN}::test_a_client_that_hangs_up_cancels"),
    ],
    "POST /completions": [
        _different(
            "the same as `/completion`",
            "the same as `/v1/completions`, for clients whose base URL has no `/v1`",
            f"{_PLAIN}::test_a_client_may_leave_v1_out_of_its_base_url",
        )
    ],
    "POST /tokenize": [
        _held(
            "`content`, `add_special`, `parse_special`",
            f"{_PLAIN}::test_the_token_that_begins_every_text_is_added",
            f"{_PLAIN}::test_control_strings_are_tokens_where_they_are_in_prompts",
        ),
        _held(
            "`with_pieces`: text, or bytes of half a character", f"{_PLAIN}::test_tokens_are_returned_with_their_pieces"
        ),
    ],
    "POST /detokenize": [_held("`tokens` become `content`", f"{_PLAIN}::test_any_tokens_have_a_text")],
    "POST /apply-template": [
        _held("`messages` become the `prompt` that the template writes", f"{_OWN}::test_a_template_is_applied")
    ],
    "POST /embedding, /embeddings": [
        _held(
            "`content` or `input`, one or several; the answer is an array of vectors in arrays",
            "test_http_embeddings.py::test_llama_servers_shape_has_a_list_of_vectors",
        ),
        _different(
            "the model or a flag says how states become a vector",
            "`pooling` in the request: `mean` or `last`",
            "test_http_embeddings.py::test_a_text_has_the_vector_that_the_engine_gives_it",
        ),
        _error(
            "`embd_normalize` other than 2; a vector for each token",
            "a 400 names the field",
            "test_http_embeddings.py::test_a_wrong_field_is_named",
        ),
    ],
    "POST /v1/embeddings": [
        _held(
            "OpenAI's shape, vectors of length 1, `float` and `base64`",
            "test_http_embeddings.py::test_a_text_has_the_vector_that_the_engine_gives_it",
            "test_http_embeddings.py::test_openais_client_reads_several_vectors",
        )
    ],
    "POST /reranking": [_different("documents in the order of their relevance", "404: there is no model for this")],
    "POST /infill": [
        _held(
            "`input_prefix`, `input_suffix` and `prompt` around the model's tokens",
            f"{_OWN}::test_infill_writes_between_prefix_and_suffix",
        ),
        _held(
            "`input_extra` as files of a repository, where the model has tokens for it",
            f"{_OWN}::test_infill_puts_other_files_before_it",
        ),
        _held("all options of `/completion`", f"{_OWN}::test_a_wrong_field_is_named_in_llama_servers_shape"),
        _different(
            "the answer is streamed",
            "it is on request, as at `/completion`",
            f"{_OWN}::test_infill_writes_between_prefix_and_suffix",
        ),
        _error("models without the tokens", "a 400 says so", f"{_OWN}::test_a_model_without_the_tokens_refuses_infill"),
    ],
    "GET /props": [
        _held(
            "`default_generation_settings`, `total_slots`, `chat_template`, `modalities`, `build_info`, `is_sleeping`",
            f"{_OWN}::test_props_tell_the_defaults_and_the_template",
        ),
        _different(
            "`model_path`",
            "the name of the folder or file, without where it is",
            f"{_OWN}::test_props_tell_the_defaults_and_the_template",
        ),
        _different("`chat_template_caps`", "empty"),
    ],
    "POST /props": [_error("changes properties", "501", f"{_OWN}::test_what_this_server_does_otherwise_is_refused")],
    "GET /slots": [
        _held("`id`, `n_ctx`, `is_processing`; `?fail_on_no_slot=1`", f"{_OWN}::test_slots_tell_what_is_computed"),
        _different("`params`, `next_token`", "they are left out: clients would see each other's requests"),
    ],
    "POST /slots/ID": [
        _error(
            "`?action=` save, restore, erase",
            "501: conversations are saved by name, at `/sessions`",
            f"{_OWN}::test_what_this_server_does_otherwise_is_refused",
        )
    ],
    "GET /metrics": [
        _different(
            "names begin with `llamacpp:`",
            "they begin with `polarlm_`, and are always served",
            f"{_PLAIN}::test_metrics_count_what_was_served",
        )
    ],
    "/lora-adapters": [
        _held("GET lists the adapters", f"{_OWN}::test_there_are_no_adapters"),
        _different("POST sets their scales", "405: there are none"),
    ],
    "GET /v1/models": [
        _held("lists the one model", f"{_OPENAI}::test_the_model_is_listed_and_found"),
        _different("`meta`, `architecture`", "`context_length` is there in their place"),
    ],
    "POST /v1/completions": [
        _held(
            "OpenAI's shape, with llama-server's fields",
            f"{_OPENAI}::test_a_plain_prompt_is_continued",
            f"{_TEXTS}::test_several_prompts_are_answered_as_each_alone",
        ),
        _held(
            "`echo`",
            f"{_TEXTS}::test_echo_puts_the_prompt_before_the_answer",
            f"{_TEXTS}::test_echo_with_logprobs_has_those_of_the_prompt",
        ),
    ],
    "POST /v1/chat/completions": [
        _held(
            "OpenAI's shape, whole and streamed, with `usage` and `cached_tokens`",
            f"{_OPENAI}::test_a_streamed_answer_is_the_same_in_pieces",
            f"{_OPENAI}::test_tokens_of_an_earlier_turn_are_counted_as_cached",
        ),
        _held("`response_format` json_object and json_schema", f"{_OPENAI}::test_answers_are_of_the_schema"),
        _held(
            "a last message of the assistant's is continued",
            f"{_CHATS}::test_a_last_message_of_the_assistant_is_continued",
        ),
        _held("`response_format` with a `schema` beside its type", f"{_OWN}::test_a_schema_may_stand_beside_its_type"),
        _held(
            "`tools`, `tool_choice`; calls whole and streamed",
            "test_http_tools.py::test_required_calls_parse",
            "test_http_tools.py::test_a_named_function_is_called",
            "test_http_tools.py::test_a_stream_has_names_once_and_arguments_as_text",
        ),
        _held(
            "`reasoning_content`, `reasoning_format`",
            "test_http_tools.py::test_reasoning_is_apart",
            "test_http_tools.py::test_reasoning_may_stay_in_the_text_or_be_left_out",
        ),
        _held("`chat_template_kwargs`", "test_http_tools.py::test_variables_of_the_template_are_honoured"),
        _refused("how much a model reasons", "reasoning_effort", "reasoning_budget_tokens"),
        _different("`timings` beside the usage", "`/completion` has them"),
    ],
    "POST /v1/chat/completions/control": [_different("ends a model's reasoning", "404")],
    "POST /v1/chat/completions/input_tokens": [
        _held("the number of tokens of messages", f"{_OWN}::test_tokens_of_messages_are_counted")
    ],
    "POST /v1/responses": [
        _held(
            "OpenAI's shape, whole and as events",
            "test_http_responses.py::test_an_input_is_answered_as_the_engine_does",
            "test_http_responses.py::test_a_streamed_response_is_the_same_in_events",
        ),
        _held("`input_tokens`", "test_http_responses.py::test_tokens_can_be_counted_before"),
    ],
    "POST /v1/messages": [
        _held(
            "Anthropic's shape, whole and as events",
            "test_http_anthropic.py::test_a_message_is_answered_as_the_engine_does",
            "test_http_anthropic.py::test_a_streamed_message_is_the_same_in_events",
        ),
        _held("`count_tokens`", "test_http_anthropic.py::test_tokens_can_be_counted_before"),
    ],
}


def promises() -> Iterator[Promise]:
    """All of them."""
    for endpoint, told in _PROMISES.items():
        for says, standing, why, tests, fields in told:
            yield Promise(endpoint, says, standing, why, tests, fields)


def table() -> str:
    """One Markdown table with a line for each promise."""
    lines = ["| Endpoint | What llama-server's documentation says | Here |", "|---|---|---|"]
    for promise in promises():
        names = ", ".join(f"`{test.rpartition('::')[2]}`" for test in promise.tests)
        here = f"*{promise.standing}*" + (f": {promise.why}" if promise.why else "")
        here += f" ({names})" if names and promise.why else f": {names}" if names else ""
        lines.append(f"| {promise.endpoint} | {promise.says} | {here} |")
    return "\n".join(lines)


if __name__ == "__main__":
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(with_tables(text, {"conformance": table}), encoding="utf-8")
