"""What all endpoints do, and those that OpenAI and Anthropic have as well."""

from __future__ import annotations

from scripts.promises.promise import Promise, different, error, held, refused

_OWN = "test_http_llama_server.py"
_TEXTS = "test_http_completions.py"
_CHATS = "test_http_continued.py"
_PLAIN = "test_http_plain.py"
_OPENAI = "test_http_openai.py"

ALL: dict[str, list[Promise]] = {
    "all": [
        held(
            "paths of OpenAI's endpoints work without `/v1` as well",
            f"{_PLAIN}::test_paths_without_v1_are_those_with_it",
            f"{_PLAIN}::test_a_client_may_leave_v1_out_of_its_base_url",
        ),
        held("with a key, requests without it get 401", f"{_OPENAI}::test_a_wrong_key_is_an_authentication_error"),
        different(
            'errors are `{"error": {"code": status, "message", "type"}}`',
            "so at llama-server's own endpoints; OpenAI's have OpenAI's shape, where `code` is a word",
            f"{_OWN}::test_a_wrong_field_is_named_in_llama_servers_shape",
        ),
        held(
            "a prompt that is too long is `exceed_context_size_error`, with `n_prompt_tokens` and `n_ctx`",
            f"{_OWN}::test_a_prompt_that_is_too_long_has_its_numbers",
            f"{_CHATS}::test_a_prompt_that_is_too_long_has_its_numbers_in_both_forms",
        ),
        different(
            "any Origin may use the API",
            "none may, unless `--cors-origin` names it: a page could use a server without a key",
            "test_http_guard.py::test_pages_of_other_origins_get_no_permission",
        ),
        error(
            "images, audio and video",
            "a 400 names the part of the message: this server takes text alone",
            f"{_OPENAI}::test_unsupported_requests_are_refused_by_name",
        ),
    ],
    "GET /health": [
        held(
            '200 and `{"status": "ok"}`, without a key, also at `/v1/health`',
            f"{_PLAIN}::test_health_needs_no_key_with_v1_either",
        ),
        held(
            "503 while the model is loaded",
            "test_early.py::test_while_a_model_loads_probes_are_told_and_others_wait",
        ),
    ],
}

STANDARD: dict[str, list[Promise]] = {
    "GET /v1/models": [
        held("lists the one model", f"{_OPENAI}::test_the_model_is_listed_and_found"),
        different("`meta`, `architecture`", "`context_length` is there in their place"),
    ],
    "POST /v1/completions": [
        held(
            "OpenAI's shape, with llama-server's fields",
            f"{_OPENAI}::test_a_plain_prompt_is_continued",
            f"{_TEXTS}::test_several_prompts_are_answered_as_each_alone",
        ),
        held(
            "`echo`",
            f"{_TEXTS}::test_echo_puts_the_prompt_before_the_answer",
            f"{_TEXTS}::test_echo_with_logprobs_has_those_of_the_prompt",
        ),
    ],
    "POST /v1/chat/completions": [
        held(
            "OpenAI's shape, whole and streamed, with `usage` and `cached_tokens`",
            f"{_OPENAI}::test_a_streamed_answer_is_the_same_in_pieces",
            f"{_OPENAI}::test_tokens_of_an_earlier_turn_are_counted_as_cached",
        ),
        held("`response_format` json_object and json_schema", f"{_OPENAI}::test_answers_are_of_the_schema"),
        held(
            "objects of a schema are closed unless it has `additionalProperties`",
            "test_http_tools.py::test_objects_of_a_schema_have_no_other_properties",
        ),
        different(
            "keywords of a schema that are not supported are passed over silently",
            "a line in the log names them, and with `strict: true` they are a 400",
            "test_http_tools.py::test_keywords_that_are_not_supported_are_refused_where_a_schema_is_strict",
        ),
        held(
            "a last message of the assistant's is continued",
            f"{_CHATS}::test_a_last_message_of_the_assistant_is_continued",
        ),
        held("`response_format` with a `schema` next to its type", f"{_OWN}::test_a_schema_may_stand_beside_its_type"),
        held(
            "`tools`, `tool_choice`; calls whole and streamed",
            "test_http_tools.py::test_required_calls_parse",
            "test_http_tools.py::test_a_named_function_is_called",
            "test_http_tools.py::test_a_stream_has_names_once_and_arguments_as_text",
        ),
        held(
            "`reasoning_content`, `reasoning_format`",
            "test_http_tools.py::test_reasoning_is_apart",
            "test_http_tools.py::test_reasoning_may_stay_in_the_text_or_be_left_out",
        ),
        held("`chat_template_kwargs`", "test_http_tools.py::test_variables_of_the_template_are_honoured"),
        held("`reasoning_effort`", "test_http_tools.py::test_an_effort_of_reasoning_goes_to_the_template"),
        refused("how long a model reasons", "reasoning_budget_tokens"),
        different("`timings` next to the usage", "`/completion` has them"),
    ],
    "POST /v1/chat/completions/control": [different("ends a model's reasoning", "404")],
    "POST /v1/chat/completions/input_tokens": [
        held("the number of tokens of messages", f"{_OWN}::test_tokens_of_messages_are_counted")
    ],
    "POST /v1/responses": [
        held(
            "OpenAI's shape, whole and as events",
            "test_http_responses.py::test_an_input_is_answered_as_the_engine_does",
            "test_http_responses.py::test_a_streamed_response_is_the_same_in_events",
        ),
        held("`input_tokens`", "test_http_responses.py::test_tokens_can_be_counted_before"),
    ],
    "POST /v1/messages": [
        held(
            "Anthropic's shape, whole and as events",
            "test_http_anthropic.py::test_a_message_is_answered_as_the_engine_does",
            "test_http_anthropic.py::test_a_streamed_message_is_the_same_in_events",
        ),
        held("`count_tokens`", "test_http_anthropic.py::test_tokens_can_be_counted_before"),
    ],
}
