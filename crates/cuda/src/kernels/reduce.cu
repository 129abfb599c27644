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

template <class T> struct Longer { typedef double Of; };
template <> struct Longer<bf16> { typedef float Of; };
template <> struct Longer<half> { typedef float Of; };

// Sums of a warp's rows, of 32 times V columns: the block adds its eight warps in their order as its part.
template <int KIND, int V, class A>
__device__ void store_part(const A* total, double* partial, i64 columns) {
    __shared__ double of_warps[8][V][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int e = 0; e < V; e++) of_warps[warp][e][lane] = (double)total[e];
    __syncthreads();
    int e = threadIdx.x % V, from = threadIdx.x / V;
    i64 column = ((i64)blockIdx.x * 32 + from) * V + e;
    if (from < 32 && column < columns) {
        double all = of_warps[0][e][from];
        for (int w = 1; w < 8; w++) all = joined<KIND>(all, of_warps[w][e][from]);
        partial[(i64)blockIdx.y * columns + column] = all;
    }
}

// The same where the results are the columns of rows that lie one after the other: V columns of a thread
// at a time; eight rows of a part side by side.
template <class T, int KIND, int V>
__global__ void __launch_bounds__(256, 4) reduce_columns(const T* x, double* partial, i64 rows, i64 columns, i64 parts) {
    // Few rows of a thread are exact enough in the type that 16 bits are computed in.
    typedef typename Longer<T>::Of A;
    i64 column = ((i64)blockIdx.x * 32 + threadIdx.x % 32) * V;
    A total[V];
    for (int e = 0; e < V; e++) total[e] = KIND == LARGEST ? -infinity<A>() : A(0);
    if (column < columns) {
#pragma unroll 4
        for (i64 row = (i64)blockIdx.y * 8 + threadIdx.x / 32; row < rows; row += parts * 8) {
            Wide<T> a = *(const Wide<T>*)(x + row * columns + column);
#pragma unroll
            for (int e = 0; e < V; e++) {
                A v = (A)a.at(e);
                if (KIND == SQUARES) v = v * v;
                total[e] = KIND == LARGEST ? Larger()(total[e], v) : total[e] + v;
            }
        }
    }
    store_part<KIND, V>(total, partial, columns);
}

// The same where there is one result of elements that lie one after the other: a block for each part.
template <class T, int KIND, int V>
__global__ void reduce_flat(const T* x, double* partial, i64 count) {
    double total[2] = {KIND == LARGEST ? -infinity<double>() : 0.0, KIND == LARGEST ? -infinity<double>() : 0.0};
    i64 packs = aligned(x, sizeof(T) * V) ? count / V : 0;
#pragma unroll 4
    for (i64 i = (i64)thread_index(); i < packs; i += (i64)thread_count()) {
        Pack<T, V> a = *(const Pack<T, V>*)(x + i * V);
#pragma unroll
        for (int e = 0; e < V; e++) {
            double v = (double)load(a.at[e]);
            total[e % 2] = joined<KIND>(total[e % 2], KIND == SQUARES ? v * v : v);
        }
    }
    for (i64 i = packs * V + (i64)thread_index(); i < count; i += (i64)thread_count()) {
        double v = (double)load(x[i]);
        total[0] = joined<KIND>(total[0], KIND == SQUARES ? v * v : v);
    }
    double all = joined<KIND>(total[0], total[1]);
    all = KIND == LARGEST ? block_reduce(all, Larger()) : block_reduce(all, Sum());
    if (threadIdx.x == 0) partial[blockIdx.x] = all;
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
#pragma unroll 4
            for (i64 part = warp; part < parts; part += 8)
                total = joined<KIND>(total, partial[part * results + result]);
        of_warps[warp][lane] = total;
        __syncthreads();
        if (warp > 0 || result >= results) return;
        for (int w = 1; w < 8; w++) total = joined<KIND>(total, of_warps[w][lane]);
    }
    out[result] = Store<C>::of(add ? A(load(out[result])) + A(total) : A(total));
}
