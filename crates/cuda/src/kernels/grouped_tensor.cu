// Products of packed rows with the matrices of their experts, on tensor cores (tensor.cu). A tile has rows of one run
// alone, so that it needs one matrix; which rows is found from the counts, by every warp for itself.

// The rows of thirty-two runs of a region, one run for each lane.
struct Runs {
    int start, end;

    // The runs from `run` on; `first` is the first row of them, and then the first behind them.
    __device__ __forceinline__ Runs(const Grouped& of, const int* counts, i64 region, i64 run, int& first) {
        int lane = threadIdx.x % 32, room = (int)of.room;
        int count = run + lane < of.runs ? counts[region * of.stride + run + lane] : 0;
        int behind = first + upto(count);
        start = behind - count < room ? behind - count : room;
        end = behind < room ? behind : room;
        first = __shfl_sync(0xffffffffu, end, 31);
    }

    // The sum of a number of this lane and of those before it.
    static __device__ __forceinline__ int upto(int x) {
        for (int apart = 1; apart < 32; apart *= 2) {
            int before = __shfl_up_sync(0xffffffffu, x, apart);
            if ((int)threadIdx.x % 32 >= apart) x += before;
        }
        return x;
    }
};

// The rows of a region that a tile has. Rows behind the last run are nobody's, and so are all of one that is padding.
struct TileRows {
    int first, end;
    i64 run;

    __device__ __forceinline__ TileRows(const Grouped& of, const int* counts, i64 region, int tile) : run(-1) {
        int behind = 0, before = 0;
        for (i64 base = 0; base < of.runs && of.holds(region); base += 32) {
            Runs runs(of, counts, region, base, behind);
            int own = (runs.end - runs.start + SIDE - 1) / SIDE, upto = Runs::upto(own);
            u32 found = __ballot_sync(0xffffffffu, tile < before + upto);
            if (found) {
                int lane = __ffs((int)found) - 1;
                int skipped = tile - before - __shfl_sync(0xffffffffu, upto - own, lane);
                first = __shfl_sync(0xffffffffu, runs.start, lane) + skipped * SIDE;
                end = __shfl_sync(0xffffffffu, runs.end, lane);
                run = base + lane;
                return;
            }
            before += __shfl_sync(0xffffffffu, upto, 31);
        }
        first = behind + (tile - before) * SIDE;
        end = (int)of.room;
    }
};

// Slices of some rows and of columns of a matrix.
template <class T, bool transposed> struct RowSlices {
    const T *x, *w;
    i64 width, apart, columns;
    int rows, depth, inner;
    bool wide_x, wide_w;

    __device__ __forceinline__ bool fetch(char* to) {
        if (depth >= inner) return false;
        int left = inner - depth;
        Slice<T, true>::fetch(to, x + depth, width, rows, left, wide_x);
        const T* from = w + (transposed ? (i64)depth : depth * apart);
        Slice<T, transposed>::fetch(to + SLICE_BYTES, from, apart, columns, left, wide_w);
        depth += DEPTH;
        return true;
    }
};

template <class T, bool transposed>
__global__ void __launch_bounds__(TILE_THREADS, 2)
tensor_rows(const T* x, const T* w, const int* counts, T* out, Grouped of, i64 width, i64 inner, i64 rows, i64 cols) {
    extern __shared__ double shared[];
    char* memory = (char*)shared;
    i64 outer = transposed ? rows : cols, columns = (outer + SIDE - 1) / SIDE;
    int tile = (int)(blockIdx.x / columns);
    i64 col = blockIdx.x % columns * SIDE;
    for (i64 region = blockIdx.y; region < of.regions; region += gridDim.y) {
        TileRows own(of, counts, region, tile);
        if (own.first >= own.end) continue;
        TensorTile result;
        result.clear();
        i64 first = region * of.room + own.first;
        if (own.run >= 0) {
            const T* matrix = w + (region / of.of_part * of.experts + own.run % of.experts) * rows * cols;
            RowSlices<T, transposed> source = {
                x + first * width, matrix + (transposed ? col * cols : col), width, cols, outer - col,
                own.end - own.first, 0, (int)inner, aligned(x, 16) && width % 8 == 0, aligned(w, 16) && cols % 8 == 0};
            result.add<T, true, transposed>(source, memory);
        }
        result.store(out + first * outer + col, outer, own.end - own.first, outer - col, false, memory);
    }
}

// Slices of the rows of an expert, in their order.
template <class T> struct ExpertSlices {
    const T *x, *y;
    const int* counts;
    const Grouped& of;
    i64 rows, cols, row, col, expert, region, regions, run;
    // Of thirty-two runs: those of the expert that are left; where the next one begins; where they are.
    u32 left;
    int behind, start, end, next, last;
    bool wide_x, wide_y;

    __device__ __forceinline__ bool fetch(char* to) {
        while (next >= last) {
            if (!left && !more()) return false;
            int lane = __ffs((int)left) - 1;
            left &= left - 1;
            next = __shfl_sync(0xffffffffu, start, lane), last = __shfl_sync(0xffffffffu, end, lane);
        }
        i64 at = region * of.room + next;
        Slice<T, false>::fetch(to, x + at * rows + row, rows, rows - row, last - next, wide_x);
        Slice<T, false>::fetch(to + SLICE_BYTES, y + at * cols + col, cols, cols - col, last - next, wide_y);
        next += DEPTH;
        return true;
    }

    // Looks for runs of the expert, in this region or a later one.
    __device__ __forceinline__ bool more() {
        for (; region < regions; region++, run = 0, behind = 0) {
            while (run < of.runs && of.holds(region)) {
                Runs runs(of, counts, region, run, behind);
                bool own = (run + threadIdx.x % 32) % of.experts == expert && runs.end > runs.start;
                left = __ballot_sync(0xffffffffu, own);
                start = runs.start, end = runs.end;
                run += 32;
                if (left) return true;
            }
        }
        return false;
    }
};

template <class T, class C>
__global__ void __launch_bounds__(TILE_THREADS, 2)
tensor_matrices(const T* x, const T* y, const int* counts, C* out, Grouped of, i64 rows, i64 cols, i64 add) {
    extern __shared__ double shared[];
    char* memory = (char*)shared;
    i64 columns = (cols + SIDE - 1) / SIDE, row = blockIdx.x / columns * SIDE, col = blockIdx.x % columns * SIDE;
    i64 all = of.regions / of.of_part * of.experts;
    for (i64 expert = blockIdx.y; expert < all; expert += gridDim.y) {
        i64 part = expert / of.experts;
        ExpertSlices<T> source = {x, y, counts, of, rows, cols, row, col, expert % of.experts, part * of.of_part,
                                  (part + 1) * of.of_part, 0, 0, 0, 0, 0, 0, 0, aligned(x, 16) && rows % 8 == 0,
                                  aligned(y, 16) && cols % 8 == 0};
        TensorTile result;
        result.clear();
        result.add<T, false, false>(source, memory);
        result.store(out + (expert * rows + row) * cols + col, cols, rows - row, cols - col, add != 0, memory);
    }
}
