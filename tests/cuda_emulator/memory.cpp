// Memory of the emulated machine: buffers, shared memory, and a record of the accesses of each byte.
//
// A store and an access of the same byte by another thread are a race unless a block barrier, or a __syncwarp of both
// lanes, is between them; between blocks, fences and atomics (fences.cpp). A record has the last store of a byte and
// the loads since then.
#include "runtime.h"

#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <type_traits>
#include <vector>

namespace emulator {
namespace {

constexpr size_t kGap = 64 << 10;  // between buffers, so that an index beyond one does not reach the next
constexpr size_t kMostDynamic = 227 << 10;
constexpr unsigned kDynamicAddress = 1024 + 128;  // dynamic shared memory: behind the system's, aligned to 128 bytes

// Accesses of one byte. Blocks have serial numbers, so that a record of an earlier block counts as none, as does one of
// an earlier launch in memory that is used again.
struct Record {
    uint32_t store_block, load_block;
    uint32_t store_time, load_time;
    int16_t store_thread;
    int16_t load_warp;  // kSeveral: more than one warp, and load_time counts block barriers; else it is the newest load
    uint32_t load_lanes;
    bool atomic, in_flight, many_blocks, unused;  // no padding: records are compared as bytes

    bool operator==(const Record &other) const { return !memcmp(this, &other, sizeof *this); }
};
static_assert(std::has_unique_object_representations_v<Record>);
constexpr int16_t kSeveral = -1;

struct Buffer {
    char *start;
    size_t bytes;
    bool constant;  // this launch does not write it
    bool fixed;     // no launch writes it
    Record *records;
};

struct Copy {
    int group;
    void *shared;
    const void *global;
    int bytes;
};
struct Copies {
    uint64_t block = 0;
    int group = 0;
    std::vector<Copy> pending;
};

// Records of the accesses to a buffer, kept for the next launch: new pages would take longer than most launches.
struct Records {
    Record *start = nullptr;
    size_t count = 0;
};
constexpr size_t kMostKept = 4 << 20;  // records of a buffer

std::vector<Buffer> buffers;
const Buffer *latest;  // that was accessed
std::vector<Records> kept_records;
uint32_t launch_begin;  // the first block of the running launch
char *arena, *arena_end, *arena_free;
unsigned char *dynamic_start;
size_t dynamic_size;
Record *static_records, *dynamic_records;
size_t static_recorded;  // bytes that have a record
Copies copies[1024];

}  // namespace

const Library *library;

// The machine's own library.
extern "C" {
extern const char __ehdr_start __attribute__((visibility("hidden")));
extern const char _end __attribute__((visibility("hidden")));
}

namespace {

Record *zeroed(size_t count) { return static_cast<Record *>(calloc(count, sizeof(Record))); }

Copies &my_copies() {
    Copies &mine = copies[running().id];
    if (mine.block != running().block) mine = {running().block, 0, {}};
    return mine;
}

const char *verb(Access kind) { return kind == Access::kLoad ? "load" : kind == Access::kStore ? "store" : "atomic"; }

bool ordered_after_loads(const Record &r) {
    if (r.load_warp == kSeveral) return r.load_time < barriers();
    const ThreadView &me = running();
    unsigned others = r.load_lanes;
    if (r.load_warp == me.warp) others &= ~(1u << me.lane);
    for (; others; others &= others - 1)
        if (known(r.load_warp * kLanes + __builtin_ctz(others)) <= r.load_time) return false;
    return true;
}

// Whether another block's loads, by lanes of one of its warps, are ordered before what this block does now.
bool were_passed_on(const Record &r) {
    if (r.many_blocks || r.load_warp == kSeveral) return false;
    for (unsigned lanes = r.load_lanes; lanes; lanes &= lanes - 1)
        if (!was_passed_on(r.load_block, r.load_warp * kLanes + __builtin_ctz(lanes), r.load_time)) return false;
    return true;
}

void remember_load(Record &r) {
    const ThreadView &me = running();
    if (r.load_block != me.block) {
        r.many_blocks |= r.load_block != 0;
        r.load_block = uint32_t(me.block);
        r.load_lanes = 0;
    }
    // Loads that are ordered before this one need no record: what is ordered after this one is ordered after them.
    if ((r.load_warp != me.warp || r.load_lanes & ~(1u << me.lane)) && ordered_after_loads(r)) r.load_lanes = 0;
    if (r.load_lanes == 0) {
        r.load_warp = int16_t(me.warp);
        r.load_time = 0;
    } else if (r.load_warp != me.warp && r.load_warp != kSeveral) {
        r.load_warp = kSeveral;
        r.load_time = 0;
    }
    r.load_lanes |= 1u << me.lane;
    const uint32_t time = r.load_warp == kSeveral ? barriers() : stamp();
    if (time > r.load_time) r.load_time = time;
}

void remember_store(Record &r, bool atomic) {
    r.store_block = uint32_t(running().block);
    r.store_thread = int16_t(running().id);
    r.store_time = stamp();
    r.atomic = atomic;
    r.in_flight = false;
    r.load_block = 0;
    r.load_lanes = 0;
    r.many_blocks = false;
}

// The rules for one byte; `where` names it for messages.
void check_byte(Record &r, Access kind, const char *where, long offset, bool shared) {
    const ThreadView &me = running();
    const bool stored = r.store_block && (!shared || r.store_block == me.block);
    if (r.in_flight && r.store_block == me.block)
        fail("%s of %s, byte %ld, whose cp.async has not been waited for", verb(kind), where, offset);
    if (shared && !stored && kind != Access::kStore)
        fail("%s of %s, byte %ld, which no thread has written: uninitialised", verb(kind), where, offset);
    if (stored && !(kind == Access::kAtomic && r.atomic)) {
        if (r.store_block != me.block && !was_passed_on(r.store_block, r.store_thread, r.store_time))
            fail("race between blocks: %s of %s, byte %ld, which another block stored to", verb(kind), where, offset);
        if (r.store_block == me.block && r.store_thread != me.id && known(r.store_thread) <= r.store_time)
            fail("race: %s of %s, byte %ld, with no barrier after the store by thread %d", verb(kind), where, offset,
                 r.store_thread);
    }
    if (kind == Access::kLoad) {
        remember_load(r);
        return;
    }
    if (!shared && (r.many_blocks || (r.load_block && r.load_block != me.block)) && !were_passed_on(r))
        fail("race between blocks: %s of %s, byte %ld, which another block loaded", verb(kind), where, offset);
    if (r.load_block == me.block && !ordered_after_loads(r))
        fail("race: %s of %s, byte %ld, with no barrier after a load by another thread", verb(kind), where, offset);
    remember_store(r, kind == Access::kAtomic);
}

// What happens to a byte depends on its record alone: bytes whose records are the same have the same again.
void check_bytes(Record *records, long first, size_t bytes, Access kind, const char *where, bool shared) {
    Record before, after;
    for (long i = first; i < first + long(bytes); ++i) {
        Record &r = records[i];
        if (r.store_block < launch_begin && r.load_block < launch_begin) r = {};
        if (i > first && r == before) {
            r = after;
            continue;
        }
        before = r;
        check_byte(r, kind, where, i, shared);
        after = r;
    }
}

void mark_in_flight(void *shared, size_t bytes, bool in_flight) {
    if (!library->checked) return;
    const unsigned char *p = static_cast<unsigned char *>(shared);
    const bool is_dynamic = p >= dynamic_start && p < dynamic_start + kMostDynamic;
    Record *records = is_dynamic ? dynamic_records + (p - dynamic_start)
                                 : static_records + (static_cast<char *>(shared) - library->shared_start);
    for (size_t i = 0; i < bytes; ++i) records[i].in_flight = in_flight;
}

bool is_inside(const Buffer &b, const char *p, size_t bytes) { return p >= b.start && p + bytes <= b.start + b.bytes; }

const Buffer &buffer_of(const char *p, size_t bytes, Access kind) {
    if (latest && is_inside(*latest, p, bytes)) return *latest;
    const Buffer *nearest = nullptr;
    for (const Buffer &b : buffers) {
        if (is_inside(b, p, bytes)) return *(latest = &b);
        if (p >= b.start - kGap / 2 && p < b.start + b.bytes + kGap / 2) nearest = &b;
    }
    if (!nearest) fail("%s of %zu bytes far outside of every buffer", verb(kind), bytes);
    fail("out of bounds: %s of %zu bytes at byte %ld of a buffer of %zu bytes", verb(kind), bytes, p - nearest->start,
         nearest->bytes);
}

void check_global(const char *p, size_t bytes, Access kind) {
    const Buffer &b = buffer_of(p, bytes, kind);
    if (b.constant && kind != Access::kLoad) fail("%s to an argument declared const", verb(kind));
    if (!b.fixed && !has_waited()) fail("%s of global memory before the launch before has ended", verb(kind));
    if (!b.constant) check_bytes(b.records, p - b.start, bytes, kind, "global memory", false);
}

// Whether it is data of the kernel's library, or of the machine's, as threadIdx is.
bool is_in_a_library(const char *p) {
    return (p >= library->start && p < library->end) || (p >= &__ehdr_start && p < &_end);
}

}  // namespace

bool is_global(const void *address) {
    const char *p = static_cast<const char *>(address);
    return p >= arena && p < arena_end;
}

void access(const void *address, size_t bytes, Access kind, size_t alignment) {
    if (!in_kernel() || !library->checked || on_a_stack(address)) return;
    const char *p = static_cast<const char *>(address);
    if (uintptr_t(p) % alignment)
        fail("misaligned: %s of %zu bytes at an address that is no multiple of %zu", verb(kind), bytes, alignment);
    const char *dynamic = reinterpret_cast<const char *>(dynamic_start);
    if (is_global(p)) {
        check_global(p, bytes, kind);
        count_access(calling(), p, bytes, kind, false);
    } else if (p >= dynamic - kGap && p < dynamic + kMostDynamic + kGap) {
        if (p < dynamic || p + bytes > dynamic + dynamic_size)
            fail("out of bounds: %s of %zu bytes at byte %ld of %zu bytes of dynamic shared memory", verb(kind), bytes,
                 p - dynamic, dynamic_size);
        check_bytes(dynamic_records, p - dynamic, bytes, kind, "dynamic shared memory", true);
        count_access(calling(), p, bytes, kind, true);
    } else if (p >= library->shared_start && p < library->shared_end) {
        check_bytes(static_records, p - library->shared_start, bytes, kind, "shared memory", true);
        count_access(calling(), p, bytes, kind, true);
    } else if (kind != Access::kLoad || !is_in_a_library(p)) {
        fail("%s of %zu bytes far outside of every buffer", verb(kind), bytes);
    }
}

unsigned char *dynamic_shared() {
    if (!dynamic_size) fail("the kernel uses dynamic shared memory, but the launch gives it none");
    return dynamic_start;
}

void begin_block_memory(size_t dynamic_bytes) {
    const size_t static_bytes = size_t(library->shared_end - library->shared_start);
    if (!dynamic_start) {
        const size_t all = kMostDynamic + 2 * kGap;
        void *space = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        dynamic_start = static_cast<unsigned char *>(space) + kGap;
        dynamic_records = zeroed(kMostDynamic);
    }
    if (static_recorded < static_bytes) {
        free(static_records);
        static_records = zeroed(static_recorded = static_bytes);
    }
    if (dynamic_bytes > kMostDynamic) fail("no GPU has %zu bytes of dynamic shared memory", dynamic_bytes);
    dynamic_size = dynamic_bytes;
    memset(dynamic_start, 0xff, dynamic_bytes);  // NaN in every float format
    if (static_bytes) memset(library->shared_start, 0xff, static_bytes);
}

void start_copy(void *shared, const void *global, int bytes) {
    access(global, size_t(bytes), Access::kLoad, size_t(bytes));
    access(shared, size_t(bytes), Access::kStore, size_t(bytes));
    memset(shared, 0xff, size_t(bytes));
    Copies &mine = my_copies();
    mine.pending.push_back({mine.group, shared, global, bytes});
    mark_in_flight(shared, size_t(bytes), true);
}

void commit_copies() { ++my_copies().group; }

bool copies_pending() { return !my_copies().pending.empty(); }

void wait_for_copies(int groups_left) {
    Copies &mine = my_copies();
    std::vector<Copy> later;
    pause_traffic(true);
    for (const Copy &c : mine.pending) {
        if (c.group >= mine.group - groups_left) {
            later.push_back(c);
            continue;
        }
        mark_in_flight(c.shared, size_t(c.bytes), false);
        access(c.shared, size_t(c.bytes), Access::kStore, 1);
        memcpy(c.shared, c.global, size_t(c.bytes));
    }
    pause_traffic(false);
    mine.pending = later;
}

}  // namespace emulator

// Called before the launch of a kernel of this library.
extern "C" void emulator_reset(const emulator::Library *of_kernel) {
    using namespace emulator;
    library = of_kernel;
    constexpr size_t kArena = size_t(2) << 30;
    if (!arena) {
        void *space = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        arena = static_cast<char *>(space);
        arena_end = arena + kArena;
    }
    madvise(arena, size_t(arena_free ? arena_free - arena : 0), MADV_DONTNEED);
    arena_free = arena + kGap;
    buffers.clear();
    latest = nullptr;
    for (Records &kept : kept_records)
        if (kept.count > kMostKept) free(kept.start), kept = {};
    launch_begin = uint32_t(blocks_so_far()) + 1;
}

// Allocates global memory, aligned as CUDA aligns it; null when the arena is full.
extern "C" void *emulator_buffer(size_t bytes, int constant, int fixed) {
    using namespace emulator;
    if (arena_free + bytes + 2 * kGap > arena_end) return nullptr;
    Record *records = nullptr;
    if (!constant && library->checked) {
        if (kept_records.size() <= buffers.size()) kept_records.resize(buffers.size() + 1);
        Records &kept = kept_records[buffers.size()];
        if (kept.count <= bytes) {
            free(kept.start);
            kept = {zeroed(bytes + 1), bytes + 1};
        }
        records = kept.start;
    }
    buffers.push_back({arena_free, bytes, constant != 0, fixed != 0, records});
    arena_free += (bytes + kGap + 255) & ~size_t(255);
    return buffers.back().start;
}
