// The place of elements in the whole value: of up to eight dims.
struct Places {
    i64 rank;
    i64 whole[8];
    Part part[8];
};

template <class T>
__global__ void dropout(const T* x, const int* key, T* y, i64 count, Mask mask, Places places) {
    typedef typename Of<T>::Acc A;
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) {
        i64 rest = (i64)i, element = 0, stride = 1, sample = 0;
        for (int d = (int)places.rank - 1; d >= 0; d--) {
            i64 len = places.part[d].len();
            i64 at = places.part[d].global(rest % len);
            rest /= len;
            if (d == 0) {
                sample = at;
            } else {
                element += at * stride;
                stride *= places.whole[d];
            }
        }
        // As the interpreter: dropped elements are zeros, whatever they were.
        bool kept = mask.keeps(key, (u64)sample, (u64)element);
        y[i] = Store<T>::of(kept ? load(x[i]) * A(mask.scale) : A(0));
    }
}
