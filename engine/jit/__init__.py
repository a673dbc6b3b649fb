"""A small language for kernels on a CPU: Python that writes LLVM IR, compiled while the program runs; see README.md.

`lang` is the language, `isa` has the levels of instructions, `compile` makes machine code of it and keeps that, and
`run` runs it on threads. Each imports only those before it.
"""
