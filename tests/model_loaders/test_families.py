"""What each family reads from a configuration of either file format."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from polarlm.model_loaders import LoadError, ModelConfig, RopeConfig, load_weights, rope_frequencies
from polarlm.model_loaders import families as families_package
from polarlm.model_loaders.config import Attention, Experts, GatedMLP, Layer, ShortConv
from polarlm.model_loaders.families import configure, families, gguf_layouts, tensors
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.safetensors_source import open_safetensors
from polarlm.model_loaders.files.weights import as_stored
from tests.conftest import ENCODERS
from tests.model_loaders.checkpoints import MODELS, NAMES, as_gguf, config_of, granite_config, read, read_all
from tests.pairs import mostly_slow
from tests.shared_data import shared

BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
}


def configured(**changes: object) -> ModelConfig:
    return read_as({**BASE, **changes})


def mixers(config: ModelConfig) -> list[Attention]:
    return list(config.attentions.values())


def windows_of(config: ModelConfig) -> tuple[int | None, ...]:
    return tuple(mixer.window for mixer in mixers(config))


def rope_of(config: ModelConfig) -> RopeConfig:
    """RoPE of the last layer that has it: without a window, where there are both."""
    return [mixer.rope for mixer in sorted(mixers(config), key=lambda mixer: mixer.window is None) if mixer.rope][-1]


def with_rope(config: ModelConfig, rope: RopeConfig) -> ModelConfig:
    return config.with_attention(lambda mixer: replace(mixer, rope=mixer.rope and rope))


def stored(name: str | Path) -> ModelConfig:
    return config_of(MODELS / name)


def written(name: str) -> dict[str, Any]:
    return json.loads((MODELS / name / "config.json").read_text())


def read_as(values: dict[str, Any]) -> ModelConfig:
    return configure(Fields(values, "config.json"))


def test_every_file_is_a_family_and_every_family_has_a_stored_model() -> None:
    files = {file.stem for file in Path(families_package.__file__).parent.glob("*.py") if file.stem[0] != "_"}
    assert set(families()) == files
    assert {stored(name).family for name in (*NAMES, *ENCODERS.iterdir())} == files


def test_sizes_come_from_the_configuration() -> None:
    layer = Layer(Attention(heads=4, kv_heads=2, head_dim=16, rope=RopeConfig()), GatedMLP(128))
    assert configured(num_key_value_heads=2) == ModelConfig(
        family="llama", layers=(layer,) * 3, hidden_size=64, vocab_size=100, max_context=512, norm_eps=1e-5
    )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
NO_ROPE = {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [0, 1, 1]}


SMALL = {"model_type": "mistral3", "text_config": {**BASE, "model_type": "mistral", "sliding_window": 32}}
GRANITE = {"model_type": "granitemoeshared", "num_local_experts": 4, "num_experts_per_tok": 2}


def has_rope(config: ModelConfig) -> list[bool]:
    return [mixer.rope is not None for mixer in mixers(config)]


def shared_of(config: ModelConfig) -> GatedMLP | None:
    assert isinstance(config.ffn, Experts)
    return config.ffn.shared


SLIDING = {"sliding_window": 32, "use_sliding_window": True}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
QWEN: list[tuple[dict[str, Any], tuple[int | None, ...]]] = [
    ({"sliding_window": 32, "max_window_layers": 1}, (None, None, None)),
    ({**SLIDING, "max_window_layers": 1, "use_sliding_window": False}, (None, None, None)),
    ({**SLIDING, "max_window_layers": 1}, (None, 32, 32)),
    ({**SLIDING, "layer_types": KINDS}, (32, None, 32)),
]
# Keys, what is looked at, and what it is.
MEANT: list[tuple[dict[str, Any], Callable[[ModelConfig], Any], Any]] = [
    ({}, lambda config: config.attention.kv_heads, 4),  # one per query head
    ({"num_key_value_heads": None}, lambda config: config.attention.kv_heads, 4),
    ({"model_type": "mistral", "sliding_window": None}, windows_of, (None, None, None)),
    ({"model_type": "mistral"}, windows_of, (None, None, None)),
    ({"model_type": "mistral", "sliding_window": 32}, windows_of, (32, 32, 32)),
    ({"model_type": "qwen3"}, lambda config: config.attention.head_dim, 128),
    ({"model_type": "qwen3", "head_dim": 32}, lambda config: config.attention.head_dim, 32),
    ({"rope_scaling": YARN}, lambda config: config.max_context, 2048),  # where files give the trained context
    ({"rope_scaling": YARN, "max_position_embeddings": 2048}, lambda config: config.max_context, 2048),
    ({"model_type": "smollm3", "num_hidden_layers": 8}, has_rope, [True, True, True, False] * 2),
    ({"model_type": "smollm3", "no_rope_layer_interval": 2}, has_rope, [True, False, True]),
    ({"model_type": "smollm3", "no_rope_layers": [0, 1, 1]}, has_rope, [False, True, True]),
    (NO_ROPE, windows_of, (8, None, None)),
    ({"model_type": "smollm3"}, lambda config: (rope_of(config).theta, config.tied_head), (2e6, True)),
    ({"model_type": "smollm3", "rope_scaling": {**YARN}}, lambda config: rope_of(config).theta, 2e6),
    ({"model_type": "smollm3", "rope_parameters": {"rope_theta": 5e6}}, lambda config: rope_of(config).theta, 5e6),
    ({"model_type": "smollm3", "tie_word_embeddings": False}, lambda config: config.tied_head, False),
    ({**GRANITE, "shared_intermediate_size": 24}, shared_of, GatedMLP(24)),
    ({**GRANITE, "shared_intermediate_size": 0}, shared_of, None),
    (GRANITE, has_rope, [True] * 3),
    (SMALL, lambda config: (config.attention.query_growth, config.attention.window), (None, 32)),
    ({**SMALL, "tie_word_embeddings": True}, lambda config: config.tied_head, True),
    ({"model_type": "lfm3", "num_hidden_layers": 5}, windows_of, (None, 256)),  # of layers 2 and 4
    ({"model_type": "granite", "position_embedding_type": "nope"}, has_rope, [False] * 3),
    *(({"model_type": model, **keys}, windows_of, found) for model in ("qwen2", "qwen3") for keys, found in QWEN),
]


def test_what_keys_mean_and_what_their_absence() -> None:
    for changes, look, expected in MEANT:
        assert look(configured(**changes)) == expected, changes


def test_muse_glimmer_without_lists_has_no_rope_and_no_window_in_every_fourth_layer_from_the_last_one() -> None:
    values = written("muse_glimmer_gated")
    text = values["text_config"]
    del text["layer_types"], text["layer_rope_theta"]
    assert read_as(values) == stored("muse_glimmer_gated")
    text["num_hidden_layers"] = 6
    config = read_as(values)
    assert windows_of(config) == (12, None, 12, 12, 12, None)
    assert [mixer.rope is None for mixer in config.attentions.values()] == [False, True, False, False, False, True]
    text["layer_rope_theta"] = [500.0] * 5 + [400.0]
    with pytest.raises(LoadError, match=r"layer_rope_theta .* but must say 0 or 500 for 6 layers"):
        read_as(values)


def test_the_last_layers_of_gemma4_e2b_share_kv_and_have_wider_networks() -> None:
    config = stored("gemma4_shared_kv")
    assert [mixer.shares_kv for mixer in config.attentions.values()] == [False, False, True, True]
    assert [layer.ffn.size for layer in config.layers] == [24, 24, 48, 48]
    values = written("gemma4_shared_kv")
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    mixtures = [layer.ffn for layer in read_as({**values, **experts}).layers]
    assert [ffn.shared.size for ffn in mixtures if isinstance(ffn, Experts) and ffn.shared] == [24, 24, 48, 48]
    values["num_kv_shared_layers"] = 3
    with pytest.raises(LoadError, match="num_kv_shared_layers is 3, but no layer before these has K/V of each kind"):
        read_as(values)


def test_the_text_of_gemma4_12b_has_names_of_its_own() -> None:
    values = written("gemma4_values_are_keys")
    for kind in ("", "Unified"):
        for task in ("CausalLM", "ConditionalGeneration"):
            model_type = f"gemma4{'_unified' if kind else ''}_text"
            changed = {**values, "model_type": model_type, "architectures": [f"Gemma4{kind}For{task}"]}
            assert read_as(changed) == stored("gemma4_values_are_keys")


def test_muse_glimmer_as_a_whole_says_whether_its_head_is_the_embedding() -> None:
    values = written("muse_glimmer_mqa")
    for of_text, whole, tied in ((True, None, False), (False, True, True), (True, True, True)):
        changed = {**values, "text_config": {**values["text_config"], "tie_word_embeddings": of_text}}
        changed |= {} if whole is None else {"tie_word_embeddings": whole}
        assert read_as(changed).tied_head is tied


def test_gemma3_with_the_older_keys() -> None:
    config = stored("gemma3_tied")
    values = written("gemma3_tied")
    del values["rope_parameters"], values["layer_types"]
    values |= {"sliding_window_pattern": 2, "rope_theta": 1e4, "rope_local_base_freq": 100.0}
    values["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    assert read_as(values) == config
    # What a published configuration leaves out is as in the 4B model; the pattern of windows is six layers long.
    kept = {key: values[key] for key in ("model_type", "hidden_size", "num_hidden_layers", "sliding_window")}
    got = read_as({**kept, "num_hidden_layers": 7})
    assert (got.attention.heads, got.attention.kv_heads, got.attention.head_dim, got.vocab_size) == (8, 4, 256, 262_208)
    assert windows_of(got) == (12, 12, 12, 12, 12, None, 12)
    assert {mixer.rope.theta for mixer in mixers(got) if mixer.rope} == {1e6, 1e4}
    assert got.attention.scale == 1 / 16


def test_the_norms_of_hunyuan_undo_a_factor_of_its_rope() -> None:
    """Equal logits in transformers, whose yarn multiplies cosines and sines by 1.139 here."""
    values = written("hunyuan_v1_dense_alpha_tied")
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    frequencies, factor = rope_frequencies(rope_of(read_as({**values, "rope_scaling": yarn})), 16)
    assert factor == 1
    np.testing.assert_array_equal(frequencies, rope_frequencies(rope_of(configured(rope_scaling=yarn)), 16)[0])


def test_modernbert_with_the_newer_keys() -> None:
    values = json.loads((ENCODERS / "modernbert" / "config.json").read_text())
    config = read_as(values)
    assert windows_of(config) == (None, 12, 12, None)
    newer = {key: value for key, value in values.items() if not key.startswith(("global_", "local_rope"))}
    newer["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows_of(config)]
    thetas = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
    newer["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    assert read_as(newer) == config
    assert read_as({**values, "hidden_activation": "silu"}).ffn.activation == "silu"  # Granite's
    for key, value in (("norm_bias", True), ("classifier_pooling", "max"), ("classifier_activation", "relu")):
        with pytest.raises(LoadError, match=f"{key} is"):
            read_as({**values, key: value})


def test_a_gemma2_without_a_key_has_the_caps_of_released_ones_and_null_is_no_cap() -> None:
    values = written("gemma2_capped_tied")
    del values["attn_logit_softcapping"], values["final_logit_softcapping"]
    config = read_as(values)
    assert (config.attention.softcap, config.logit_softcap) == (50.0, 30.0)
    config = read_as({**values, "attn_logit_softcapping": None})
    assert (config.attention.softcap, config.logit_softcap) == (None, 30.0)
    with pytest.raises(LoadError, match="attn_logit_softcapping is 0, but must be a number"):
        read_as({**values, "attn_logit_softcapping": 0})


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_gemma3_for_images(prefix: str, tmp_path: Path) -> None:
    config, weights, _ = load_weights(MODELS / "gemma3_tied")
    whole = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": written("gemma3_tied"),
    }
    (tmp_path / "config.json").write_text(json.dumps({**whole, "vision_config": {"hidden_size": 8}}))
    files = {
        prefix + name.removeprefix("model."): tensor
        for name, tensor in read_all(open_safetensors(MODELS / "gemma3_tied")).items()
    }
    files["vision_tower.vision_model.post_layernorm.weight"] = np.ones(8, np.float32)
    save_file(files, tmp_path / "model.safetensors")
    got, copy, _ = load_weights(tmp_path)
    assert got == config
    for name, tensor in read_all(weights).items():
        np.testing.assert_array_equal(read(copy, name), tensor, err_msg=name)


def test_the_scale_of_embeddings_is_rounded_to_their_stored_type() -> None:
    for dtype, scale in (("BF16", 50.5), ("F16", 50.59375), ("F32", 2560**0.5), ("Q8_0", 2560**0.5)):
        assert as_stored(2560**0.5, dtype) == scale


def test_phi3_longrope() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [float(i) for i in range(1, 9)]}
    scaling = {"type": "su", **factors}
    config = configured(model_type="phi3", original_max_position_embeddings=128, rope_scaling=scaling)
    rope = rope_of(config)
    for kind in ("longrope", "yarn"):  # other names for it
        settings = {"original_max_position_embeddings": 128, "rope_scaling": {**scaling, "type": kind}}
        assert rope_of(configured(model_type="phi3", **settings)) == rope
    assert (rope.kind, rope.factor, rope.original_context) == ("longrope", 4.0, 128)
    assert rope.divisors == tuple(factors["long_factor"])
    assert rope_of(config.for_context(128)).divisors == (1.0,) * 8
    # A model no longer than it was trained has the short factors alone.
    same = configured(model_type="phi3", original_max_position_embeddings=512, rope_scaling=scaling)
    assert rope_of(same).divisors == rope_of(same.for_context(600)).divisors == (1.0,) * 8
    with pytest.raises(LoadError, match=r"long_factor.*8 pairs"):
        configured(
            model_type="phi3", original_max_position_embeddings=9, rope_scaling={**scaling, "long_factor": [1.0] * 7}
        )
    with pytest.raises(LoadError, match="a kind of RoPE that is not supported"):
        configured(model_type="llama", rope_scaling={**scaling, "type": "longrope"})


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"model_type": "deepseek_v4"}, "deepseek_v4.*mixture of experts.*use another family or a dense model"),
    ({"model_type": "novel", "num_local_experts": 8}, f"mixture of experts.*supported are {families()[0]}"),
    ({"model_type": "mamba2"}, "recurrent layers.*attention in all layers"),
    ({"model_type": "internvl_chat"}, "images.*a text-only model"),
    ({"model_type": "novel", "vision_config": {"a": 1}}, "images"),
    ({"model_type": "novel", "is_encoder_decoder": True}, "encoder"),
    ({"model_type": "gpt_neox"}, f"gpt_neox.*supported are {', '.join(families())}"),
    ({"model_type": "_decoder"}, "not supported"),
    *(({key: None}, f"config.json lacks the key '{key}'") for key in BASE),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM"),
    ({"num_key_value_heads": 3}, "num_attention_heads is 4.*3 key/value heads"),
    ({"head_dim": 15}, "head_dim.*even"),
    ({"hidden_size": 60}, "hidden_size.*even"),
    ({"hidden_size": 62}, "hidden_size.*no head_dim"),
    ({"hidden_act": "gelu"}, "hidden_act.*silu"),
    *(({"hidden_size": value}, "hidden_size") for value in (float("nan"), -64, 10**30, 64.5, "64", True)),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 1]}, "no_rope_layers"),
    ({"model_type": "qwen2", **SLIDING, "layer_types": KINDS[:2]}, "layer_types"),
    ({"model_type": "qwen2", **SLIDING}, "max_window_layers"),
    ({"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}, "text_config: model_type is 'mistral4'"),
]


def test_the_refusal_of_a_configuration_names_the_file_and_the_key() -> None:
    for changes, reason in REFUSED:
        with pytest.raises(LoadError, match=reason) as caught:
            configured(**changes)
        assert str(caught.value).startswith("config.json")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
_KEYS = [
    *BASE,
    *("num_key_value_heads", "head_dim", "architectures", "hidden_act", "rope_theta", "rope_scaling"),
    *("partial_rotary_factor", "rotary_dim", "no_rope_layers", "no_rope_layer_interval", "rope_local_base_freq"),
    *("query_pre_attn_scalar", "text_config", "sliding_window_pattern", "hidden_activation"),
    *("original_max_position_embeddings", "rope_parameters", "attention_bias", "sliding_window", "layer_types"),
    *("use_sliding_window", "max_window_layers"),
]
_ROPES = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "llama3", "yarn", "longrope"])},
    optional={
        **dict.fromkeys(
            ("factor", "original_max_position_embeddings", "low_freq_factor", "beta_fast", "rope_theta"), _JSON
        ),
        **dict.fromkeys(("short_factor", "long_factor"), st.just([1.0] * 8) | _JSON),
    },
)


@example(
    family="phi3",
    changes={
        "rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        "original_max_position_embeddings": 1,
    },
)
@example(
    family="phi3",
    changes={
        "rope_scaling": {"type": "su", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        "max_position_embeddings": 1,
    },
)
@given(
    family=st.sampled_from(families()),
    changes=st.dictionaries(st.sampled_from(_KEYS), _JSON | _ROPES, max_size=4),
)
def test_any_values_make_a_configuration_or_one_clear_error(family: str, changes: dict[str, object]) -> None:
    try:
        config = configured(**{"model_type": family, **changes})
    except LoadError:
        return
    assert config.attention.heads % config.attention.kv_heads == 0
    assert config.attention.head_dim % 2 == 0
    for mixer in {mixer for mixer in mixers(config) if mixer.rope is not None}:
        frequencies, factor = rope_frequencies(mixer.rope, mixer.rotated)
        assert np.isfinite(frequencies).all()
        assert np.isfinite(factor)


IN_LLAMA = ("mistral", "mixtral")  # their files call themselves llama
IN_GGUF = {*IN_LLAMA} | {family for family, _ in gguf_layouts().values()}
# Dense layers, biases of ERNIE and of convolutions, and weights of OLMoE's experts that are divided by their sum, for
# which their architectures have no names. Recurrent layers and latent attention have tests of their own.
WITHOUT_GGUF = (
    "deepseek_v2_greedy",
    "ernie4_5_biases",
    "granite_hybrid_experts",
    "granite_hybrid_tied",
    "nemotron_h_dense",
    "nemotron_h_experts",
    "nemotron_h_latent",
    "olmoe_normed_gqa",
    "qwen2_moe_mixed_normed",
    "qwen3_moe_mixed_tied",
    "lfm2_biases",
    "qwen3_5_moe_with_images",
    "qwen3_5_tied",
    "qwen3_next_shared_keys",
    "kimi_linear_nope",
)
IN_FORMAT = [name for name in NAMES if read_as(written(name)).family in IN_GGUF and name not in WITHOUT_GGUF]
SOME = (
    "llama_mqa_yarn",
    "granite_tied",
    "granite_moe",
    "minimax_m2_partial",
    "mistral3_with_images",
    "hunyuan_v1_dense_alpha_tied",
    "cohere2_windows_tied",
    "gemma4_shared_kv",
    "phi3_longrope_partial",
    "gpt_oss_mxfp4",
    "lfm2_moe_dense_first",
    "qwen2_5_vl_windows",
    "qwen3_vl_moe_deepstack",
    "glm4_partial",
    "glm4v_positions",
)


def architecture(config: ModelConfig) -> str:
    names = {family: layout.architecture for family, layout in gguf_layouts().values()}
    names["granitemoehybrid"] = "granitemoe"  # without recurrent layers
    return "llama" if config.family in IN_LLAMA else names[config.family]


@mostly_slow("name", IN_FORMAT, SOME)
def test_a_gguf_file_describes_the_same_model(name: str, tmp_path: Path) -> None:
    config, weights, _ = load_weights(MODELS / name)
    written, of_rope = read_all(weights), rope_of(config)
    scaling = {"linear": {"rope__scaling__type": "linear", "rope__scaling__factor": of_rope.factor}}
    scaling["yarn"] = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": of_rope.factor,
        "rope__scaling__original_context_length": of_rope.original_context,
    }
    changes: dict[str, object] = dict(scaling.get(of_rope.kind, {}))
    expected = config
    if of_rope.kind == "llama3":  # it is written as a tensor of divisors, which this file lacks
        expected = with_rope(expected, RopeConfig(theta=of_rope.theta))
    if of_rope.kind == "longrope":
        changes |= longrope(of_rope, written)
        expected = with_rope(expected, replace(of_rope, attention_factor=0.75))
    if config.family == "hunyuan_v1_dense":  # the base that alpha makes is no whole number
        expected = with_rope(expected, replace(of_rope, theta=float(np.float32(of_rope.theta))))
    if of_rope.sections:
        changes["rope__dimension_sections"] = [*of_rope.sections, 0]
    if config.family == "gemma2":
        changes["attention__sliding_window"] = config.attention.window
        caps = {"attn": config.attention.softcap, "final": config.logit_softcap or 30.0}
        changes |= {f"{name}_logit_softcapping": cap for name, cap in caps.items()}
        expected = replace(expected, logit_softcap=caps["final"])  # they cannot say that there is no cap
        scale = config.attention.head_dim**-0.5
        expected = expected.with_attention(lambda mixer: replace(mixer, scale=scale))  # they know no other
    elif config.family == "gemma3":
        changes |= {
            **{"attention__sliding_window": 12, "attention__sliding_window_pattern": 2},
            "rope__freq_base_swa": config.attention.rope.theta,
        }
        scale = config.attention.head_dim**-0.5
        expected = expected.with_attention(lambda mixer: replace(mixer, scale=scale))  # they know no other
    elif config.family == "gemma4":
        changes |= gemma4(config, written)
    elif config.family.startswith("lfm2"):
        changes |= lfm2(config)
    elif config.family.startswith("granite"):
        changes |= granite_config(json.loads((MODELS / name / "config.json").read_text()))
    elif config.family == "mistral3":
        changes |= {"attention__temperature_scale": 0.25, "rope__scaling__yarn_log_multiplier": of_rope.mscale_all_dim}
        changes["rope__scaling__yarn_beta_fast"] = of_rope.beta_fast
    elif config.attention.window and config.family in (*IN_LLAMA, "phi3", "gpt_oss", "cohere2"):
        changes["attention__sliding_window"] = config.attention.window
    else:  # windows of upper layers have no key
        expected = expected.with_attention(lambda mixer: replace(mixer, window=None))
    if config.centred:
        changes["logit_scale"] = config.logit_scale
    if config.family in ("glm4_moe", "lfm2_moe"):
        changes["leading_dense_block_count"] = sum(isinstance(layer.ffn, GatedMLP) for layer in config.layers)
    arch = architecture(config)
    of_file = dict(written)
    for spec in tensors(config).specs():
        if spec.copy_of:
            del of_file[spec.name]
        elif spec.flat:
            of_file[spec.name] = of_file[spec.name].reshape(config.hidden_size, -1)
        elif spec.factor != 1:
            of_file[spec.name] = of_file[spec.name] / np.float32(spec.factor)
    got, copy, dtype = load_weights(as_gguf(tmp_path / "model.gguf", arch, config, of_file, **changes))
    assert dtype == "F32"
    assert got.norm_eps == pytest.approx(config.norm_eps, rel=1e-6)  # GGUF keeps it in float32
    rope, wanted = rope_of(got), rope_of(expected)
    assert rope.divisors == pytest.approx(wanted.divisors)
    assert rope.short_divisors == pytest.approx(wanted.short_divisors)
    if rope.divisors and config.family != "gemma4":  # whose layers with a window have another RoPE
        expected = with_rope(expected, replace(wanted, divisors=rope.divisors, short_divisors=rope.short_divisors))
    assert got == replace(expected, norm_eps=got.norm_eps)
    for key, tensor in read_all(copy).items():
        np.testing.assert_array_equal(tensor, written[key], err_msg=key)


def lfm2(config: ModelConfig) -> dict[str, object]:
    """Further metadata: layers with convolutions have no KV heads."""
    heads = [config.attentions[n].kv_heads if n in config.attentions else 0 for n in range(len(config.layers))]
    conv = next(layer.mixer for layer in config.layers if isinstance(layer.mixer, ShortConv))
    return {"attention__head_count_kv": heads, "shortconv__l_cache": conv.width}


def gemma4(config: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, object]:
    """Further metadata; RoPE of layers without a window becomes a tensor of divisors."""
    local, whole = config.attentions[0], config.attentions[len(config.layers) - 1]
    sizes = [(layer.ffn.shared if isinstance(layer.ffn, Experts) else layer.ffn).size for layer in config.layers]
    tensors["rope_freqs.weight"] = np.array(whole.rope.divisors, np.float32)
    return {
        "attention__sliding_window": local.window,
        "attention__sliding_window_pattern": [mixer.window is not None for mixer in config.attentions.values()],
        "attention__head_count_kv": [mixer.kv_heads for mixer in config.attentions.values()],
        **dict.fromkeys(("attention__key_length", "attention__value_length", "rope__dimension_count"), whole.head_dim),
        "attention__key_length_swa": local.head_dim,
        "rope__freq_base": whole.rope.theta,
        "rope__freq_base_swa": local.rope.theta,
        "final_logit_softcapping": config.logit_softcap,
        "feed_forward_length": sizes if len(set(sizes)) > 1 else sizes[0],
        "attention__shared_kv_layers": len(config.layers) - len(config.kv_attentions),
        "embedding_length_per_layer_input": config.layer_embedding,
    }


def copied_as_gguf(
    folder: Path, name: str, arch: str, tensors: dict[str, np.ndarray] | None = None, **changes: object
) -> Path:
    """A stored model in a GGUF file, with further tensors and metadata."""
    config, weights, _ = load_weights(MODELS / name)
    return as_gguf(folder / "model.gguf", arch, config, {**read_all(weights), **(tensors or {})}, **changes)


def test_the_head_of_a_gguf_file_is_read_if_it_has_one(tmp_path: Path) -> None:
    """Also for families that are tied by default."""
    config = stored("gemma3_tied")
    head = np.full((config.vocab_size, config.hidden_size), 0.5, np.float32)
    got, copy, _ = load_weights(copied_as_gguf(tmp_path, "gemma3_tied", "gemma3", {"lm_head.weight": head}))
    assert not got.tied_head
    np.testing.assert_array_equal(read(copy, "lm_head.weight"), head)


def test_a_gguf_file_of_olmo3_is_refused(tmp_path: Path) -> None:
    """Its architecture says olmo2, and three layers of four have windows."""
    path = copied_as_gguf(tmp_path, "olmo2_post_norms", "olmo2", attention__sliding_window=16)
    with pytest.raises(LoadError, match=r"olmo2\.attention\.sliding_window is 16, which makes it an OLMo 3"):
        load_weights(path)


def longrope(rope: RopeConfig, tensors: dict[str, np.ndarray]) -> dict[str, object]:
    """Further metadata; the factors become tensors."""
    tensors["rope_factors_long.weight"] = np.array(rope.divisors, np.float32)
    tensors["rope_factors_short.weight"] = np.array(rope.short_divisors, np.float32)
    return {"rope__scaling__original_context_length": rope.original_context, "rope__scaling__attn_factor": 0.75}


def test_a_gguf_files_rope_divisors(tmp_path: Path) -> None:
    divisors = np.array([1.0, 1.5, 4.0, 8.0], np.float32)
    got = config_of(copied_as_gguf(tmp_path, "llama_mha", "llama", {"rope_freqs.weight": divisors}))
    assert rope_of(got) == replace(rope_of(stored("llama_mha")), divisors=(1.0, 1.5, 4.0, 8.0))
    with pytest.raises(LoadError, match=r"rope_freqs.weight.*\(3,\).*\(4,\)"):
        load_weights(copied_as_gguf(tmp_path, "llama_mha", "llama", {"rope_freqs.weight": divisors[:3]}))


def test_yarn_in_a_gguf_file(tmp_path: Path) -> None:
    """Its magnitude multiplies yarn's own. Without a factor it does not scale."""
    yarn = {"rope__scaling__type": "yarn"}
    scaling = {**yarn, "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 0.5}
    got = config_of(copied_as_gguf(tmp_path, "llama_mqa_yarn", "llama", **scaling))
    assert rope_of(got).attention_factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4)), rel=1e-12)
    scaling = {**yarn, "rope__scaling__original_context_length": 32}
    got = config_of(copied_as_gguf(tmp_path, "llama_mqa_yarn", "llama", **scaling))
    rope, dim = rope_of(got), got.attention.head_dim
    assert (rope.kind, rope.factor) == ("yarn", 1.0)
    plain, _ = rope_frequencies(RopeConfig(theta=rope.theta), dim)
    np.testing.assert_array_equal(rope_frequencies(rope, dim)[0], plain)


SCALINGS: list[tuple[dict[str, object], float | None]] = [
    ({"rope__scaling__factor": 4.0}, 4.0),
    ({"rope__scaling__type": "linear", "rope__scale_linear": 4.0}, 4.0),
    ({"rope__scaling__factor": 2.0, "rope__scale_linear": 4.0}, 2.0),
    ({"rope__scaling__factor": 0.0}, None),
    ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
    ({"rope__scaling__original_context_length": 64}, None),
]


def test_a_gguf_files_scaling_without_a_type_is_linear(tmp_path: Path) -> None:
    plain = RopeConfig(theta=rope_of(stored("llama_mha")).theta)
    for scaling, factor in SCALINGS:
        got = config_of(copied_as_gguf(tmp_path, "llama_mha", "llama", **scaling))
        assert rope_of(got) == (replace(plain, kind="linear", factor=factor) if factor else plain), scaling


UNUSABLE: list[tuple[str, dict[str, object], str]] = [
    ("gemma", {}, f"gemma.*supported are {', '.join(sorted(gguf_layouts()))}"),
    ("mamba", {}, "mamba.*recurrent layers"),
    ("qwen3", {"expert_count": 8}, "mixture of experts.*qwen3 models have not"),
    ("llama", {"attention__causal": False}, "embedding model.*llama.attention.causal is false"),
    ("llama", {"expert_count": 8, "expert_used_count": 9}, "llama.expert_used_count is 9.*only 8 experts"),
    ("llama", {"rope__dimension_count": 4}, "llama.rope.dimension_count is 4"),
    ("llama", {"rope__scaling__type": "longrope"}, "llama.rope.scaling.type.*longrope"),
    ("llama", {"attention__head_count": 3}, "llama.attention.head_count is 3"),
    ("llama", {"context_length": 0}, "llama.context_length"),
]


def test_unusable_gguf_metadata_names_the_files_own_key(tmp_path: Path) -> None:
    for arch, changes, named in UNUSABLE:
        with pytest.raises(LoadError, match=named) as caught:
            load_weights(copied_as_gguf(tmp_path, "llama_mha", arch, **changes))
        assert "model.gguf" in str(caught.value)


def test_a_gguf_file_with_only_a_vocabulary_is_refused() -> None:
    with pytest.raises(LoadError, match="no token embedding"):
        load_weights(shared("tokenizers", "llama.cpp-vocab", "ggml-vocab-llama-spm.gguf"))
