// Norms, softmax and cross-entropy: a block for each row.
//
// A row is reduced to a few numbers over its valid elements, and then finished. Where ranks hold
// parts of a row, `measure` stores the numbers of this rank's part, the ranks gather them, and
// `finish` merges all parts in their order, so that every rank finds the same bits.

enum { RMS, LAYER, SOFTMAX, SOFTMAX_GRAD, ENTROPY, ENTROPY_GRAD, RMS_GRAD, LAYER_GRAD };

struct Rows {
    // Elements of a row here, those that are valid, and the valid ones on all ranks.
    i64 width, valid, total;
    // The first class that a part of a row of logits holds.
    i64 first;
    // How many parts were gathered (0: rows are whole), and the number of numbers of each.
    i64 parts, own, numbers;
    double eps;
    // The rows, without the last dim.
    Extents extents;
    i64 count;
};

template <class A> struct Numbers {
    A a, b, c;
};

// The operands and results, in the order of the op.
struct Operands {
    const void* in[5];
    void* out[3];
};

template <class T, int KIND>
__device__ Numbers<typename Of<T>::Acc> measured(const Operands& o, const Rows& rows, i64 row) {
    typedef typename Of<T>::Acc A;
    const T* x = (const T*)o.in[0] + row * rows.width;
    Numbers<A> n = {A(0), A(0), A(0)};
    if (KIND == RMS) {
        for (i64 i = threadIdx.x; i < rows.valid; i += blockDim.x) {
            A v = load(x[i]);
            n.a = fma(v, v, n.a);
        }
        n.a = block_reduce(n.a, Sum());
    } else if (KIND == LAYER) {
        for (i64 i = threadIdx.x; i < rows.valid; i += blockDim.x) n.a += load(x[i]);
        n.a = block_reduce(n.a, Sum());
        n.a = rows.valid > 0 ? n.a / A(rows.valid) : A(0);
        for (i64 i = threadIdx.x; i < rows.valid; i += blockDim.x) {
            A v = load(x[i]) - n.a;
            n.b = fma(v, v, n.b);
        }
        n.b = block_reduce(n.b, Sum());
    } else if (KIND == SOFTMAX || KIND == ENTROPY) {
        n.a = -infinity<A>();
        for (i64 i = threadIdx.x; i < rows.valid; i += blockDim.x) n.a = Larger()(n.a, A(load(x[i])));
        n.a = block_reduce(n.a, Larger());
        if (n.a != -infinity<A>())
            for (i64 i = threadIdx.x; i < rows.valid; i += blockDim.x) n.b += exp_of(load(x[i]) - n.a);
        n.b = block_reduce(n.b, Sum());
        if (KIND == ENTROPY) {
            i64 target = ((const int*)o.in[1])[row] - rows.first;
            if (((const int*)o.in[1])[row] >= 0 && target >= 0 && target < rows.valid) n.c = load(x[target]);
        }
    } else if (KIND == SOFTMAX_GRAD) {
        const T* dy = (const T*)o.in[1] + row * rows.width;
        for (i64 i = threadIdx.x; i < rows.valid; i += blockDim.x) n.a = fma(A(load(x[i])), A(load(dy[i])), n.a);
        n.a = block_reduce(n.a, Sum());
    } else if (KIND == RMS_GRAD) {
        const T *gain = (const T*)o.in[1], *dy = (const T*)o.in[3] + row * rows.width;
        for (i64 i = threadIdx.x; i < rows.valid; i += blockDim.x)
            n.a = fma(A(load(x[i])), load(dy[i]) * load(gain[i]), n.a);
        n.a = block_reduce(n.a, Sum());
    } else if (KIND == LAYER_GRAD) {
        const T *gain = (const T*)o.in[1], *dy = (const T*)o.in[4] + row * rows.width;
        A mean = ((const A*)o.in[2])[row], rstd = ((const A*)o.in[3])[row];
        for (i64 i = threadIdx.x; i < rows.valid; i += blockDim.x) {
            A s = load(dy[i]) * load(gain[i]);
            n.a += s;
            n.b = fma((load(x[i]) - mean) * rstd, s, n.b);
        }
        n.a = block_reduce(n.a, Sum());
        n.b = block_reduce(n.b, Sum());
    }
    return n;
}

// The numbers of two parts of a row, of n and m elements, as those of both.
template <int KIND, class A>
__device__ Numbers<A> merged(Numbers<A> x, i64 n, Numbers<A> y, i64 m) {
    if (KIND == LAYER) {
        if (m == 0) return x;
        A share = A((double)m / (double)(n + m)), apart = y.a - x.a;
        Numbers<A> both = {x.a + apart * share, x.b + y.b + apart * apart * A(n) * share, A(0)};
        return both;
    }
    if (KIND == SOFTMAX || KIND == ENTROPY) {
        A top = Larger()(x.a, y.a);
        A left = x.b == A(0) ? A(0) : x.b * exp_of(x.a - top);
        A right = y.b == A(0) ? A(0) : y.b * exp_of(y.a - top);
        Numbers<A> both = {top, left + right, x.c + y.c};
        return both;
    }
    Numbers<A> both = {x.a + y.a, x.b + y.b, x.c + y.c};
    return both;
}

// The numbers of a whole row: measured here, or merged from all parts.
template <class T, int KIND>
__device__ Numbers<typename Of<T>::Acc> numbers_of(const Operands& o, const Rows& rows, i64 row,
                                                   const typename Of<T>::Acc* gathered, const i64* counts) {
    typedef typename Of<T>::Acc A;
    if (KIND == ENTROPY_GRAD) {
        Numbers<A> none = {A(0), A(0), A(0)};
        return none;
    }
    if (rows.parts == 0) return measured<T, KIND>(o, rows, row);
    Numbers<A> all = {A(0), A(0), A(0)};
    i64 seen = 0;
    for (i64 part = 0; part < rows.parts; part++) {
        const A* at = gathered + (part * rows.count + row) * rows.numbers;
        Numbers<A> one = {at[0], rows.numbers > 1 ? at[1] : A(0), rows.numbers > 2 ? at[2] : A(0)};
        all = part == 0 ? one : merged<KIND>(all, seen, one, counts[part]);
        seen += counts[part];
    }
    return all;
}

// Stores the numbers of this rank's part of every row; of padding, numbers that change nothing.
template <class T, int KIND>
__global__ void measure(Operands o, Rows rows, typename Of<T>::Acc* gathered) {
    typedef typename Of<T>::Acc A;
    for (i64 row = blockIdx.x; row < rows.count; row += gridDim.x) {
        Numbers<A> n = {A(0), A(0), A(0)};
        if (rows.extents.holds(row)) n = measured<T, KIND>(o, rows, row);
        A* at = gathered + (rows.own * rows.count + row) * rows.numbers;
        if (threadIdx.x == 0) {
            at[0] = n.a;
            if (rows.numbers > 1) at[1] = n.b;
            if (rows.numbers > 2) at[2] = n.c;
        }
    }
}

// Whether a target names no class; negative ones are ignored.
__device__ __forceinline__ bool refuses(int target, const Rows& rows, Fault* fault, i64 site) {
    if (target < rows.total) return false;
    if (threadIdx.x == 0) report(fault, site, target, rows.total);
    return true;
}

template <class T, int KIND>
__global__ void finish(Operands o, Rows rows, const typename Of<T>::Acc* gathered, const i64* counts,
                       Fault* fault, i64 site) {
    typedef typename Of<T>::Acc A;
    for (i64 row = blockIdx.x; row < rows.count; row += gridDim.x) {
        const T* x = (const T*)o.in[0] + row * rows.width;
        T* y = (T*)o.out[0] + row * rows.width;
        bool valid = rows.extents.holds(row);
        i64 width = valid ? rows.valid : 0;
        Numbers<A> n = {A(0), A(0), A(0)};
        if (valid) n = numbers_of<T, KIND>(o, rows, row, gathered, counts);
        // Results may lie over operands: what was measured must be read by all threads before.
        __syncthreads();
        if (KIND == RMS || KIND == LAYER) {
            A mean = KIND == LAYER ? n.a : A(0);
            A rstd = A(1) / sqrt_of((KIND == LAYER ? n.b : n.a) / A(rows.total) + A(rows.eps));
            const T *gain = (const T*)o.in[1], *bias = (const T*)o.in[2];
            for (i64 i = threadIdx.x; i < rows.width; i += blockDim.x) {
                A v = A(0);
                if (i < width) {
                    v = (load(x[i]) - mean) * rstd * load(gain[i]);
                    if (KIND == LAYER) v += load(bias[i]);
                }
                y[i] = Store<T>::of(v);
            }
            if (threadIdx.x == 0) {
                if (KIND == LAYER) ((A*)o.out[1])[row] = valid ? mean : A(0);
                ((A*)o.out[KIND == LAYER ? 2 : 1])[row] = valid ? rstd : A(0);
            }
        } else if (KIND == SOFTMAX) {
            A inverse = A(1) / n.b;
            for (i64 i = threadIdx.x; i < rows.width; i += blockDim.x)
                y[i] = Store<T>::of(i < width ? exp_of(load(x[i]) - n.a) * inverse : A(0));
        } else if (KIND == SOFTMAX_GRAD) {
            const T* dy = (const T*)o.in[1] + row * rows.width;
            for (i64 i = threadIdx.x; i < rows.width; i += blockDim.x)
                y[i] = Store<T>::of(i < width ? load(x[i]) * (load(dy[i]) - n.a) : A(0));
        } else if (KIND == ENTROPY) {
            int target = valid ? ((const int*)o.in[1])[row] : -1;
            bool bad = refuses(target, rows, fault, site);
            A total = n.b == A(0) ? n.a : n.a + log_of(n.b);
            if (threadIdx.x == 0) {
                ((A*)o.out[0])[row] = target < 0 || bad ? A(0) : total - n.c;
                ((A*)o.out[1])[row] = valid ? total : A(0);
            }
        } else if (KIND == ENTROPY_GRAD) {
            int target = valid ? ((const int*)o.in[1])[row] : -1;
            bool bad = refuses(target, rows, fault, site);
            bool counts_here = valid && target >= 0 && !bad;
            A total = valid ? ((const A*)o.in[2])[row] : A(0), d = valid ? ((const A*)o.in[3])[row] : A(0);
            i64 hit = (i64)target - rows.first;
            for (i64 i = threadIdx.x; i < rows.width; i += blockDim.x) {
                A v = A(0);
                if (counts_here && i < width) v = (exp_of(load(x[i]) - total) - (i == hit ? A(1) : A(0))) * d;
                y[i] = Store<T>::of(v);
            }
        }
        __syncthreads();
    }
}

// dx of a norm, and the sums over this block's rows that the gradients of gain and bias consist of.
// Block `p` takes the rows p, p + blocks and so on, and writes part `p` of the sums.
template <class T, int KIND>
__global__ void finish_norm_grad(Operands o, Rows rows, const typename Of<T>::Acc* gathered, const i64* counts,
                                 const T* past, i64 add, typename Of<T>::Acc* sums) {
    typedef typename Of<T>::Acc A;
    extern __shared__ double shared[];
    A* own = (A*)shared;
    const int vectors = KIND == LAYER_GRAD ? 2 : 1;
    for (i64 i = threadIdx.x; i < vectors * rows.width; i += blockDim.x) own[i] = A(0);
    for (i64 row = blockIdx.x; row < rows.count; row += gridDim.x) {
        const T *x = (const T*)o.in[0] + row * rows.width, *gain = (const T*)o.in[1];
        const T* dy = (const T*)o.in[KIND == LAYER_GRAD ? 4 : 3] + row * rows.width;
        T* dx = (T*)o.out[0] + row * rows.width;
        bool valid = rows.extents.holds(row);
        Numbers<A> n = {A(0), A(0), A(0)};
        A mean = A(0), rstd = A(0);
        if (valid) {
            n = numbers_of<T, KIND>(o, rows, row, gathered, counts);
            mean = KIND == LAYER_GRAD ? ((const A*)o.in[2])[row] : A(0);
            rstd = ((const A*)o.in[KIND == LAYER_GRAD ? 3 : 2])[row];
        }
        __syncthreads();
        A flat = KIND == LAYER_GRAD ? n.a / A(rows.total) : A(0);
        A along = KIND == LAYER_GRAD ? n.b / A(rows.total) : rstd * n.a / A(rows.total);
        for (i64 i = threadIdx.x; i < rows.width; i += blockDim.x) {
            A v = A(0);
            if (valid && i < rows.valid) {
                A d = load(dy[i]), unit = (load(x[i]) - mean) * rstd;
                v = rstd * (d * load(gain[i]) - flat - unit * along);
                own[i] = fma(d, unit, own[i]);
                if (KIND == LAYER_GRAD) own[rows.width + i] += d;
            }
            T y = Store<T>::of(v);
            if (past) y = Store<T>::of(load(past[row * rows.width + i]) + load(y));
            dx[i] = add ? Store<T>::of(load(dx[i]) + load(y)) : y;
        }
        __syncthreads();
    }
    for (i64 i = threadIdx.x; i < vectors * rows.width; i += blockDim.x)
        sums[(i64)blockIdx.x * vectors * rows.width + i] = own[i];
}

// The sums of the parts, in their order: one vector of each part for each row of blocks.
template <class A, class C>
__global__ void sum_parts(const A* sums, C* first, C* second, i64 parts, i64 width, i64 valid, i64 add, i64 add2) {
    // 32 columns for a block, whose warps take every so many parts; then the warps, in their order.
    __shared__ A of_warps[32][33];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    i64 i = (i64)blockIdx.x * 32 + lane, vector = blockIdx.y, stride = (i64)gridDim.y * width;
    A total = A(0);
    if (i < valid) {
#pragma unroll 4
        for (i64 part = warp; part < parts; part += warps) total += sums[part * stride + vector * width + i];
    }
    of_warps[warp][lane] = total;
    __syncthreads();
    if (warp > 0 || i >= width) return;
    for (int w = 1; w < warps; w++) total += of_warps[w][lane];
    C* out = vector ? second : first;
    out[i] = Store<C>::of((vector ? add2 : add) ? A(load(out[i])) + total : total);
}
