"""Keyword arguments of the engine's methods, for type checkers and editors, made by `scripts.keywords`."""

from __future__ import annotations

from typing import Any, TypedDict


class EngineKeywords(TypedDict, total=False):
    """Fields of EngineConfig."""

    weights: str | None
    hf_repo: str | None
    model_draft: str | None
    mmproj: str | None
    lora: dict[str, str]
    packs: dict[str, str]
    allowed_packs: str | None
    chat_template_file: str | None
    weight_type: str
    input_bits: str | int
    device: str
    tensor_split: str | None
    ctx_size: int
    cache_type: str
    cache_type_k: str | None
    cache_type_v: str | None
    kv_memory: str | None
    state_type: str
    state_cache: str | None
    key_conditioning: bool
    calibration: bool
    threads: int
    expert_cache: str | None
    cpu_moe: str | None
    replayable: bool
    block_size: int
    parallel: int
    spec_type: str
    draft_max: int
    kept_sequences: int
    cache_disk: str | None
    cache_disk_folder: str | None
    kv_store: str | None
    cache_ram: str | None


class SamplingKeywords(TypedDict, total=False):
    """Fields of SamplingParams."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    repeat_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    repeat_last_n: int
    dry_multiplier: float | None
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int | None
    dry_sequence_breakers: tuple[str, ...] | None
    logit_bias: dict[int, float]
    seed: int
    stop: tuple[str, ...]
    stop_anywhere: bool
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    schema: dict[str, Any] | str | None
    grammar: str | None
    regex: str | None
    shown_tokens: tuple[int, ...]
    reasoning_budget: int
    spec_type: str | None
    draft_max: int | None


class GenerateKeywords(SamplingKeywords, total=False):
    """Fields of SamplingParams, and what `stream` takes beside them."""

    progress: bool
    constraint: Any
