// Dropout by counters (Philox4x32-10): a mask is a pure function of the key and the element.

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

// What decides which elements are kept: the key of the step, the op, and the rate.
struct Mask {
    i64 site, threshold;
    double scale;

    __device__ __forceinline__ bool keeps(const int* key, u64 sample, u64 element) const {
        u64 quad = element / 4;
        u32 first = (u32)key[4] + (u32)sample;
        Words words = philox((u32)key[0], (u32)key[1], (u32)quad, first ^ (u32)(quad >> 32),
                             (u32)key[2], (u32)site | (u32)key[3] << 16);
        return (u64)words.at[element % 4] >= (u64)threshold;
    }
};
