"""Memory in the kernel language: constants, loads and stores, atomics, calls."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from polarlm.engine.jit.lang.level import Level
from polarlm.engine.jit.lang.values import I8, I32, I64, POINTER, Number, Type, Value, check_constant, expect


class MemoryEmitter:
    """Emits constants and memory instructions into one function; see `engine.jit.lang.emit.Emitter`."""

    def __init__(self, level: Level, function: ir.Function) -> None:
        self.level = level
        self.function = function
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        # Keyed by type and number as text, which distinguishes -0.0 from 0.0. Without it, making constants took a
        # quarter of the time of emitting.
        self._constants: dict[tuple[str, str], ir.Constant] = {}

    @property
    def is_x86(self) -> bool:
        return self.builder.module.triple.startswith(("x86_64", "i686"))

    def constant(self, type: Type, number: Any) -> Value:
        """A constant; a single number fills all lanes of a vector. Raises TypeError if the type cannot hold it."""
        key = str(type), repr(number)
        if key not in self._constants:
            if isinstance(type, ir.VectorType) and not isinstance(number, (list, tuple)):
                number = [number] * type.count
            check_constant(type, number)
            self._constants[key] = ir.Constant(type, list(number) if isinstance(number, tuple) else number)
        return Value(self, self._constants[key])

    def zero(self, type: Type) -> Value:
        scalar = type.element if isinstance(type, ir.VectorType) else type
        return self.constant(type, 0.0 if isinstance(scalar, (ir.HalfType, ir.FloatType, ir.DoubleType)) else 0)

    def i64(self, number: int) -> Value:
        return self.constant(I64, number)

    def offset(self, pointer: Value, nbytes: Number) -> Value:
        """The pointer plus `nbytes` (int64) bytes."""
        step = nbytes if isinstance(nbytes, Value) else self.i64(nbytes)  # type: ignore[arg-type]
        expect(pointer.type == POINTER and step.type == I64, "a pointer and an int64", pointer, step)
        return Value(self, self.builder.gep(pointer.ir, [step.ir], source_etype=I8))

    def load(self, pointer: Value, type: Type, offset: int = 0) -> Value:
        """The value at `pointer` + `offset` bytes."""
        expect(pointer.type == POINTER, "a pointer", pointer)
        load = self.builder.load(self.offset(pointer, offset).ir if offset else pointer.ir, typ=type)
        load.align = 1
        return Value(self, load)

    def store(self, value: Value, pointer: Value, offset: int = 0) -> None:
        expect(pointer.type == POINTER, "a pointer", pointer)
        store = self.builder.store(value.ir, self.offset(pointer, offset).ir if offset else pointer.ir)
        store.align = 1

    def constant_bytes(self, content: bytes) -> Value:
        """A pointer to constant bytes, aligned to 64."""
        kind = ir.ArrayType(I8, len(content))
        module = self.builder.module
        constant = ir.GlobalVariable(module, kind, module.get_unique_name("bytes"))
        constant.linkage, constant.global_constant, constant.align = "internal", True, 64
        constant.initializer = ir.Constant(kind, bytearray(content))
        return self._remove_type(constant)

    def stack(self, nbytes: int) -> Value:
        """A pointer to stack memory of the function, aligned to 64; a few KiB at most."""
        with self.builder.goto_entry_block():
            memory = self.builder.alloca(ir.ArrayType(I8, nbytes))
            memory.align = 64
            return self._remove_type(memory)

    def prefetch(self, pointer: Value, nbytes: int, *, level: int = 1) -> None:
        """Prefetch bytes into the core's cache of level 1 or 2, a line of 64 bytes at a time."""
        for offset in range(0, nbytes, 64):
            address = self.offset(pointer, offset)
            options = (self.constant(I32, number) for number in (0, 4 - level, 1))  # for reading, locality, data cache
            self.intrinsic("llvm.prefetch.p0", None, address, *options)

    def _remove_type(self, pointer: Any) -> Value:
        """The pointer as an opaque one: llvmlite would check the type of its contents at every use."""
        return Value(self, self.builder.inttoptr(self.builder.ptrtoint(pointer, I64), POINTER))

    def keep_order(self) -> None:
        """Where a level `keeps_order`: what is emitted before this stays before what is emitted after it. LLVM would
        begin a long loop with all of its reads, for which there are not enough registers. No instruction comes of it.
        """
        if not self.level.keeps_order:
            return
        # The optimizer moves no read across code that may write, and the scheduler nothing across a label.
        nothing = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", side_effect=True)
        self.builder.call(nothing, [])
        module, name = self.builder.module, "llvm.codeview.annotation"
        kind = ir.FunctionType(ir.VoidType(), [ir.MetaDataType()])
        label = module.globals.get(name) or ir.Function(module, kind, name)
        self.builder.call(label, [module.add_metadata(["order"])])

    def black_box(self, value: Value, *, has_own_value: bool = True) -> Value:
        """Where a level `keeps_order`: the same pointer or 16 bytes, without LLVM's knowing that they are the same. It
        does not keep what was read there, or computed from it, in registers. Else the value itself.

        has_own_value: every call stands for a value of its own.
        """
        if not self.level.keeps_order:
            return value
        register = "r" if value.type == POINTER else "w"
        same = ir.InlineAsm(ir.FunctionType(value.type, [value.type]), "", f"={register},0", side_effect=has_own_value)
        return Value(self, self.builder.call(same, [value.ir]))

    def load_atomic(self, pointer: Value) -> Value:
        """The int64 at `pointer`; whatever was written before it is visible too (sequentially consistent)."""
        expect(pointer.type == POINTER, "a pointer", pointer)
        return Value(self, self.builder.load_atomic(pointer.ir, "seq_cst", 8, typ=I64))

    def store_atomic(self, number: Value, pointer: Value, ordering: str = "seq_cst") -> None:
        """Store an int64 after all earlier writes of this thread (sequentially consistent; "release" is cheaper)."""
        expect(pointer.type == POINTER and number.type == I64, "a pointer and an int64", pointer, number)
        # llvmlite needs a typed pointer here.
        typed = self.builder.inttoptr(self.builder.ptrtoint(pointer.ir, I64), I64.as_pointer())
        self.builder.store_atomic(number.ir, typed, ordering, 8)

    def add_atomic(self, pointer: Value, number: Value) -> None:
        """Add to the int64 at `pointer`, after all earlier writes of this thread (sequentially consistent)."""
        expect(pointer.type == POINTER and number.type == I64, "a pointer and an int64", pointer, number)
        self.builder.atomic_rmw("add", pointer.ir, number.ir, "seq_cst")

    def exchange_if(self, pointer: Value, expected: Value, number: Value) -> Value:
        """Compare-and-exchange: replace the int64 at `pointer` by `number` if it is `expected` → whether it was."""
        right = pointer.type == POINTER and expected.type == number.type == I64
        expect(right, "a pointer and two int64", pointer, expected, number)
        result = self.builder.cmpxchg(pointer.ir, expected.ir, number.ir, "seq_cst", "seq_cst")
        return Value(self, self.builder.extract_value(result, 1))

    def call(self, function: Value, *arguments: Value) -> None:
        """Call the function at a pointer, which returns nothing."""
        expect(function.type == POINTER, "a pointer", function)
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        # llvmlite needs a typed pointer here.
        typed = self.builder.inttoptr(self.builder.ptrtoint(function.ir, I64), kind.as_pointer())
        self.builder.call(typed, [argument.ir for argument in arguments])

    def intrinsic(self, name: str, result: Type | None, *arguments: Value) -> Value:
        """A call of an LLVM intrinsic. LLVM aborts the process if the level does not have its instruction."""
        module = self.builder.module
        function = module.globals.get(name) or ir.Function(
            module, ir.FunctionType(result or ir.VoidType(), [argument.type for argument in arguments]), name
        )
        return Value(self, self.builder.call(function, [argument.ir for argument in arguments]))
