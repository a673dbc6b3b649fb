// What a kernel's accesses cost: wavefronts of shared memory, sectors of global memory, next to the least possible.
//
// The n-th time that each lane of a warp comes to a place in the code is one request. g++ splits some accesses of 16
// and 8 bytes into four and two; what a thread does next to its last access, at the address after it and at another
// place, is joined to it again. Lanes that skip a turn of a loop are paired wrongly with those that do not.
#include "runtime.h"

#include <cstring>
#include <map>
#include <set>
#include <vector>

namespace emulator {
namespace {

constexpr uintptr_t kWord = 4, kBanks = 32, kSector = 32;
constexpr size_t kWidest = 16;  // bytes of a lane's access

struct Place {
    const void *code;
    bool shared;
    Access kind;
    auto operator<=>(const Place &) const = default;
};
struct Lane {
    const char *address = nullptr;
    size_t bytes = 0;
};
struct Request {
    Lane lanes[kLanes];
};
struct Total {
    long requests = 0, used = 0, least = 0;
};
struct Last {  // access of a thread
    uint64_t block = 0;
    Place place{};
    Lane *lane = nullptr;
    std::map<Place, int> turns;
};

bool counting, paused;
uint64_t block;
std::map<std::tuple<Place, int, int>, Request> requests;  // the running block's, by place, warp, turn
Last last[1024];
std::map<Place, Total> totals;

uintptr_t number(const Lane &lane) { return reinterpret_cast<uintptr_t>(lane.address); }

// Lanes whose accesses are as wide share a wavefront, 128 bytes, in their order. A word that several read is read once;
// different words of a bank are read one after another.
void add_wavefronts(const Request &request, size_t widest, Total &total) {
    const int together = widest <= 4 ? 32 : widest <= 8 ? 16 : 8;
    for (int first = 0; first < kLanes; first += together) {
        std::set<uintptr_t> words, of_bank[kBanks];
        for (int l = first; l < first + together; ++l) {
            uintptr_t begin = number(request.lanes[l]), end = begin + request.lanes[l].bytes;
            for (uintptr_t at = begin / kWord * kWord; at < end; at += kWord) {
                words.insert(at / kWord);
                of_bank[at / kWord % kBanks].insert(at / kWord);
            }
        }
        size_t most = 0;
        for (const auto &bank : of_bank) most = bank.size() > most ? bank.size() : most;
        total.used += long(most), total.least += long((words.size() + kBanks - 1) / kBanks);
    }
}

void add_sectors(const Request &request, Total &total) {
    std::set<uintptr_t> sectors, bytes;
    for (const Lane &lane : request.lanes)
        for (uintptr_t at = number(lane); at < number(lane) + lane.bytes; ++at) {
            sectors.insert(at / kSector), bytes.insert(at);
        }
    total.used += long(sectors.size()), total.least += long((bytes.size() + kSector - 1) / kSector);
}

void end_block() {
    for (const auto &[key, request] : requests) {
        const Place &place = std::get<0>(key);
        size_t widest = 0;
        for (const Lane &lane : request.lanes) widest = lane.bytes > widest ? lane.bytes : widest;
        Total &total = totals[place];
        ++total.requests;
        if (place.shared)
            add_wavefronts(request, widest, total);
        else
            add_sectors(request, total);
    }
    requests.clear();
}

}  // namespace

void pause_traffic(bool pause) { paused = pause; }

void count_access(const void *code, const void *address, size_t bytes, Access kind, bool shared) {
    if (!counting || paused) return;
    const ThreadView &me = running();
    if (block != me.block) end_block(), block = me.block;
    Last &mine = last[me.id];
    if (mine.block != me.block) mine = {me.block, {}, nullptr, {}};
    const Place place{code, shared, kind};
    const char *const at = static_cast<const char *>(address);
    bool other_code = mine.lane && mine.place.shared == shared && mine.place.kind == kind && mine.place.code != code;
    bool whole_words = other_code && bytes >= kWord && mine.lane->bytes >= kWord;
    if (whole_words && mine.lane->address + mine.lane->bytes == at && mine.lane->bytes + bytes <= kWidest) {
        mine.lane->bytes += bytes;
        mine.place.code = code;
        return;
    }
    Lane &lane = requests[{place, me.warp, mine.turns[place]++}].lanes[me.lane];
    lane = {at, bytes};
    mine.lane = &lane, mine.place = place;
}

}  // namespace emulator

using namespace emulator;

// Begins to count, or ends.
extern "C" void emulator_count(int on) {
    counting = on != 0, paused = false, block = 0;
    requests.clear(), totals.clear();
    for (Last &of : last) of = {};
}

// The totals of a place: its offset in the kernel's library, whether it is in shared memory, requests, wavefronts or
// sectors, and the least of them. Returns 0 behind the last place.
extern "C" int emulator_traffic(int number, long *out) {
    end_block();
    if (size_t(number) >= totals.size()) return 0;
    auto at = totals.begin();
    std::advance(at, number);
    const auto &[place, total] = *at;
    out[0] = long(static_cast<const char *>(place.code) - library->start) - 1;
    out[1] = place.shared, out[2] = total.requests, out[3] = total.used, out[4] = total.least;
    return 1;
}
