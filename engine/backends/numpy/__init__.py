"""The op set in NumPy: the reference for other backends, and the fallback on a CPU without compiled kernels."""
