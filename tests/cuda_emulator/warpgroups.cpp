// Products of warpgroups (wgmma), by the chapter "Asynchronous warpgroup level matrix instructions" of the PTX ISA.
//
// A product is computed when the threads of its warpgroup wait for its group, by what its operands hold then: nothing
// that happens in between is forgiven. Its sums are NaN until then. Operands in shared memory count as read by two
// threads each, in different warps, where the product starts and where they wait. Registers that a product has used may
// be changed only before a wgmma_fence, and a product that follows a wait needs one.
#include "machine.h"
#include "numbers.h"

#include <cstring>

namespace emulator {
namespace {

constexpr int kMembers = 128;  // threads of a warpgroup
constexpr int kDepth = 16;     // numbers of a row of A
constexpr unsigned kAligned = 16, kPatternRows = 8;

// A thread's part of a product.
struct Own {
    float *d = nullptr;
    const unsigned *a = nullptr;
    unsigned a_at_start[4];
};
struct Product {
    int columns;
    bool adds;
    uint64_t descriptor;
    Own own[kMembers];
    int started = 0;  // threads that have
};
struct Registers {  // a thread's, which a product has used
    void *start;
    size_t bytes;
    std::vector<unsigned char> at_fence;
};
struct Sums {  // a thread's, while products add to them
    float *d;
    std::vector<float> values;
};
struct Member {
    size_t started = 0, ended = 0;  // products
    std::vector<size_t> groups;     // products before the end of each
    bool fenced = false;
    std::vector<Registers> used;
    std::vector<Sums> sums;
};
struct Warpgroup {
    std::deque<Product> products;
    Member members[kMembers];
    int waiting = 0;
    size_t until = 0;
};

std::vector<Warpgroup> warpgroups;
uint64_t block;  // that they belong to; most blocks have none

Warpgroup &mine() {
    if (threads % kMembers) fail("a block with products of warpgroups has a multiple of %d threads", kMembers);
    if (block != running().block) {
        block = running().block;
        warpgroups.clear();
        warpgroups.resize(size_t(threads / kMembers));
    }
    return warpgroups[size_t(running().id / kMembers)];
}
Member &me() { return mine().members[running().id % kMembers]; }

Sums *sums_of(Member &member, const float *d) {
    for (Sums &sums : member.sums)
        if (sums.d == d) return &sums;
    return nullptr;
}

// Before a product uses a thread's registers; they are not in use by another one.
void check_registers(Member &member, void *start, size_t bytes, const char *what) {
    for (Registers &r : member.used) {
        if (r.start != start || r.bytes != bytes) continue;
        if (memcmp(r.at_fence.data(), start, bytes)) fail("%s have changed since the last wgmma_fence", what);
        return;
    }
    const char *const bytes_of = static_cast<char *>(start);
    member.used.push_back({start, bytes, {bytes_of, bytes_of + bytes}});
}

// The bytes of row `row`, numbers 8c … 8c + 7, of an operand whose rows are next to each other along its other side
// ("K-major"): 16 bytes, at an address of shared memory.
unsigned address_of(uint64_t descriptor, unsigned row, unsigned c) {
    const auto field = [&](int shift) { return unsigned(descriptor >> shift & 0x3fff) * kAligned; };
    const unsigned start = field(0), leading = field(16), stride = field(32), mode = unsigned(descriptor >> 62);
    if (descriptor & 0x3fff'c000'c000'c000 & ~(uint64_t(7) << 49)) fail("a descriptor whose reserved bits are not 0");
    if (descriptor >> 49 & 7) fail("a descriptor with a base offset, which the emulator does not know");
    const unsigned in_pattern = row % kPatternRows, patterns = row / kPatternRows * stride;
    if (mode == 0) return start + in_pattern * kAligned + patterns + c * leading;
    const unsigned chunks = mode == 1 ? 8 : mode == 2 ? 4 : 2;  // chunks of 16 bytes in a row of the pattern
    const unsigned plain = start + in_pattern * chunks * kAligned + patterns + c * kAligned;
    return plain ^ (plain >> 7 & (chunks - 1)) * kAligned;
}

// Counts the thread's share of an operand's bytes as read by it.
void read_operand(const Product &product) {
    pause_traffic(true);
    for (int row = running().id % (kMembers / 2); row < product.columns; row += kMembers / 2)
        for (unsigned c = 0; c < 2; ++c)
            access_by_product(shared_pointer(address_of(product.descriptor, unsigned(row), c)), kAligned);
    pause_traffic(false);
}

float half_at(const unsigned char *p, int i) {
    __half x;
    memcpy(&x, p + 2 * i, sizeof x);
    return value(x);
}

void compute(Warpgroup &group, const Product &product) {
    static float a[64][kDepth], b[256][kDepth];
    for (int row = 0; row < product.columns; ++row)
        for (unsigned c = 0; c < 2; ++c) {
            const unsigned char *const p = shared_pointer(address_of(product.descriptor, unsigned(row), c));
            for (int i = 0; i < 8; ++i) b[row][8 * c + unsigned(i)] = half_at(p, i);
        }
    for (int t = 0; t < kMembers; ++t) {
        const Own &own = product.own[t];
        if (memcmp(own.a, own.a_at_start, sizeof own.a_at_start))
            fail("registers of operand A have changed before the product was waited for");
        const int g = t % 32 / 4, tg = t % 4;
        for (int r = 0; r < 4; ++r)
            for (int h = 0; h < 2; ++h)
                a[t / 32 * 16 + g + r % 2 * 8][2 * tg + r / 2 * 8 + h] =
                    half_at(reinterpret_cast<const unsigned char *>(own.a + r), h);
    }
    for (int t = 0; t < kMembers; ++t) {
        std::vector<float> &sums = sums_of(group.members[t], product.own[t].d)->values;
        const int g = t % 32 / 4, tg = t % 4;
        for (int i = 0; i < product.columns / 2; ++i) {
            const float *const of_row = a[t / 32 * 16 + g + i / 2 % 2 * 8];
            const float *const of_column = b[i / 4 * 8 + 2 * tg + i % 2];
            float sum = 0;
            for (int k = 0; k < kDepth; ++k) sum += of_row[k] * of_column[k];
            sums[size_t(i)] = (product.adds ? sums[size_t(i)] : 0) + sum;
        }
    }
}

// Whether a product that has not ended adds to these sums.
bool in_use(const Warpgroup &group, size_t ended, int member, const float *d) {
    for (size_t i = ended; i < group.products.size(); ++i)
        if (group.products[i].own[member].d == d) return true;
    return false;
}

void end_products(Warpgroup &group, size_t until) {
    const size_t from = group.members[0].ended;
    for (size_t i = from; i < until; ++i) compute(group, group.products[i]);
    for (int t = 0; t < kMembers; ++t) {
        Member &member = group.members[t];
        member.ended = until;
        for (size_t s = 0; s < member.sums.size();) {
            Sums &sums = member.sums[s];
            if (in_use(group, until, t, sums.d)) {
                ++s;
                continue;
            }
            const size_t bytes = sums.values.size() * sizeof(float);
            for (size_t i = 0; i < bytes; ++i)
                if (reinterpret_cast<unsigned char *>(sums.d)[i] != 0xff)
                    fail("sums of a product have changed before it was waited for");
            memcpy(sums.d, sums.values.data(), bytes);
            member.sums.erase(member.sums.begin() + long(s));
        }
    }
}

}  // namespace

bool products_pending() { return block == running().block && me().ended < me().started; }

void fence_registers() {
    meet(~0u, "wgmma_fence", 0, "", 1);
    Member &member = me();
    member.fenced = true;
    for (Registers &r : member.used) memcpy(r.at_fence.data(), r.start, r.bytes);
}

void start_product(int columns, bool adds, float *d, const unsigned *a, uint64_t descriptor) {
    meet(~0u, "wgmma", columns, &descriptor, sizeof descriptor);
    Warpgroup &group = mine();
    Member &member = me();
    if (!member.fenced) fail("a product without a wgmma_fence before it, or since the last wait");
    if (member.started == group.products.size()) group.products.push_back({columns, adds, descriptor});
    Product &product = group.products[member.started++];
    if (product.columns != columns || product.adds != adds || product.descriptor != descriptor)
        fail("threads of a warpgroup start different products");
    Own &own = product.own[running().id % kMembers];
    own.d = d, own.a = a;
    memcpy(own.a_at_start, a, sizeof own.a_at_start);
    ++product.started;
    check_registers(member, const_cast<unsigned *>(a), sizeof own.a_at_start, "registers of operand A");
    const size_t bytes = size_t(columns) / 2 * sizeof(float);
    if (!sums_of(member, d)) {
        check_registers(member, d, bytes, "sums");
        member.sums.push_back({d, {d, d + columns / 2}});
        memset(d, 0xff, bytes);
    }
    read_operand(product);
}

void commit_products() {
    meet(~0u, "wgmma_commit", 0, "", 1);
    me().groups.push_back(me().started);
}

void wait_for_products(int groups_left) {
    meet(~0u, "wgmma_wait", groups_left, "", 1);
    Warpgroup &group = mine();
    Member &member = me();
    const size_t groups = member.groups.size();
    const size_t until = groups > size_t(groups_left) ? member.groups[groups - 1 - size_t(groups_left)] : 0;
    for (size_t i = member.ended; i < until; ++i) read_operand(group.products[i]);
    member.fenced = false;
    if (group.waiting && group.until != until) fail("threads of a warpgroup wait for different products");
    group.until = until;
    if (++group.waiting < kMembers) {
        current->operation = "wgmma_wait";
        current->line = 0;
        current->state = State::kInWarp;
        yield();
        return;
    }
    group.waiting = 0;
    if (until > member.ended) end_products(group, until);
    const int first = running().id / kMembers * kMembers;
    for (int id = first; id < first + kMembers; ++id) wake(fibers[id]);
}

}  // namespace emulator
