"""What compute-sanitizer sees, on the emulator."""

from __future__ import annotations

import pytest

from tests.cuda import small_batches
from tests.cuda.emulated import EmulatedDevice
from tests.cuda.test_gpu import Unrecorded


@pytest.mark.slow
def test_the_batch_for_the_sanitizer_launches_every_encoder() -> None:
    device = EmulatedDevice(checked=False)
    assert all(finite for _, finite in small_batches.run(Unrecorded(device)))
    encoders = {"encode_blocks_kernel", "encode_rows_kernel"}
    assert {*encoders, "decode_attention_kernel", "group_pairs_kernel", "add_experts_kernel"} <= {*device.launches}
