"""Sets of instructions that kernels may use, a class each: `generic`, and a file for each kind of CPU."""
