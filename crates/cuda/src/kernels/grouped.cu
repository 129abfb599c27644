// Products of packed rows with the matrices of their experts. How many rows an expert has is read from counts;
// everything else is known before. No atomic operations: a block of threads has a tile of the result.

// Regions of packed rows: all of them and those of a part of the experts; rows that each has room for, its runs with
// padding and without, experts of a part. In the first dims of rows, with and without padding: what is padding is nobody's.
struct Grouped {
    i64 regions, of_part, room, stride, runs, experts, dims, shape[6], valid[6];

    __device__ __forceinline__ bool holds(i64 region) const {
        bool inside = true;
        for (int d = (int)dims - 1; d >= 0; d--) {
            inside = inside && region % shape[d] < valid[d];
            region /= shape[d];
        }
        return inside;
    }
};

enum { GROUPED_TILE = 16 };

// A tile of the rows of a region: of each run that reaches into it, those rows. `rows` by `cols` is the shape of a
// matrix, as it lies in memory; `inner` of the elements of a row are valid.
template <class T, bool transposed>
__global__ void grouped_rows(const T* x, const T* w, const int* counts, T* out, Grouped of, i64 width, i64 inner,
                             i64 rows, i64 cols) {
    typedef typename Of<T>::Acc A;
    __shared__ A left[GROUPED_TILE][GROUPED_TILE + 1], right[GROUPED_TILE][GROUPED_TILE + 1];
    int ty = threadIdx.x / GROUPED_TILE, tx = threadIdx.x % GROUPED_TILE;
    i64 outer = transposed ? rows : cols, columns = (outer + GROUPED_TILE - 1) / GROUPED_TILE;
    i64 begin = (i64)blockIdx.x / columns * GROUPED_TILE, row = begin + ty;
    i64 col = (i64)blockIdx.x % columns * GROUPED_TILE + tx;
    for (i64 region = blockIdx.y; region < of.regions; region += gridDim.y) {
        A total = A(0);
        i64 first = 0;
        bool held = of.holds(region);
        for (i64 run = 0; held && run < of.runs && first < begin + GROUPED_TILE; run++) {
            i64 end = first + counts[region * of.stride + run];
            if (end > begin && end > first) {
                const T* own = w + (region / of.of_part * of.experts + run % of.experts) * rows * cols;
                bool mine = row >= first && row < end && row < of.room;
                for (i64 k = 0; k < inner; k += GROUPED_TILE) {
                    left[ty][tx] = mine && k + tx < inner ? A(load(x[(region * of.room + row) * width + k + tx])) : A(0);
                    bool has = col < outer && k + ty < inner;
                    i64 at = transposed ? col * cols + k + ty : (k + ty) * cols + col;
                    right[ty][tx] = has ? A(load(own[at])) : A(0);
                    __syncthreads();
                    for (int i = 0; i < GROUPED_TILE; i++) total = fma(left[ty][i], right[i][tx], total);
                    __syncthreads();
                }
            }
            first = end;
        }
        if (row < of.room && col < outer) out[(region * of.room + row) * outer + col] = Store<T>::of(total);
    }
}

// A tile of the gradient of an expert's matrix, summed over its rows in their order.
template <class T, class C>
__global__ void grouped_matrices(const T* x, const T* y, const int* counts, C* out, Grouped of, i64 rows, i64 cols,
                                 i64 add) {
    typedef typename Of<T>::Acc A;
    __shared__ A left[GROUPED_TILE][GROUPED_TILE + 1], right[GROUPED_TILE][GROUPED_TILE + 1];
    int ty = threadIdx.x / GROUPED_TILE, tx = threadIdx.x % GROUPED_TILE;
    i64 columns = (cols + GROUPED_TILE - 1) / GROUPED_TILE;
    i64 begin = (i64)blockIdx.x / columns * GROUPED_TILE, next = (i64)blockIdx.x % columns * GROUPED_TILE;
    i64 all = of.regions / of.of_part * of.experts;
    for (i64 expert = blockIdx.y; expert < all; expert += gridDim.y) {
        A total = A(0);
        i64 part = expert / of.experts;
        for (i64 region = part * of.of_part; region < (part + 1) * of.of_part; region++) {
            if (!of.holds(region)) continue;
            i64 first = 0;
            for (i64 run = 0; run < of.runs; run++) {
                i64 end = first + counts[region * of.stride + run];
                if (end > of.room) end = of.room;
                for (i64 k = first; run % of.experts == expert % of.experts && k < end; k += GROUPED_TILE) {
                    i64 row = region * of.room + k + ty;
                    bool has = k + ty < end;
                    left[ty][tx] = has && begin + tx < rows ? A(load(x[row * rows + begin + tx])) : A(0);
                    right[ty][tx] = has && next + tx < cols ? A(load(y[row * cols + next + tx])) : A(0);
                    __syncthreads();
                    for (int i = 0; i < GROUPED_TILE; i++) total = fma(left[i][ty], right[i][tx], total);
                    __syncthreads();
                }
                first = end;
            }
        }
        i64 row = begin + ty, col = next + tx;
        if (row < rows && col < cols) {
            i64 at = (expert * rows + row) * cols + col;
            if (add) total += A(load(out[at]));
            out[at] = Store<C>::of(total);
        }
    }
}
