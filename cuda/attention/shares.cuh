// How decode_attention.cu divides its work; tests/cuda/test_shares.py checks the shares.
//
// A cell is up to HEADS query vectors of one KV head of one sequence: column c of a KV head is head c % GROUP of its
// group, of row c / GROUP. A unit is what a warp does at a time: a quantized block, or 16 tokens of a full-precision
// record, of about as many bytes. The units of all cells stand in one row: by sequence, KV head, chunk of columns, and
// by token. Each CTA takes an equal share of that row, each of its warps an equal share of the CTA's.

// HEADS: columns of a cell; the last one of a KV head may have fewer. CHUNKS: cells of a KV head, of one row.
constexpr int CHUNKS = (GROUP + 7) / 8, HEADS = STEP_ROWS > 1 ? 8 : (GROUP + CHUNKS - 1) / CHUNKS;
constexpr int SLICES = N / 16;  // slices of a record

// Then all blocks are read in slices, as no block needs decoding.
constexpr bool ALL_FULL = KEYS_ARE_FULL && VALUES_ARE_FULL;

// Units first … first + units − 1 for `count` takers, who get equally many; the first of them may get one more.
struct Shares {
    int first, base, extra;

    static __device__ __forceinline__ Shares of(int first, int units, int count) {
        const int base = unsigned(units) / unsigned(count);
        return {first, base, units - base * count};
    }
    __device__ __forceinline__ int begin(int taker) const { return first + taker * base + min(taker, extra); }
    __device__ __forceinline__ int end(int taker) const { return begin(taker + 1); }
    // Who has unit `unit`, which someone has.
    __device__ __forceinline__ int taker(int unit) const {
        const int offset = unit - first, larger = extra * (base + 1);
        const bool has_larger = offset < larger;
        const unsigned earlier = has_larger ? offset : offset - larger, size = base + has_larger;
        return (has_larger ? 0 : extra) + int(earlier / size);
    }
};

// Positions that any row of a sequence sees; none where newest < oldest.
struct Visible {
    int oldest, newest;

    __device__ __forceinline__ Visible(const Span &span, int window)
        : oldest(window > 0 ? max(0, span.position - window + 1) : 0), newest(span.position + span.rows - 1) {}
    __device__ __forceinline__ Visible(int oldest, int newest) : oldest(oldest), newest(newest) {}
};

// The quantized blocks with visible tokens: `count` from block `number` of the sequence on.
struct QuantizedBlocks {
    int count, number;
    const int *ids;

    __device__ __forceinline__ QuantizedBlocks() {}
    __device__ __forceinline__ QuantizedBlocks(const Span &span, const Visible &visible) {
        const int skipped = min(max(0, visible.oldest / N - span.first_quantized), span.quantized);
        count = visible.newest < visible.oldest ? 0 : span.quantized - skipped;
        number = span.first_quantized + skipped, ids = span.ids() + skipped;
    }
    __device__ __forceinline__ int units() const { return ALL_FULL ? count * SLICES : count; }
};

// The full-precision records with visible tokens, in slices of 16 tokens: the sink's, then those from position `start`
// on.
struct FullBlocks {
    int sink, sink_slices;
    int start, later_slices;
    const int *later;  // records by the blocks' numbers

    __device__ __forceinline__ FullBlocks(const Span &span, const Visible &visible) {
        sink = span.sink;
        sink_slices = sink >= 0 && visible.oldest < min(N, visible.newest + 1) ? SLICES : 0;
        start = max(span.current_block * N, visible.oldest / 16 * 16);
        later_slices = max(0, visible.newest - start + 16) / 16;
        later = span.records() - span.current_block;
    }
    __device__ __forceinline__ int units() const { return sink_slices + later_slices; }
};

__device__ __forceinline__ int chunks_of(const Span &span) {
    return STEP_ROWS > 1 ? (span.rows * GROUP + HEADS - 1) / HEADS : CHUNKS;
}

// One cell: units start … end − 1 of the row.
struct Cell {
    int sequence, number, start, end;  // number: in its sequence
};

// What a warp does next: units first … first + units − 1 of a cell. In shared memory, and volatile: read anew at each
// use instead of kept in registers.
struct Turn {
    volatile int sequence, number;  // the cell's
    volatile int first, units;
    volatile int next, end;  // in the row: the unit after this turn, and the end of the warp's share
    volatile int oldest;     // visible position, counted from the end of the turn's last quantized block
};

// A sequence's part of the row: where it ends, and the units of each cell.
struct Stretch {
    volatile int end, size;
};

// The row of units of all sequences. It is in shared memory, at addresses that the compiler knows.
struct Plan {
    static constexpr int WORDS = WARPS * sizeof(Turn) / 4;

    const int *spans;
    Turn *turns;          // [WARPS]
    volatile int *share;  // a CTA's: Shares::base and Shares::extra
    Stretch *stretches;   // [sequences]
    int span_stride, sequences, kv_heads, window;

    __device__ __forceinline__ Plan(int *memory, const int *spans, int span_stride, int sequences, int kv_heads,
                                    int window)
        : spans(spans), turns(reinterpret_cast<Turn *>(memory)), share(memory + WORDS),
          stretches(reinterpret_cast<Stretch *>(memory + WORDS + 2)), span_stride(span_stride),
          sequences(sequences), kv_heads(kv_heads), window(window) {}

    __device__ __forceinline__ const Span &span(int sequence) const { return span_at(spans, span_stride, sequence); }


    __device__ __forceinline__ int units(int sequence) const {
        const Span &own = span(sequence);
        const Visible visible(own, window);
        return QuantizedBlocks(own, visible).units() + FullBlocks(own, visible).units();
    }

    // Brings the spans into the L1 cache, and with them the ids of blocks, for which every warp would wait as long
    // again: each thread loads a word of 32 bytes. All warps but the first one call it, which fills the row meanwhile.
    // scratch: `room` words of shared memory, which nobody reads; but a load whose result is not stored would be none.
    __device__ __forceinline__ void expect_spans(int *scratch, int room) const {
        const int number = threadIdx.x - 32;
        const bool is_there = 8 * number < (long long)sequences * span_stride;
        if (is_there && number < room) scratch[number] = spans[8 * number];
    }

    // Computes the row; the first warp calls it together, and a barrier must follow.
    __device__ __forceinline__ void fill() const {
        const int lane = threadIdx.x % 32;
        int first = 0, earlier = 0;
#pragma unroll 1
        do {
            const int own = first + lane, size = own < sequences ? units(own) : 0;
            int sum = own < sequences ? size * kv_heads * chunks_of(span(own)) : 0;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(ALL_LANES, sum, step);
                if (lane >= step) sum += other;
            }
            if (own < sequences) stretches[own].end = earlier + sum, stretches[own].size = size;
            earlier += __shfl_sync(ALL_LANES, sum, 31);
            first += 32;
        } while (first < sequences);
        const Shares ctas = Shares::of(0, earlier, gridDim.x);
        if (lane == 0) share[0] = ctas.base, share[1] = ctas.extra;
    }

    // Computes the warp's share of the row. Returns whether the CTA has units.
    __device__ __forceinline__ bool begin() const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const Shares own = warps(ctas());
        if (lane == 0) turns[warp].next = own.begin(warp), turns[warp].end = own.end(warp);
        __syncwarp();
        return own.end(WARPS - 1) > own.first;
    }

    __device__ __forceinline__ Shares ctas() const { return {0, share[0], share[1]}; }
    __device__ __forceinline__ Shares warps(const Shares &ctas) const {
        const int begin = ctas.begin(blockIdx.x);
        return Shares::of(begin, ctas.end(blockIdx.x) - begin, WARPS);
    }

    // The cell with unit `unit`; a warp calls it together.
    __device__ __forceinline__ Cell cell(int unit) const {
        int first = -32;
        unsigned beyond;
        do {
            first += 32;
            const int own = first + thread_read_anew() % 32;
            beyond = __ballot_sync(ALL_LANES, own < sequences && stretches[own].end > unit);
        } while (beyond == 0);
        const int sequence = first + __ffs(beyond) - 1;
        const int start = sequence > 0 ? stretches[sequence - 1].end : 0, size = stretches[sequence].size;
        const int number = unsigned(unit - start) / unsigned(size);
        return {sequence, number, start + number * size, start + (number + 1) * size};
    }

    // Begins the warp's next turn, which has no units at the end of its share.
    __device__ __forceinline__ void begin_turn() const {
        const int thread = thread_read_anew();
        Turn &turn = turns[thread / 32];
        const int unit = turn.next, end = turn.end;
        const bool has_units = unit < end;
        const Cell own = cell(has_units ? unit : end - 1);
        __syncwarp();  // all lanes have read the last turn
        if (thread % 32 == 0) {
            turn.sequence = own.sequence, turn.number = own.number;
            turn.first = unit - own.start, turn.units = has_units ? min(end, own.end) - unit : 0;
            turn.next = has_units ? min(end, own.end) : unit;
        }
        __syncwarp();
    }
};
