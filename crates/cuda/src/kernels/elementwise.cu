// Functions of one element, for the groups that are generated from programs.

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

// The distribution function of the standard normal.
__device__ __forceinline__ float normal_cdf(float x) { return 0.5f * erfcf(-x * 0.70710678118654752f); }
__device__ __forceinline__ double normal_cdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752); }

__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
__device__ __forceinline__ float log1p_of(float x) { return log1pf(x); }
__device__ __forceinline__ double log1p_of(double x) { return log1p(x); }
__device__ __forceinline__ float sqrt_of(float x) { return sqrtf(x); }
__device__ __forceinline__ double sqrt_of(double x) { return sqrt(x); }

template <class A> __device__ __forceinline__ A gelu_inner(A x) {
    return A(0.7978845608028654) * (x + A(0.044715) * x * x * x);
}

template <class A> struct Functions {
    static __device__ __forceinline__ A neg(A x) { return -x; }
    static __device__ __forceinline__ A exp(A x) { return exp_of(x); }
    static __device__ __forceinline__ A log(A x) { return log_of(x); }
    static __device__ __forceinline__ A sqrt(A x) { return sqrt_of(x); }
    static __device__ __forceinline__ A rsqrt(A x) { return A(1) / sqrt_of(x); }
    static __device__ __forceinline__ A recip(A x) { return A(1) / x; }
    static __device__ __forceinline__ A square(A x) { return x * x; }
    static __device__ __forceinline__ A tanh(A x) { return tanh_of(x); }
    static __device__ __forceinline__ A sigmoid(A x) { return ::sigmoid(x); }
    static __device__ __forceinline__ A relu(A x) { return x <= A(0) ? A(0) : x; }
    static __device__ __forceinline__ A gelu(A x) { return A(0.5) * x * (A(1) + tanh_of(gelu_inner(x))); }
    static __device__ __forceinline__ A gelu_erf(A x) { return x * normal_cdf(x); }
    static __device__ __forceinline__ A silu(A x) { return x * ::sigmoid(x); }
    static __device__ __forceinline__ A softplus(A x) {
        return x > A(0) ? x + log1p_of(exp_of(-x)) : log1p_of(exp_of(x));
    }
};

// Derivatives.
template <class A> struct Slopes {
    static __device__ __forceinline__ A neg(A x) { return A(-1); }
    static __device__ __forceinline__ A exp(A x) { return exp_of(x); }
    static __device__ __forceinline__ A log(A x) { return A(1) / x; }
    static __device__ __forceinline__ A sqrt(A x) { return A(0.5) / sqrt_of(x); }
    static __device__ __forceinline__ A rsqrt(A x) { return A(-0.5) / (x * sqrt_of(x)); }
    static __device__ __forceinline__ A recip(A x) { return A(-1) / (x * x); }
    static __device__ __forceinline__ A square(A x) { return A(2) * x; }
    static __device__ __forceinline__ A tanh(A x) {
        A t = tanh_of(x);
        return A(1) - t * t;
    }
    static __device__ __forceinline__ A sigmoid(A x) {
        A s = ::sigmoid(x);
        return s * (A(1) - s);
    }
    static __device__ __forceinline__ A relu(A x) { return x <= A(0) ? A(0) : A(1); }
    static __device__ __forceinline__ A gelu(A x) {
        A t = tanh_of(gelu_inner(x));
        A inner = A(0.7978845608028654) * (A(1) + A(3 * 0.044715) * x * x);
        return A(0.5) * (A(1) + t) + A(0.5) * x * (A(1) - t * t) * inner;
    }
    static __device__ __forceinline__ A gelu_erf(A x) {
        return normal_cdf(x) + x * exp_of(A(-0.5) * x * x) * A(0.3989422804014327);
    }
    static __device__ __forceinline__ A silu(A x) {
        A s = ::sigmoid(x);
        return s * (A(1) + x * (A(1) - s));
    }
    static __device__ __forceinline__ A softplus(A x) { return ::sigmoid(x); }
};

// The same for results of 16 bits, which keep eight or eleven: fast exponentials and quotients have twenty, and
// few instructions. gelu(x) = x·sigmoid(2·inner), without the loss of digits of 1 + tanh.
__device__ __forceinline__ float quick_sigmoid(float x) {
    return inverse(1.0f + power(-1.4426950408889634f * x));
}

__device__ __forceinline__ float quick_gelu_gate(float x) {
    return quick_sigmoid(x * fmaf(x * x, 0.07135481627159852f, 1.5957691216057308f));
}

struct QuickFunctions : Functions<float> {
    static __device__ __forceinline__ float exp(float x) { return power(1.4426950408889634f * x); }
    static __device__ __forceinline__ float sigmoid(float x) { return quick_sigmoid(x); }
    static __device__ __forceinline__ float gelu(float x) { return x * quick_gelu_gate(x); }
    static __device__ __forceinline__ float silu(float x) { return x * quick_sigmoid(x); }
};

struct QuickSlopes : Slopes<float> {
    static __device__ __forceinline__ float exp(float x) { return power(1.4426950408889634f * x); }
    static __device__ __forceinline__ float sigmoid(float x) {
        float s = quick_sigmoid(x);
        return fmaf(-s, s, s);
    }
    static __device__ __forceinline__ float gelu(float x) {
        float s = quick_gelu_gate(x), slope = x * fmaf(x * x, 0.21406444881479556f, 1.5957691216057308f);
        return fmaf(fmaf(-s, s, s), slope, s);
    }
    static __device__ __forceinline__ float silu(float x) {
        float s = quick_sigmoid(x);
        return s * fmaf(x, 1.0f - s, 1.0f);
    }
};

template <class A> __device__ __forceinline__ A either_nan(A a, A b, A otherwise) {
    return a != a ? a : (b != b ? b : otherwise);
}

// Conversions as the op `cast` defines them: truncation towards zero into integers.
template <class T> struct To {
    template <class S> static __device__ __forceinline__ T of(S x) { return Store<T>::of(x); }
    static __device__ __forceinline__ T of(int x) { return Store<T>::of((typename Of<T>::Acc)x); }
    static __device__ __forceinline__ T of(u8 x) { return Store<T>::of((typename Of<T>::Acc)x); }
};
template <> struct To<int> {
    static __device__ __forceinline__ int of(float x) { return __float2int_rz(x); }
    static __device__ __forceinline__ int of(double x) { return __double2int_rz(x); }
    static __device__ __forceinline__ int of(int x) { return x; }
    static __device__ __forceinline__ int of(u8 x) { return x; }
};
template <> struct To<u8> {
    template <class S> static __device__ __forceinline__ u8 of(S x) { return x != S(0) ? 1 : 0; }
};
__device__ __forceinline__ int load(int x) { return x; }
__device__ __forceinline__ u8 load(u8 x) { return x; }
