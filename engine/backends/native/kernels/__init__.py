"""The kernels: functions that emit their bodies; see `engine.jit.lang.Kernel`."""
