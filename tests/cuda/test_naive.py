"""The kernel to read first, run by the emulator with every check on, against attention over decoded codes."""

from __future__ import annotations

import pytest

from scripts import run_naive
from scripts.run_naive import Setting, Stored, errors, launch, random_setting, store


def faults(setting: Setting, stored: Stored, launched: Stored | None = None) -> list[str]:
    """The faults of the kernel's result for `launched`, by default `stored`."""
    out = launch(setting, launched or stored)
    differences = errors(out, setting, stored)
    return [f"off by {error}, allowed {allowed}" for error, allowed, _ in differences if not error <= allowed]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), [(4, 2, 64, 16), (2, 1, 64, 4)])
def test_the_naive_kernel_is_attention_over_codes(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    """Lengths of one token, of whole blocks, of one more, and with many quantized blocks."""
    lengths = [1, block_size, block_size + 1, 2 * block_size, 7 * block_size + 3]
    setting = random_setting(1, lengths, heads, kv_heads, head_dim, block_size)
    assert faults(setting, store(setting)) == []


def test_the_command_confirms_a_correct_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_naive.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 launch"
    assert len(lines) == 7
    assert lines[-1] == "The kernel computes attention over the codes."
