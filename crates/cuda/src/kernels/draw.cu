// Initial values, with the bits that the host gives them.

// Halves of singles.
struct Upper { u16 bits; };
struct Lower { u16 bits; };
template <> struct Store<Upper> {
    static __device__ __forceinline__ Upper of(double x) {
        u16 upper, lower;
        split_halves((float)x, upper, lower);
        return Upper{upper};
    }
};
template <> struct Store<Lower> {
    static __device__ __forceinline__ Lower of(double x) {
        u16 upper, lower;
        split_halves((float)x, upper, lower);
        return Lower{lower};
    }
};

enum { CONSTANT, NORMAL, UNIFORM };

// The elements from `first` on: a constant, or numbers of the stream with this key and purpose. Narrow types are
// rounded through f32.
template <class T, int KIND>
__global__ void draw(T* out, i64 count, i64 first, i64 key, i64 purpose, double by) {
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) {
        double value = by;
        if (KIND != CONSTANT) {
            u64 index = (u64)first + i;
            Words words = philox((u32)key, (u32)((u64)key >> 32), (u32)index, (u32)(index >> 32), (u32)purpose,
                                 (u32)((u64)purpose >> 32));
            value = KIND == NORMAL ? by * normal_number(words) : by * (2.0 * uniform_number(words) - 1.0);
        }
        out[i] = Store<T>::of(value);
    }
}
