// Ops that move elements without computing, and the copies at the ends of programs.

// A walk over up to eight dims: steps in the operand and in the result.
struct Walk {
    i64 rank, count;
    i64 size[8], from[8], to[8];
};

template <class T> __global__ void copy_strided(const T* from, T* to, Walk walk) {
    for (u64 i = thread_index(); i < (u64)walk.count; i += thread_count()) {
        u64 rest = i;
        i64 source = 0, target = 0;
        for (int d = (int)walk.rank - 1; d >= 0; d--) {
            u64 next = rest / (u64)walk.size[d];
            i64 at = (i64)(rest - next * (u64)walk.size[d]);
            source += at * walk.from[d];
            target += at * walk.to[d];
            rest = next;
        }
        to[target] = from[source];
    }
}

// Rows of `inner` elements: of every `wanted` in the result, each is at its place among `given`.
template <class T>
__global__ void pick(const T* from, T* to, const i64* places, i64 wanted, i64 given, i64 inner, i64 count) {
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) {
        u64 row = i / (u64)inner, group = row / (u64)wanted;
        u64 source = group * (u64)given + (u64)places[row - group * (u64)wanted];
        to[i] = from[source * (u64)inner + (i - row * (u64)inner)];
    }
}

template <class T> __global__ void fill(T* to, i64 count, double value) {
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) to[i] = Store<T>::of(value);
}

template <class T> __global__ void fill_word(T* to, i64 count, i64 value) {
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) to[i] = (T)value;
}

// to = from, or to += from.
template <class T> __global__ void copy_or_add(const T* from, T* to, i64 count, i64 add) {
    for (u64 i = thread_index(); i < (u64)count; i += thread_count())
        to[i] = add ? Store<T>::of(load(to[i]) + load(from[i])) : from[i];
}

// The operand with zeros in its padding, or its valid elements added.
template <class T> __global__ void zero_padding(const T* x, T* y, Extents extents, i64 count, i64 add) {
    for (u64 i = thread_index(); i < (u64)count; i += thread_count()) {
        bool valid = extents.holds((i64)i);
        if (add) {
            if (valid) y[i] = Store<T>::of(load(y[i]) + load(x[i]));
        } else if (valid) {
            y[i] = x[i];
        } else {
            y[i] = Store<T>::of(typename Of<T>::Acc(0));
        }
    }
}
