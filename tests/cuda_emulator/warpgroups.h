// Bodies of the wrappers of cuda/attention/wgmma.cuh; warpgroups.cpp says what the machine makes of them.
#pragma once

template <int COUNT>
EMULATOR_INLINE void keep_here(float (&)[COUNT]) {}
template <int COUNT>
EMULATOR_INLINE void keep_here(unsigned (&)[COUNT][4]) {}

EMULATOR_PRIMITIVE static unsigned shared_address(const void *p) {
    EMULATOR_AT_CALLER();
    return emulator::shared_address(p);
}

EMULATOR_PRIMITIVE static void fence_async_proxy() { emulator::fence_async_proxy(); }

EMULATOR_PRIMITIVE static void wgmma_fence() {
    EMULATOR_AT_CALLER();
    emulator::fence_registers();
}
EMULATOR_PRIMITIVE static void wgmma_commit() {
    EMULATOR_AT_CALLER();
    emulator::commit_products();
}
template <int GROUPS_LEFT>
EMULATOR_PRIMITIVE void wgmma_wait() {
    EMULATOR_AT_CALLER();
    emulator::wait_for_products(GROUPS_LEFT);
}

template <bool ADDS, int COUNT>
EMULATOR_PRIMITIVE void wgmma_m64k16(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b) {
    static_assert(COUNT == 32 || COUNT == 64);
    EMULATOR_AT_CALLER();
    emulator::start_product(2 * COUNT, ADDS, d, a, b);
}
