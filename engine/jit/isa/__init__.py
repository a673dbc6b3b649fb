"""Sets of instructions that kernels may use, each a class: `generic`, and a file per kind of CPU."""

VARIABLE = "POLARLM_CPU_LEVEL"  # environment variable that restricts the level, for measurements and tests
