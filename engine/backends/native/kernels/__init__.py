"""The kernels: functions that emit their bodies; see `engine.jit.compile.compiler.Kernel`."""
