"""Runs the text of `cuda/*.cu` on the CPU, so that kernels are proved on machines without a GPU.

    program = Program(source("activate_mul", ACTIVATION="silu"))
    program.launch("activate_mul_kernel", (1, tokens), (256,), y, gate_up, np.int32(f), seed=2)

With `device.h` and the files that it includes, g++ compiles CUDA C++, each text to a library; `matrix.h` replaces the
inline PTX of `prelude.cuh`. The machine is a library that all of them use: `fibers.cpp` runs the threads, `waiting.cpp`
has barriers and warp operations, `memory.cpp` checks every access.

It is stricter than a GPU: only `__syncthreads` and `__syncwarp` order memory accesses of different threads (no shuffle,
vote or matrix operation does), and blocks of one launch may share nothing but atomics, and what one block stores before
a fence and an atomic, and another reads after an atomic at the same address and a fence: `__threadfence`, or the fences
of an atomic that releases and acquires, `arrives_last` (`fences.cpp`).

A kernel that waits for the launch before it must not use what that may write or read until then (`Program.launch`).

Numbers are as a GPU may have them: a * b + c is fused into one rounding (where bits count, write __fmul_rn, __fadd_rn
or __fmaf_rn), denormal floats are flushed, and functions such as expf, rsqrtf and exp2_fast are off by their documented
error (`numbers.h`, `fibers.cpp`).

`Program.traffic` tells what accesses cost: wavefronts of shared memory, sectors of global memory (`traffic.cpp`).

It can't show: speed; orders that only spinning, other fences or several launches establish; bulk copies and clusters;
sums inside a product of tensor cores, which truncate; loads of global memory that has not been written (fill outputs
and scratch with NaN).
"""

from tests.cuda_emulator.driver import EmulatorError, Program, Traffic

__all__ = ["EmulatorError", "Program", "Traffic"]
