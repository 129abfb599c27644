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

// The same for heads without padding whose halves are packs: 16 bytes of each half of a head at a time, and
// `HEADS` neighbours of a position with the same angles.
template <class T, int HEADS>
__global__ void rotary_packs(const T* x, const typename Of<T>::Acc* cosines, const typename Of<T>::Acc* sines,
                             T* y, i64 count, i64 positions, i64 heads, i64 size, double sign) {
    typedef typename Of<T>::Acc A;
    const int V = Wide<T>::N;
    u32 half = (u32)size / 2, each = half / V, groups = (u32)heads / HEADS;
    const A turned = A(sign);
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) {
        u64 group = (u64)count >> 32 ? i / each : (u32)i / each;
        u32 pair = (u32)(i - group * each) * V;
        u64 row = group >> 32 ? group / groups : (u32)group / groups;
        u64 position = row >> 32 ? row % (u64)positions : (u32)row % (u32)positions;
        u64 angle = position * half + pair, at = group * HEADS * (u64)size + pair;
        Wide<T> a[HEADS], b[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            a[h] = *(const Wide<T>*)(x + at + h * size);
            b[h] = *(const Wide<T>*)(x + at + h * size + half);
        }
        Pack<A, V> c = *(const Pack<A, V>*)(cosines + angle), s = *(const Pack<A, V>*)(sines + angle);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            A left[V], right[V];
#pragma unroll
            for (int e = 0; e < V; e++) {
                A turn = turned * s.at[e];
                left[e] = a[h].at(e) * c.at[e] - b[h].at(e) * turn;
                right[e] = b[h].at(e) * c.at[e] + a[h].at(e) * turn;
            }
            a[h].put(left);
            b[h].put(right);
            *(Wide<T>*)(y + at + h * size) = a[h];
            *(Wide<T>*)(y + at + h * size + half) = b[h];
        }
    }
}
