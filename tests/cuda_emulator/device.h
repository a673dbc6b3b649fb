// CUDA C++ for g++, included before the text of a kernel. This file has keywords, barriers, warp operations and
// atomics; numbers.h has types and arithmetic; matrix.h replaces the wrappers around inline PTX in the prelude.
#pragma once
#define POLAR_EMULATOR 1
#include "numbers.h"
#include "runtime.h"

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __shared__ static __attribute__((section("emulated_shared")))
#define __forceinline__ inline  // as g++ likes: all inlined, a kernel takes twice as long to compile
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

#define DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(emulator::enter_dynamic_shared())

// Functions that a kernel calls here are built without checks and never inlined: errors name the line of the call.
#define EMULATOR_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))
#define EMULATOR_PRIMITIVE EMULATOR_UNCHECKED __attribute__((noinline, unused))

namespace emulator {

EMULATOR_PRIMITIVE static unsigned char *enter_dynamic_shared() {
    EMULATOR_AT_CALLER();
    return dynamic_shared();
}

EMULATOR_PRIMITIVE static void enter_barrier(int line) {
    EMULATOR_AT_CALLER();
    block_barrier(line);
}

EMULATOR_PRIMITIVE static void enter_warp_barrier(int line, unsigned mask = 0xffffffffu) {
    EMULATOR_AT_CALLER();
    meet(mask, "__syncwarp", line, nullptr, 0);
}

enum class Shuffle { kFrom, kXor, kUp, kDown };

// The lane that `lane` reads, inside its segment of `width` lanes; its own where the other lies outside.
EMULATOR_PRIMITIVE static int source_lane(Shuffle kind, int lane, int argument, int width) {
    const int first = lane & ~(width - 1), last = first + width - 1;
    switch (kind) {
        case Shuffle::kFrom: return first + (argument & (width - 1));
        case Shuffle::kXor: return (lane ^ argument) <= last ? lane ^ argument : lane;
        case Shuffle::kUp: return lane - argument >= first ? lane - argument : lane;
        default: return lane + argument <= last ? lane + argument : lane;
    }
}

template <class T>
EMULATOR_PRIMITIVE T shuffle(int line, Shuffle kind, unsigned mask, T value, int argument, int width = 32) {
    EMULATOR_AT_CALLER();
    static const char *const names[] = {"__shfl_sync", "__shfl_xor_sync", "__shfl_up_sync", "__shfl_down_sync"};
    static_assert(sizeof(T) <= 8, "shuffles move 4 or 8 bytes");
    Slots slots = meet(mask, names[int(kind)], line, &value, sizeof value);
    const int from = source_lane(kind, lane(), argument, width);
    if (!(mask >> from & 1)) fail("%s reads lane %d, which is not in the mask %08x", names[int(kind)], from, mask);
    T result;
    __builtin_memcpy(&result, slots[from], sizeof result);
    return result;
}

EMULATOR_PRIMITIVE static unsigned ballot(int line, const char *name, unsigned mask, bool predicate) {
    EMULATOR_AT_CALLER();
    Slots slots = meet(mask, name, line, &predicate, sizeof predicate);
    unsigned set = 0;
    for (int l = 0; l < kLanes; ++l)
        if (mask >> l & 1) set |= unsigned(slots[l][0]) << l;
    return set;
}

template <class T>
EMULATOR_PRIMITIVE T sum(int line, unsigned mask, T value) {
    EMULATOR_AT_CALLER();
    Slots slots = meet(mask, "__reduce_add_sync", line, &value, sizeof value);
    value = 0;
    for (int l = 0; l < kLanes; ++l) {
        T other;
        __builtin_memcpy(&other, slots[l], sizeof other);
        if (mask >> l & 1) value += other;
    }
    return value;
}

// Indivisible, because control passes to other threads only inside barriers and warp operations.
template <class T, class Change>
EMULATOR_PRIMITIVE T change(T *address, Change result_of) {
    EMULATOR_AT_CALLER();
    access(address, sizeof(T), Access::kAtomic, sizeof(T));
    const T old = *address;
    *address = result_of(old);
    pass_on(address);
    return old;
}

EMULATOR_PRIMITIVE static void enter_fence() {
    EMULATOR_AT_CALLER();
    fence();
}

}  // namespace emulator

#define __syncthreads() emulator::enter_barrier(__LINE__)
#define __syncwarp(...) emulator::enter_warp_barrier(__LINE__ __VA_OPT__(, ) __VA_ARGS__)
#define __shfl_sync(...) emulator::shuffle(__LINE__, emulator::Shuffle::kFrom, __VA_ARGS__)
#define __shfl_xor_sync(...) emulator::shuffle(__LINE__, emulator::Shuffle::kXor, __VA_ARGS__)
#define __shfl_up_sync(...) emulator::shuffle(__LINE__, emulator::Shuffle::kUp, __VA_ARGS__)
#define __shfl_down_sync(...) emulator::shuffle(__LINE__, emulator::Shuffle::kDown, __VA_ARGS__)
#define __ballot_sync(mask, p) emulator::ballot(__LINE__, "__ballot_sync", mask, p)
#define __any_sync(mask, p) int(emulator::ballot(__LINE__, "__any_sync", mask, p) != 0)
#define __all_sync(mask, p) int(emulator::ballot(__LINE__, "__all_sync", mask, p) == (mask))
#define __reduce_add_sync(mask, v) emulator::sum(__LINE__, mask, v)

#define EMULATOR_ATOMIC(name, result)                                                   \
    template <class T>                                                                  \
    EMULATOR_INLINE T name(T *address, std::type_identity_t<T> value) {                 \
        return emulator::change(address, [value](T old) -> T { return result; });       \
    }
EMULATOR_ATOMIC(atomicAdd, old + value)
EMULATOR_ATOMIC(atomicExch, ((void)old, value))
EMULATOR_ATOMIC(atomicInc, old >= value ? 0 : old + 1)

EMULATOR_INLINE void __threadfence() { emulator::enter_fence(); }
EMULATOR_INLINE bool arrives_last(int *count, int sharing) {
    emulator::enter_fence();
    const int before = atomicInc(count, sharing - 1);
    emulator::enter_fence();
    return before + 1 == sharing;
}

// Loads and stores with a cache hint.
#define EMULATOR_LOAD(name)                 \
    template <class T>                      \
    EMULATOR_INLINE T name(const T *p) {    \
        return *p;                          \
    }
#define EMULATOR_STORE(name)                                            \
    template <class T>                                                  \
    EMULATOR_INLINE void name(T *p, std::type_identity_t<T> value) {    \
        *p = value;                                                     \
    }
EMULATOR_LOAD(__ldg)
EMULATOR_LOAD(__ldcs)
EMULATOR_STORE(__stcg)

#include "matrix.h"
#include "signature.h"
