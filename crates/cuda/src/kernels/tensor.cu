// Tiles of products on tensor cores: factors of 16 bits, sums in f32. A block of threads has a tile of the result.
// Slices of both operands come to shared memory while earlier ones are multiplied.
//
// A warp does this with three instructions of GPUs of version 8.0; where a processor runs the kernels, functions of
// the same meaning stand in for them (tools/gpu/stand_in/kernel.h).

// The side of a tile; how much of the sum a slice has; how many slices are in shared memory; threads of a block, of
// which each warp has a quarter of the tile. All slices together are as large as a tile of f32.
enum { SIDE = 128, DEPTH = 32, SLICES = 4, TILE_THREADS = 128, SLICE_BYTES = 2 * SIDE * DEPTH };

// Copies 16 bytes to shared memory, later: the first `bytes` of them from memory, the others zeros.
__device__ __forceinline__ void copy_later(void* to, const void* from, int bytes) {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(bytes) : "memory");
#else
    stand_in::copy_later(to, from, bytes);
#endif
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void end_copies() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    stand_in::end_copies();
#endif
}

// Waits for all groups of this thread's copies but the last few.
template <int last> __device__ __forceinline__ void await_copies() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(last) : "memory");
#else
    stand_in::await_copies(last);
#endif
}

// Four matrices of 8 rows of 16 bytes: lane l has the address of row l % 8 of matrix l / 8. Of each it gets two
// neighbours of row l / 4; or, turned, of column l / 4.
template <bool turned> __device__ __forceinline__ void load_matrices(u32* to, const void* row) {
#ifdef __CUDA_ARCH__
    u32 at = (u32)__cvta_generic_to_shared(row);
    if (turned)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
#else
    stand_in::load_matrices(to, row, turned);
#endif
}

// Adds the product of 16 rows by 16 and 16 by 8 columns.
template <class T> __device__ __forceinline__ void multiply(float* sum, const u32* a, u32 b0, u32 b1);
#ifdef __CUDA_ARCH__
#define MULTIPLY(T, name)                                                                                         \
    template <> __device__ __forceinline__ void multiply<T>(float* sum, const u32* a, u32 b0, u32 b1) {           \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 "                                        \
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                     \
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                              \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                      \
    }
MULTIPLY(bf16, "bf16")
MULTIPLY(half, "f16")
#undef MULTIPLY
#else
template <class T> __device__ __forceinline__ void multiply(float* sum, const u32* a, u32 b0, u32 b1) {
    stand_in::multiply(sum, a, b0, b1, [](u16 bits) {
        T x = {bits};
        return load(x);
    });
}
#endif

// A slice of an operand in shared memory. What lies along a row of memory, in chunks of 16 bytes, are elements of the
// sum (`along`) or of the tile's side. Chunks of rows that a warp reads at once are in different banks.
template <class T, bool along> struct Slice {
    static __device__ __forceinline__ int place(int row, int chunk) {
        return 16 * (along ? row * (DEPTH / 8) + (chunk ^ (row >> 1 & 3)) : row * (SIDE / 8) + (chunk ^ (row & 7)));
    }

    // Brings it from memory, whose rows are `apart` elements long: `sides` by `depths` elements of it, and zeros for
    // the rest. Unless everything is `wide`, in multiples of 16 bytes, element by element.
    static __device__ __forceinline__ void fetch(char* to, const T* from, i64 apart, i64 sides, i64 depths, bool wide) {
        if (wide) {
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                Chunk own(i, sides, depths);
                copy_later(to + own.at, own.count ? from + own.row * apart + own.first : from, own.count * 2);
            }
            return;
        }
        for (int i = 0; i < CHUNKS; i++) {
            Chunk own(i, sides, depths);
            Pack<T, 8> found;
            for (int e = 0; e < 8; e++)
                found.at[e].bits = e < own.count ? from[own.row * apart + own.first + e].bits : (u16)0;
            *(Pack<T, 8>*)(to + own.at) = found;
        }
    }

    // Of the chunks of a slice, those of a thread: the row, the first element, how many there are in memory, and where
    // they come to.
    enum { CHUNKS = SIDE * DEPTH / 8 / TILE_THREADS };
    struct Chunk {
        int row, first, count, at;

        __device__ __forceinline__ Chunk(int i, i64 sides, i64 depths) {
            const int chunks = (along ? DEPTH : SIDE) / 8;
            int n = (int)threadIdx.x + i * TILE_THREADS, chunk = n % chunks;
            row = n / chunks, first = chunk * 8, at = place(row, chunk);
            i64 left = (along ? depths : sides) - first;
            count = row >= (along ? sides : depths) || left < 0 ? 0 : (left < 8 ? (int)left : 8);
        }
    };

    // What a warp multiplies of it: 16 of the side and 16 of the sum. Of the left operand, pairs of sides come together;
    // of the right one, pairs of the sum.
    template <bool left> static __device__ __forceinline__ void part(u32* to, const char* from, int side, int depth) {
        int lane = threadIdx.x % 32, one = lane / 8 % 2 * 8, two = lane / 16 * 8;
        int s = side + (left ? one : two), d = depth + (left ? two : one);
        load_matrices<!along>(to, from + (along ? place(s + lane % 8, d / 8) : place(d + lane % 8, s / 8)));
    }
};

// A tile of sums: a warp has 64 by 64 of it, in pieces of 16 by 8.
struct TensorTile {
    float sum[4][8][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4 * 8 * 4; i++) sum[i / 32][i / 4 % 8][i % 4] = 0.0f;
    }

    __device__ __forceinline__ static int row() { return (int)threadIdx.x / 64 * 64; }
    __device__ __forceinline__ static int column() { return (int)threadIdx.x / 32 % 2 * 64; }

    // Adds the products of all slices that `source` fetches into shared memory, one after the other.
    template <class T, bool a_along, bool b_along, class Source>
    __device__ __forceinline__ void add(Source& source, char* memory) {
        int fetched = 0, multiplied = 0;
        for (int ahead = 0; ahead < SLICES - 1; ahead++) {
            fetched += source.fetch(slice(memory, fetched));
            end_copies();
        }
        while (multiplied < fetched) {
            await_copies<SLICES - 2>();
            // The slice is there for all threads, and all are done with the one whose place is taken next.
            __syncthreads();
            fetched += source.fetch(slice(memory, fetched));
            end_copies();
            const char* a = slice(memory, multiplied++);
#pragma unroll
            for (int depth = 0; depth < DEPTH; depth += 16) {
                u32 left[4][4], right[4][4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    Slice<T, a_along>::template part<true>(left[i], a, row() + i * 16, depth);
                    Slice<T, b_along>::template part<false>(right[i], a + SLICE_BYTES, column() + i * 16, depth);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        multiply<T>(sum[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
        await_copies<0>();
        __syncthreads();
    }

    // Slices of both operands.
    static __device__ __forceinline__ char* slice(char* memory, int number) {
        return memory + number % SLICES * 2 * SLICE_BYTES;
    }

    // Writes `rows` by `columns` of it, through shared memory, so that neighbours are written together; or adds it.
    template <class C>
    __device__ __forceinline__ void store(C* to, i64 apart, i64 rows, i64 columns, bool adds, char* memory) const {
        float* all = (float*)memory;
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4 * 8 * 2; i++) {
            int r = row() + i / 16 * 16 + i % 2 * 8 + lane / 4, c = column() + i / 2 % 8 * 8 + lane % 4 * 2;
            float* at = all + place(r, c);
            at[0] = sum[i / 16][i / 2 % 8][i % 2 * 2], at[1] = sum[i / 16][i / 2 % 8][i % 2 * 2 + 1];
        }
        __syncthreads();
        enum { N = Wide<C>::N };
        bool wide = aligned(to, 16) && apart % N == 0;
        for (int n = threadIdx.x; n < SIDE * SIDE / N; n += TILE_THREADS) {
            int r = n / (SIDE / N), c = n % (SIDE / N) * N;
            if (r >= rows || c >= columns) continue;
            C* at = to + r * apart + c;
            const float* from = all + place(r, c);
            if (wide && c + N <= columns) {
                Wide<C> old, made;
                if (adds) old = *(const Wide<C>*)at;
                float values[N];
#pragma unroll
                for (int e = 0; e < N; e++) values[e] = adds ? from[e] + old.at(e) : from[e];
                made.put(values);
                store_wide(at, made);
            } else {
                for (int e = 0; e < N && c + e < columns; e++)
                    at[e] = Store<C>::of(adds ? from[e] + load(at[e]) : from[e]);
            }
        }
        __syncthreads();
    }

    // Eight neighbours lie together, and those of rows that are written at once in different banks.
    static __device__ __forceinline__ int place(int row, int column) {
        return row * SIDE + ((column / 8 ^ (row & 3)) * 8 + column % 8);
    }
};
