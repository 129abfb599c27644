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
