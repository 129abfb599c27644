// Initial values, with the bits that the host gives them (`ir/src/random/elementary.rs`): the same operations in
// the same order, none of them contracted.

__device__ __forceinline__ double drawn_ln(double x) {
    const u64 one = 0x3ff0000000000000ull, root = 0x3fe6a09e00000000ull;
    u64 bits = (u64)__double_as_longlong(x) + (one - root);
    double k = (double)((int)(bits >> 52) - 0x3ff);
    double f = __longlong_as_double((i64)((bits & 0x000fffffffffffffull) + root)) - 1.0;
    double half = 0.5 * f * f, s = f / (2.0 + f), z = s * s, w = z * z;
    double even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    double odd = z * (6.666666666666735130e-01 +
                      w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
    return s * (half + (odd + even)) + k * 1.90821492927058770002e-10 - half + f + k * 6.93147180369123816490e-01;
}

__device__ __forceinline__ double drawn_cos(double turns) {
    double quarter = floor(4.0 * turns + 0.5), x = (4.0 * turns - quarter) * 1.57079632679489661923;
    double z = x * x, w = z * z;
    double r = z * (4.16666666666666019037e-02 + z * (-1.38888888888741095749e-03 + z * 2.48015872894767294178e-05)) +
               w * w * (-2.75573143513906633035e-07 + z * (2.08757232129817482790e-09 + z * -1.13596475577881948265e-11));
    double half = 0.5 * z, rest = 1.0 - half, cosine = rest + ((1.0 - rest - half) + z * r);
    r = 8.33333333332248946124e-03 + z * (-1.98412698298579493134e-04 + z * 2.75573137070700676789e-06) +
        z * w * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10);
    double sine = x + z * x * (-1.66666666666666324348e-01 + z * r);
    int turn = (int)quarter % 4;
    return turn == 0 ? cosine : turn == 1 ? -sine : turn == 2 ? -cosine : sine;
}

__device__ __forceinline__ double unit_interval(u32 high, u32 low) {
    return (double)(((u64)high << 32 | low) >> 11) * (1.0 / 9007199254740992.0);
}

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
            double a = unit_interval(words.at[0], words.at[1]), b = unit_interval(words.at[2], words.at[3]);
            value = KIND == NORMAL ? by * (sqrt(-2.0 * drawn_ln(1.0 - a)) * drawn_cos(b)) : by * (2.0 * a - 1.0);
        }
        out[i] = Store<T>::of(value);
    }
}
