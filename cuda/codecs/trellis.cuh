// Pairs of channels, rounded together as a path: the two lowest bits of a vector's code before negate the first and the
// second value of a point. Twin of engine/codecs/trellis.py.
//
// Records are as ring's. The codes before a tile's, four to a word as well, are a neighbour's: lane tg - 1 has them for
// keys, lane g - 1 for values. For the first of these lanes they are pairs 8s + 4h - 1 of keys and 8j - 1 of values:
// the last lane has them, in this tile's word or in the word of tile (s - 1, i) or (u, j - 1). So the last lane hands
// on bytes of two words, others their word, and one shuffle a tile brings all codes before.
// With five or six bits, a code has two to spare in its byte, once the digits there have been collected: they choose
// among rows with all signs of a point, and PAIRS has four for each. Otherwise signs are added to what has been looked
// up.
template <class L>
struct trellis : PairTable<L> {
    using Table = PairTable<L>;
    static constexpr bool PATHS = true, SIGNED_ROWS = L::BITS <= 6;

    struct SignedRows : L {
        static constexpr int BITS = L::BITS + 2;
    };
    static __device__ __forceinline__ uint4 piece(const unsigned char *tables, int row, int number, int last) {
        if constexpr (SIGNED_ROWS) return PairTable<SignedRows>::piece(tables, row, number, last);
        return Table::piece(tables, row, number, last);
    }

    struct Decoder : Table::Decoder {
        unsigned latest[L::VALUES ? 1 : L::PT];  // words of the tiles of the pairs before; zeros before the first one
        unsigned handed;                         // which bytes of a word and of the latest one this lane hands on
        int source;                              // the lane whose codes are before this one's

        __device__ __forceinline__ Decoder(const typename Table::Codes &codes, const unsigned char *shared, int lane)
            : Table::Decoder(codes, shared, lane), latest{} {
            if constexpr (L::VALUES)
                handed = lane >= 28 ? 0x7654 : 0x3210, source = lane + 28 & 31;
            else
                handed = lane % 4 == 3 ? 0x1076 : 0x3210, source = lane & 28 | lane + 3 & 3;
        }

        __device__ __forceinline__ void next(int t, unsigned (&a)[4]) {
            const unsigned word = this->word(t), previous = codes_before(t, word);
            unsigned c[4];
            if constexpr (SIGNED_ROWS) {
                constexpr unsigned code = (0xffu << 8 - L::BITS) & 0xff, signs = 3u << 6 - L::BITS, bytes = 0x01010101u;
                this->bytes(word & code * bytes | previous >> 2 & signs * bytes, c);
            } else {
                this->bytes(word, c);
                this->negate(c, previous, 8 - L::BITS);
            }
            this->arrange(c, a);
        }

        __device__ __forceinline__ void pass(int t) { latest[L::VALUES ? 0 : t % L::PT] = this->word(t); }

        __device__ __forceinline__ unsigned codes_before(int t, unsigned word) {
            unsigned &last = latest[L::VALUES ? 0 : t % L::PT];
            if (L::VALUES && t % L::STEPS == 0) last = 0;
            const unsigned own = __byte_perm(word, last, handed);
            last = word;
            return __shfl_sync(0xffffffffu, own, source);
        }
    };
};
