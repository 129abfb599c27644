// Rotation of each head's pairs by its position; angles come from tables made by the host.

template <class T>
__global__ void rotary(const T* x, const typename Of<T>::Acc* cosines, const typename Of<T>::Acc* sines,
                       T* y, i64 count, i64 positions, i64 heads, i64 size, i64 valid, double sign) {
    typedef typename Of<T>::Acc A;
    // Of every head: its pairs, then each element of its padding.
    i64 half = valid / 2, each = half + size - valid;
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) {
        i64 head = (i64)(i / (u64)each), pair = (i64)i - head * each;
        i64 position = head / heads % positions;
        const T* from = x + head * size;
        T* to = y + head * size;
        if (pair >= half) {
            to[valid + pair - half] = Store<T>::of(A(0));
            continue;
        }
        A c = cosines[position * half + pair], s = A(sign) * sines[position * half + pair];
        A a = load(from[pair]), b = load(from[pair + half]);
        to[pair] = Store<T>::of(a * c - b * s);
        to[pair + half] = Store<T>::of(b * c + a * s);
    }
}

// The same for heads without padding whose halves are packs: 16 bytes of each half of a thread at a time. A second
// tensor may be turned beside the first: it has a row of blocks of its own.
template <class T>
__global__ void rotary_packs(const T* x, const typename Of<T>::Acc* cosines, const typename Of<T>::Acc* sines,
                             T* y, i64 count, i64 positions, i64 heads, i64 size, double sign, const T* other,
                             T* into, i64 other_count, i64 other_heads) {
    typedef typename Of<T>::Acc A;
    if (blockIdx.y) x = other, y = into, count = other_count, heads = other_heads;
    const int V = Wide<T>::N;
    u32 half = (u32)size / 2, each = half / V;
    const A turned = A(sign);
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) {
        u64 head = (u64)count >> 32 ? i / each : (u32)i / each;
        u32 pair = (u32)(i - head * each) * V;
        u64 row = head >> 32 ? head / (u64)heads : (u32)head / (u32)heads;
        u64 position = row >> 32 ? row % (u64)positions : (u32)row % (u32)positions;
        u64 angle = position * half + pair, at = head * (u64)size + pair;
        Wide<T> a = *(const Wide<T>*)(x + at), b = *(const Wide<T>*)(x + at + half);
        Pack<A, V> c = *(const Pack<A, V>*)(cosines + angle), s = *(const Pack<A, V>*)(sines + angle);
        A left[V], right[V];
#pragma unroll
        for (int e = 0; e < V; e++) {
            A turn = turned * s.at[e];
            left[e] = a.at(e) * c.at[e] - b.at(e) * turn;
            right[e] = b.at(e) * c.at[e] + a.at(e) * turn;
        }
        a.put(left);
        b.put(right);
        store_wide(y + at, a);
        store_wide(y + at + half, b);
    }
}
