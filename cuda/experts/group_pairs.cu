// Pairs of a row and an expert, grouped by expert, for products in which rows share the weights of an expert.
//
// ids (P): the expert of each pair; pair p is of row p / sharing. rows (P): the row of the pair in each place, where
// pairs of an expert are neighbours, expert 0's first. places (P): the place of each pair. Pairs of one expert
// are in any order. groups (most, 3): expert, first place and number of pairs, at most ROWS, of each group; after the
// last one the number is 0.
// Grid (1), block a multiple of 32. DEFINES: COUNT (experts), ROWS.
// PRECOND: most is at least the number of groups: min(P, COUNT + P / ROWS).
extern "C" __global__ void __launch_bounds__(1024)
group_pairs_kernel(int *rows, int *places, int *groups, const int *ids, int pairs, int sharing, int most) {
    let_next_begin();
    wait_for_previous();
    __shared__ int counts[COUNT], next[COUNT];
    for (int e = threadIdx.x; e < COUNT; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) atomicAdd(&counts[ids[p]], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < COUNT; e += blockDim.x) {
        int first = 0, group = 0;
        for (int earlier = 0; earlier < e; ++earlier)
            first += counts[earlier], group += (counts[earlier] + ROWS - 1) / ROWS;
        next[e] = first;
        for (int done = 0; done < counts[e]; done += ROWS, ++group) {
            groups[3 * group] = e;
            groups[3 * group + 1] = first + done;
            groups[3 * group + 2] = min(ROWS, counts[e] - done);
        }
        if (e == COUNT - 1)
            for (; group < most; ++group) groups[3 * group] = groups[3 * group + 1] = groups[3 * group + 2] = 0;
    }
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
        const int place = atomicAdd(&next[ids[p]], 1);
        rows[place] = p / sharing;
        places[p] = place;
    }
}
