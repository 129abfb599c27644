// Sums and maxima over dims, in two steps of fixed order: parts of the reduced elements, then parts.

enum { TOTAL, LARGEST, SQUARES };

// A walk over the dims that stay and one over the reduced ones: extents and strides in the operand.
struct Reduction {
    i64 kept, reduced;
    i64 results, elements;
    i64 kept_size[8], kept_stride[8];
    i64 reduced_size[8], reduced_stride[8];
};

__device__ __forceinline__ i64 place(u64 index, i64 rank, const i64* size, const i64* stride) {
    i64 at = 0;
    for (int d = (int)rank - 1; d > 0; d--) {
        u64 next = index / (u64)size[d];
        at += (i64)(index - next * (u64)size[d]) * stride[d];
        index = next;
    }
    return rank > 0 ? at + (i64)index * stride[0] : at;
}

// Sums are taken in double precision, as on the CPU: long sums of squares lose nothing.
template <int KIND> __device__ __forceinline__ double joined(double a, double b) {
    if (KIND == LARGEST) return Larger()(a, b);
    return a + b;
}

// Part `p` of each result: elements p, p + parts and so on of those it reduces.
template <class T, int KIND>
__global__ void reduce_parts(const T* x, double* partial, Reduction r, i64 parts) {
    for (u64 i = thread_index(); i < (u64)(r.results * parts); i += thread_count()) {
        u64 part = i / (u64)r.results, result = i - part * (u64)r.results;
        i64 first = place(result, r.kept, r.kept_size, r.kept_stride);
        double total = KIND == LARGEST ? -infinity<double>() : 0.0;
        for (u64 k = part; k < (u64)r.elements; k += (u64)parts) {
            double v = (double)load(x[first + place(k, r.reduced, r.reduced_size, r.reduced_stride)]);
            total = joined<KIND>(total, KIND == SQUARES ? v * v : v);
        }
        partial[part * (u64)r.results + result] = total;
    }
}

// The same where the results are the columns of rows that lie one after the other: V columns of a
// thread at a time.
template <class T, int KIND, int V>
__global__ void reduce_columns(const T* x, double* partial, i64 rows, i64 columns, i64 parts) {
    i64 packs = columns / V;
    for (u64 i = thread_index(); i < (u64)(packs * parts); i += thread_count()) {
        i64 part = (i64)(i / (u64)packs), column = ((i64)i - part * packs) * V;
        double total[V];
        for (int e = 0; e < V; e++) total[e] = KIND == LARGEST ? -infinity<double>() : 0.0;
        for (i64 row = part; row < rows; row += parts) {
            Pack<T, V> a = *(const Pack<T, V>*)(x + row * columns + column);
            for (int e = 0; e < V; e++) {
                double v = (double)load(a.at[e]);
                total[e] = joined<KIND>(total[e], KIND == SQUARES ? v * v : v);
            }
        }
        for (int e = 0; e < V; e++) partial[part * columns + column + e] = total[e];
    }
}

template <class C, int KIND>
__global__ void reduce_finish(const double* partial, C* out, i64 results, i64 parts, i64 add) {
    typedef typename Of<C>::Acc A;
    // A block for each result if there are few; otherwise its warps take parts of 32 results in turn.
    bool few = results <= (i64)gridDim.x;
    __shared__ double of_warps[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 result = few ? (i64)blockIdx.x : (i64)blockIdx.x * 32 + lane;
    double total = KIND == LARGEST ? -infinity<double>() : 0.0;
    if (few) {
        for (i64 part = threadIdx.x; part < parts; part += blockDim.x)
            total = joined<KIND>(total, partial[part * results + result]);
        total = KIND == LARGEST ? block_reduce(total, Larger()) : block_reduce(total, Sum());
        if (threadIdx.x > 0) return;
    } else {
        if (result < results)
            for (i64 part = warp; part < parts; part += 8)
                total = joined<KIND>(total, partial[part * results + result]);
        of_warps[warp][lane] = total;
        __syncthreads();
        if (warp > 0 || result >= results) return;
        for (int w = 1; w < 8; w++) total = joined<KIND>(total, of_warps[w][lane]);
    }
    out[result] = Store<C>::of(add ? A(load(out[result])) + A(total) : A(total));
}
