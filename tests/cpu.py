"""The backend that engines have on this machine's CPU: compiled kernels, or NumPy where there is no llvmlite."""

from polarlm.engine.backends.select import select

CpuOps = type(select("cpu", 0)[0])
