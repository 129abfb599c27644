// The place of elements in the whole value: of up to eight dims.
struct Places {
    i64 rank;
    i64 whole[8];
    Part part[8];

    // The sample of a local element, and its number there.
    __device__ __forceinline__ void find(i64 i, i64& sample, i64& element) const {
        i64 rest = i, stride = 1;
        sample = element = 0;
        for (int d = (int)rank - 1; d >= 0; d--) {
            i64 len = part[d].len();
            i64 at = part[d].global(rest % len);
            rest /= len;
            if (d == 0) {
                sample = at;
            } else {
                element += at * stride;
                stride *= whole[d];
            }
        }
    }
};

template <class T>
__global__ void dropout(const T* x, const int* key, T* y, i64 count, Mask mask, Places places) {
    typedef typename Of<T>::Acc A;
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) {
        i64 sample, element;
        places.find((i64)i, sample, element);
        // As the interpreter: dropped elements are zeros, whatever they were.
        bool kept = mask.keeps(key, (u64)sample, (u64)element);
        y[i] = Store<T>::of(kept ? load(x[i]) * A(mask.scale) : A(0));
    }
}

template <class T, bool NORMAL>
__device__ __forceinline__ void numbers(const int* key, T* y, i64 count, i64 site, const Places& places) {
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) {
        i64 sample, element;
        places.find((i64)i, sample, element);
        Words words = op_words(key, site, (u64)sample, (u64)element);
        y[i] = Store<T>::of(NORMAL ? normal_number(words) : uniform_number(words));
    }
}

template <class T> __global__ void uniform_numbers(const int* key, T* y, i64 count, i64 site, Places places) {
    numbers<T, false>(key, y, count, site, places);
}

template <class T> __global__ void normal_numbers(const int* key, T* y, i64 count, i64 site, Places places) {
    numbers<T, true>(key, y, count, site, places);
}
