// The functions that g++ calls from a kernel built with -fsanitize=thread,alignment,…: our checks instead of libtsan.
#include "runtime.h"

using emulator::Access;

#define HOOK(name, bytes, kind, alignment)                      \
    extern "C" void __tsan_##name(void *p) {                    \
        EMULATOR_AT_CALLER();                                   \
        emulator::access(p, bytes, Access::kind, alignment);    \
    }
#define HOOKS(bytes)                                     \
    HOOK(read##bytes, bytes, kLoad, bytes)               \
    HOOK(write##bytes, bytes, kStore, bytes)             \
    HOOK(volatile_read##bytes, bytes, kLoad, bytes)      \
    HOOK(volatile_write##bytes, bytes, kStore, bytes)    \
    HOOK(unaligned_read##bytes, bytes, kLoad, 1)         \
    HOOK(unaligned_write##bytes, bytes, kStore, 1)

HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

extern "C" void __tsan_read_range(void *p, size_t bytes) {
    EMULATOR_AT_CALLER();
    emulator::access(p, bytes, Access::kLoad, 1);
}
extern "C" void __tsan_write_range(void *p, size_t bytes) {
    EMULATOR_AT_CALLER();
    emulator::access(p, bytes, Access::kStore, 1);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit() {}

#define UNDEFINED(name, what, ...)                                   \
    extern "C" void __ubsan_handle_##name##_abort(__VA_ARGS__) {     \
        EMULATOR_AT_CALLER();                                        \
        emulator::fail(what);                                        \
    }

UNDEFINED(type_mismatch_v1, "misaligned: the address does not fit the type that is loaded or stored", void *, void *)
UNDEFINED(out_of_bounds, "out of bounds: index past the end of the array", void *, void *)
UNDEFINED(shift_out_of_bounds, "shift by more bits than the type has, or by a negative number", void *, void *, void *)
UNDEFINED(divrem_overflow, "division by zero", void *, void *, void *)
UNDEFINED(float_cast_overflow, "a float that does not fit the integer type it is cast to", void *, void *)
