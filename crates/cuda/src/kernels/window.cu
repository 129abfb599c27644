// Windows over images [batch, height, width, channels]: convolution, pooling and their gradients. A thread
// for each element of the result, which reads what its taps reach; gradients gather instead of scattering.

struct Span {
    i64 size, stride, dilation, shift;
    // What exists of what is held: from, to.
    i64 inputs[2], outputs[2];

    // The input that a tap of an output reads, or -1.
    __device__ __forceinline__ i64 input(i64 output, i64 tap) const {
        i64 at = output * stride + tap * dilation - shift;
        return inputs[0] <= at && at < inputs[1] ? at : -1;
    }
    // The output whose tap reads an input, or -1.
    __device__ __forceinline__ i64 output(i64 input, i64 tap) const {
        i64 at = input + shift - tap * dilation;
        if (at < 0 || at % stride != 0) return -1;
        at /= stride;
        return outputs[0] <= at && at < outputs[1] ? at : -1;
    }
    template <bool BACK> __device__ __forceinline__ i64 read(i64 at, i64 tap) const {
        return BACK ? output(at, tap) : input(at, tap);
    }
};

struct Windows {
    // The shape of the result (of dy, for the gradient of weights), and of what is gathered.
    i64 batch, height, width, channels;
    i64 valid_batch, valid_height, valid_width, valid_channels;
    i64 from_height, from_width, from_channels, valid_from;
    // Taps of the weights along height and width, padding included.
    i64 taps_down, taps_across;
    Span rows, columns;

    __device__ __forceinline__ i64 place(i64 b, i64 r, i64 c) const { return (b * from_height + r) * from_width + c; }
    __device__ __forceinline__ bool has(i64 b, i64 y, i64 x, i64 o) const {
        return b < valid_batch && y < valid_height && x < valid_width && o < valid_channels;
    }
};

template <class T, bool BACK> __global__ void convolution(const T* from, const T* w, T* out, Windows v) {
    typedef typename Of<T>::Acc A;
    i64 count = v.batch * v.height * v.width * v.channels;
    for (i64 n = (i64)thread_index(); n < count; n += (i64)thread_count()) {
        i64 o = n % v.channels, x = n / v.channels % v.width, y = n / v.channels / v.width % v.height;
        i64 b = n / v.channels / v.width / v.height;
        A total = A(0);
        if (v.has(b, y, x, o)) {
            for (i64 k = 0; k < v.rows.size; k++) {
                i64 r = v.rows.read<BACK>(y, k);
                if (r < 0) continue;
                for (i64 l = 0; l < v.columns.size; l++) {
                    i64 c = v.columns.read<BACK>(x, l);
                    if (c < 0) continue;
                    const T* image = from + v.place(b, r, c) * v.from_channels;
                    i64 tap = k * v.taps_across + l;
                    // Backwards, the result's channels are those that the weights read.
                    const T* weight = w + (BACK ? (tap * v.channels + o) * v.from_channels : tap * v.from_channels * v.channels + o);
                    i64 step = BACK ? 1 : v.channels;
                    for (i64 i = 0; i < v.valid_from; i++) total = fma(A(load(image[i])), A(load(weight[i * step])), total);
                }
            }
        }
        out[n] = Store<T>::of(total);
    }
}

// A block for each tap and input channel; its threads take output channels.
template <class T, class C> __global__ void convolution_weights(const T* from, const T* dy, C* out, Windows v, i64 add) {
    typedef typename Of<T>::Acc A;
    i64 rows = v.taps_down * v.taps_across * v.from_channels;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 i = row % v.from_channels, tap = row / v.from_channels;
        i64 k = tap / v.taps_across, l = tap % v.taps_across;
        for (i64 o = threadIdx.x; o < v.channels; o += blockDim.x) {
            A total = A(0);
            if (i < v.valid_from && o < v.valid_channels && k < v.rows.size && l < v.columns.size)
                for (i64 b = 0; b < v.valid_batch; b++)
                    for (i64 y = 0; y < v.valid_height; y++) {
                        i64 r = v.rows.input(y, k);
                        if (r < 0) continue;
                        A line = A(0);
                        for (i64 x = 0; x < v.valid_width; x++) {
                            i64 c = v.columns.input(x, l);
                            if (c < 0) continue;
                            A image = A(load(from[v.place(b, r, c) * v.from_channels + i]));
                            line = fma(image, A(load(dy[((b * v.height + y) * v.width + x) * v.channels + o])), line);
                        }
                        total += line;
                    }
            i64 n = row * v.channels + o;
            out[n] = Store<C>::of(add ? A(load(out[n])) + total : total);
        }
    }
}

template <class T, bool MAX> __global__ void pool(const T* from, T* out, int* taken, Windows v) {
    typedef typename Of<T>::Acc A;
    i64 count = v.batch * v.height * v.width * v.channels, taps = v.rows.size * v.columns.size;
    for (i64 n = (i64)thread_index(); n < count; n += (i64)thread_count()) {
        i64 o = n % v.channels, x = n / v.channels % v.width, y = n / v.channels / v.width % v.height;
        i64 b = n / v.channels / v.width / v.height;
        A value = A(0);
        int tap = 0;
        if (v.has(b, y, x, o)) {
            if (MAX) value = -infinity<A>(), tap = -1;
            for (i64 j = 0; j < taps; j++) {
                i64 r = v.rows.input(y, j / v.columns.size), c = v.columns.input(x, j % v.columns.size);
                if (r < 0 || c < 0) continue;
                A a = A(load(from[v.place(b, r, c) * v.channels + o]));
                if (!MAX) value += a;
                else if (tap < 0 || a > value || a != a) value = a, tap = (int)j;
            }
            if (!MAX) value = value * (A(1) / A(taps));
        }
        out[n] = Store<T>::of(value);
        if (MAX) taken[n] = tap;
    }
}

template <class T, bool MAX> __global__ void pool_grad(const T* dy, const int* taken, T* out, Windows v) {
    typedef typename Of<T>::Acc A;
    i64 count = v.batch * v.height * v.width * v.channels, taps = v.rows.size * v.columns.size;
    for (i64 n = (i64)thread_index(); n < count; n += (i64)thread_count()) {
        i64 o = n % v.channels, x = n / v.channels % v.width, y = n / v.channels / v.width % v.height;
        i64 b = n / v.channels / v.width / v.height;
        A total = A(0);
        if (v.has(b, y, x, o))
            for (i64 j = 0; j < taps; j++) {
                i64 r = v.rows.output(y, j / v.columns.size), c = v.columns.output(x, j % v.columns.size);
                if (r < 0 || c < 0) continue;
                i64 at = v.place(b, r, c) * v.channels + o;
                if (!MAX || taken[at] == (int)j) total += A(load(dy[at]));
            }
        out[n] = Store<T>::of(MAX ? total : total * (A(1) / A(taps)));
    }
}
