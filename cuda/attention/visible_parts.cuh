// The parts of blocks that a CTA loops over in attention of a prompt. Part of prefill_attention.cu, which explains
// letters.

constexpr int PART_BYTES = TILES * 512, FULL_BYTES = FullKeyLayout::NBYTES;

// One side's pools: quantized records, the sink's, the new rows' records.
struct SidePools {
    const unsigned char *quantized, *sink, *current;
    int kv_heads;

    // The CTA's KV head in a pool whose records are at `first` plus multiples of BYTES.
    template <int BYTES>
    __device__ const unsigned char *record(const unsigned char *first, int block) const {
        return first + (block * (long long)kv_heads + blockIdx.y) * BYTES;
    }
};

enum class Region { SINK, QUANTIZED, CURRENT };

// One part of a block of one KV head.
struct Part {
    Region region;
    int block;         // in its pool
    int number;        // within the record
    int start;         // position of the first token

    __device__ const unsigned char *full(const SidePools &pools) const {
        const unsigned char *const pool =
            region == Region::SINK ? pools.sink : region == Region::QUANTIZED ? pools.quantized : pools.current;
        return pools.record<FULL_BYTES>(pool, block) + number * PART_BYTES;
    }
};

// The parts that are visible to rows at positions `first` … `last`, in order.
struct VisibleParts {
    const Span &span;
    // For each region, parts before the window (…_hidden) and visible parts.
    int sink_hidden, sink, quantized_hidden, quantized, current_hidden, current;

    __device__ VisibleParts(const Span &span, int first, int last, int window) : span(span) {
        const int oldest = window > 0 ? max(0, first - window + 1) / PART : 0;  // part of the sequence
        sink = span.sink >= 0 ? PARTS : 0;
        quantized = span.quantized * PARTS;
        current = last / PART + 1 - span.current_block * PARTS;
        sink -= sink_hidden = min(oldest, sink);
        quantized -= quantized_hidden = min(max(0, oldest - span.first_quantized * PARTS), quantized);
        current -= current_hidden = min(max(0, oldest - span.current_block * PARTS), current);
    }

    __device__ int count() const { return sink + quantized + current; }

    __device__ Part at(int n) const {
        if (n < sink) return part(Region::SINK, span.sink, 0, sink_hidden + n);
        n += quantized_hidden - sink;
        if (n < quantized_hidden + quantized)
            return part(Region::QUANTIZED, span.ids()[n / PARTS], span.first_quantized, n);
        n += current_hidden - quantized_hidden - quantized;
        return part(Region::CURRENT, span.current + n / PARTS, span.current_block, n);
    }

    // Part n of a region whose first block is block `first` of the sequence; block: in the pool.
    __device__ Part part(Region region, int block, int first, int n) const {
        return {region, block, n % PARTS, first * N + n * PART};
    }
};
