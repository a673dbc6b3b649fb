// Block barriers and warp operations, and the order of memory accesses that they establish between threads.
#include "machine.h"

#include <algorithm>
#include <cstring>

namespace emulator {
namespace {

int waiting, barrier_line;
uint32_t barrier_count;

// All accesses of all threads so far are ordered before all later ones. All get one time, since some may have gone
// ahead by fences of their own, and the loads of a warp are remembered with the newest time of its lanes.
void order_block() {
    ++barrier_count;
    uint32_t newest = 0;
    for (int id = 0; id < threads; ++id) newest = fibers[id].time > newest ? fibers[id].time : newest;
    for (int id = 0; id < threads; ++id) fibers[id].barrier_time = fibers[id].time = newest + 1;
    for (Warp &warp : warps)
        for (auto &of_lane : warp.known) std::fill_n(of_lane, kLanes, newest + 1);
}

void order_lanes(Warp &warp, int first, unsigned mask) {
    uint32_t newest[kLanes] = {};
    for (int l = 0; l < kLanes; ++l) {
        if (!(mask >> l & 1)) continue;
        warp.known[l][l] = ++fibers[first + l].time;
        for (int other = 0; other < kLanes; ++other)
            if (warp.known[l][other] > newest[other]) newest[other] = warp.known[l][other];
    }
    for (int l = 0; l < kLanes; ++l)
        if (mask >> l & 1) memcpy(warp.known[l], newest, sizeof newest);
}

Meeting &meeting_of(Warp &warp, unsigned mask) {
    for (Meeting &m : warp.meetings)
        if (m.mask == mask) return m;
    warp.meetings.emplace_back();
    warp.meetings.back().mask = mask;
    return warp.meetings.back();
}

}  // namespace

uint32_t barriers() { return barrier_count; }

void begin_block_waits() {
    barrier_count = 0;
    waiting = 0;
    warps.clear();
    warps.resize(size_t(threads + kLanes - 1) / kLanes);
}

uint32_t known(int id) {
    const ThreadView &me = current->view;
    return id / kLanes == me.warp ? warps[size_t(me.warp)].known[me.lane][id % kLanes] : fibers[id].barrier_time;
}

void block_barrier(int line) {
    if (waiting && barrier_line != line)
        fail("divergent barrier: this thread is at the barrier in line %d, others wait at the one in line %d", line,
             barrier_line);
    if (alive != threads) fail("divergent barrier: %d threads of the block have returned", threads - alive);
    barrier_line = line;
    current->operation = "__syncthreads";
    current->line = line;
    current->state = State::kAtBarrier;
    if (++waiting < threads) {
        yield();
        return;
    }
    waiting = 0;
    order_block();
    for (int id = 0; id < threads; ++id) wake(fibers[id]);
}

Slots meet(unsigned mask, const char *operation, int line, const void *value, size_t bytes, void (*finish)(Slots)) {
    const ThreadView me = current->view;
    const int first = me.warp * kLanes, size = threads - first < kLanes ? threads - first : kLanes;
    if (!(mask >> me.lane & 1)) fail("%s: lane %d is not in the mask %08x", operation, me.lane, mask);
    if (size < kLanes && mask >> size) fail("%s: mask %08x names lanes that the block does not have", operation, mask);
    Meeting &m = meeting_of(warps[size_t(me.warp)], mask);
    if (m.arrived && (m.line != line || (m.operation != operation && strcmp(m.operation, operation))))
        fail("divergent warp: this lane is at %s in line %d, others wait at %s in line %d", operation, line,
             m.operation, m.line);
    m.operation = operation;
    m.line = line;
    Slots slots = m.slots[m.round & 1];
    memcpy(slots[me.lane], value, bytes);
    m.arrived |= 1u << me.lane;
    current->operation = operation;
    current->line = line;
    if (m.arrived != mask) {
        current->state = State::kInWarp;
        yield();
        return slots;
    }
    if (finish) finish(slots);
    m.arrived = 0;
    ++m.round;
    // As in CUDA, only __syncwarp orders memory accesses of lanes; a shuffle or a vote does not.
    if (!bytes) order_lanes(warps[size_t(me.warp)], first, mask);
    for (int l = 0; l < kLanes; ++l)
        if (mask >> l & 1) wake(fibers[first + l]);
    return slots;
}

}  // namespace emulator
