// The loss of rows of logits and their gradient in the same memory, for the fused loss.

// The exponential, as exact as the element type needs.
template <class T> __device__ __forceinline__ typename Of<T>::Acc exp_for(typename Of<T>::Acc x) { return exp_of(x); }
template <> __device__ __forceinline__ float exp_for<bf16>(float x) { return __expf(x); }
template <> __device__ __forceinline__ float exp_for<half>(float x) { return __expf(x); }

// One row, V elements at a time: the largest and the sum of exponentials in one pass, then the
// gradient.
template <class T, int V>
__device__ void entropy_row(T* x, i64 classes, i64 target, typename Of<T>::Acc scale, typename Of<T>::Acc* nll) {
    typedef typename Of<T>::Acc A;
    A top = -infinity<A>(), sum = A(0);
    for (i64 i = (i64)threadIdx.x * V; i < classes; i += (i64)blockDim.x * V) {
        Pack<T, V> x8 = *(const Pack<T, V>*)(x + i);
        A largest = load(x8.at[0]);
        for (int e = 1; e < V; e++) largest = Larger()(largest, A(load(x8.at[e])));
        if (largest > top || largest != largest) {
            sum *= exp_for<T>(top - largest);
            top = largest;
        }
        for (int e = 0; e < V; e++) sum += exp_for<T>(load(x8.at[e]) - top);
    }
    A all = block_reduce(top, Larger());
    sum = block_reduce(top == -infinity<A>() ? A(0) : sum * exp_for<T>(top - all), Sum());
    A total = all + log_of(sum);
    if (threadIdx.x == 0) *nll = target < 0 ? A(0) : total - A(load(x[target]));
    __syncthreads();
    for (i64 i = (i64)threadIdx.x * V; i < classes; i += (i64)blockDim.x * V) {
        Pack<T, V> x8 = *(const Pack<T, V>*)(x + i);
        for (int e = 0; e < V; e++) {
            A p = exp_for<T>(load(x8.at[e]) - total) - (i + e == target ? A(1) : A(0));
            x8.at[e] = Store<T>::of(target < 0 ? A(0) : p * scale);
        }
        *(Pack<T, V>*)(x + i) = x8;
    }
    __syncthreads();
}

// Rows of 16 bits an element, 16 bytes of a thread at a time. Powers of two of scaled logits are one multiplication
// and addition cheaper than exponentials.
const float OF_POWERS = 1.4426950408889634f;

// The largest element of a row, and the sum of the exponentials of what the elements are below it.
struct Peak {
    float top, sum;

    // The sum grows while the row is read, and shrinks when a larger element comes.
    __device__ __forceinline__ void take(float largest) {
        if (largest > top) {
            sum *= power((top - largest) * OF_POWERS);
            top = largest;
        }
    }

    __device__ __forceinline__ float below() const { return top == -infinity<float>() ? 0.0f : -top * OF_POWERS; }
};

// Of the first `valid` elements of a row, on all threads; packs of valid elements are kept if there is room.
template <class T> __device__ __forceinline__ Peak peak_of(const T* x, int valid, Wide<T>* kept) {
    const int V = 8, packs = valid / V;
    Peak own = {-infinity<float>(), 0.0f};
#pragma unroll 4
    for (int p = threadIdx.x; p < packs; p += blockDim.x) {
        Wide<T> a = ((const Wide<T>*)x)[p];
        if (kept) kept[p] = a;
        float largest = a.at(0);
#pragma unroll
        for (int e = 1; e < V; e++) largest = fmaxf(largest, a.at(e));
        own.take(largest);
        float below = own.below();
#pragma unroll
        for (int e = 0; e < V; e++) own.sum += power(fmaf(a.at(e), OF_POWERS, below));
    }
    // What is no whole pack.
    if (int i = packs * V + threadIdx.x; i < valid) {
        own.take(load(x[i]));
        own.sum += power(fmaf(load(x[i]), OF_POWERS, own.below()));
    }
    // A NaN is no maximum, but makes the sum one.
    float all = block_reduce(own.top, Larger());
    if (own.top != -infinity<float>()) own.sum *= power((own.top - all) * OF_POWERS);
    Peak row = {all, block_reduce(own.sum, Sum())};
    return row;
}

// The gradient of a row from its logits: of its `valid` elements; the rest of its packs becomes zero.
template <class T>
__device__ __forceinline__ void put_entropy_grad(const Wide<T>* from, T* to, int valid, int width, i64 target,
                                                 float total, float scale) {
    const int V = 8;
    const float below = -total * OF_POWERS;
#pragma unroll 2
    for (int p = threadIdx.x; p < width / V; p += blockDim.x) {
        Wide<T> a = from[p];
        float y[V];
#pragma unroll
        for (int e = 0; e < V; e++) y[e] = power(fmaf(a.at(e), OF_POWERS, below));
        if (target / V == p) {
#pragma unroll
            for (int e = 0; e < V; e++) y[e] -= target % V == e ? 1.0f : 0.0f;
        }
#pragma unroll
        for (int e = 0; e < V; e++) y[e] = (p + 1) * V <= valid || p * V + e < valid ? y[e] * scale : 0.0f;
        a.put(y);
        ((Wide<T>*)to)[p] = a;
    }
}

// A whole row that fits the block's shared memory: it is read once.
template <class T>
__device__ void entropy_kept(T* x, int classes, i64 target, float scale, float* nll, Wide<T>* kept) {
    float right = threadIdx.x == 0 && target >= 0 ? load(x[target]) : 0.0f;
    Peak peak = peak_of(x, classes, kept);
    float total = peak.top + log_of(peak.sum);
    if (threadIdx.x == 0) *nll = target < 0 ? 0.0f : total - right;
    put_entropy_grad(kept, x, classes, classes, target, total, target < 0 ? 0.0f : scale);
    __syncthreads();
}

// This rank's part of every row of logits, as `measure` stores it.
template <class T> __global__ void __launch_bounds__(512) measure_entropy(Operands o, Rows rows, float* gathered) {
    for (i64 row = blockIdx.x; row < rows.count; row += gridDim.x) {
        const T* x = (const T*)o.in[0] + row * rows.width;
        bool valid = rows.extents.holds(row);
        i64 target = valid ? ((const int*)o.in[1])[row] : -1, hit = target - rows.first;
        Peak peak = {0.0f, 0.0f};
        if (valid) peak = peak_of<T>(x, (int)rows.valid, 0);
        float* at = gathered + (rows.own * rows.count + row) * rows.numbers;
        if (threadIdx.x == 0) {
            at[0] = peak.top;
            at[1] = peak.sum;
            at[2] = target >= 0 && hit >= 0 && hit < rows.valid ? load(x[hit]) : 0.0f;
        }
    }
}

// The gradient of this rank's part of every row, as `finish` has it.
template <class T>
__global__ void __launch_bounds__(512) finish_entropy_grad(Operands o, Rows rows, Fault* fault, i64 site) {
    for (i64 row = blockIdx.x; row < rows.count; row += gridDim.x) {
        const T* x = (const T*)o.in[0] + row * rows.width;
        T* y = (T*)o.out[0] + row * rows.width;
        bool valid = rows.extents.holds(row);
        int target = valid ? ((const int*)o.in[1])[row] : -1;
        bool counts = target >= 0 && !refuses(target, rows, fault, site);
        float total = valid ? ((const float*)o.in[2])[row] : 0.0f, d = counts ? ((const float*)o.in[3])[row] : 0.0f;
        put_entropy_grad((const Wide<T>*)x, y, counts ? (int)rows.valid : 0, (int)rows.width,
                         (i64)target - rows.first, total, d);
    }
}

template <class T>
__global__ void __launch_bounds__(512, 2) entropy_of_kept_rows(T* logits, const int* targets, const float* scale,
                                                               float* nll, i64 rows, i64 classes, Fault* fault,
                                                               i64 site) {
    extern __shared__ double shared[];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 target = targets[row];
        if (target >= classes) {
            if (threadIdx.x == 0) report(fault, site, target, classes);
            target = -1;
        }
        entropy_kept(logits + row * classes, (int)classes, target, *scale, nll + row, (Wide<T>*)shared);
    }
}

template <class T>
__global__ void entropy_in_place(T* logits, const int* targets, const typename Of<T>::Acc* scale,
                                 typename Of<T>::Acc* nll, i64 rows, i64 classes, Fault* fault, i64 site) {
    const int V = 16 / sizeof(T);
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        T* x = logits + row * classes;
        i64 target = targets[row];
        if (target >= classes) {
            if (threadIdx.x == 0) report(fault, site, target, classes);
            target = -1;
        }
        if (classes % V == 0 && aligned(x, 16)) {
            entropy_row<T, V>(x, classes, target, *scale, nll + row);
        } else {
            entropy_row<T, 1>(x, classes, target, *scale, nll + row);
        }
    }
}
