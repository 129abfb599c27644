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
        for (i64 i = threadIdx.x; i < width; i += blockDim.x)
            y[row * width + i] = here ? table[local * width + i] : Store<T>::of(typename Of<T>::Acc(0));
    }
}

// Rows of the table that a block sums, and positions that it remembers at a time.
enum { TABLE_ROWS = 16, HITS = 2048 };

// Each block owns some rows of the table. It goes through all ids, remembers the positions of its own
// in order, and adds their gradients in that order: the bits do not depend on the run.
template <class T, class C>
__global__ void embedding_grad(const int* ids, const T* dy, C* out, i64 count, i64 width, Held held,
                               i64 table_rows, Extents extents, Fault* fault, i64 site, i64 add) {
    typedef typename Of<T>::Acc A;
    __shared__ int position[HITS];
    __shared__ int owner[HITS];
    __shared__ int of_warps[32];
    i64 first = (i64)blockIdx.x * TABLE_ROWS, last = first + TABLE_ROWS;
    if (last > table_rows) last = table_rows;
    bool adds = add != 0;
    int hits = 0, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (i64 begin = 0; begin < count || begin == 0; begin += blockDim.x) {
        i64 at = begin + threadIdx.x;
        i64 local = -1;
        if (at < count && extents.holds(at)) {
            i64 id = ids[at];
            if (id < 0 || id >= held.vocabulary) {
                report(fault, site, id, held.vocabulary);
            } else {
                local = id - held.first;
            }
        }
        bool hit = local >= first && local < last && local < held.rows;
        u32 mask = __ballot_sync(0xffffffffu, hit);
        if (threadIdx.x % 32 == 0) of_warps[warp] = __popc(mask);
        __syncthreads();
        int before = 0, all = 0;
        for (int w = 0; w < warps; w++) {
            if (w < warp) before += of_warps[w];
            all += of_warps[w];
        }
        if (hit) {
            int slot = hits + before + __popc(mask & ((1u << (threadIdx.x % 32)) - 1));
            position[slot] = (int)at;
            owner[slot] = (int)(local - first);
        }
        hits += all;
        __syncthreads();
        bool over = begin + blockDim.x >= count;
        if (!over && hits + (int)blockDim.x <= HITS) continue;
        // Adds what was found so far.
        for (i64 i = threadIdx.x; i < (last - first) * width; i += blockDim.x) {
            int row = (int)(i / width);
            i64 column = i - (i64)row * width;
            A total = A(0);
            for (int h = 0; h < hits; h++)
                if (owner[h] == row) total += load(dy[(i64)position[h] * width + column]);
            C* to = out + (first + row) * width + column;
            *to = Store<C>::of(adds ? A(load(*to)) + total : total);
        }
        adds = true;
        hits = 0;
        __syncthreads();
    }
}
