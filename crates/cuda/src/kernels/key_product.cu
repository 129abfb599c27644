// Products of stored scores with the keys that are here: a thread for each element of the result.

struct Keys {
    // Local sizes: sequences, queries, keys that are here, query heads, key heads, elements of a head,
    // columns of scores.
    i64 batch, queries, here, heads, key_heads, size, columns;
    i64 causal, goes_on;
    // Queries and keys of whole sequences.
    i64 all_queries, all_keys;
    // Without padding.
    i64 valid_batch, valid_queries, valid_here, valid_key_heads, valid_group, valid_size;
    Part positions, places;

    __device__ __forceinline__ i64 query_at(i64 b, i64 i, i64 h) const { return ((b * queries + i) * heads + h) * size; }
    __device__ __forceinline__ i64 key_at(i64 b, i64 j, i64 g) const { return ((b * here + j) * key_heads + g) * size; }
    __device__ __forceinline__ i64 row_at(i64 b, i64 i, i64 h) const { return ((b * heads + h) * queries + i) * columns; }
    __device__ __forceinline__ i64 group() const { return heads / key_heads; }
    __device__ __forceinline__ bool has_head(i64 b, i64 h) const {
        return b < valid_batch && h / group() < valid_key_heads && h % group() < valid_group;
    }
    __device__ __forceinline__ bool sees(i64 i, i64 j) const {
        return !causal || j + all_queries <= positions.global(i) + all_keys;
    }
};

// One element for each pair of a query and a key that is here. The columns of other keys are what they
// were: the caller cleared or copied them.
template <class T>
__global__ void key_scores(const T* x, const T* y, typename Of<T>::Acc* p, Keys k) {
    typedef typename Of<T>::Acc A;
    i64 count = k.batch * k.heads * k.queries * k.here;
    for (i64 n = (i64)thread_index(); n < count; n += (i64)thread_count()) {
        i64 j = n % k.here, i = n / k.here % k.queries, h = n / k.here / k.queries % k.heads;
        i64 b = n / k.here / k.queries / k.heads;
        if (j >= k.valid_here || i >= k.valid_queries || !k.has_head(b, h)) continue;
        i64 column = k.places.global(j);
        A total = -infinity<A>();
        if (k.sees(i, column)) {
            const T* query = x + k.query_at(b, i, h);
            const T* key = y + k.key_at(b, j, h / k.group());
            total = A(0);
            for (i64 e = 0; e < k.valid_size; e++) total = fma(A(load(query[e])), A(load(key[e])), total);
        }
        p[k.row_at(b, i, h) + column] = total;
    }
}

template <class T>
__global__ void key_weighted(const T* p, const T* y, const typename Of<T>::Acc* before, typename Of<T>::Acc* x, Keys k) {
    typedef typename Of<T>::Acc A;
    i64 count = k.batch * k.queries * k.heads * k.size;
    for (i64 n = (i64)thread_index(); n < count; n += (i64)thread_count()) {
        i64 e = n % k.size, h = n / k.size % k.heads, i = n / k.size / k.heads % k.queries;
        i64 b = n / k.size / k.heads / k.queries;
        A total = k.goes_on ? before[n] : A(0);
        if (e < k.valid_size && i < k.valid_queries && k.has_head(b, h)) {
            const T* row = p + k.row_at(b, i, h);
            for (i64 j = 0; j < k.valid_here; j++)
                total = fma(A(load(row[k.places.global(j)])), A(load(y[k.key_at(b, j, h / k.group()) + e])), total);
        }
        x[n] = total;
    }
}

template <class T>
__global__ void key_sums(const T* p, const T* x, const typename Of<T>::Acc* before, typename Of<T>::Acc* y, Keys k) {
    typedef typename Of<T>::Acc A;
    i64 count = k.batch * k.here * k.key_heads * k.size;
    for (i64 n = (i64)thread_index(); n < count; n += (i64)thread_count()) {
        i64 e = n % k.size, g = n / k.size % k.key_heads, j = n / k.size / k.key_heads % k.here;
        i64 b = n / k.size / k.key_heads / k.here;
        A total = k.goes_on ? before[n] : A(0);
        if (e < k.valid_size && j < k.valid_here && b < k.valid_batch && g < k.valid_key_heads) {
            i64 column = k.places.global(j);
            for (i64 r = 0; r < k.valid_group; r++) {
                i64 h = g * k.group() + r;
                for (i64 i = 0; i < k.valid_queries; i++)
                    total = fma(A(load(p[k.row_at(b, i, h) + column])), A(load(x[k.query_at(b, i, h) + e])), total);
            }
        }
        y[n] = total;
    }
}
