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

// What the gradient of a norm at one element is, and what is added to it. Each sum is rounded, as if it were
// computed alone.
template <class T, class A>
__device__ __forceinline__ void store_norm_grad(T* dx, A* y, const Wide<T>& p, const T* past, i64 add) {
    const int V = Wide<T>::N;
    Wide<T> a;
    a.put(y);
    if (past) {
#pragma unroll
        for (int e = 0; e < V; e++) y[e] = p.at(e) + a.at(e);
        a.put(y);
    }
    if (add) {
        Wide<T> old = *(const Wide<T>*)dx;
#pragma unroll
        for (int e = 0; e < V; e++) y[e] = old.at(e) + a.at(e);
        a.put(y);
    }
    *(Wide<T>*)dx = a;
}

// Their gradients, added to `past` if there is one: a block for each row, 16 bytes of a thread, which loads
// the next row while it works on this one. Each thread sums its columns' shares of the gradients of gain
// and bias over the rows of its block, which are a part. A row has P times 32 threads; as many blocks run on
// a processor as the host launches for it.
template <class T, int KIND, int P>
__global__ void __launch_bounds__(32 * P, P <= 32 ? 32 / P : 1)
    norm_rows_grad(Operands o, Rows rows, const T* past, i64 add, typename Of<T>::Acc* sums) {
    typedef typename Of<T>::Acc A;
    const int V = Wide<T>::N, vectors = KIND == LAYER_GRAD ? 2 : 1;
    __shared__ A of_warps[2][2][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, turn = 0;
    const int width = 32 * P * V, column = threadIdx.x * V;
    const A share = A(1) / A(width);
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
        A flat = A(0), along = A(0), y[V];
#pragma unroll
        for (int e = 0; e < V; e++) {
            A v = d.at(e), s = v * gain.at(e), unit = (a.at(e) - mean) * rstd;
            if (KIND == LAYER_GRAD) {
                flat += s;
                of_bias[e] += v;
            }
            along = fma(unit, s, along);
            of_gain[e] = fma(v, unit, of_gain[e]);
        }
        along = warp_reduce(along, Sum());
        if (KIND == LAYER_GRAD) flat = warp_reduce(flat, Sum());
        if (lane == 0) {
            of_warps[turn][0][warp] = along;
            of_warps[turn][1][warp] = flat;
        }
        __syncthreads();
        along = flat = A(0);
#pragma unroll
        for (int w = 0; w < P; w++) {
            along += of_warps[turn][0][w];
            if (KIND == LAYER_GRAD) flat += of_warps[turn][1][w];
        }
        along *= share;
        flat *= share;
#pragma unroll
        for (int e = 0; e < V; e++)
            y[e] = rstd * (d.at(e) * gain.at(e) - flat - (a.at(e) - mean) * rstd * along);
        store_norm_grad(dx + row * width, y, p, past, add);
        a = a1, d = d1, p = p1, mean = mean1, rstd = rstd1, row = next, turn ^= 1;
    }
    A* own = sums + (i64)blockIdx.x * vectors * width + column;
#pragma unroll
    for (int e = 0; e < V; e++) {
        own[e] = of_gain[e];
        if (KIND == LAYER_GRAD) own[width + e] = of_bias[e];
    }
}

// The same for narrow rows: a warp for each, which stays in its registers. A block's warps add their shares of
// the gradients of gain and bias in their order.
template <class T, int KIND, int P>
__global__ void __launch_bounds__(32 * NORM_WARPS, 4)
    norm_narrow_grad(Operands o, Rows rows, const T* past, i64 add, typename Of<T>::Acc* sums) {
    typedef typename Of<T>::Acc A;
    const int V = Wide<T>::N, vectors = KIND == LAYER_GRAD ? 2 : 1, width = 32 * P * V;
    __shared__ A of_warps[NORM_WARPS][32 * P * Wide<T>::N];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const A share = A(1) / A(width);
    const T *x = (const T*)o.in[0], *gain = (const T*)o.in[1], *dy = (const T*)o.in[KIND == LAYER_GRAD ? 4 : 3];
    const A *means = (const A*)o.in[2], *rstds = (const A*)o.in[KIND == LAYER_GRAD ? 3 : 2];
    T* dx = (T*)o.out[0];
    A own[2][P * V];
#pragma unroll
    for (int i = 0; i < P * V; i++) own[0][i] = own[1][i] = A(0);
    for (i64 row = (i64)blockIdx.x * NORM_WARPS + warp; row < rows.count; row += (i64)gridDim.x * NORM_WARPS) {
        const i64 first = row * width + lane * V;
        Wide<T> a[P], d[P], p[P];
#pragma unroll
        for (int c = 0; c < P; c++) {
            const i64 at = first + c * 32 * V;
            a[c] = *(const Wide<T>*)(x + at);
            d[c] = *(const Wide<T>*)(dy + at);
            if (past) p[c] = *(const Wide<T>*)(past + at);
        }
        A mean = KIND == LAYER_GRAD ? means[row] : A(0), rstd = rstds[row], flat = A(0), along = A(0);
#pragma unroll
        for (int c = 0; c < P; c++) {
            Wide<T> g = *(const Wide<T>*)(gain + (c * 32 + lane) * V);
#pragma unroll
            for (int e = 0; e < V; e++) {
                A v = d[c].at(e), s = v * g.at(e), unit = (a[c].at(e) - mean) * rstd;
                if (KIND == LAYER_GRAD) {
                    flat += s;
                    own[1][c * V + e] += v;
                }
                along = fma(unit, s, along);
                own[0][c * V + e] = fma(v, unit, own[0][c * V + e]);
            }
        }
        along = warp_reduce(along, Sum()) * share;
        if (KIND == LAYER_GRAD) flat = warp_reduce(flat, Sum()) * share;
#pragma unroll
        for (int c = 0; c < P; c++) {
            Wide<T> g = *(const Wide<T>*)(gain + (c * 32 + lane) * V);
            A y[V];
#pragma unroll
            for (int e = 0; e < V; e++)
                y[e] = rstd * (d[c].at(e) * g.at(e) - flat - (a[c].at(e) - mean) * rstd * along);
            store_norm_grad(dx + first + c * 32 * V, y, p[c], past, add);
        }
    }
#pragma unroll
    for (int vector = 0; vector < vectors; vector++) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < P * V; i++) of_warps[warp][(i / V * 32 + lane) * V + i % V] = own[vector][i];
        __syncthreads();
        for (int i = threadIdx.x; i < width; i += 32 * NORM_WARPS) {
            A total = of_warps[0][i];
            for (int w = 1; w < NORM_WARPS; w++) total += of_warps[w][i];
            sums[((i64)blockIdx.x * vectors + vector) * width + i] = total;
        }
    }
}
