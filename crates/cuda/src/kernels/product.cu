// Products of any arrangement, for operands that the library of matrix products does not take.

struct Einsum {
    i64 rows, cols, inner;
    i64 a_row, a_inner, b_inner, b_col, c_row, c_col;
    // Loops around the matrices, and loops over sums that are not evenly spaced.
    i64 outers, batch, outer_size[6], outer_a[6], outer_b[6], outer_c[6];
    i64 sums, terms, sum_size[6], sum_a[6], sum_b[6];
};

enum { TILE = 16 };

template <class T, class C>
__global__ void einsum(const T* a, const T* b, const C* addend, C* c, Einsum e, i64 add) {
    typedef typename Of<T>::Acc A;
    __shared__ A left[TILE][TILE + 1], right[TILE][TILE + 1];
    int ty = threadIdx.x / TILE, tx = threadIdx.x % TILE;
    i64 columns = (e.cols + TILE - 1) / TILE;
    i64 row = (i64)blockIdx.x / columns * TILE + ty, col = (i64)blockIdx.x % columns * TILE + tx;
    for (i64 batch = blockIdx.y; batch < e.batch; batch += gridDim.y) {
        i64 at_a = 0, at_b = 0, at_c = 0, rest = batch;
        for (int d = (int)e.outers - 1; d >= 0; d--) {
            i64 at = rest % e.outer_size[d];
            rest /= e.outer_size[d];
            at_a += at * e.outer_a[d];
            at_b += at * e.outer_b[d];
            at_c += at * e.outer_c[d];
        }
        A total = A(0);
        for (i64 term = 0; term < e.terms; term++) {
            i64 from_a = at_a, from_b = at_b;
            rest = term;
            for (int d = (int)e.sums - 1; d >= 0; d--) {
                i64 at = rest % e.sum_size[d];
                rest /= e.sum_size[d];
                from_a += at * e.sum_a[d];
                from_b += at * e.sum_b[d];
            }
            for (i64 k = 0; k < e.inner; k += TILE) {
                left[ty][tx] = row < e.rows && k + tx < e.inner
                    ? A(load(a[from_a + row * e.a_row + (k + tx) * e.a_inner])) : A(0);
                right[ty][tx] = col < e.cols && k + ty < e.inner
                    ? A(load(b[from_b + (k + ty) * e.b_inner + col * e.b_col])) : A(0);
                __syncthreads();
                for (int x = 0; x < TILE; x++) total = fma(left[ty][x], right[x][tx], total);
                __syncthreads();
            }
        }
        if (row < e.rows && col < e.cols) {
            i64 at = at_c + row * e.c_row + col * e.c_col;
            if (addend) total += A(load(addend[at]));
            if (add) total += A(load(c[at]));
            c[at] = Store<C>::of(total);
        }
    }
}
