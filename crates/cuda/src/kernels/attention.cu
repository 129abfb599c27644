// Scaled dot-product attention, forward and backward, in any element type; no atomic operations, so
// repeated runs give the same bits. Keys may come in parts: a call then goes on from the results of earlier
// ones, which are of the accumulator type, as its own are.
//
// A warp computes one query (or one key in the gradients of keys and values). Its lanes are 32 keys
// (queries) at a time while it scores them, and elements of the head while it sums.

struct Attend {
    i64 batch, queries, keys, heads, groups, size;
    i64 causal, drops;
    double scale;
    // Queries and keys of the whole sequence; what is valid here of keys, queries and heads of a group.
    i64 all_queries, all_keys, valid_keys, valid_queries, valid_group;
    Part of_batch, of_positions, of_heads, of_keys;
    Mask mask;

    __device__ __forceinline__ bool is_valid(i64 query, i64 head) const {
        return query < valid_queries && head % (heads / groups) < valid_group;
    }

    // How many keys, from the first that is here, a query sees: places of keys increase in every order.
    __device__ __forceinline__ i64 visible(i64 query) const {
        if (!causal) return valid_keys;
        i64 seen = of_keys.before(of_positions.global(query) + 1 + all_keys - all_queries);
        return seen < valid_keys ? seen : valid_keys;
    }

    // The factor by which dropout multiplies a probability.
    __device__ __forceinline__ double kept(const int* key, i64 b, i64 head, i64 query, i64 j) const {
        if (!drops) return 1.0;
        i64 row = of_heads.global(head) * all_queries + of_positions.global(query);
        bool keep = mask.keeps(key, (u64)of_batch.global(b), (u64)(row * all_keys + of_keys.global(j)));
        return keep ? mask.scale : 0.0;
    }

    __device__ __forceinline__ i64 query_at(i64 b, i64 query, i64 head) const {
        return ((b * queries + query) * heads + head) * size;
    }
    __device__ __forceinline__ i64 key_at(i64 b, i64 j, i64 group) const {
        return ((b * keys + j) * groups + group) * size;
    }
    __device__ __forceinline__ i64 row_of(i64 b, i64 head, i64 query) const {
        return (b * heads + head) * queries + query;
    }
};

enum { WARPS = 8 };

// 32 rows of a tensor, each `size` elements, `apart` elements from one to the next; zeros from `end`.
template <class T, class A>
__device__ __forceinline__ void load_tile(A* tile, i64 stride, const T* from, i64 apart, i64 size, i64 first, i64 end) {
    for (i64 x = threadIdx.x; x < 32 * size; x += blockDim.x) {
        i64 row = x / size, column = x - row * size;
        tile[row * stride + column] = first + row < end ? A(load(from[(first + row) * apart + column])) : A(0);
    }
}

template <class A> __device__ __forceinline__ A dot(const A* a, const A* b, i64 n) {
    A total = A(0);
    for (i64 x = 0; x < n; x++) total = fma(a[x], b[x], total);
    return total;
}

// With log-sum-exp (flash), or with stored probabilities: the second pass then uses the rounded ones. Results
// of type O go on from an attention over other keys, if there was one.
template <class T, class O, int R>
__global__ void attention(const T* q, const T* k, const T* v, const O* o_before,
                          const typename Of<T>::Acc* lse_before, const int* key, O* o, typename Of<T>::Acc* lse,
                          T* probabilities, T* dropped, Attend a) {
    typedef typename Of<T>::Acc A;
    extern __shared__ double shared[];
    A *ks = (A*)shared, *vs = ks + 32 * (a.size + 1), *qs = vs + 32 * a.size;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i64 i = (i64)blockIdx.x * WARPS + warp, h = blockIdx.y, b = blockIdx.z, group = h / (a.heads / a.groups);
    bool here = i < a.queries;
    i64 seen = here && a.is_valid(i, h) ? a.visible(i) : 0;
    A* own = qs + warp * a.size;
    if (here)
        for (i64 x = lane; x < a.size; x += 32) own[x] = load(q[a.query_at(b, i, h) + x]);
    i64 most = block_reduce(seen, Larger());
    A top = -infinity<A>(), sum = A(0), total = A(0), acc[R];
    for (int r = 0; r < R; r++) acc[r] = A(0);
    const T *k0 = k + a.key_at(b, 0, group), *v0 = v + a.key_at(b, 0, group);
    i64 apart = a.groups * a.size, row = here ? a.row_of(b, h, i) : 0;
    if (o_before && here && a.is_valid(i, h) && lse_before[row] > -infinity<A>()) {
        // Its exponentials sum to one, relative to their log-sum-exp.
        top = lse_before[row], sum = A(1);
        for (int r = 0; r < R; r++)
            if (lane + 32 * r < a.size) acc[r] = load(o_before[a.query_at(b, i, h) + lane + 32 * r]);
    }
    int passes = probabilities ? 2 : 1;
    for (int pass = 0; pass < passes; pass++) {
        bool last = pass == passes - 1;
        for (i64 j0 = 0; j0 < most; j0 += 32) {
            load_tile(ks, a.size + 1, k0, apart, a.size, j0, a.valid_keys);
            if (last) load_tile(vs, a.size, v0, apart, a.size, j0, a.valid_keys);
            __syncthreads();
            if (j0 < seen) {
                i64 j = j0 + lane;
                A s = j < seen ? dot(own, ks + lane * (a.size + 1), a.size) * A(a.scale) : -infinity<A>();
                A p = A(0);
                if (probabilities && last) {
                    p = j < seen ? exp_of(s - total) : A(0);
                    T rounded = Store<T>::of(p);
                    p = load(rounded);
                    if (j < a.keys) probabilities[row * a.keys + j] = rounded;
                    if (a.drops) {
                        rounded = Store<T>::of(p * A(a.kept(key, b, h, i, j)));
                        p = load(rounded);
                        if (j < a.keys) dropped[row * a.keys + j] = rounded;
                    }
                } else {
                    A next = Larger()(top, warp_reduce(s, Larger()));
                    A shrink = top == -infinity<A>() ? A(0) : exp_of(top - next);
                    p = j < seen ? exp_of(s - next) : A(0);
                    sum = sum * shrink + warp_reduce(p, Sum());
                    top = next;
                    if (last) {
                        for (int r = 0; r < R; r++) acc[r] *= shrink;
                        if (a.drops && j < seen) p *= A(a.kept(key, b, h, i, j));
                    }
                }
                if (last)
                    for (int jj = 0; jj < 32; jj++) {
                        A weight = __shfl_sync(0xffffffffu, p, jj);
                        for (int r = 0; r < R; r++)
                            if (lane + 32 * r < a.size) acc[r] = fma(weight, vs[jj * a.size + lane + 32 * r], acc[r]);
                    }
            }
            __syncthreads();
        }
        total = sum > A(0) ? top + log_of(sum) : -infinity<A>();
    }
    if (!here) return;
    A inverse = probabilities ? A(1) : (sum > A(0) ? A(1) / sum : A(0));
    for (int r = 0; r < R; r++)
        if (lane + 32 * r < a.size)
            o[a.query_at(b, i, h) + lane + 32 * r] = Store<O>::of(acc[r] * inverse);
    if (lse && lane == 0) lse[row] = total;
    if (probabilities) {
        // Keys that no tile of this query covered.
        for (i64 j = (seen + 31) / 32 * 32 + lane; j < a.keys; j += 32) {
            probabilities[row * a.keys + j] = Store<T>::of(A(0));
            if (a.drops) dropped[row * a.keys + j] = Store<T>::of(A(0));
        }
    }
}

// The inner product of do and o of each query.
template <class T>
__global__ void attention_delta(const T* o, const T* dy, typename Of<T>::Acc* delta, Attend a) {
    typedef typename Of<T>::Acc A;
    i64 rows = a.batch * a.heads * a.queries, lane = threadIdx.x % 32;
    for (i64 row = (i64)(thread_index() / 32); row < rows; row += (i64)(thread_count() / 32)) {
        i64 i = row % a.queries, h = row / a.queries % a.heads, b = row / a.queries / a.heads;
        A total = A(0);
        if (a.is_valid(i, h)) {
            i64 at = a.query_at(b, i, h);
            for (i64 x = lane; x < a.size; x += 32) total = fma(A(load(o[at + x])), A(load(dy[at + x])), total);
        }
        total = warp_reduce(total, Sum());
        if (lane == 0) delta[row] = total;
    }
}

// The probability of a pair that sees each other: recomputed, or as it was stored.
template <class T, class A>
__device__ __forceinline__ A probability(A score, const A* lse, const T* probabilities, i64 row, i64 keys, i64 j) {
    return probabilities ? A(load(probabilities[row * keys + j])) : exp_of(score - lse[row]);
}

// The gradient of a query, added to what other keys gave, if there were any.
template <class T, class O, int R>
__global__ void attention_grad_queries(const T* q, const T* k, const T* v, const int* key, const T* dy,
                                       const typename Of<T>::Acc* lse, const T* probabilities,
                                       const typename Of<T>::Acc* delta, const O* dq_before, O* dq, Attend a) {
    typedef typename Of<T>::Acc A;
    extern __shared__ double shared[];
    A *ks = (A*)shared, *vs = ks + 32 * (a.size + 1), *qs = vs + 32 * (a.size + 1), *ys = qs + WARPS * a.size;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i64 i = (i64)blockIdx.x * WARPS + warp, h = blockIdx.y, b = blockIdx.z, group = h / (a.heads / a.groups);
    bool here = i < a.queries;
    i64 seen = here && a.is_valid(i, h) ? a.visible(i) : 0;
    A *own = qs + warp * a.size, *own_dy = ys + warp * a.size;
    if (here)
        for (i64 x = lane; x < a.size; x += 32) {
            own[x] = load(q[a.query_at(b, i, h) + x]);
            own_dy[x] = load(dy[a.query_at(b, i, h) + x]);
        }
    i64 most = block_reduce(seen, Larger());
    A acc[R];
    bool adds = dq_before && here && a.is_valid(i, h);
    for (int r = 0; r < R; r++)
        acc[r] = adds && lane + 32 * r < a.size ? A(load(dq_before[a.query_at(b, i, h) + lane + 32 * r])) : A(0);
    const T *k0 = k + a.key_at(b, 0, group), *v0 = v + a.key_at(b, 0, group);
    i64 apart = a.groups * a.size, row = here ? a.row_of(b, h, i) : 0;
    for (i64 j0 = 0; j0 < most; j0 += 32) {
        load_tile(ks, a.size + 1, k0, apart, a.size, j0, a.valid_keys);
        load_tile(vs, a.size + 1, v0, apart, a.size, j0, a.valid_keys);
        __syncthreads();
        if (j0 < seen) {
            i64 j = j0 + lane;
            A ds = A(0);
            if (j < seen) {
                A s = dot(own, ks + lane * (a.size + 1), a.size) * A(a.scale);
                A p = probability(s, lse, probabilities, row, a.keys, j);
                A dp = dot(own_dy, vs + lane * (a.size + 1), a.size) * A(a.kept(key, b, h, i, j));
                ds = p * (dp - delta[row]) * A(a.scale);
            }
            for (int jj = 0; jj < 32; jj++) {
                A weight = __shfl_sync(0xffffffffu, ds, jj);
                for (int r = 0; r < R; r++)
                    if (lane + 32 * r < a.size) acc[r] = fma(weight, ks[jj * (a.size + 1) + lane + 32 * r], acc[r]);
            }
        }
        __syncthreads();
    }
    if (!here) return;
    for (int r = 0; r < R; r++)
        if (lane + 32 * r < a.size) dq[a.query_at(b, i, h) + lane + 32 * r] = Store<O>::of(acc[r]);
}

// The queries of all heads of a group, in order, added to what other queries gave, if there were any.
template <class T, class O, int R>
__global__ void attention_grad_keys(const T* q, const T* k, const T* v, const int* key, const T* dy,
                                    const typename Of<T>::Acc* lse, const T* probabilities, const T* dropped,
                                    const typename Of<T>::Acc* delta, const O* dk_before, const O* dv_before,
                                    O* dk, O* dv, Attend a) {
    typedef typename Of<T>::Acc A;
    extern __shared__ double shared[];
    A *qs = (A*)shared, *ys = qs + 32 * (a.size + 1), *ks = ys + 32 * (a.size + 1), *vs = ks + WARPS * a.size;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i64 first = (i64)blockIdx.x * WARPS, j = first + warp, group = blockIdx.y, b = blockIdx.z;
    bool here = j < a.keys, valid = j < a.valid_keys;
    A *own = ks + warp * a.size, *own_v = vs + warp * a.size;
    if (here)
        for (i64 x = lane; x < a.size; x += 32) {
            own[x] = load(k[a.key_at(b, j, group) + x]);
            own_v[x] = load(v[a.key_at(b, j, group) + x]);
        }
    A of_k[R], of_v[R];
    for (int r = 0; r < R; r++) {
        bool adds = dk_before && valid && lane + 32 * r < a.size;
        i64 at = a.key_at(b, j, group) + lane + 32 * r;
        of_k[r] = adds ? A(load(dk_before[at])) : A(0);
        of_v[r] = adds ? A(load(dv_before[at])) : A(0);
    }
    i64 each = a.heads / a.groups, apart = a.heads * a.size;
    i64 end = a.valid_queries < a.queries ? a.valid_queries : a.queries;
    for (i64 h = group * each; h < group * each + a.valid_group; h++) {
        const T *q0 = q + a.query_at(b, 0, h), *y0 = dy + a.query_at(b, 0, h);
        for (i64 i0 = 0; i0 < end; i0 += 32) {
            // Queries in order see more and more keys: the last of the tile sees the most.
            i64 last = i0 + 31 < end ? i0 + 31 : end - 1;
            if (a.visible(last) <= first) continue;
            __syncthreads();
            load_tile(qs, a.size + 1, q0, apart, a.size, i0, end);
            load_tile(ys, a.size + 1, y0, apart, a.size, i0, end);
            __syncthreads();
            i64 i = i0 + lane;
            A ds = A(0), p = A(0);
            if (valid && i < end && j < a.visible(i)) {
                i64 row = a.row_of(b, h, i);
                A s = dot(own, qs + lane * (a.size + 1), a.size) * A(a.scale);
                A kept = A(a.kept(key, b, h, i, j));
                p = probability(s, lse, probabilities, row, a.keys, j);
                A dp = dot(own_v, ys + lane * (a.size + 1), a.size) * kept;
                ds = p * (dp - delta[row]) * A(a.scale);
                p = dropped ? A(load(dropped[row * a.keys + j])) : p * kept;
            }
            for (int ii = 0; ii < 32; ii++) {
                A weight = __shfl_sync(0xffffffffu, ds, ii), share = __shfl_sync(0xffffffffu, p, ii);
                for (int r = 0; r < R; r++)
                    if (lane + 32 * r < a.size) {
                        of_k[r] = fma(weight, qs[ii * (a.size + 1) + lane + 32 * r], of_k[r]);
                        of_v[r] = fma(share, ys[ii * (a.size + 1) + lane + 32 * r], of_v[r]);
                    }
            }
        }
    }
    if (!here) return;
    for (int r = 0; r < R; r++)
        if (lane + 32 * r < a.size) {
            i64 at = a.key_at(b, j, group) + lane + 32 * r;
            dk[at] = Store<O>::of(valid ? of_k[r] : A(0));
            dv[at] = Store<O>::of(valid ? of_v[r] : A(0));
        }
}
