// What ranks that see each other's memory move: rows of bytes, and elements that are combined in the order of
// the ranks, with the bits of the transports of the host's memory.

// Where rows lie; strides are in bytes.
struct RankRows {
    char* base;
    i64 outer, row;

    __device__ __forceinline__ char* at(i64 group, i64 row_of_group) const {
        return base + group * outer + row_of_group * row;
    }
};

// Places of all ranks: sources in the order of the group, or targets with the rank's own first.
struct RankPlaces {
    RankRows at[64];
};

// How threads walk over rows: `lanes` neighbours (a power of two) take the elements of a row in turns.
struct RowWalk {
    i64 rows_in_all, rows, len, lanes;

    template <class F> __device__ __forceinline__ void each(F f) const {
        i64 lane = threadIdx.x & (lanes - 1), rows_at_once = blockDim.x / lanes;
        for (i64 r = blockIdx.x * rows_at_once + threadIdx.x / lanes; r < rows_in_all;
             r += gridDim.x * rows_at_once) {
            i64 group = rows == 1 ? r : r / rows;
            for (i64 at = blockIdx.y * lanes + lane; at < len; at += gridDim.y * lanes) {
                f(group, r - group * rows, at);
            }
        }
    }
};

struct alignas(16) Bytes16 {
    u64 low, high;
};

template <class U> __global__ void move_rows(RankRows from, RankRows to, RowWalk walk) {
    walk.each([&](i64 group, i64 row, i64 at) {
        ((U*)to.at(group, row))[at] = ((const U*)from.at(group, row))[at];
    });
}

// An element as it is combined, and back: whole numbers without a sign, so that they wrap.
template <class T> struct Combined {
    typedef typename Of<T>::Acc A;
    static __device__ __forceinline__ A from(T x) { return load(x); }
    static __device__ __forceinline__ T back(A x) { return Store<T>::of(x); }
};
template <> struct Combined<int> {
    typedef u32 A;
    static __device__ __forceinline__ u32 from(int x) { return (u32)x; }
    static __device__ __forceinline__ int back(u32 x) { return (int)x; }
};

// In this order: of a NaN and a number, the later one. Whole numbers wrap.
struct Added {
    template <class A> static __device__ __forceinline__ A of(A a, A b) { return a + b; }
};
struct Largest {
    template <class A> static __device__ __forceinline__ A of(A a, A b) {
        return larger(a, b) ? a : b;
    }
    static __device__ __forceinline__ bool larger(u32 a, u32 b) { return (int)a > (int)b; }
    static __device__ __forceinline__ bool larger(float a, float b) { return a > b; }
    static __device__ __forceinline__ bool larger(double a, double b) { return a > b; }
};

// N neighbours at once of every source, combined, into every target.
template <class T, class F, int N>
__global__ void combine(RankPlaces sources, RankPlaces targets, RowWalk walk, i64 given, i64 wanted, i64 accumulate) {
    typedef Combined<T> C;
    typedef typename C::A A;
    walk.each([&](i64 group, i64 row, i64 at) {
        A sum[N];
        Pack<T, N> pack = ((const Pack<T, N>*)sources.at[0].at(group, row))[at];
        for (int i = 0; i < N; i++) sum[i] = C::from(pack.at[i]);
        for (i64 s = 1; s < given; s++) {
            pack = ((const Pack<T, N>*)sources.at[s].at(group, row))[at];
            for (int i = 0; i < N; i++) sum[i] = F::of(sum[i], C::from(pack.at[i]));
        }
        if (accumulate) {
            pack = ((const Pack<T, N>*)targets.at[0].at(group, row))[at];
            for (int i = 0; i < N; i++) sum[i] = F::of(C::from(pack.at[i]), sum[i]);
        }
        for (int i = 0; i < N; i++) pack.at[i] = C::back(sum[i]);
        for (i64 t = 0; t < wanted; t++) ((Pack<T, N>*)targets.at[t].at(group, row))[at] = pack;
    });
}
