"""Launches of the kernels in `cuda/recurrent/`: layers whose state is not K/V."""
