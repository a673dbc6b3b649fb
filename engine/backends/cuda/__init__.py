"""The op set on an NVIDIA GPU: launches of the kernels in `cuda/`."""
