// The loss of rows of logits and their gradient in the same memory, for the fused loss.

// The exponential, as exact as the element type needs.
template <class T> __device__ __forceinline__ typename Of<T>::Acc exp_for(typename Of<T>::Acc x) { return exp_of(x); }
template <> __device__ __forceinline__ float exp_for<bf16>(float x) { return __expf(x); }

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
