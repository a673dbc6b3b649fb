"""The op set on a CPU with compiled kernels, which read packed weights and codes without unpacking them first.

Kernels are written in the language of `engine.jit`, which compiles them for a level of CPU features, caches their
machine code in the user's cache folder, and runs them on persistent threads.
"""
