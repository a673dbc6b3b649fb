// The emulated machine, as the CUDA shim (device.h) and the launcher see it.
//
// One CPU thread runs everything. Each CUDA thread is a fiber, and control passes from one to another only where a
// kernel waits: at block barriers and at warp operations. So at every access the machine knows which accesses of other
// threads are ordered before it, and which are not (memory.cpp).
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
constexpr int kSlotBytes = 64;  // the largest value of one lane in a warp operation
using Slots = unsigned char (*)[kSlotBytes];

int lane();

// Stops the launch with a message; its place is the line that called the current hook or primitive.
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Called first in every function that a kernel may call: errors name the line of this return address.
void at(void *return_address);
#define EMULATOR_AT_CALLER() emulator::at(__builtin_return_address(0))

// __syncthreads at a source line.
void block_barrier(int line);

// Waits until every lane of `mask` has arrived with `bytes` of `value`; returns their values, by lane. The last lane to
// arrive runs `finish` over these slots first. Without bytes it is __syncwarp, which also orders memory accesses.
Slots meet(unsigned mask, const char *operation, int line, const void *value, size_t bytes,
           void (*finish)(Slots) = nullptr);

// __threadfence or fence_gpu, and what follows every atomic: see fences.cpp.
void fence();
void pass_on(const void *address);

enum class Access { kLoad, kStore, kAtomic };

// Checks one access of the running thread and records it; does nothing in a build without checks.
void access(const void *address, size_t bytes, Access kind, size_t alignment);

// For what accesses cost (traffic.cpp): one of the running thread, by the instruction at `code`. What copies write when
// they are waited for has been counted where they began.
void count_access(const void *code, const void *address, size_t bytes, Access kind, bool shared);
void pause_traffic(bool pause);
const void *calling();  // the return address of the current hook or primitive

// cp.async: copies from `global` to `shared` that are in flight until the thread waits for their group.
void start_copy(void *shared, const void *global, int bytes);
void commit_copies();
void wait_for_copies(int groups_left);
bool copies_pending();

// From here on the thread may use what the launch before this one writes or reads.
void wait_for_previous();

// Memory of the running block: poisoned before it starts.
unsigned char *dynamic_shared();

// The running thread, for memory.cpp.
struct ThreadView {
    uint64_t block;  // serial number, never used twice
    int id, warp, lane;
};
bool has_waited();  // for the launch before this one; true where this one need not
bool in_kernel();  // false in the launcher's own code, which may be built with hooks too
const ThreadView &running();
uint32_t stamp();                       // the running thread's time
void advance_time();                    // what it does from here on is at a later time
uint32_t known(int id);                 // the newest time of thread `id` that is ordered before this moment
uint32_t barriers();                    // block barriers of the running block so far
bool on_a_stack(const void *address);
uint64_t blocks_so_far();  // that have begun, of all launches: the serial number of the newest
// Whether the running thread's accesses are ordered after what `thread` of the block `from` did up to `time`.
bool was_passed_on(uint64_t from, int thread, uint32_t time);

// The part of a launch that memory.cpp does.
void begin_block_memory(size_t dynamic_bytes);

// The library of a kernel.
struct Library {
    const char *start, *end;          // the whole library
    char *shared_start, *shared_end;  // its static __shared__ variables
    bool checked;                     // built with checks of every access
};
extern const Library *library;  // the running kernel's

}  // namespace emulator
