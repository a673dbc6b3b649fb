"""RoPE frequencies agree with transformers, from the newer and the older keys."""

import json

import numpy as np
import pytest

from polarlm.model_loaders import LoadError, RopeConfig, load_weights, rope_frequencies
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.rope import rope_config
from tests.model_loaders.checkpoints import MODELS, NAMES

# The references are float32: a power whose exponent's rounding is multiplied by ln(theta) < 14, then a few products.
RELATIVE = 20 * np.finfo(np.float32).eps
UNROTATED = 1e-25  # radians per position: a divisor stands for channels that are not rotated
WITH_ROPE = [name for name in NAMES if "inv_freq" in np.load(MODELS / name / "reference.npz")]
CASES = json.loads((MODELS.parent / "rope.json").read_text())


def parsed(**values: object) -> RopeConfig:
    return rope_config(Fields(values, "config.json"), max_context=4096)


@pytest.mark.parametrize("name", WITH_ROPE)
def test_frequencies_of_the_stored_models(name: str) -> None:
    reference = np.load(MODELS / name / "reference.npz")
    config, weights, _ = load_weights(MODELS / name)
    weights.close()
    mixers = [mixer for mixer in config.attentions.values() if mixer.rope]
    last = sorted(mixers, key=lambda mixer: mixer.window is None)[-1]  # without a window, where there are both
    rope, rotated = last.rope, last.rotated
    frequencies, factor = rope_frequencies(rope, rotated)
    assert frequencies.dtype == np.float64
    np.testing.assert_allclose(frequencies, reference["inv_freq"], rtol=RELATIVE, atol=UNROTATED)
    assert factor == pytest.approx(float(reference["attention_factor"]), rel=1e-12)
    if "local_inv_freq" in reference:
        local = next(mixer for mixer in mixers if mixer.window)
        frequencies, _ = rope_frequencies(local.rope, local.rotated)
        np.testing.assert_allclose(frequencies, reference["local_inv_freq"], rtol=RELATIVE)
    if "short_inv_freq" in reference:
        for tokens in (1, rope.original_context):
            short, same = rope_frequencies(config.for_context(tokens).attention.rope, rotated)
            np.testing.assert_allclose(short, reference["short_inv_freq"], rtol=RELATIVE)
            assert same == factor
        assert config.for_context(rope.original_context + 1) == config.for_context(0) == config


def test_frequencies_of_released_settings_in_newer_and_older_keys() -> None:
    for case in CASES.values():
        parameters, context = dict(case["rope_parameters"]), case["max_position_embeddings"]
        rope = rope_config(Fields({"rope_parameters": parameters}, "config.json"), context)
        frequencies, factor = rope_frequencies(rope, case["head_dim"])
        np.testing.assert_allclose(frequencies, case["inv_freq"], rtol=RELATIVE)
        assert factor == pytest.approx(case["attention_factor"], rel=1e-12)
        theta, kind = parameters.pop("rope_theta"), parameters.pop("rope_type")
        for key in ("rope_type", "type"):
            older = {"rope_theta": theta, "rope_scaling": {key: kind, **parameters}}
            assert rope_config(Fields(older, "config.json"), context) == rope


def test_absent_rope_settings_mean_the_default_kind() -> None:
    for absent in ({}, {"rope_scaling": None}, {"rope_parameters": {}}):
        assert parsed(**absent) == RopeConfig(theta=10_000.0)
        assert parsed(rope_theta=5e5, **absent) == RopeConfig(theta=5e5)


def test_the_trained_context_defaults_to_the_models() -> None:
    assert parsed(rope_scaling={"type": "yarn", "factor": 2.0}).original_context == 4096
    # and yarn's factor to the stretch from one to the other
    assert parsed(rope_scaling={"type": "yarn", "original_max_position_embeddings": 1024}).factor == 4.0


UNUSABLE: list[tuple[dict[str, object], str]] = [
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic.*supported: default, linear, llama3, yarn"),
    ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope.*supported: default, linear, llama3, yarn"),
    ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "high_freq_factor"),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "high_freq_factor",
    ),
    ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor"),
    ({"rope_theta": -1.0}, "rope_theta"),
    ({"rope_scaling": [1]}, "rope_scaling"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
]


def test_unusable_settings_name_the_key() -> None:
    for values, named in UNUSABLE:
        with pytest.raises(LoadError, match=named):
            parsed(**values)


def test_stored_divisors_replace_the_llama3_rule() -> None:
    """GGUF files of Llama 3.1 say `default` and store the divisor of each frequency."""
    llama3 = RopeConfig(
        theta=5e5, kind="llama3", factor=8.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    plain = RopeConfig(theta=5e5)
    wanted, _ = rope_frequencies(llama3, 128)
    divisors = tuple((rope_frequencies(plain, 128)[0] / wanted).tolist())
    got, _ = rope_frequencies(RopeConfig(theta=5e5, divisors=divisors), 128)
    np.testing.assert_allclose(got, wanted, rtol=1e-14)
