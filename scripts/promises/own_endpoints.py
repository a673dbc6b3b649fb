"""What llama-server's own endpoints do."""

from __future__ import annotations

from scripts.promises.promise import Promise, different, error, held, refused

_OWN = "test_http_llama_server.py"
_PLAIN = "test_http_plain.py"
_OPENAI = "test_http_openai.py"
_FIELDS = "test_http_fields.py"

OWN: dict[str, list[Promise]] = {
    "POST /completion": [
        held(
            '`prompt` is a string, ids, both mixed, `{"prompt_string"}`, or an array of these: several answers',
            f"{_OWN}::test_every_form_of_a_prompt_is_taken",
        ),
        error("`multimodal_data`", "a 400 names the field", f"{_OWN}::test_a_prompt_of_another_form_is_refused"),
        held(
            "a string at the beginning gets the token that begins every text, where the model wants it",
            "../test_prompt_options.py::test_a_text_at_the_beginning_of_ids_begins_a_sequence",
        ),
        held(
            "names of control tokens in a prompt are these tokens", f"{_FIELDS}::test_a_raw_prompt_has_control_tokens"
        ),
        held(
            "`temperature`, `top_k`, `top_p`, `min_p`, penalties, DRY, `seed`, `stop`, `ignore_eos`",
            "test_fields.py::test_honoured_fields_reach_the_engine",
            f"{_OPENAI}::test_an_answer_ends_before_a_stop_string",
        ),
        different(
            "their defaults",
            "the model's own come first; `repeat_penalty` is 1, and DRY looks at the whole context",
            f"{_OWN}::test_props_tell_the_defaults_and_the_template",
        ),
        different(
            "`repeat_last_n` may be any number", "0 to 64", "test_fields.py::test_honoured_fields_reach_the_engine"
        ),
        held(
            "`logit_bias` as pairs or an object, of ids or texts, and false",
            f"{_OWN}::test_settings_are_those_that_were_used",
            f"{_FIELDS}::test_a_bias_is_for_texts_too",
        ),
        held("`grammar` in GBNF, `json_schema`", "test_http_constraints.py::test_several_answers_of_one_form"),
        held(
            "`n_predict`; 0 reads the prompt into the cache",
            f"{_OWN}::test_no_tokens_read_the_prompt_into_the_cache",
            f"{_FIELDS}::test_every_name_of_max_tokens_is_honoured",
        ),
        different(
            "`n_predict` may be exceeded for the rest of a character",
            "it is never exceeded; half a character is U+FFFD",
        ),
        held("`n_cmpl` answers to each prompt", f"{_OWN}::test_every_form_of_a_prompt_is_taken"),
        held("`cache_prompt`", f"{_OWN}::test_no_tokens_read_the_prompt_into_the_cache"),
        different(
            "`id_slot`, `n_cache_reuse`",
            "they change nothing: every request finds what any other has left in the cache",
            "test_fields.py::test_harmless_fields_are_ignored",
        ),
        different(
            "`n_keep`, and continuing when the context is full",
            "the answer ends there, with `truncated`",
            f"{_OWN}::test_an_answer_that_fills_the_context_is_truncated",
        ),
        held(
            "`n_probs`: `completion_probabilities` with `id`, `token`, `bytes`, `logprob`, `top_logprobs`",
            f"{_OWN}::test_probabilities_of_the_most_likely_tokens",
        ),
        held("`return_tokens`", f"{_OWN}::test_tokens_are_returned_on_request"),
        different(
            "`timings_per_token`",
            "events have the figures of the answer so far, those of the prompt come in the last event",
            f"{_OWN}::test_timings_count_and_time_both_parts",
        ),
        different(
            "`return_progress`, `sse_ping_interval`",
            "nothing is sent before the first token; OpenAI's endpoint for chats has `prompt_progress`",
            "test_http_streams.py::test_a_chat_tells_how_far_its_prompt_is",
        ),
        refused(
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
        refused("other forms of the answer, adapters", "post_sampling_probs", "response_fields", "lora"),
        held(
            "`content`, `tokens`, `stop`, `model`, `prompt`, `truncated`; `tokens_predicted`, `_evaluated`, `_cached`",
            f"{_OWN}::test_an_answer_has_llama_servers_fields",
        ),
        held(
            "streamed events have `content`, `tokens`, `stop`; the last one has the rest",
            f"{_OWN}::test_a_streamed_answer_is_the_whole_one",
        ),
        held(
            "`stop_type` is `eos`, `limit` or `word`, with `stopping_word`",
            f"{_OWN}::test_the_reason_for_the_end_is_told",
        ),
        different("`stop_type` is `none` in events before the last", "it is not there"),
        held("`timings`", f"{_OWN}::test_timings_count_and_time_both_parts"),
        different(
            "`generation_settings` with `n_ctx` and `model`",
            "`model` stands next to it",
            f"{_OWN}::test_settings_are_those_that_were_used",
        ),
        held("a client that hangs up ends its request", f"{_OWN}::test_a_client_that_hangs_up_cancels"),
    ],
    "POST /completions": [
        different(
            "the same as `/completion`",
            "the same as `/v1/completions`, for clients whose base URL has no `/v1`",
            f"{_PLAIN}::test_a_client_may_leave_v1_out_of_its_base_url",
        )
    ],
    "POST /tokenize": [
        held(
            "`content`, `add_special`, `parse_special`",
            f"{_PLAIN}::test_the_token_that_begins_every_text_is_added",
            f"{_PLAIN}::test_control_strings_are_tokens_where_they_are_in_prompts",
        ),
        held(
            "`with_pieces`: text, or bytes of half a character", f"{_PLAIN}::test_tokens_are_returned_with_their_pieces"
        ),
    ],
    "POST /detokenize": [
        held(
            "`tokens` become `content`",
            f"{_PLAIN}::test_any_tokens_have_a_text",
            f"{_PLAIN}::test_control_tokens_come_back",
        )
    ],
    "POST /apply-template": [
        held("`messages` become the `prompt` that the template writes", f"{_OWN}::test_a_template_is_applied")
    ],
    "POST /embedding, /embeddings": [
        held(
            "`content` or `input`, one or several; the answer is an array of vectors in arrays",
            "test_http_embeddings.py::test_llama_servers_shape_has_a_list_of_vectors",
        ),
        different(
            "the model or a flag says how states become a vector",
            "`pooling` in the request: `mean` or `last`",
            "test_http_embeddings.py::test_a_text_has_the_vector_that_the_engine_gives_it",
        ),
        error(
            "`embd_normalize` other than 2; a vector for each token",
            "a 400 names the field",
            "test_http_embeddings.py::test_a_wrong_field_is_named",
        ),
    ],
    "POST /v1/embeddings": [
        held(
            "OpenAI's shape, vectors of length 1, `float` and `base64`",
            "test_http_embeddings.py::test_a_text_has_the_vector_that_the_engine_gives_it",
            "test_http_embeddings.py::test_openais_client_reads_several_vectors",
        )
    ],
    "POST /reranking": [different("documents in the order of their relevance", "404: there is no model for this")],
    "POST /infill": [
        held(
            "`input_prefix`, `input_suffix` and `prompt` around the model's tokens",
            f"{_OWN}::test_infill_writes_between_prefix_and_suffix",
        ),
        held(
            "`input_extra` as files of a repository, where the model has tokens for it",
            f"{_OWN}::test_infill_puts_other_files_before_it",
        ),
        held("all options of `/completion`", f"{_OWN}::test_a_wrong_field_is_named_in_llama_servers_shape"),
        different(
            "the answer is streamed",
            "it is on request, as at `/completion`",
            f"{_OWN}::test_infill_writes_between_prefix_and_suffix",
        ),
        error("models without the tokens", "a 400 says so", f"{_OWN}::test_a_model_without_the_tokens_refuses_infill"),
    ],
    "GET /props": [
        held(
            "`default_generation_settings`, `total_slots`, `chat_template`, `modalities`, `build_info`, `is_sleeping`",
            f"{_OWN}::test_props_tell_the_defaults_and_the_template",
        ),
        different(
            "`model_path`",
            "the name of the folder or file, without where it is",
            f"{_OWN}::test_props_tell_the_defaults_and_the_template",
        ),
        different("`chat_template_caps`", "empty"),
    ],
    "POST /props": [error("changes properties", "501", f"{_OWN}::test_what_this_server_does_otherwise_is_refused")],
    "GET /slots": [
        held("`id`, `n_ctx`, `is_processing`; `?fail_on_no_slot=1`", f"{_OWN}::test_slots_tell_what_is_computed"),
        different("`params`, `next_token`", "they are left out: clients would see each other's requests"),
    ],
    "POST /slots/ID": [
        error(
            "`?action=` save, restore, erase",
            "501: conversations are saved by name, at `/sessions`",
            f"{_OWN}::test_what_this_server_does_otherwise_is_refused",
        )
    ],
    "GET /metrics": [
        different(
            "names begin with `llamacpp:`",
            "they begin with `polarlm_`, and are always served",
            f"{_PLAIN}::test_metrics_count_what_was_served",
        )
    ],
    "/lora-adapters": [
        held("GET lists the adapters", f"{_OWN}::test_there_are_no_adapters"),
        different("POST sets their scales", "405: there are none"),
    ],
}
