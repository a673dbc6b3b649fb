"""A small language for kernels on a CPU: Python that writes LLVM IR, compiled at run time; see README.md.

`lang` is the language, `isa` has the levels of instructions, `compile` makes machine code and caches it, and `run` runs
it on threads. Each imports only those before it.
"""
