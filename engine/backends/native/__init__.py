"""The op set on a CPU with compiled kernels: packed weights and codes are read as they lie in memory.

Kernels are written in the language of `engine.jit`, which compiles them for a level of CPU features, keeps their
machine code in the user's cache folder, and runs them on persistent threads.
"""
