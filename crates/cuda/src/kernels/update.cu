// Updates of flat units: AdamW and SGD as PyTorch defines them, and ops over the members of a unit.

struct Decay {
    double rate;
    // The number in the whole unit of this rank's first element; `decays` of every `block` decay.
    i64 offset, decays, block;

    __device__ __forceinline__ double at(u64 i) const {
        if (decays >= block) return rate;
        u64 element = (u64)offset + i;
        u64 within = (element | (u64)block) >> 32 ? element % (u64)block : (u32)element % (u32)block;
        return within < (u64)decays ? rate : 0.0;
    }
};

template <class A, class G, class C>
__global__ void adamw(const A* w, const G* g, const A* m, const A* v, const A* lr_at, const A* step_at,
                      const A* clip_at, A* w_out, A* m_out, A* v_out, C* copy, i64 count, double beta1,
                      double beta2, double eps, Decay decay) {
    A lr = *lr_at, clip = *clip_at;
    double step = (double)*step_at;
    A first = A(1.0 / (1.0 - pow(beta1, step))), second = A(1.0 / (1.0 - pow(beta2, step)));
    A b1 = A(beta1), b2 = A(beta2), c1 = A(1.0 - beta1), c2 = A(1.0 - beta2);
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) {
        A d = A(load(g[i])) * clip;
        A m1 = b1 * m[i] + c1 * d, v1 = b2 * v[i] + c2 * d * d, w1 = w[i];
        w1 -= lr * A(decay.at(i)) * w1;
        w1 -= lr * (m1 * first) / (sqrt_of(v1 * second) + A(eps));
        m_out[i] = m1;
        v_out[i] = v1;
        w_out[i] = w1;
        if (copy) copy[i] = Store<C>::of(w1);
    }
}

template <class A, class G, class C>
__global__ void sgd(const A* w, const G* g, const A* m, const A* lr_at, const A* clip_at, A* w_out, A* m_out,
                    C* copy, i64 count, double momentum, i64 nesterov, Decay decay) {
    A lr = *lr_at, clip = *clip_at, mu = A(momentum);
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) {
        A w1 = w[i], d = A(load(g[i])) * clip + A(decay.at(i)) * w1;
        A m1 = mu * m[i] + d;
        w1 -= lr * (nesterov ? d + mu * m1 : m1);
        m_out[i] = m1;
        w_out[i] = w1;
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
