"""The op set on a CPU with compiled kernels: packed weights and codes are read as they lie in memory.

Kernels are written in Python as LLVM IR (`emit.py`), compiled by llvmlite for one of the `target.py` levels, kept as
machine code in the user's cache folder, and run on persistent threads (`workers.py`).
"""
