"""Launches that begin before the one before them has ended: which kernels wait, for what, and how they are launched."""

from __future__ import annotations

import re
from dataclasses import fields

import numpy as np
import pytest

from polarlm.engine.backends.cuda.device import overlap
from polarlm.engine.backends.cuda.device.kernel_source import folder, waits
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.errors import EngineError
from polarlm.engine.model.forward import Transformer
from polarlm.engine.weight_formats import Linear, Matrix
from tests.cuda.emulated import EmulatedDevice
from tests.cuda.nvrtc import compile_binary, compiler
from tests.cuda.sass import disassemble, disassembler
from tests.cuda.test_model_emulated import Talk, model_from, model_of
from tests.cuda.test_packed_model import mixed_model
from tests.cuda.variants import VARIANTS, Variant
from tests.cuda_emulator.build import kernel_names
from tests.pairs import mostly_slow

# Kernels of steps and of prompts that wait; the others begin when the one before them has ended.
WAITING = {
    *("embed_kernel", "narrow_kernel", "rms_norm_kernel", "gemv_kernel", "gemv_packed_kernel", "gemm_wide_kernel"),
    *("add_parts_kernel", "place_kv_kernel", "transform_heads_kernel", "append_kv_kernel"),
    *("rotate_kernel", "rotate_dense_kernel", "decode_attention_kernel"),
    *("route_kernel", "group_pairs_kernel", "add_experts_kernel", "elementwise_kernel", "softcap_kernel"),
    *("centre_kernel", "join_latents_kernel", "take_latents_kernel", "latent_attention_kernel", "latent_sums_kernel"),
    *("activate_mul_kernel", "short_conv_kernel", "delta_step_kernel", "channel_delta_kernel"),
    "mamba2_results_kernel",
    *("sample_adjust_kernel", "sample_kernel", "sample_shaped_kernel", "sample_restore_kernel"),
}
EARLY = ("gemv", "gemv_packed", "gemm_wide", "decode_attention")  # first loads of weights or tables
LATE = ("gemm_wide",)  # the next kernel may begin when the loop has ended


@pytest.fixture
def _compiler() -> None:
    try:
        compiler()
        disassembler()
    except EngineError as error:
        pytest.skip(str(error))


def can_wait(kernel: str) -> bool:
    return "wait_for_previous();" in next(folder().rglob(f"{kernel}.cu")).read_text(encoding="utf-8")


# -- texts ---------------------------------------------------------------------------------------------------------


def test_the_kernels_of_steps_wait_where_they_are_compiled_for_it() -> None:
    seen = set()
    for variants in VARIANTS.values():
        text = variants[0].overlapping().text()
        names = list(kernel_names(text))
        seen |= {name for name in names if waits(text, name)}
        assert not any(waits(variants[0].text(), name) for name in names)
    assert seen == WAITING


@pytest.mark.usefixtures("_compiler")
@mostly_slow("kernel", filter(can_wait, VARIANTS), ["gemv", "rms_norm"])
def test_compiled_kernels_wait_as_their_texts_say(kernel: str) -> None:
    """Products load weights before they wait, attention its tables; none stores anything, which would damage what the
    launch before it reads. The compiler may move a load behind the wait: not with every number of warps, so steps of
    one row and of several are compiled."""
    of_kernel = VARIANTS[kernel]
    some = [v for v in of_kernel if v.cache and v.cache.keys == "ring4" and not v.cache.head_dim % 128] or of_kernel
    rows = {variant.defines.get("STEP_ROWS"): variant for variant in reversed(some)}
    for variant in rows.values():
        check_waits(variant.overlapping())


def check_waits(variant: Variant) -> None:
    text = variant.text()
    used, binary = compile_binary(text, 90)
    assert not any(usage.spilled for usage in used)
    for name, compiled in disassemble(binary).items():
        opcodes = [instruction.name for instruction in compiled.instructions]
        assert ("ACQBULK" in opcodes) == ("PREEXIT" in opcodes) == waits(text, name)
        if not waits(text, name):
            continue
        before = opcodes[: opcodes.index("ACQBULK")]
        assert ("PREEXIT" in before) == (name.removesuffix("_kernel") not in LATE)
        assert not {"STG", "ATOM", "ATOMG", "RED", "REDG"} & set(before)
        is_early = name.removesuffix("_kernel") in EARLY
        assert any(opcode in ("LDG", "LDGSTS") for opcode in before) == is_early


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("kernel", ["gemv", "gemm_wide", "place_kv"])
def test_without_the_constant_the_calls_change_no_instruction(kernel: str) -> None:
    text = VARIANTS[kernel][0].text()
    without = re.sub(r"^ +(let_next_begin|wait_for_previous)\(\);$", "", text, flags=re.MULTILINE)
    assert without != text
    assert compile_binary(text, 90)[1] == compile_binary(without, 90)[1]
    assert compile_binary(VARIANTS[kernel][0].overlapping().text(), 90)[1] != compile_binary(text, 90)[1]


# -- on the emulator -----------------------------------------------------------------------------------------------


class OverlappingDevice(EmulatedDevice):
    """Kernels may use nothing but weights and tables before they wait."""

    overlaps = True


def test_weights_are_there_before_a_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that overlaps reads weights before it waits, and then for the launch before it alone."""
    device = EmulatedDevice(checked=False)
    monkeypatch.setattr(device, "wait", lambda: device.launches.append("wait"))
    model_from(CudaOps(device), *mixed_model(), ("ring4", "ring3.5"))
    assert "repack_kernel" in device.launches
    assert "wait" in device.launches
    read = device.launches.index("wait")
    assert not {"repack_kernel", "narrow_kernel"} & set(device.launches[read:])


def fix(model: Transformer) -> None:
    """Make the matrices and the codecs' tables read-only: no launch writes them any more."""
    weights = model.weights
    parts = [part for layer in weights.layers for part in (layer.mixer, layer.ffn)]
    layers = [getattr(part, field.name) for part in parts for field in fields(part)]
    for held in (weights.embedding, weights.head, *layers):
        parts = held.parts if isinstance(held, Linear) else (held,) if isinstance(held, Matrix) else ()
        for part in parts:
            part.data.flags.writeable = False
    caches = [model.store.cache(layer) for layer in range(len(weights.layers))]
    for cache in caches:
        for tables in (cache.keys.tables, cache.values.tables):
            if tables is not None:
                tables.flags.writeable = False


def few_words(model: Transformer) -> list[np.ndarray]:
    """Logits of two prompts, a step that is recorded and run again, and a step of two rows."""
    dialogue = Talk(model, 2)
    dialogue.prompt(range(5, 25))
    dialogue.prompt(range(30, 34), outputs=1, index=1)
    for token in (40, 43, 44):
        dialogue.step([token])
    dialogue.step([41, 42])
    return dialogue.logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "types"), [("llama_gqa_llama3_tied", ("ring4", "ring3.5")), ("Q4_K_M", ("f16", "f16"))]
)
def test_a_model_uses_nothing_but_constants_before_it_waits(kind: str, types: tuple[str, str]) -> None:
    """Prompts and steps; and its logits are the same."""

    def made(device: EmulatedDevice) -> Transformer:
        ops = CudaOps(device)
        return model_from(ops, *mixed_model(), types) if kind == "Q4_K_M" else model_of(ops, kind, types)

    device = OverlappingDevice()
    model = made(device)
    fix(model)
    logits = few_words(model)
    waiting = {name for name in device.launches if name in WAITING}
    assert waiting >= {"place_kv_kernel", "decode_attention_kernel"}
    np.testing.assert_equal(logits, few_words(made(EmulatedDevice(checked=False))))


# -- where launches overlap --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "capability", "cuda", "overlaps"),
    [
        ("1", (12, 0), 13000, True),
        ("1", (8, 9), 13000, False),
        ("1", (9, 0), 12020, False),
        ("0", (9, 0), 13000, False),
        (None, (9, 0), 13000, True),
        (None, (12, 0), 13000, False),
    ],
)
def test_it_takes_the_variable_the_gpu_and_cuda(
    monkeypatch: pytest.MonkeyPatch, wanted: str | None, capability: tuple[int, int], cuda: int, overlaps: bool
) -> None:
    if wanted is None:
        monkeypatch.delenv(overlap.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(overlap.VARIABLE, wanted)
    assert (overlap.is_enabled(capability) and overlap.is_supported(capability, cuda + 20, cuda)) == overlaps
