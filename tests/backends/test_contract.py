"""Which ops a backend computes itself: a missing kernel is listed, and no silent inheritance."""

import ast
from collections.abc import Iterator
from pathlib import Path

from polarlm.engine.backends import native
from polarlm.engine.backends.cuda.device.tracing import TracingDevice
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import EncoderOps, Ops

FOLDER = Path(native.__path__[0])


# The ops that NumPy computes for every layer. None of them multiplies: they copy memory of the host, or say what it is.
NUMPY_OPS = frozenset(
    (
        *("buffer", "read_blocks", "write_blocks", "read_full", "write_full"),  # copies of K/V
        *("keep_states", "restore_states", "check_recurrent"),  # copies of recurrent states
        *("to_device", "to_host", "empty", "clip", "pack_sampler_inputs"),  # arrays are NumPy's
        *("free_memory", "work_bytes", "reserve_workspace", "wait", "check"),  # the machine is the same
        *("layer_ops", "encoder_ops", "latent_ops", "run_between_graphs"),  # one device, whose graphs have no parts
    )
)
# The ops that NumPy computes for layers without a kernel, which `numpy_fallbacks` names; and copies in the middle of a
# layer, which wait for the kernels of a stream.
NUMPY_FALLBACKS = frozenset(
    (
        *("cache", "cache_bytes", "copy_full", "encode_blocks", "round_trip", "attention"),
        *("self_attention", "gated_delta", "channel_delta", "mamba2", "append_kv", "assign"),
    )
)


def ops() -> set[str]:
    """The names of all ops that are methods, or are optional ones."""
    kinds = [kind for kind in (*Ops.__mro__, *EncoderOps.__mro__) if kind.__module__.startswith("polarlm.")]
    return {name for kind in kinds for name in vars(kind) if not name.startswith("_")}


def owner(kind: type, name: str) -> str:
    return next((base.__module__ for base in kind.__mro__ if name in vars(base)), "")


def test_numpy_has_every_op() -> None:
    assert not {name for name in ops() if not hasattr(NumpyOps(1), name)}


def test_what_compiled_kernels_leave_to_numpy_is_listed() -> None:
    attributes = {name for name in ops() if not callable(getattr(NumpyOps, name))} - {"encoder_ops", "latent_ops"}
    inherited = {name for name in ops() - attributes if ".numpy." in owner(NativeOps, name)}
    assert inherited == NUMPY_OPS


def calls_of_numpy() -> Iterator[str]:
    """The ops of the native backend that call NumPy's op of the same name."""
    for path in FOLDER.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and function.name in ops():
                text = ast.unparse(function)
                if f"super().{function.name}" in text or "run_numpy" in text:
                    yield function.name


def test_fallbacks_for_layers_without_kernels_are_listed() -> None:
    assert set(calls_of_numpy()) == NUMPY_FALLBACKS


def test_a_gpu_has_every_op() -> None:
    device = CudaOps(TracingDevice(lambda launch: None, 1, 1 << 16))
    missing = {name for name in ops() if not hasattr(device, name)}
    assert not missing
