"""The op set on an NVIDIA GPU: Python that launches the kernels in `cuda/`."""
