"""Kernels, their compilation to object code, and loading it."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeAlias

import llvmlite
import numpy as np
from llvmlite import ir

from polarlm.engine.jit.compile import images
from polarlm.engine.jit.compile.target import machine
from polarlm.engine.jit.isa.levels import Level
from polarlm.engine.jit.lang import records
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.records import Record
from polarlm.engine.jit.lang.values import I64, POINTER, Value


@dataclass(frozen=True)
class Kernel(Generic[Record]):
    """A kernel: a function of arguments that computes units begin, …, end − 1 of an op.

    name: unique; it includes everything that the kernel is specialized for. emit(e, arguments, begin, end, scratch)
    emits its body. arguments: the record (`lang/records.py`) whose values `emit` gets. scratch: bytes of the calling
    thread's memory that it needs, aligned to 64. Units may run in any order, on any threads.
    """

    name: str
    emit: Callable[[Emitter, Record, Value, Value, Value], None]
    arguments: type[Record]
    scratch: int = 0

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and self.name == other.name

    def module(self, level: Level) -> str:
        """The LLVM IR of the kernel."""
        module = ir.Module(name=self.name)
        module.triple = _triple(level)
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, I64, I64, POINTER]), "kernel")
        function.attributes.add("nounwind")
        # LLVM must not turn a loop into a call of memset. llvmlite does not know this attribute, hence set.add.
        set.add(function.attributes, '"no-builtins"')
        e = Emitter(level, function)
        given, begin, end, scratch = (Value(e, argument) for argument in function.args)
        self.emit(e, records.read(e, self.arguments, given), begin, end, scratch)
        e.builder.ret_void()
        return str(module)

    def pack(self, arguments: Record) -> np.ndarray:
        """The arguments as the kernel reads them: int64, 8 bytes per field."""
        assert type(arguments) is self.arguments, f"{self.name} takes {self.arguments.__name__}, not {arguments}"
        return records.words(arguments)


# llvmlite has its own lock, which would stay locked in a forked child if another thread was compiling.
_llvm_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(
        before=_llvm_lock.acquire, after_in_parent=_llvm_lock.release, after_in_child=_llvm_lock.release
    )

_numbers = itertools.count()  # names of loaded objects


@cache
def _binding() -> Any:
    """llvmlite.binding, initialized."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@cache
def _triple(level: Level) -> str:
    """LLVM's name of the system that kernels of a level run on: this one, or Linux on the level's own machine."""
    llvm = _binding()
    if level.machine in ("", machine()):
        return llvm.get_process_triple()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return f"{level.machine}-unknown-linux-gnu"


def _cpu(level: Level) -> str:
    return level.cpu or ("x86-64" if (level.machine or machine()) == "x86_64" else "generic")


def target_description(level: Level) -> str:
    """A text that identifies the target, LLVM's version (it is part of llvmlite) and the kind of code of `finished`."""
    kind = "images" if images.AVAILABLE else "objects"
    system = f"{sys.platform} {machine()}"
    return f"llvmlite {llvmlite.__version__}, {system}, {_cpu(level)}, {level.features}, {kind}"


def _target_machine(level: Level) -> Any:
    # The code of an image must be position-independent.
    code = {"codemodel": "small", "reloc": "pic"} if images.AVAILABLE else {"codemodel": "jitdefault", "jit": True}
    target = _binding().Target.from_triple(_triple(level))
    return target.create_target_machine(cpu=_cpu(level), features=level.features, opt=3, **code)


def _optimized(source: str, target: Any) -> Any:
    llvm = _binding()
    module = llvm.parse_assembly(source)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = False  # kernels unroll themselves where that pays
    options.slp_vectorization = False
    options.loop_vectorization = False
    passes = llvm.create_pass_builder(target, options)
    passes.getModulePassManager().run(module, passes)
    return module


def compile_object(kernel: Kernel, level: Level) -> bytes:
    """The kernel as an object file, for `finished`. Raises RuntimeError if LLVM cannot compile it."""
    source = kernel.module(level)
    with _llvm_lock:
        return _object(source, level)


def _object(source: str, level: Level) -> bytes:
    """The object file of LLVM IR. LLVM's objects are freed on return, which must happen while the lock is held."""
    target = _target_machine(level)
    return target.emit_object(_optimized(source, target))


def assembly(kernel: Kernel, level: Level) -> str:
    """The machine code of the kernel as assembly text."""
    return _assembly(kernel.module(level), level).decode()


def _assembly(source: str, level: Level) -> bytes:
    """The machine code of LLVM IR as assembly text."""
    target = _target_machine(level)
    return target.emit_assembly(_optimized(source, target)).encode()


@cache
def _linker(level: Level) -> Any:
    return _binding().create_lljit_compiler(_target_machine(level), suppress_errors=True)


class LoadedObject:
    """An object file in memory, linked by LLVM. `address`, the kernel's, is valid as long as this object lives.

    Raises RuntimeError if the code is not an object file or calls functions that this process does not have, or if the
    system does not allow executable memory.
    """

    def __init__(self, code: bytes, level: Level) -> None:
        with _llvm_lock:
            self._linker = _linker(level)
            library = _binding().JITLibraryBuilder().add_object_img(code).add_current_process()
            self._tracker = library.export_symbol("kernel").link(self._linker, f"kernel{next(_numbers)}")
        self.address: int = self._tracker["kernel"]


Loaded: TypeAlias = images.LoadedImage | LoadedObject


def finished(code: bytes) -> bytes:
    """An object file in the form that is cached and that `load` takes: an image, or unchanged.

    Raises ValueError for code that needs more than itself, see `images.link`.
    """
    return images.link(code) if images.AVAILABLE else code


def load(code: bytes, level: Level) -> Loaded:
    """The code in executable memory; its `address` is valid as long as the result lives. Raises as the two classes."""
    return images.LoadedImage(code) if images.AVAILABLE else LoadedObject(code, level)
