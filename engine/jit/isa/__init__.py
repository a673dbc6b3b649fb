"""Sets of instructions that kernels may use."""
