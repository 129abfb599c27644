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

// The same for rows of 16 bits an element that are whole packs and fit the block's shared memory: a row is read once.
// Powers of two of scaled logits are one multiplication and addition cheaper than exponentials.
template <class T>
__device__ void entropy_kept(T* x, int classes, i64 target, float scale, float* nll, Wide<T>* kept) {
    const int V = 8, packs = classes / V;
    const float by = 1.4426950408889634f;
    float top = -infinity<float>(), sum = 0.0f, right = 0.0f;
    if (threadIdx.x == 0 && target >= 0) right = load(x[target]);
    // The sum grows while the row is read, and shrinks when a larger element comes.
#pragma unroll 4
    for (int p = threadIdx.x; p < packs; p += blockDim.x) {
        Wide<T> a = ((const Wide<T>*)x)[p];
        kept[p] = a;
        float largest = a.at(0);
#pragma unroll
        for (int e = 1; e < V; e++) largest = fmaxf(largest, a.at(e));
        if (largest > top) {
            sum *= power((top - largest) * by);
            top = largest;
        }
        float below = top == -infinity<float>() ? 0.0f : -top * by;
#pragma unroll
        for (int e = 0; e < V; e++) sum += power(fmaf(a.at(e), by, below));
    }
    // A NaN is no maximum, but makes the sum one.
    float all = block_reduce(top, Larger());
    if (top != -infinity<float>()) sum *= power((top - all) * by);
    float total = all + log_of(block_reduce(sum, Sum())), below = -total * by;
    if (threadIdx.x == 0) *nll = target < 0 ? 0.0f : total - right;
    float own = target < 0 ? 0.0f : scale;
#pragma unroll 2
    for (int p = threadIdx.x; p < packs; p += blockDim.x) {
        Wide<T> a = kept[p];
        float y[V];
#pragma unroll
        for (int e = 0; e < V; e++) y[e] = power(fmaf(a.at(e), by, below));
        if (target / V == p) {
#pragma unroll
            for (int e = 0; e < V; e++) y[e] -= target % V == e ? 1.0f : 0.0f;
        }
#pragma unroll
        for (int e = 0; e < V; e++) y[e] *= own;
        a.put(y);
        ((Wide<T>*)x)[p] = a;
    }
    __syncthreads();
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
