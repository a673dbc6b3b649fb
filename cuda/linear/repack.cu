// Rows of a packed weight format, from the bytes of a file to the tiles of packed_weights.cuh.
//
// matrix: tiles; raw (rows, blocks, nbytes); the rows become rows first … of the matrix.
// bits (n, 8), flips (n): the bytes of the fields of a block. Bit b of byte i is bit bits[i, b] of the block in the
// file, or 0 where that is negative, and it is flipped where flips[i] has it. The fields are the scale, with OFFSETS
// the offset, with SUBS all sub_scales and with OFFSETS all sub_offsets, and the codes, a byte each.
// powers (256): with POWERS, the scale for each number in place of the scale.
// Grid (rows, ceil(in / 8 / block)), block at most 256. DEFINES: WEIGHT (a packed format).
// PRECOND: in % VALUES == 0; matrix and bits aligned to 16 bytes, rows of its last tile that no slab has set are zero.

// Byte i of the fields of a block.
__device__ __forceinline__ unsigned field_byte(const unsigned char *block, const short *bits,
                                               const unsigned char *flips, int i) {
    const Chunk<short> from = reinterpret_cast<const Chunk<short> *>(bits)[i];
    unsigned byte = flips[i];
#pragma unroll
    for (int b = 0; b < 8; ++b)
        if (from.at[b] >= 0) byte ^= (block[from.at[b] / 8] >> from.at[b] % 8 & 1u) << b;
    return byte;
}

// The lowest bit of code j of 8 in a plane of B bits.
template <int B>
constexpr int place_of(int j) {
    return B == 8 ? j / 4 * 32 + j / 2 % 2 * 8 + j % 2 * 16 : B * (j / 2 + j % 2 * 4);
}

extern "C" __global__ void __launch_bounds__(256)
repack_kernel(unsigned char *matrix, const unsigned char *raw, const short *bits, const unsigned char *flips,
              const unsigned short *powers, int first, int in, int nbytes) {
    using W = WEIGHT;
    constexpr int groups = W::VALUES / W::GROUP, fields = W::OFFSETS ? 2 : 1, LOW = W::LOW, HIGH = W::HIGH;
    const int k = (blockIdx.y * blockDim.x + threadIdx.x) * 8, row = first + blockIdx.x;
    if (k >= in) return;
    raw += (blockIdx.x * (long long)(in / W::VALUES) + k / W::VALUES) * nbytes;
    unsigned char *const block = const_cast<unsigned char *>(W::block_at(matrix, row / 16, in, k));
    const int i = k % W::VALUES, group = i / W::GROUP, at = row % 16, place = 2 * (at % 8 * 4 + i % 32 / 8) + at / 8;
    if (i == 0) {
        unsigned short *const numbers = reinterpret_cast<unsigned short *>(block) + fields * at;
#pragma unroll
        for (int f = 0; f < fields; ++f)
            numbers[f] = field_byte(raw, bits, flips, 2 * f) | field_byte(raw, bits, flips, 2 * f + 1) << 8;
        if (powers) numbers[0] = powers[numbers[0]];
    }
    if (W::SUB_NUMBERS && i % W::GROUP == 0) {
        unsigned char *const sub_numbers = block + W::NUMBERS + W::SUB_NUMBERS * group + fields * at;
#pragma unroll
        for (int f = 0; f < fields; ++f)
            sub_numbers[f] = field_byte(raw, bits, flips, 2 * fields + groups * f + group);
    }
    unsigned long long low = 0, high = 0;
#pragma unroll 1
    for (int j = 0; j < 8; ++j) {
        const unsigned long long code = field_byte(raw, bits, flips, W::codes(groups) / 16 + i + j);
        low |= (code & ((1ull << LOW) - 1)) << place_of<LOW>(j);
        high |= (code >> LOW) << place_of<HIGH>(j);
    }
    unsigned char *const plane = block + W::plane(i);
#pragma unroll
    for (int b = 0; b < LOW; ++b) plane[place * LOW + b] = low >> 8 * b;
#pragma unroll
    for (int b = 0; b < HIGH; ++b) plane[64 * LOW + place * HIGH + b] = high >> 8 * b;
}
