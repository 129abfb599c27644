// Types and helpers of all kernels. There are no CUDA headers: NVRTC alone compiles this.
//
// Every value is computed in the accumulator of its element type and rounded when it is stored.
// Contraction of products and sums is off for the whole program (so that fused groups give the bits
// of separate ops); loops of products ask for it by `fma`.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
    u16 bits;
};

struct half {
    u16 bits;
};

template <class T> struct Of;
template <> struct Of<double> { typedef double Acc; };
template <> struct Of<float> { typedef float Acc; };
template <> struct Of<bf16> { typedef float Acc; };
template <> struct Of<half> { typedef float Acc; };

__device__ __forceinline__ double load(double x) { return x; }
__device__ __forceinline__ float load(float x) { return x; }
__device__ __forceinline__ float load(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

__device__ __forceinline__ float load(half x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#else
    // As the bits of a single, exponents are too small by 112; the product makes small numbers right too.
    u32 magnitude = (u32)(x.bits & 0x7fff) << 13;
    u32 number = __float_as_uint(__uint_as_float(magnitude) * __uint_as_float(239u << 23));
    bool special = (x.bits & 0x7c00) == 0x7c00;
    return __uint_as_float((special ? magnitude | 0x7f800000 : number) | (u32)(x.bits & 0x8000) << 16);
#endif
}

// The nearest bf16 of a single, ties away from zero, and its lower 16 bits (crates/ir/src/halves.rs); NaN stays NaN.
__device__ __forceinline__ void split_halves(float x, u16& upper, u16& lower) {
    u32 b = __float_as_uint(x);
    bool nan = (b & 0x7fffffff) > 0x7f800000;
    upper = (u16)(nan ? b >> 16 | 0x40 : (b + 0x8000) >> 16);
    lower = nan ? (u16)0 : (u16)b;
}

// The nearest number of an element type, ties to even.
template <class T> struct Store;
template <> struct Store<double> {
    static __device__ __forceinline__ double of(double x) { return x; }
};
template <> struct Store<float> {
    static __device__ __forceinline__ float of(float x) { return x; }
    static __device__ __forceinline__ float of(double x) { return (float)x; }
};
template <> struct Store<bf16> {
    static __device__ __forceinline__ bf16 of(float x) {
        bf16 y;
#ifdef __CUDA_ARCH__
        // Two numbers at once: the instruction for one alone is slower.
        u32 both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(0.0f), "f"(x));
        y.bits = (u16)both;
#else
        u32 b = __float_as_uint(x);
        y.bits = (b & 0x7fffffff) > 0x7f800000 ? (u16)(b >> 16 | 0x40)
                                               : (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
#endif
        return y;
    }
    static __device__ __forceinline__ bf16 of(double x) { return of((float)x); }
};

// What is too large becomes infinity.
template <> struct Store<half> {
    static __device__ __forceinline__ half of(float x) {
        half y;
#ifdef __CUDA_ARCH__
        u32 both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(0.0f), "f"(x));
        y.bits = (u16)both;
#else
        u32 b = __float_as_uint(x), m = b & 0x7fffffff, sign = b >> 16 & 0x8000, shift = 126u << 23;
        u32 small = __float_as_uint(__uint_as_float(m) + __uint_as_float(shift)) - shift;
        u32 usual = (m - (112u << 23) + 0xfff + (m >> 13 & 1)) >> 13, large = m > 0x7f800000 ? 0x7e00 : 0x7c00;
        y.bits = (u16)((m >= 143u << 23 ? large : m < 113u << 23 ? small : usual) | sign);
#endif
        return y;
    }
    static __device__ __forceinline__ half of(double x) { return of((float)x); }
};

// Several elements that are read or written at once.
template <class T, int N> struct alignas(sizeof(T) * N) Pack {
    T at[N];
};

// Sixteen bytes of elements that stay in four registers, two numbers of 16 bits in each.
template <class T> struct Wide;
template <> struct alignas(16) Wide<double> {
    enum { N = 2 };
    double v[2];
    __device__ __forceinline__ double at(int e) const { return v[e]; }
    __device__ __forceinline__ void put(const double* x) { v[0] = x[0], v[1] = x[1]; }
};
template <> struct alignas(16) Wide<float> {
    enum { N = 4 };
    float v[4];
    __device__ __forceinline__ float at(int e) const { return v[e]; }
    __device__ __forceinline__ void put(const float* x) {
        for (int e = 0; e < 4; e++) v[e] = x[e];
    }
};
template <> struct alignas(16) Wide<bf16> {
    enum { N = 8 };
    u32 v[4];
    __device__ __forceinline__ bf16 element(int e) const {
        bf16 x;
        x.bits = (u16)(v[e / 2] >> (e % 2 ? 16 : 0));
        return x;
    }
    __device__ __forceinline__ float at(int e) const {
        return __uint_as_float(e % 2 ? v[e / 2] & 0xffff0000u : v[e / 2] << 16);
    }
    __device__ __forceinline__ void put(const float* x) {
        for (int e = 0; e < 4; e++) {
#ifdef __CUDA_ARCH__
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v[e]) : "f"(x[2 * e + 1]), "f"(x[2 * e]));
#else
            v[e] = (u32)Store<bf16>::of(x[2 * e + 1]).bits << 16 | Store<bf16>::of(x[2 * e]).bits;
#endif
        }
    }
};

template <> struct alignas(16) Wide<half> {
    enum { N = 8 };
    u32 v[4];
    __device__ __forceinline__ half element(int e) const {
        half x;
        x.bits = (u16)(v[e / 2] >> (e % 2 ? 16 : 0));
        return x;
    }
    __device__ __forceinline__ float at(int e) const {
        half x = {(u16)(e % 2 ? v[e / 2] >> 16 : v[e / 2])};
        return load(x);
    }
    __device__ __forceinline__ void put(const float* x) {
        for (int e = 0; e < 4; e++) {
#ifdef __CUDA_ARCH__
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v[e]) : "f"(x[2 * e + 1]), "f"(x[2 * e]));
#else
            v[e] = (u32)Store<half>::of(x[2 * e + 1]).bits << 16 | Store<half>::of(x[2 * e]).bits;
#endif
        }
    }
};

// Stores a pack of 16 bits an element at once: the compiler makes four stores of some assignments.
template <class T> __device__ __forceinline__ void store_wide(T* to, const Wide<T>& x) { *(Wide<T>*)to = x; }
#ifdef __CUDA_ARCH__
__device__ __forceinline__ void store_words(void* to, const u32* v) {
    asm volatile("{ .reg .u64 at; cvta.to.global.u64 at, %0; st.global.v4.b32 [at], {%1, %2, %3, %4}; }" ::"l"(to),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}
template <> __device__ __forceinline__ void store_wide<bf16>(bf16* to, const Wide<bf16>& x) { store_words(to, x.v); }
template <> __device__ __forceinline__ void store_wide<half>(half* to, const Wide<half>& x) { store_words(to, x.v); }
#endif

__device__ __forceinline__ bool aligned(const void* p, int bytes) {
    return ((u64)p & (u64)(bytes - 1)) == 0;
}

__device__ __forceinline__ u64 thread_index() {
    return (u64)blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ u64 thread_count() { return (u64)gridDim.x * blockDim.x; }

// The part of a dim that this rank holds: its local-to-global map.
struct Part {
    i64 order, shard, shards, extent;

    __device__ __forceinline__ i64 global(i64 local) const {
        if (shards == 1) return local;
        i64 block = extent / shards;
        if (order == 0) return shard * block + local;
        if (order == 1) return local * shards + shard;
        i64 half = block / 2;
        return local < half ? shard * half + local : (2 * shards - 1 - shard) * half + local - half;
    }

    __device__ __forceinline__ i64 len() const { return extent / shards; }

    // How many of its elements, which are the first, have places below this one.
    __device__ __forceinline__ i64 before(i64 end) const {
        i64 block = len(), half = block / 2;
        if (shards == 1) return within(end, block);
        if (order == 0) return within(end - shard * block, block);
        if (order == 1) return within((end - shard + shards - 1) / shards, block);
        return within(end - shard * half, half) + within(end - (2 * shards - 1 - shard) * half, half);
    }

    static __device__ __forceinline__ i64 within(i64 count, i64 most) {
        return count < 0 ? 0 : (count < most ? count : most);
    }
};

// Extents of up to eight dims, and how many elements of each are valid; the rest is padding.
struct Extents {
    i64 rank;
    i64 size[8];
    i64 valid[8];

    __device__ __forceinline__ bool holds(i64 index) const {
        for (int d = (int)rank - 1; d >= 0; d--) {
            if (index % size[d] >= valid[d]) return false;
            index /= size[d];
        }
        return true;
    }
};

// Where a kernel reports an id that names nothing: the first one counts.
struct Fault {
    i64 code, site, value, limit;
};

__device__ __forceinline__ void report(Fault* fault, i64 site, i64 value, i64 limit) {
    if (fault->code == 0) {
        fault->site = site;
        fault->value = value;
        fault->limit = limit;
        __threadfence_system();
        fault->code = 1;
    }
}

struct Sum {
    template <class A> __device__ __forceinline__ A operator()(A a, A b) const { return a + b; }
};

// The larger one; a NaN stays a NaN.
struct Larger {
    template <class A> __device__ __forceinline__ A operator()(A a, A b) const {
        return a != a ? a : (b != b ? b : (a > b ? a : b));
    }
};

// The reduction of one number of each thread of a warp, the same on all of them.
template <class A, class F> __device__ __forceinline__ A warp_reduce(A x, F f) {
    for (int apart = 16; apart > 0; apart >>= 1) x = f(x, __shfl_xor_sync(0xffffffffu, x, apart));
    return x;
}

// The same over a block of whole warps, in a fixed order.
template <class A, class F> __device__ __forceinline__ A block_reduce(A x, F f) {
    __shared__ A of_warps[32];
    x = warp_reduce(x, f);
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = of_warps[0];
    for (int warp = 1; warp < (int)blockDim.x / 32; warp++) x = f(x, of_warps[warp]);
    return x;
}

template <class A> __device__ __forceinline__ A infinity();
template <> __device__ __forceinline__ float infinity<float>() { return __uint_as_float(0x7f800000u); }
template <> __device__ __forceinline__ double infinity<double>() {
    return __longlong_as_double(0x7ff0000000000000ll);
}

// The power of two and the inverse, as exact as bf16 needs: they have twenty bits and more.
__device__ __forceinline__ float power(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

__device__ __forceinline__ float inverse(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f / x;
#endif
}
