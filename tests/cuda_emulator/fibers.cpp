// Fibers, their order, and the launch of a kernel.
#include "machine.h"

#include <cstdarg>
#include <cstdio>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {

Fiber fibers[kMostThreads];
std::vector<Warp> warps;
Fiber *current;
int threads, alive;

namespace {

constexpr size_t kStackBytes = 256 << 10;
std::vector<int> ready;  // those behind `taken`
size_t taken;
char *stacks;
ucontext_t births[kMostThreads];
void *launcher[5];
void (*kernel)(void **);
void **arguments;

bool overlaps, any_waited;  // this launch begins before the one before it has ended; a thread has waited for that
uint64_t block_serial;
unsigned order_seed;
uint64_t random_state;
std::string message;
void *error_address;
void *caller;

unsigned random_below(unsigned n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return unsigned(random_state >> 33) % n;
}

// Seed 0 runs threads in their order, seed 1 the last one first, any other seed in a random order.
Fiber *next_ready() {
    const size_t count = ready.size() - taken;
    if (!count) return nullptr;
    const size_t at = taken + (order_seed == 0 ? 0 : order_seed == 1 ? count - 1 : random_below(unsigned(count)));
    const int id = ready[at];
    if (at == taken)
        ++taken;
    else
        ready.erase(ready.begin() + long(at));
    if (taken == ready.size()) ready.clear(), taken = 0;
    return &fibers[id];
}

[[noreturn]] void leave() { __builtin_longjmp(launcher, 1); }

[[noreturn]] void jump_to(Fiber *next) {
    current = next;
    threadIdx = next->index;
    if (next->born) __builtin_longjmp(next->jump, 1);
    next->born = true;
    setcontext(&births[next - fibers]);
    __builtin_unreachable();
}

// Reports a deadlock; the error's place is where the first waiting thread stands.
[[noreturn]] void deadlock() {
    std::string text;
    int shown = 0;
    for (int id = 0; id < threads && shown < 6; ++id) {
        const Fiber &f = fibers[id];
        if (f.state == State::kDone || (f.view.lane && f.state != State::kInWarp)) continue;
        if (!shown++) caller = f.place;
        char part[96];
        snprintf(part, sizeof part, "; thread %d at %s in line %d", id, f.operation, f.line);
        text += part;
    }
    fail("deadlock: %d threads are left and none can go on%s", alive, text.c_str());
}

// A fiber is reused from block to block: a new one costs two system calls.
void fiber_main() {
    for (;;) {
        kernel(arguments);
        Fiber *me = current;
        if (copies_pending()) fail("the thread returned while its cp.async was under way");
        me->state = State::kDone;
        --alive;
        if (!alive) {
            if (!__builtin_setjmp(me->jump)) leave();
        } else {
            yield();
        }
    }
}

void prepare_thread(int id, const unsigned *block) {
    Fiber &f = fibers[id];
    f.index = {id % block[0], id / block[0] % block[1], id / block[0] / block[1]};
    f.view = {block_serial, id, id / kLanes, id % kLanes};
    f.state = State::kReady;
    f.waited = !overlaps;
    f.time = f.barrier_time = 1;
    if (!f.born) {
        ucontext_t &birth = births[id];
        getcontext(&birth);
        birth.uc_stack.ss_sp = stacks + size_t(id) * kStackBytes;
        birth.uc_stack.ss_size = kStackBytes - size_t(id) % 64 * 320;  // else all tops share a few lines of caches
        birth.uc_link = nullptr;
        makecontext(&birth, fiber_main, 0);
    }
    ready.push_back(id);
}

bool run_block(const unsigned *block, size_t dynamic_bytes) {
    ++block_serial;
    alive = threads;
    ready.clear(), taken = 0;
    begin_block_waits();
    for (int id = 0; id < threads; ++id) prepare_thread(id, block);
    begin_block_memory(dynamic_bytes);
    if (!__builtin_setjmp(launcher)) jump_to(next_ready());
    current = nullptr;
    if (!message.empty()) {  // the fibers are somewhere inside the kernel: they cannot be resumed
        for (Fiber &f : fibers) f.born = false;
        return false;
    }
    return true;
}

}  // namespace

// Never inlined: it would leave its frame by another function's jump.
__attribute__((noinline)) void yield() {
    Fiber *me = current;
    me->place = caller;
    Fiber *next = next_ready();
    if (!next) deadlock();
    if (next == me) return;
    if (!__builtin_setjmp(me->jump)) jump_to(next);
    caller = me->place;
}

void wake(Fiber &fiber) {
    fiber.state = State::kReady;
    if (&fiber != current) ready.push_back(fiber.view.id);
}

void wait_for_previous() { current->waited = any_waited = true; }
bool has_waited() { return current->waited; }

int lane() { return current->view.lane; }
bool in_kernel() { return current; }
const ThreadView &running() { return current->view; }
uint32_t stamp() { return current->time; }
void advance_time() { ++current->time; }
void at(void *return_address) { caller = return_address; }
const void *calling() { return caller; }
uint64_t blocks_so_far() { return block_serial; }

bool on_a_stack(const void *address) {
    const char *p = static_cast<const char *>(address);
    return p >= stacks && p < stacks + kStackBytes * kMostThreads;
}

void fail(const char *format, ...) {
    char text[1024];
    int used = 0;
    if (current)
        used = snprintf(text, sizeof text, "block (%u, %u, %u), thread %d: ", blockIdx.x, blockIdx.y, blockIdx.z,
                        current->view.id);
    va_list list;
    va_start(list, format);
    vsnprintf(text + used, sizeof text - size_t(used), format, list);
    va_end(list);
    message = text;
    error_address = caller;
    leave();
}

}  // namespace emulator

using namespace emulator;

extern "C" const char *emulator_error() { return message.c_str(); }

// The place of the error, as an offset into the kernel's library; 0 when it is not known.
extern "C" size_t emulator_error_offset() {
    return error_address ? size_t(static_cast<const char *>(error_address) - library->start) - 1 : 0;
}

namespace {

// Denormal floats are 0, as operands and as results, while it exists: with CuPy, kernels are compiled with -ftz=true.
// Fibers get this state when they are born, or keep it from one to the next.
class Flushing {
#if defined(__x86_64__)
    unsigned before = __builtin_ia32_stmxcsr();

public:
    Flushing() { __builtin_ia32_ldmxcsr(before | 0x8040); }
    ~Flushing() { __builtin_ia32_ldmxcsr(before); }
#elif defined(__aarch64__)
    uint64_t before = __builtin_aarch64_get_fpcr64();

public:
    Flushing() { __builtin_aarch64_set_fpcr64(before | 1 << 24); }
    ~Flushing() { __builtin_aarch64_set_fpcr64(before); }
#endif
};

}  // namespace

// Runs every block; returns 0, or 1 with a message. overlapped: whether the launch before this one may still run.
extern "C" int emulator_launch(void (*thunk)(void **), void **values, const unsigned *grid, const unsigned *block,
                               size_t dynamic_bytes, unsigned seed, int overlapped) {
    message.clear();
    error_address = caller = nullptr;
    current = nullptr;
    threads = int(block[0] * block[1] * block[2]);
    if (threads < 1 || threads > kMostThreads) {
        message = "a block has 1 to 1024 threads, not " + std::to_string(threads);
        return 1;
    }
    if (!stacks)
        stacks = static_cast<char *>(mmap(nullptr, kStackBytes * kMostThreads, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    kernel = thunk;
    arguments = values;
    overlaps = overlapped, any_waited = false;
    order_seed = seed;
    random_state = seed;
    begin_launch_fences();
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    std::vector<unsigned> blocks(size_t(grid[0]) * grid[1] * grid[2]);
    for (unsigned i = 0; i < blocks.size(); ++i) blocks[i] = seed == 1 ? unsigned(blocks.size()) - 1 - i : i;
    for (size_t i = blocks.size(); seed > 1 && i > 1; --i) std::swap(blocks[i - 1], blocks[random_below(unsigned(i))]);
    const Flushing flushing;
    for (unsigned b : blocks) {
        blockIdx = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
        if (!run_block(block, dynamic_bytes)) return 1;
    }
    if (overlaps && !any_waited) {
        message = "no thread waits for the launch before: this one could end first";
        return 1;
    }
    return 0;
}
