// Random words by counters (Philox4x32-10), and numbers of them: pure functions of the key and the element.

struct Words {
    u32 at[4];
};

__device__ __forceinline__ Words philox(u32 k0, u32 k1, u32 c0, u32 c1, u32 c2, u32 c3) {
    for (int round = 0; round < 10; round++) {
        u64 p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
        u32 a = (u32)(p1 >> 32) ^ c1 ^ k0, b = (u32)(p0 >> 32) ^ c3 ^ k1;
        c0 = a;
        c1 = (u32)p1;
        c2 = b;
        c3 = (u32)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    Words words = {{c0, c1, c2, c3}};
    return words;
}

// Normal numbers have the bits that the host gives them (`ir/src/random/elementary.rs`): the same operations in the
// same order, none of them contracted.
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

__device__ __forceinline__ double uniform_number(Words words) { return unit_interval(words.at[0], words.at[1]); }

// Box and Muller's transform.
__device__ __forceinline__ double normal_number(Words words) {
    double a = unit_interval(words.at[0], words.at[1]), b = unit_interval(words.at[2], words.at[3]);
    return sqrt(-2.0 * drawn_ln(1.0 - a)) * drawn_cos(b);
}

// The words of a counter of a random op: of four elements of a mask, or of one random number.
__device__ __forceinline__ Words op_words(const int* key, i64 site, u64 sample, u64 count) {
    u32 first = (u32)key[4] + (u32)sample;
    return philox((u32)key[0], (u32)key[1], (u32)count, first ^ (u32)(count >> 32), (u32)key[2],
                  (u32)site | (u32)key[3] << 16);
}

// What decides which elements are kept: the key of the step, the op, and the rate.
struct Mask {
    i64 site, threshold;
    double scale;

    __device__ __forceinline__ bool keeps(const int* key, u64 sample, u64 element) const {
        Words words = op_words(key, site, sample, element / 4);
        return (u64)words.at[element % 4] >= (u64)threshold;
    }
};
