"""The kernels, each a function that emits its body; see `engine.jit.compile.compiler.Kernel`."""
