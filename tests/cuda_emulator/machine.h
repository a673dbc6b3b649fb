// The running block: what fibers.cpp and waiting.cpp share.
#pragma once
#include "runtime.h"

#include <deque>
#include <vector>

namespace emulator {

constexpr int kMostThreads = 1024;

enum class State { kReady, kAtBarrier, kInWarp, kDone };

struct Fiber {
    void *jump[5];  // where it goes on, for __builtin_longjmp: the C library's unwinds and mangles, which takes longer
    bool born = false;
    State state;
    bool waited;  // for the launch before this one
    uint3 index;
    ThreadView view;
    const char *operation;  // at which it waits
    int line;
    void *place;            // return address of that operation, for messages
    uint32_t time;          // grows with every operation that orders this thread's accesses
    uint32_t barrier_time;  // `time` after the last block barrier
};

// Warp operations of lanes with one mask. There are two sets of slots: a fast lane may arrive at the next operation
// while a slow one still reads the results of the last, but never at the one after that.
struct Meeting {
    unsigned mask, arrived = 0;
    const char *operation = nullptr;
    int line = 0;
    unsigned round = 0;
    alignas(16) unsigned char slots[2][kLanes][kSlotBytes];
};

struct Warp {
    std::deque<Meeting> meetings;
    uint32_t known[kLanes][kLanes] = {};  // [lane][other]: the newest time of `other` that `lane` is ordered after
};

extern Fiber fibers[kMostThreads];
extern std::vector<Warp> warps;
extern Fiber *current;
extern int threads, alive;

void yield();             // passes control to another fiber; returns when this one is resumed
void wake(Fiber &fiber);  // makes it ready to be resumed
void begin_block_waits();
bool is_global(const void *address);
void begin_launch_fences();

}  // namespace emulator
