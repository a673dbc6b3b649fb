"""The kernels, each a function that emits its body; see `engine.backends.native.compiler.Kernel`."""
