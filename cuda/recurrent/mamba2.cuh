// Where a projected row [z | x | B | C | dt] of Mamba 2 has what belongs to its heads. Their queries, keys and values
// are C, B and x; channels are counted from the first of x.
struct Mamba2Heads : DeltaHeads {
    __device__ __forceinline__ int value(int head) const { return head * VALUE_DIM; }
    __device__ __forceinline__ int key(int key) const { return values * VALUE_DIM + key * KEY_DIM; }
    __device__ __forceinline__ int query(int key) const { return values * VALUE_DIM + (keys + key) * KEY_DIM; }

    __device__ __forceinline__ int first_channel() const { return values * VALUE_DIM; }  // after z
    __device__ __forceinline__ int step(int head) const { return first_channel() + channels() + head; }
};
