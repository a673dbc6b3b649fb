"""The op set on a GPU of NVIDIA's: launches of the kernels in `cuda/`."""
