// The emulated machine, as the CUDA shim (device.h) and the launcher see it.
//
// One CPU thread runs everything. Each CUDA thread is a fiber, and control passes from one to another only where a
// kernel waits: at block barriers and at warp operations. So the machine knows at every access which accesses of other
// threads the program has put before it, and which it has not (memory.cpp).
#pragma once
#include <cstddef>
#include <cstdint>

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulator {

constexpr int kLanes = 32;
constexpr int kSlotBytes = 64;  // the most that one lane brings to a warp operation
using Slots = unsigned char (*)[kSlotBytes];

struct BarrierVotes {
    int count;     // threads whose predicate was true
    bool all, any;
};

int lane();

// Stop the launch with a message; the place is that of the hook or primitive that the kernel called.
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Called first by everything that a kernel may enter: errors name the line of this return address.
void at(void *return_address);
#define EMULATOR_AT_CALLER() emulator::at(__builtin_return_address(0))

// __syncthreads at a source line.
BarrierVotes block_barrier(int line, bool predicate);

// Wait until every lane of `mask` is here, each with `bytes` of `value`; returns what they brought, by lane. The last
// lane to come runs `finish` over the slots first. With no bytes it is __syncwarp, which orders memory accesses as well.
Slots meet(unsigned mask, const char *operation, int line, const void *value, size_t bytes,
           void (*finish)(Slots) = nullptr);

enum class Access { kLoad, kStore, kAtomic };

// Check one access of the running thread and remember it; does nothing in a build without checks.
void access(const void *address, size_t bytes, Access kind, size_t alignment);

// cp.async: bytes that are on their way from `global` to `shared` until the thread waits for their group.
void start_copy(void *shared, const void *global, int bytes);
void commit_copies();
void wait_for_copies(int groups_left);
bool copies_pending();

// Memory of the running block: poisoned before it starts.
unsigned char *dynamic_shared();

// What memory.cpp has to know of the running thread.
struct ThreadView {
    uint64_t block;  // serial number, never used twice
    int id, warp, lane;
};
bool in_kernel();  // false in the launcher's own code, which may be built with hooks too
const ThreadView &running();
uint32_t stamp();                       // the running thread's time
uint32_t known(int id);                 // the newest time of thread `id` whose accesses lie before this moment
uint32_t barriers();                    // block barriers of the running block so far
bool on_a_stack(const void *address);

// Parts of a launch that belong to memory.cpp.
void begin_block_memory(size_t dynamic_bytes);
extern const bool kChecked;  // the kernel was built with checks of every access

}  // namespace emulator
