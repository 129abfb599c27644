// Rows of a table by id, and the table's gradient without atomic operations.

struct Held {
    // Rows of the whole table, the first that is here, and how many are here.
    i64 vocabulary, first, rows;
};

template <class T>
__global__ void embedding(const T* table, const int* ids, T* y, i64 count, i64 width, Held held, Extents extents,
                          Fault* fault, i64 site) {
    for (i64 row = blockIdx.x; row < count; row += gridDim.x) {
        i64 local = -1;
        if (extents.holds(row)) {
            i64 id = ids[row];
            if (id < 0 || id >= held.vocabulary) {
                if (threadIdx.x == 0) report(fault, site, id, held.vocabulary);
            } else {
                local = id - held.first;
            }
        }
        bool here = local >= 0 && local < held.rows;
        const int V = 16 / sizeof(T);
        i64 packs = width % V == 0 && aligned(table, 16) && aligned(y, 16) ? width / V : 0;
        for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
            Pack<T, V> found;
            for (int e = 0; e < V; e++) found.at[e] = Store<T>::of(typename Of<T>::Acc(0));
            if (here) found = *(const Pack<T, V>*)(table + local * width + i * V);
            *(Pack<T, V>*)(y + row * width + i * V) = found;
        }
        for (i64 i = packs * V + threadIdx.x; i < width; i += blockDim.x)
            y[row * width + i] = here ? table[local * width + i] : Store<T>::of(typename Of<T>::Acc(0));
    }
}

// Rows of the table that a block owns, its warps, ids that a thread looks at in a turn, and positions
// that the block remembers at a time.
enum { TABLE_ROWS = 64, TABLE_WARPS = 16, IDS = 4, HITS = 6144 };

// The sum of the gradients at the remembered positions of one row: a warp, V columns of a lane at a
// time, in the order of the positions.
template <class T, class C, int V>
__device__ void add_hits(const T* dy, C* out, i64 width, const int* position, const u8* owner, int hits, int row,
                         bool adds) {
    typedef typename Of<T>::Acc A;
    int lane = threadIdx.x % 32;
    for (i64 first = 0; first < width; first += 32 * V) {
        i64 column = first + lane * V;
        bool inside = column < width;
        A total[V];
        for (int e = 0; e < V; e++) total[e] = A(0);
        for (int begin = 0; begin < hits; begin += 32) {
            u32 mask = __ballot_sync(0xffffffffu, begin + lane < hits && owner[begin + lane] == row);
            while (mask) {
                // Several at once, so that their loads overlap.
                Pack<T, V> found[4];
                int many = 0;
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    if (!mask) break;
                    int hit = begin + __ffs((int)mask) - 1;
                    mask &= mask - 1;
                    if (inside) found[k] = *(const Pack<T, V>*)(dy + (i64)position[hit] * width + column);
                    many = k + 1;
                }
#pragma unroll
                for (int k = 0; k < 4; k++)
                    if (inside && k < many)
                        for (int e = 0; e < V; e++) total[e] += load(found[k].at[e]);
            }
        }
        if (!inside) continue;
        C* to = out + column;
        for (int e = 0; e < V; e++) to[e] = Store<C>::of(adds ? A(load(to[e])) + total[e] : total[e]);
    }
}

// Each block owns some rows of the table. It goes through all ids, remembers the positions of its own
// in order, and adds their gradients in that order: the bits do not depend on the run.
template <class T, class C>
__global__ void __launch_bounds__(32 * TABLE_WARPS)
    embedding_grad(const int* ids, const T* dy, C* out, i64 count, i64 width, Held held, i64 table_rows,
                   Extents extents, i64 padded, Fault* fault, i64 site, i64 add) {
    const int V = 16 / sizeof(T);
    __shared__ int position[HITS];
    __shared__ u8 owner[HITS];
    __shared__ int of_warps[TABLE_WARPS];
    i64 first = (i64)blockIdx.x * TABLE_ROWS, last = first + TABLE_ROWS;
    if (last > table_rows) last = table_rows;
    bool adds = add != 0, packs = width % V == 0 && aligned(dy, 16);
    int hits = 0, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 turn = (i64)blockDim.x * IDS;
    for (i64 begin = 0; begin < count || begin == 0; begin += turn) {
        // A thread looks at neighbours, so that the order of threads is that of positions.
        int local[IDS], own = 0;
        for (int k = 0; k < IDS; k++) {
            i64 at = begin + (i64)threadIdx.x * IDS + k, found = -1;
            if (at < count && (!padded || extents.holds(at))) {
                i64 id = ids[at];
                if (id < 0 || id >= held.vocabulary) {
                    report(fault, site, id, held.vocabulary);
                } else {
                    found = id - held.first;
                }
            }
            bool hit = found >= first && found < last && found < held.rows;
            local[k] = hit ? (int)(found - first) : -1;
            own += hit;
        }
        // How many hits come before this thread's: of its warp's lanes, then of the warps.
        int upto = own;
        for (int apart = 1; apart < 32; apart <<= 1) {
            int other = __shfl_sync(0xffffffffu, upto, lane >= apart ? lane - apart : lane);
            if (lane >= apart) upto += other;
        }
        if (lane == 31) of_warps[warp] = upto;
        __syncthreads();
        int slot = hits + upto - own, all = 0;
        for (int w = 0; w < TABLE_WARPS; w++) {
            if (w < warp) slot += of_warps[w];
            all += of_warps[w];
        }
        for (int k = 0; k < IDS; k++) {
            if (local[k] < 0) continue;
            position[slot] = (int)(begin + (i64)threadIdx.x * IDS + k);
            owner[slot] = (u8)local[k];
            slot++;
        }
        hits += all;
        __syncthreads();
        bool over = begin + turn >= count;
        if (!over && hits + (int)turn <= HITS) continue;
        // Adds what was found so far.
        for (int row = warp; row < (int)(last - first); row += TABLE_WARPS) {
            C* to = out + (first + row) * width;
            if (packs) {
                add_hits<T, C, V>(dy, to, width, position, owner, hits, row, adds);
            } else {
                add_hits<T, C, 1>(dy, to, width, position, owner, hits, row, adds);
            }
        }
        adds = true;
        hits = 0;
        __syncthreads();
    }
}
