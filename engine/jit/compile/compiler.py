"""Compilation of kernels to object code, and loading it."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from functools import cache
from typing import Any, TypeAlias

import llvmlite
from llvmlite import ir

from polarlm.engine.jit.compile import images
from polarlm.engine.jit.compile.target import machine
from polarlm.engine.jit.lang import I64, POINTER, Emitter, Kernel, Level, Value, read

# llvmlite has its own lock, which would stay locked in a forked child if another thread was compiling.
_llvm_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(
        before=_llvm_lock.acquire, after_in_parent=_llvm_lock.release, after_in_child=_llvm_lock.release
    )

_numbers = itertools.count()  # names of loaded objects


@cache
def _binding() -> Any:
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
    """A text that identifies the target, LLVM's version (it is part of llvmlite) and the kind of code of
    `cacheable_code`."""
    kind = "images" if images.AVAILABLE else "objects"
    system = f"{sys.platform} {machine()}"
    return f"llvmlite {llvmlite.__version__}, {system}, {_cpu(level)}, {level.features}, {kind}"


def _target_machine(level: Level) -> Any:
    # The code of an image must be position-independent.
    code = {"codemodel": "small", "reloc": "pic"} if images.AVAILABLE else {"codemodel": "jitdefault", "jit": True}
    target = _binding().Target.from_triple(_triple(level))
    return target.create_target_machine(cpu=_cpu(level), features=level.features, opt=3, **code)


def _optimize(text: str, target: Any) -> Any:
    llvm = _binding()
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = False  # kernels unroll themselves where that pays
    options.slp_vectorization = False
    options.loop_vectorization = False
    passes = llvm.create_pass_builder(target, options)
    passes.getModulePassManager().run(module, passes)
    return module


def source(kernel: Kernel[Any], level: Level) -> str:
    """The LLVM IR of the kernel."""
    module = ir.Module(name=kernel.name)
    module.triple = _triple(level)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, I64, I64, POINTER]), "kernel")
    function.attributes.add("nounwind")
    # LLVM must not turn a loop into a call of memset. llvmlite does not know this attribute, hence set.add.
    set.add(function.attributes, '"no-builtins"')
    e = Emitter(level, function)
    arguments, begin, end, scratch = (Value(e, argument) for argument in function.args)
    kernel.emit(e, read(e, kernel.arguments, arguments), begin, end, scratch)
    e.builder.ret_void()
    return str(module)


def compile_object(kernel: Kernel[Any], level: Level) -> bytes:
    """The kernel as an object file, for `cacheable_code`. Raises RuntimeError if LLVM cannot compile it."""
    text = source(kernel, level)
    with _llvm_lock:
        return _object(text, level)


def _object(text: str, level: Level) -> bytes:
    """The object file of LLVM IR. LLVM's objects are freed on return, which must happen while the lock is held."""
    target = _target_machine(level)
    return target.emit_object(_optimize(text, target))


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


LoadedCode: TypeAlias = images.LoadedImage | LoadedObject


def cacheable_code(code: bytes) -> bytes:
    """An object file in the form that is cached and that `load` takes: an image, or unchanged.

    Raises ValueError for code that needs more than itself, see `images.link`.
    """
    return images.link(code) if images.AVAILABLE else code


def load(code: bytes, level: Level) -> LoadedCode:
    """The code in executable memory; its `address` is valid as long as the result lives. Raises as the two classes."""
    return images.LoadedImage(code) if images.AVAILABLE else LoadedObject(code, level)
