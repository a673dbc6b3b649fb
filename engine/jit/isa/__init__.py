"""Sets of instructions that kernels may use, a class each: `generic`, and a file for each kind of CPU."""

VARIABLE = "POLARLM_CPU_LEVEL"  # of the environment: restricts the level, for measurements and tests
