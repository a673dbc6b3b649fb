// What blocks of a launch pass to each other: stores, a fence, an atomic; then, in another block, an atomic at
// the same address and a fence. Only this orders the stores of one block before the accesses of another.
#include "machine.h"

#include <algorithm>
#include <map>
#include <memory>

namespace emulator {
namespace {

// All accesses of thread t of `block` whose time is below before[t] are ordered before a fence.
struct Ordered {
    uint64_t block;
    std::vector<uint32_t> before;
};
using Shared = std::shared_ptr<const Ordered>;

struct Fence {
    int thread;
    uint32_t time;  // the thread's, after the fence
    Shared ordered;
};
struct Acquired {
    int thread;
    uint32_t time;
    std::map<uint64_t, std::vector<Shared>> blocks;
};

uint64_t block;                                     // that the members below belong to
std::vector<Fence> fences;                          // the running block's
std::map<int, std::vector<Shared>> seen_atomically;  // by thread: released at an address, no fence since then
std::vector<Acquired> acquired;
std::map<const void *, std::vector<Shared>> released;  // all blocks', by address

void enter_block() {
    if (block == running().block) return;
    block = running().block;
    fences.clear(), seen_atomically.clear(), acquired.clear();
}

bool is_before(int thread, uint32_t time) { return thread == running().id || known(thread) > time; }

}  // namespace

void begin_launch_fences() { released.clear(); }

void fence() {
    if (!library->checked) return;
    enter_block();
    const int me = running().id;
    Ordered ordered{running().block, {}};
    for (int id = 0; id < threads; ++id) ordered.before.push_back(known(id));
    ordered.before[size_t(me)] = ++current->time;
    fences.push_back({me, current->time, std::make_shared<const Ordered>(std::move(ordered))});
    std::vector<Shared> &seen = seen_atomically[me];
    if (seen.empty()) return;
    Acquired mine{me, current->time, {}};
    for (const Shared &other : seen) mine.blocks[other->block].push_back(other);
    seen.clear();
    acquired.push_back(std::move(mine));
}

void pass_on(const void *address) {
    if (!library->checked || !is_global(address)) return;  // shared memory is the block's own
    enter_block();
    std::vector<Shared> &there = released[address];
    std::vector<Shared> &seen = seen_atomically[running().id];
    for (const Shared &other : there)
        if (other->block != block) seen.push_back(other);
    for (const Fence &f : fences)
        if (is_before(f.thread, f.time) && std::find(there.begin(), there.end(), f.ordered) == there.end())
            there.push_back(f.ordered);
}

bool was_passed_on(uint64_t from, int thread, uint32_t time) {
    enter_block();
    for (const Acquired &a : acquired) {
        const auto found = a.blocks.find(from);
        if (found == a.blocks.end() || !is_before(a.thread, a.time)) continue;
        for (const Shared &other : found->second)
            if (other->before[size_t(thread)] > time) return true;
    }
    return false;
}

}  // namespace emulator
