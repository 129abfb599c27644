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

// Norms of whole rows without padding: a warp for each row, which stays in its registers as P times 16
// bytes of each lane.
enum { NORM_WARPS = 4 };

template <class T, int KIND, int P>
__global__ void __launch_bounds__(32 * NORM_WARPS) norm_rows(Operands o, Rows rows) {
    typedef typename Of<T>::Acc A;
    const int V = Wide<T>::N;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const T *gain = (const T*)o.in[1], *bias = (const T*)o.in[2];
    const int width = (int)rows.width;
    for (i64 row = (i64)blockIdx.x * NORM_WARPS + warp; row < rows.count; row += (i64)gridDim.x * NORM_WARPS) {
        const T* x = (const T*)o.in[0] + row * width;
        T* y = (T*)o.out[0] + row * width;
        Wide<T> a[P];
#pragma unroll
        for (int c = 0; c < P; c++) {
            int i = (c * 32 + lane) * V;
            if (i < width) a[c] = *(const Wide<T>*)(x + i);
        }
        A mean = A(0), sum = A(0);
        if (KIND == LAYER) {
#pragma unroll
            for (int c = 0; c < P; c++) {
                if ((c * 32 + lane) * V >= width) continue;
#pragma unroll
                for (int e = 0; e < V; e++) mean += a[c].at(e);
            }
            mean = warp_reduce(mean, Sum()) / A(width);
        }
#pragma unroll
        for (int c = 0; c < P; c++) {
            if ((c * 32 + lane) * V >= width) continue;
#pragma unroll
            for (int e = 0; e < V; e++) {
                A v = a[c].at(e) - mean;
                sum = fma(v, v, sum);
            }
        }
        A rstd = A(1) / sqrt_of(warp_reduce(sum, Sum()) / A(width) + A(rows.eps));
#pragma unroll
        for (int c = 0; c < P; c++) {
            int i = (c * 32 + lane) * V;
            if (i >= width) continue;
            Wide<T> g = *(const Wide<T>*)(gain + i), b = g;
            if (KIND == LAYER) b = *(const Wide<T>*)(bias + i);
            A v[V];
#pragma unroll
            for (int e = 0; e < V; e++) {
                v[e] = (a[c].at(e) - mean) * rstd * g.at(e);
                if (KIND == LAYER) v[e] += b.at(e);
            }
            g.put(v);
            *(Wide<T>*)(y + i) = g;
        }
        if (lane == 0) {
            if (KIND == LAYER) ((A*)o.out[1])[row] = mean;
            ((A*)o.out[KIND == LAYER ? 2 : 1])[row] = rstd;
        }
    }
}

// Their gradients, added to `past` if there is one: a block for each row, 16 bytes of a thread, which loads
// the next row while it works on this one. Each thread sums its columns' shares of the gradients of gain
// and bias over the rows of its block, which are a part.
template <class T, int KIND>
__global__ void norm_rows_grad(Operands o, Rows rows, const T* past, i64 add, typename Of<T>::Acc* sums) {
    typedef typename Of<T>::Acc A;
    const int V = Wide<T>::N, vectors = KIND == LAYER_GRAD ? 2 : 1;
    __shared__ A of_warps[2][2][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, turn = 0;
    const int width = (int)rows.width, column = threadIdx.x * V;
    const T *x = (const T*)o.in[0] + column, *dy = (const T*)o.in[KIND == LAYER_GRAD ? 4 : 3] + column;
    const A *means = (const A*)o.in[2], *rstds = (const A*)o.in[KIND == LAYER_GRAD ? 3 : 2];
    T* dx = (T*)o.out[0] + column;
    const Wide<T> gain = *(const Wide<T>*)((const T*)o.in[1] + column);
    A of_gain[V], of_bias[V];
#pragma unroll
    for (int e = 0; e < V; e++) of_gain[e] = of_bias[e] = A(0);
    i64 row = blockIdx.x;
    Wide<T> a = *(const Wide<T>*)(x + row * width), d = *(const Wide<T>*)(dy + row * width), p = a;
    if (past) p = *(const Wide<T>*)(past + column + row * width);
    A mean = KIND == LAYER_GRAD ? means[row] : A(0), rstd = rstds[row];
    while (row < rows.count) {
        i64 next = row + gridDim.x, then = next < rows.count ? next : row;
        Wide<T> a1 = *(const Wide<T>*)(x + then * width), d1 = *(const Wide<T>*)(dy + then * width), p1 = a1;
        if (past) p1 = *(const Wide<T>*)(past + column + then * width);
        A mean1 = KIND == LAYER_GRAD ? means[then] : A(0), rstd1 = rstds[then];
        A flat = A(0), along = A(0), unit[V];
#pragma unroll
        for (int e = 0; e < V; e++) {
            A v = d.at(e), s = v * gain.at(e);
            unit[e] = (a.at(e) - mean) * rstd;
            if (KIND == LAYER_GRAD) {
                flat += s;
                of_bias[e] += v;
            }
            along = fma(unit[e], s, along);
            of_gain[e] = fma(v, unit[e], of_gain[e]);
        }
        along = warp_reduce(along, Sum());
        if (KIND == LAYER_GRAD) flat = warp_reduce(flat, Sum());
        if (lane == 0) {
            of_warps[turn][0][warp] = along;
            of_warps[turn][1][warp] = flat;
        }
        __syncthreads();
        along = flat = A(0);
        for (int w = 0; w < warps; w++) {
            along += of_warps[turn][0][w];
            if (KIND == LAYER_GRAD) flat += of_warps[turn][1][w];
        }
        along /= A(width);
        flat /= A(width);
        A y[V];
#pragma unroll
        for (int e = 0; e < V; e++) y[e] = rstd * (d.at(e) * gain.at(e) - flat - unit[e] * along);
        a.put(y);
        // Each sum is rounded, as if it were computed alone.
        if (past) {
#pragma unroll
            for (int e = 0; e < V; e++) y[e] = p.at(e) + a.at(e);
            a.put(y);
        }
        if (add) {
            p = *(const Wide<T>*)(dx + row * width);
#pragma unroll
            for (int e = 0; e < V; e++) y[e] = p.at(e) + a.at(e);
            a.put(y);
        }
        *(Wide<T>*)(dx + row * width) = a;
        a = a1, d = d1, p = p1, mean = mean1, rstd = rstd1, row = next, turn ^= 1;
    }
    A* own = sums + (i64)blockIdx.x * vectors * width + column;
#pragma unroll
    for (int e = 0; e < V; e++) {
        own[e] = of_gain[e];
        if (KIND == LAYER_GRAD) own[width + e] = of_bias[e];
    }
}
