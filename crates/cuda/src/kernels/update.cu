// Updates of flat units: Adam, AdamW and SGD as PyTorch defines them, Lion and LAMB's direction, and ops over the members of a unit.

struct Decay {
    double rate;
    // The number in the whole unit of this rank's first element; `decays` of every `block` decay.
    i64 offset, decays, block;

    // Where in its block an element lies.
    __device__ __forceinline__ u64 within(u64 i) const {
        if (decays >= block) return 0;
        u64 element = (u64)offset + i;
        return (element | (u64)block) >> 32 ? element % (u64)block : (u32)element % (u32)block;
    }

    __device__ __forceinline__ bool decays_at(u64 within) const {
        return decays >= block || (within >= (u64)block ? within - (u64)block : within) < (u64)decays;
    }

    __device__ __forceinline__ double at(u64 i) const { return decays_at(within(i)) ? rate : 0.0; }
};

// Where a step must change nothing, `go` is there and zero.
template <class A>
__device__ __forceinline__ bool stops(const A* go) {
    return go && *go == A(0);
}

// Weights as updates see them: masters themselves or, in bf16, upper halves of masters whose lower halves lie
// beside them (crates/ir/src/halves.rs).
template <class W> struct Halves {
    enum { ARE = 0 };
    static __device__ __forceinline__ W join(W w, u16) { return w; }
    static __device__ __forceinline__ void split(W x, W& w, u16&) { w = x; }
};
template <> struct Halves<bf16> {
    enum { ARE = 1 };
    static __device__ __forceinline__ float join(bf16 w, u16 low) {
        return __uint_as_float((u32)(u16)(w.bits - (low >> 15)) << 16 | low);
    }
    static __device__ __forceinline__ void split(float x, bf16& w, u16& low) {
        split_halves(x, w.bits, low);
    }
};

// The constants of a step of AdamW.
template <class A> struct Step {
    A lr, clip, first, second, b1, b2, c1, c2, eps;
    // Whether decay is part of the gradient, as in Adam.
    bool coupled;
};

template <class A>
__device__ __forceinline__ void adamw_one(const Step<A>& s, A decay, A g, A& w, A& m, A& v) {
    A d = g * s.clip;
    if (s.coupled) d += decay * w;
    else w -= s.lr * decay * w;
    m = s.b1 * m + s.c1 * d;
    v = s.b2 * v + s.c2 * d * d;
    w -= s.lr * (m * s.first) / (sqrt_of(v * s.second) + s.eps);
}

// A power with a whole number, by squares: one thread of each block needs it.
__device__ __forceinline__ double whole_power(double x, u32 n) {
    double y = 1.0;
    for (; n > 0; n >>= 1, x *= x)
        if (n & 1) y *= x;
    return y;
}

// Four neighbours of a thread in a pack, where all addresses allow it; two packs, a block apart, so that all their
// loads are on the way at once. A thread has no others: blocks that end make room for the next ones.
template <class W, class G, class C, class A = typename Of<W>::Acc>
__global__ void __launch_bounds__(256)
    adamw(const W* w, const G* g, const u16* low, const A* m, const A* v, const A* lr_at, const A* step_at,
          const A* clip_at, const A* go, W* w_out, u16* low_out, A* m_out, A* v_out, C* copy, i64 count, double beta1,
          double beta2, double eps, i64 coupled, Decay decay) {
    typedef Halves<W> H;
    const int V = 4, PACKS = 2;
    bool wide = aligned(w, sizeof(W) * V) && aligned(g, sizeof(G) * V) && aligned(m, sizeof(A) * V) &&
                aligned(v, sizeof(A) * V) && aligned(w_out, sizeof(W) * V) && aligned(m_out, sizeof(A) * V) &&
                aligned(v_out, sizeof(A) * V) && (!copy || aligned(copy, sizeof(C) * V)) &&
                (!H::ARE || (aligned(low, sizeof(u16) * V) && aligned(low_out, sizeof(u16) * V)));
    const i64 packs = wide ? count / V : 0, first = (i64)blockIdx.x * blockDim.x * PACKS + threadIdx.x;
    Pack<G, V> g4[PACKS];
    Pack<W, V> w4[PACKS];
    Pack<u16, V> l4[PACKS];
    Pack<A, V> m4[PACKS], v4[PACKS];
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        const i64 p = first + (i64)k * blockDim.x;
        if (p >= packs) continue;
        g4[k] = ((const Pack<G, V>*)g)[p];
        w4[k] = ((const Pack<W, V>*)w)[p];
        if (H::ARE) l4[k] = ((const Pack<u16, V>*)low)[p];
        m4[k] = ((const Pack<A, V>*)m)[p];
        v4[k] = ((const Pack<A, V>*)v)[p];
    }
    __shared__ A corrections[2];
    if (threadIdx.x == 0) {
        u32 step = (u32)*step_at;
        corrections[0] = A(1.0 / (1.0 - whole_power(beta1, step)));
        corrections[1] = A(1.0 / (1.0 - whole_power(beta2, step)));
    }
    __syncthreads();
    Step<A> s = {*lr_at, *clip_at, corrections[0], corrections[1], A(beta1), A(beta2),
                 A(1.0 - beta1), A(1.0 - beta2), A(eps), coupled != 0};
    const bool stop = stops(go);
    const A rate = A(decay.rate);
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        const i64 p = first + (i64)k * blockDim.x;
        if (p >= packs) continue;
        const u64 within = decay.within((u64)p * V);
        Pack<C, V> c4;
#pragma unroll
        for (int e = 0; e < V; e++) {
            A own = decay.decays_at(within + e) ? rate : A(0);
            A master = H::join(w4[k].at[e], l4[k].at[e]);
            if (!stop) adamw_one<A>(s, own, A(load(g4[k].at[e])), master, m4[k].at[e], v4[k].at[e]);
            H::split(master, w4[k].at[e], l4[k].at[e]);
            c4.at[e] = Store<C>::of(master);
        }
        ((Pack<W, V>*)w_out)[p] = w4[k];
        if (H::ARE) ((Pack<u16, V>*)low_out)[p] = l4[k];
        ((Pack<A, V>*)m_out)[p] = m4[k];
        ((Pack<A, V>*)v_out)[p] = v4[k];
        if (copy) ((Pack<C, V>*)copy)[p] = c4;
    }
    for (i64 i = packs * V + (i64)thread_index(); i < count; i += (i64)thread_count()) {
        u16 l1 = H::ARE ? low[i] : (u16)0;
        A w1 = H::join(w[i], l1), m1 = m[i], v1 = v[i];
        if (!stop) adamw_one<A>(s, A(decay.at((u64)i)), A(load(g[i])), w1, m1, v1);
        m_out[i] = m1;
        v_out[i] = v1;
        H::split(w1, w_out[i], l1);
        if (H::ARE) low_out[i] = l1;
        if (copy) copy[i] = Store<C>::of(w1);
    }
}

template <class A, class G, class C>
__global__ void lamb_direction(const A* w, const G* g, const A* m, const A* v, const A* lr_at,
                               const A* step_at, const A* clip_at, const A* go, A* u_out, A* m_out,
                               A* v_out, C* copy, i64 count, double beta1, double beta2, double eps,
                               Decay decay) {
    A clip = *clip_at;
    double step = (double)*step_at;
    A first = A(1.0 / (1.0 - pow(beta1, step))), second = A(1.0 / (1.0 - pow(beta2, step)));
    A b1 = A(beta1), b2 = A(beta2), c1 = A(1.0 - beta1), c2 = A(1.0 - beta2);
    bool stop = stops(go);
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) {
        A m1 = m[i], v1 = v[i], u1 = A(0);
        if (!stop) {
            A d = A(load(g[i])) * clip;
            m1 = b1 * m1 + c1 * d;
            v1 = b2 * v1 + c2 * d * d;
            u1 = (m1 * first) / (sqrt_of(v1 * second) + A(eps)) + A(decay.at(i)) * w[i];
        }
        m_out[i] = m1;
        v_out[i] = v1;
        u_out[i] = u1;
    }
}

template <class W, class G, class C, class A = typename Of<W>::Acc>
__global__ void sgd(const W* w, const G* g, const u16* low, const A* m, const A* lr_at, const A* clip_at, const A* go,
                    W* w_out, u16* low_out, A* m_out, C* copy, i64 count, double momentum, i64 nesterov, Decay decay) {
    A lr = *lr_at, clip = *clip_at, mu = A(momentum);
    bool stop = stops(go);
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) {
        u16 l1 = Halves<W>::ARE ? low[i] : (u16)0;
        A w1 = Halves<W>::join(w[i], l1), m1 = m[i];
        if (!stop) {
            A d = A(load(g[i])) * clip + A(decay.at(i)) * w1;
            m1 = mu * m1 + d;
            w1 -= lr * (nesterov ? d + mu * m1 : m1);
        }
        m_out[i] = m1;
        Halves<W>::split(w1, w_out[i], l1);
        if (Halves<W>::ARE) low_out[i] = l1;
        if (copy) copy[i] = Store<C>::of(w1);
    }
}

template <class W, class G, class C, class A = typename Of<W>::Acc>
__global__ void lion(const W* w, const G* g, const u16* low, const A* m, const A* lr_at, const A* clip_at, const A* go,
                     W* w_out, u16* low_out, A* m_out, C* copy, i64 count, double beta1, double beta2, Decay decay) {
    A lr = *lr_at, clip = *clip_at;
    A b1 = A(beta1), b2 = A(beta2), c1 = A(1.0 - beta1), c2 = A(1.0 - beta2);
    bool stop = stops(go);
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) {
        u16 l1 = Halves<W>::ARE ? low[i] : (u16)0;
        A w1 = Halves<W>::join(w[i], l1), m1 = m[i];
        if (!stop) {
            A d = A(load(g[i])) * clip, turned = b1 * m1 + c1 * d;
            A sign = turned > A(0) ? A(1) : turned < A(0) ? A(-1) : A(0);
            w1 -= lr * (sign + A(decay.at(i)) * w1);
            m1 = b2 * m1 + c2 * d;
        }
        m_out[i] = m1;
        Halves<W>::split(w1, w_out[i], l1);
        if (Halves<W>::ARE) low_out[i] = l1;
        if (copy) copy[i] = Store<C>::of(w1);
    }
}

// Neighbouring elements of one member: first element, end, member; members in order.
template <class T>
__global__ void member_squares(const T* x, typename Of<T>::Acc* out, const i64* pieces, i64 count, i64 add) {
    typedef typename Of<T>::Acc A;
    // A block for each member.
    i64 member = blockIdx.x;
    double total = 0.0;
    for (i64 p = 0; p < count; p++) {
        if (pieces[3 * p + 2] != member) continue;
        for (i64 i = pieces[3 * p] + threadIdx.x; i < pieces[3 * p + 1]; i += blockDim.x) {
            double v = (double)load(x[i]);
            total += v * v;
        }
    }
    total = block_reduce(total, Sum());
    if (threadIdx.x == 0) out[member] = add ? out[member] + A(total) : A(total);
}

// A block row for each piece; those of no member are copied.
template <class T>
__global__ void member_scale(const T* x, const typename Of<T>::Acc* factors, T* y, const i64* pieces) {
    const i64* piece = pieces + 3 * (i64)blockIdx.y;
    for (u64 i = (u64)piece[0] + thread_index(); i < (u64)piece[1]; i += thread_count())
        y[i] = piece[2] < 0 ? x[i] : Store<T>::of(load(x[i]) * factors[piece[2]]);
}

// Means of squares of rows: a block for each row. Runs are neighbouring elements of a row: first element, end, row, column;
// for each row its first run, the end of its runs, and its columns.
template <class T>
__global__ void factor_rows(const T* x, typename Of<T>::Acc* out, const i64* runs, const i64* rows) {
    typedef typename Of<T>::Acc A;
    const i64* row = rows + 3 * (i64)blockIdx.x;
    double total = 0.0;
    for (i64 r = row[0]; r < row[1]; r++) {
        for (i64 i = runs[4 * r] + threadIdx.x; i < runs[4 * r + 1]; i += blockDim.x) {
            double v = (double)load(x[i]);
            total += v * v;
        }
    }
    total = block_reduce(total, Sum());
    if (threadIdx.x == 0) out[blockIdx.x] = A(total / (double)row[2]);
}

// Means of squares of columns: a block for up to 32 of one matrix, a warp for every 32nd row. For each block: its first
// column and their end, its first run and their end, and the rows of the matrix.
template <class T>
__global__ void factor_columns(const T* x, typename Of<T>::Acc* out, const i64* runs, const i64* columns) {
    typedef typename Of<T>::Acc A;
    __shared__ double sums[32][32];
    const i64* own = columns + 5 * (i64)blockIdx.x;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const i64 column = own[0] + lane;
    double total = 0.0;
    for (i64 r = own[2] + warp; r < own[3]; r += warps) {
        const i64* run = runs + 4 * r;
        const i64 at = run[0] + column - run[3];
        if (column < own[1] && column >= run[3] && at < run[1]) {
            double v = (double)load(x[at]);
            total += v * v;
        }
    }
    sums[warp][lane] = total;
    __syncthreads();
    if (warp != 0 || column >= own[1]) return;
    for (int w = 1; w < warps; w++) total += sums[w][lane];
    out[column] = A(total / (double)own[4]);
}

// Elements divided by the numbers of their rows and columns; runs of no row are zero.
template <class T>
__global__ void factor_direction(const T* x, const typename Of<T>::Acc* rows, const typename Of<T>::Acc* columns,
                                 const typename Of<T>::Acc* by, const typename Of<T>::Acc* go,
                                 typename Of<T>::Acc* y, const i64* runs, i64 count) {
    typedef typename Of<T>::Acc A;
    const bool stop = stops(go);
    for (i64 r = blockIdx.x; r < count; r += gridDim.x) {
        const i64* run = runs + 4 * r;
        const bool none = stop || run[2] < 0;
        const A factor = none ? A(0) : *by / rows[run[2]];
        for (i64 i = run[0] + threadIdx.x; i < run[1]; i += blockDim.x)
            y[i] = none ? A(0) : A(load(x[i])) * factor / columns[run[3] + i - run[0]];
    }
}
