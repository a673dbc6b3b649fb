"""The kernel language at every level of CPU features, against NumPy."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polarlm.engine.jit.compile.compiler import source
from polarlm.engine.jit.isa.levels import LEVELS
from polarlm.engine.jit.lang import F32, F64, I8, I16, I32, I64, Emitter, Kernel, Type, Value, vector
from polarlm.engine.jit.lang.level import Level
from polarlm.engine.jit.lang.values import F16
from tests.jit.levels import declared, every_level, run
from tests.pairs import in_turn

TYPES: dict[Any, Type] = {
    np.dtype(name): kind
    for name, kind in {"i1": I8, "u1": I8, "i2": I16, "i4": I32, "u4": I32, "i8": I64, "f4": F32, "f8": F64}.items()
}


def over_vectors(
    level: Level, name: str, body: Callable[..., Value], *inputs: np.ndarray, result: str = "f4", lanes: int = 16
) -> np.ndarray:
    """body(e, vectors of `lanes` numbers of each input) over all of the inputs. name: of the kernel."""
    out = np.zeros(inputs[0].shape, result)

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        *sources, target = args
        with e.loop(begin, end) as unit:
            given = [
                e.load(source + unit * (lanes * x.itemsize), vector(TYPES[x.dtype], lanes))
                for source, x in zip(sources, inputs, strict=True)
            ]
            e.store(body(e, *given), target + unit * (lanes * out.itemsize))

    names = " ".join(f"input_{number}" for number in range(len(inputs)))
    assert out.size % lanes == 0
    run(Kernel(f"test_{name}", emit, declared(f"{names} out")), level, out.size // lanes, (*inputs, out))
    return out


# -- arithmetic ----------------------------------------------------------------------------------------------------

INTEGERS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "add": (operator.add, operator.add),
    "sub": (operator.sub, operator.sub),
    "mul": (operator.mul, operator.mul),
    "and": (operator.and_, operator.and_),
    "or": (operator.or_, operator.or_),
    "xor": (operator.xor, operator.xor),
    "div": (operator.floordiv, lambda a, b: (a.view("u4") // b.view("u4")).view("i4")),
    "mod": (operator.mod, lambda a, b: (a.view("u4") % b.view("u4")).view("i4")),
    "left": (lambda a, b: a << (b & 31), lambda a, b: a << (b & 31)),
    "right": (lambda a, b: a >> (b & 31), lambda a, b: (a.view("u4") >> (b & 31).view("u4")).view("i4")),
    "ashr": (lambda a, b: a.ashr(b & 31), lambda a, b: a >> (b & 31)),
    "neg": (lambda a, b: -a, lambda a, b: -a),
    "not": (lambda a, b: ~a, lambda a, b: ~a),
    "less": (lambda a, b: (a < b).zext(I32), operator.lt),
    "at_most": (lambda a, b: (a <= b).zext(I32), operator.le),
    "greater": (lambda a, b: (a > b).zext(I32), operator.gt),
    "at_least": (lambda a, b: (a >= b).zext(I32), operator.ge),
    "equal": (lambda a, b: a.equals(b).zext(I32), operator.eq),
    "minimum": (lambda a, b: a.emitter.imin(a, b), np.minimum),
    "maximum": (lambda a, b: a.emitter.imax(a, b), np.maximum),
    "constant": (lambda a, b: a * 3 - 0x7FFFFFFF, lambda a, b: a * np.int32(3) - np.int32(0x7FFFFFFF)),
}


@every_level
@in_turn("name", INTEGERS)
def test_integers(name: str, level: Level) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-(2**31), 2**31, (2, 160), np.int32)
    a[:16:3], b[:16], a[16:32] = -(2**31), rng.integers(1, 9, 16), b[16:32]
    kernel, reference = INTEGERS[name]
    with np.errstate(over="ignore"):
        want = reference(a, b)
    found = over_vectors(level, f"int_{name}", lambda e, a, b: kernel(a, b), a, b, result="i4")
    np.testing.assert_array_equal(found, want)


FLOATS: dict[str, tuple[Callable[..., Value], Callable[[Any, Any], Any]]] = {
    "add": (lambda e, a, b: a + b, operator.add),
    "sub": (lambda e, a, b: a - b, operator.sub),
    "mul": (lambda e, a, b: a * b, operator.mul),
    "div": (lambda e, a, b: a / b, operator.truediv),
    "neg": (lambda e, a, b: -a, lambda a, b: -a),
    "constant": (lambda e, a, b: a * 0.1 + 2, lambda a, b: a * np.float32(0.1) + 2),
    "maximum": (lambda e, a, b: e.fmax(a, b), np.fmax),
    "minimum": (lambda e, a, b: e.fmin(a, b), np.fmin),
    "absolute": (lambda e, a, b: e.absolute(a), lambda a, b: abs(a)),
    "sqrt": (lambda e, a, b: e.sqrt(e.absolute(a)), lambda a, b: np.sqrt(abs(a))),
    "select": (lambda e, a, b: e.select(a < b, a, b), lambda a, b: np.where(a < b, a, b)),
    "ordered": (lambda e, a, b: e.select(a >= b, a, -a), lambda a, b: np.where(a >= b, a, -a)),
}


@every_level
@in_turn("name", FLOATS)
def test_floats(name: str, level: Level) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 160)).astype(np.float32)
    a[:8], b[:8] = 0, [0, -0.0, 1, np.inf, -np.inf, np.nan, 3, -3]
    a[8:16], b[8:16] = [np.inf, -np.inf, np.nan, 1, np.nan, 1e38, -1e38, 1e-40], [1, 1, 1, np.nan, np.nan, 1e38, 9, 1]
    kernel, reference = FLOATS[name]
    with np.errstate(all="ignore"):
        want = reference(a, b)
    found = over_vectors(level, f"float_{name}", kernel, a, b)
    same = (found == want) | (np.isnan(found) & np.isnan(want))
    if name not in {"maximum", "minimum"}:  # which do not tell zeros apart
        same &= (np.signbit(found) == np.signbit(want)) | np.isnan(want)
    assert same.all(), (a[~same], b[~same], found[~same], want[~same])


@every_level
def test_fma_adds_the_exact_product_where_the_level_has_it(level: Level) -> None:
    a = np.full(16, 1 + 2.0**-12, np.float32)
    found = over_vectors(level, "fma", lambda e, a: e.fma(a, a, e.const_like(-1.0, a)), a)
    exact, rounded = 2.0**-11 + 2.0**-24, 2.0**-11
    assert (found == (exact if "fma" in level.needs else rounded)).all()


# -- conversions ---------------------------------------------------------------------------------------------------


@every_level
def test_conversions(level: Level) -> None:
    words = np.random.default_rng(4).integers(-(2**31), 2**31, 64, np.int32)
    bytes_, floats = words.astype(np.int8), words.astype(np.float32) / np.float32(7)
    cases: list[tuple[str, Callable[..., Value], np.ndarray, str, np.ndarray]] = [
        ("sext", lambda e, x: x.sext(I32), bytes_, "i4", bytes_.astype(np.int32)),
        ("zext", lambda e, x: x.zext(I32), bytes_, "i4", bytes_.view(np.uint8).astype(np.int32)),
        ("trunc", lambda e, x: x.trunc(I8), words, "i1", bytes_),
        ("to_float", lambda e, x: x.to_float(), words, "f4", words.astype(np.float32)),
        ("same_width", lambda e, x: x.sext(I32), words, "i4", words),
        ("to_int", lambda e, x: x.to_int(), floats, "i4", floats.astype(np.int32)),
        ("bits", lambda e, x: x.bits(vector(I32, 16)), floats, "i4", floats.view("i4")),
    ]
    for name, body, given, result, want in cases:
        np.testing.assert_array_equal(over_vectors(level, name, body, given, result=result), want, name)


@every_level
def test_round_takes_ties_to_even(level: Level) -> None:
    rng = np.random.default_rng(5)
    halves = np.arange(-300.5, 300, 1.0)
    ends = [2.0**22, -(2.0**22), 2.0**22 - 0.5, 0.0, -0.0, 0.49999997, -0.49999997]
    x = np.concatenate([halves, ends, rng.uniform(-1e6, 1e6, 1000)]).astype(np.float32)
    x = np.concatenate([x, np.zeros(-len(x) % 16, np.float32)])
    found = over_vectors(level, "round", lambda e, x: e.round(x), x, result="i4")
    np.testing.assert_array_equal(found, np.rint(x).astype(np.int32))


@every_level
def test_half_to_float_of_all_halves(level: Level) -> None:
    bits = np.arange(65536).astype(np.uint16)
    found = over_vectors(level, "half", lambda e, x: e.half_to_float(x), bits.view(np.int16))
    wanted = bits.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(found, wanted)  # NaN where it is
    is_number = ~np.isnan(wanted)
    np.testing.assert_array_equal(found.view(np.uint32)[is_number], wanted.view(np.uint32)[is_number])


@every_level
def test_float_to_half(level: Level) -> None:
    """Every half, the middles between neighbours, which are ties, and what lies just beside them."""
    every = np.arange(1 << 15, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)].astype(np.float32)
    middles = (every[1:] + every[:-1]) / 2
    positive = np.concatenate([every, middles, np.nextafter(middles, 0), np.nextafter(middles, np.float32(1e9))])
    x = np.concatenate([positive, -positive])
    x = np.ascontiguousarray(x[: len(x) // 16 * 16])
    halves = over_vectors(level, "halves", lambda e, x: e.float_to_half(x), x, result="f2")
    np.testing.assert_array_equal(halves.view(np.int16), x.astype(np.float16).view(np.int16))


# -- the exponential function --------------------------------------------------------------------------------------


def exp_of(level: Level, x: np.ndarray, name: str = "exp") -> np.ndarray:
    x = np.concatenate([x, np.zeros(-len(x) % 16)]).astype(np.float32)
    return over_vectors(level, name, lambda e, x: getattr(e, name)(x), x).astype(np.float64)


@every_level
def test_exp_is_within_its_bound(level: Level) -> None:
    x = np.concatenate([np.linspace(-87.3, 88.37, 400_000), np.linspace(-1e-3, 1e-3, 4001)]).astype(np.float32)
    found, want = exp_of(level, x)[: len(x)], np.exp(x.astype(np.float64))
    error = np.abs(found / want - 1)
    assert error.max() < 1.5e-7, x[error.argmax()]
    assert exp_of(level, np.zeros(1))[0] == 1


@every_level
def test_exp_at_its_ends(level: Level) -> None:
    tiny, top = np.float32(1e-45), np.finfo(np.float32).max
    zeros, ones, infinite = [-87.7, -88, -104, -1e30, -top, -np.inf], [tiny, -tiny, 1e-30], [88.4, 89, 1e30, np.inf]
    found = exp_of(level, np.array([*zeros, *ones, *infinite, np.nan, -np.nan]))
    assert found[:15].tolist()[:13] == [0] * 6 + [1] * 3 + [np.inf] * 4
    assert np.isnan(found[13:15]).all()


@every_level
def test_exp2_is_within_its_bound(level: Level) -> None:
    x = np.concatenate([np.linspace(-126, 127, 400_000), np.linspace(-1e-3, 1e-3, 4001)]).astype(np.float32)
    error = np.abs(exp_of(level, x, "exp2")[: len(x)] / np.exp2(x.astype(np.float64)) - 1)
    assert error.max() < 2e-7, x[error.argmax()]
    found = exp_of(level, np.array([-127, -1e30, -np.inf, 0, -3, 127, np.nan]), "exp2")
    assert found[:6].tolist() == [0, 0, 0, 1, 0.125, 2.0**127]
    assert np.isnan(found[6])


# -- lanes ---------------------------------------------------------------------------------------------------------


@every_level
@pytest.mark.parametrize(("name", "kind"), [("sum", "f4"), ("sum", "i4"), ("fmax", "f4"), ("imax", "i4")])
def test_lanes_become_one_number(name: str, kind: str, level: Level) -> None:
    x = np.random.default_rng(7).integers(-(2**20), 2**20, (10, 16)).astype(kind)  # their sums are exact
    reduced: Callable[..., Value] = lambda e, a: e.splat(getattr(e, f"{name}_lanes")(a), 16)  # noqa: E731
    rows = over_vectors(level, f"{name}_{kind}", reduced, x.ravel(), result=kind).reshape(x.shape)
    result = x.sum(1) if name == "sum" else x.max(1)
    np.testing.assert_array_equal(rows, np.repeat(result[:, None], 16, 1))


# -- constants -----------------------------------------------------------------------------------------------------


@every_level
def test_constants_that_are_equal_in_python_are_told_apart(level: Level) -> None:
    """A kernel keeps its constants: 0.0 must not stand for -0.0, nor a number for another type's."""
    out, kind = np.zeros((4, 16), np.float32), vector(F32, 16)

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        e.store(e.constant(kind, 0.0), args.out)
        e.store(e.constant(kind, -0.0), args.out, 64)
        e.store(e.constant(vector(I32, 16), 1), args.out, 128)
        e.store(e.constant(kind, 1.0), args.out, 192)

    run(Kernel("test_constants", emit, declared("out")), level, 1, (out,))
    assert np.array_equal(out.view(np.uint32), np.array([[0], [1 << 31], [1], [0x3F800000]], np.uint32).repeat(16, 1))


# -- mistakes ------------------------------------------------------------------------------------------------------

MISTAKES: dict[str, Callable[[Emitter, Value, Value, Value, Value], Any]] = {
    "float and integer": lambda e, f, i, n, p: f + i,
    "widths": lambda e, f, i, n, p: i + i.trunc(I8),
    "bits of floats": lambda e, f, i, n, p: f & f,
    "shift by all bits": lambda e, f, i, n, p: i >> 32,
    "quotient of integers": lambda e, f, i, n, p: i / 2,
    "constant beyond the type": lambda e, f, i, n, p: i.trunc(I8) & 256,
    "narrower by sext": lambda e, f, i, n, p: i.sext(I8),
    "bits of another size": lambda e, f, i, n, p: f.bits(vector(F16, 16)),
    "load from a number": lambda e, f, i, n, p: e.load(n, F32),
    "pointer plus vector": lambda e, f, i, n, p: p + i,
    "atomic vector": lambda e, f, i, n, p: e.store_atomic(i, p),
    "call of a number": lambda e, f, i, n, p: e.call(n),
    "lane beyond both": lambda e, f, i, n, p: e.shuffle(f, f, [32]),
    "bounds of a loop": lambda e, f, i, n, p: e.loop(0, n.trunc(I32)).__enter__(),
    "condition of many bits": lambda e, f, i, n, p: e.when(f < 0.0).__enter__(),
    "select of two types": lambda e, f, i, n, p: e.select(f < 0.0, f, i),
    "maximum of integers": lambda e, f, i, n, p: e.fmax(i, 0),
    "fma of integers": lambda e, f, i, n, p: e.fma(i, i, i),
    "exp of integers": lambda e, f, i, n, p: e.exp(i),
    "variable of another type": lambda e, f, i, n, p: e.variable(f).set(i),
}


@in_turn("name", MISTAKES)
def test_a_mistake_raises_where_it_is_made(name: str) -> None:
    """And not when LLVM reads the kernel, which then has no line of Python to name."""

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        f, i = e.load(args.p, vector(F32, 16)), e.load(args.p, vector(I32, 16))
        with pytest.raises(TypeError):
            MISTAKES[name](e, f, i, args.n, args.p)

    source(Kernel(f"test_{name}", emit, declared("p", "n")), LEVELS[-1])
