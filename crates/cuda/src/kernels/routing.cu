// Choices of experts, places of tokens, and rows that go there and come back. No atomic operations: which thread
// writes an element is known beforehand, so the bits do not depend on the run.

// The k largest of each row, a thread for each row: the lower index wins a tie, a NaN is smaller than every
// number. Columns behind k are zero.
template <class T>
__global__ void top_k(const T* x, T* values, int* index, i64 rows, i64 size, i64 valid, i64 stride, i64 k) {
    typedef typename Of<T>::Acc A;
    for (i64 row = thread_index(); row < rows; row += thread_count()) {
        for (i64 at = 0; at < stride; at++) {
            i64 best = -1;
            A most = A(0);
            for (i64 i = 0; at < k && i < valid; i++) {
                bool taken = false;
                for (i64 j = 0; j < at; j++) taken = taken || index[row * stride + j] == i;
                A number = load(x[row * size + i]);
                if (taken) continue;
                if (best < 0 || (most != most ? number == number : number > most)) {
                    best = i;
                    most = number;
                }
            }
            values[row * stride + at] = best < 0 ? Store<T>::of(A(0)) : x[row * size + best];
            index[row * stride + at] = best < 0 ? 0 : (int)best;
        }
    }
}

// Each element of dy where it was taken from, zeros elsewhere.
template <class T>
__global__ void top_k_grad(const int* index, const T* dy, T* dx, i64 elements, i64 size, i64 stride, i64 k) {
    for (i64 at = thread_index(); at < elements; at += thread_count()) {
        i64 row = at / size, column = at % size;
        T found = Store<T>::of(typename Of<T>::Acc(0));
        for (i64 j = 0; j < k; j++)
            if (index[row * stride + j] == column) found = dy[row * stride + j];
        dx[at] = found;
    }
}

// Tokens of a group and their choices, and how many of each are valid.
struct Choices {
    i64 tokens, valid_tokens, k, valid_k;

    __device__ __forceinline__ i64 group() const { return tokens * k; }

    __device__ __forceinline__ bool holds(i64 at) const { return at / k < valid_tokens && at % k < valid_k; }
};

// A warp for each group and expert goes through the group's choices, first ones first, and counts those of
// its expert. The warp behind the last expert takes what has none, and padding.
template <class S>
__global__ void assign(const int* index, const S* stands, int* slots, i64 groups, Choices of, i64 experts,
                       i64 capacity) {
    i64 lane = threadIdx.x % 32, warps = thread_count() / 32;
    for (i64 warp = thread_index() / 32; warp < groups * (experts + 1); warp += warps) {
        i64 group = warp / (experts + 1), expert = warp % (experts + 1), taken = 0;
        for (i64 choice = 0; choice < of.k; choice++) {
            for (i64 begin = 0; begin < of.tokens; begin += 32) {
                i64 token = begin + lane, at = group * of.group() + token * of.k + choice;
                i64 wanted = -1;
                if (token < of.tokens) {
                    wanted = index[at];
                    bool valid = token < of.valid_tokens && choice < of.valid_k && (!stands || stands[at] != 0);
                    if (!valid || wanted < 0 || wanted >= experts) wanted = experts;
                }
                bool mine = wanted == expert;
                u32 mask = __ballot_sync(0xffffffffu, mine);
                i64 place = taken + __popc(mask & ((1u << lane) - 1));
                bool has = expert < experts && place < capacity;
                if (mine) slots[at] = (int)(has ? expert * capacity + place : experts * capacity);
                taken += __popc(mask);
            }
        }
    }
}

// The expert of a choice; `experts` for what has none and for padding.
template <class S>
__device__ __forceinline__ i64 wanted_expert(const int* index, const S* stands, i64 base, i64 at, const Choices& of,
                                             i64 experts) {
    i64 wanted = index[base + at];
    bool valid = of.holds(at) && (!stands || stands[base + at] != 0);
    return valid && wanted >= 0 && wanted < experts ? wanted : experts;
}

// A warp for each group and expert: rows of earlier experts of its part come first, and what is left of the room is
// this one's. The warp behind the last expert
// takes what has none, and padding. Of the parts, `held` from `first` on are counted here.
template <class S>
__global__ void queue(const int* index, const S* stands, int* slots, int* counts, i64 groups, Choices of, i64 experts,
                      i64 parts, i64 room, i64 first, i64 held, i64 stride) {
    i64 lane = threadIdx.x % 32, warps = thread_count() / 32, own = experts / parts;
    for (i64 warp = thread_index() / 32; warp < groups * (experts + 1); warp += warps) {
        i64 group = warp / (experts + 1), expert = warp % (experts + 1), base = group * of.group(), before = 0;
        i64 part = expert / own;
        for (i64 at = lane; at < of.group(); at += 32) {
            i64 wanted = wanted_expert(index, stands, base, at, of, experts);
            if (wanted < expert && wanted >= part * own) before++;
        }
        before = warp_reduce(before, Sum());
        i64 next = before;
        for (i64 choice = 0; choice < of.k; choice++) {
            for (i64 begin = 0; begin < of.tokens; begin += 32) {
                i64 token = begin + lane, at = token * of.k + choice;
                bool mine = token < of.tokens && wanted_expert(index, stands, base, at, of, experts) == expert;
                u32 mask = __ballot_sync(0xffffffffu, mine);
                i64 row = next + __popc(mask & ((1u << lane) - 1));
                bool fits = expert < experts && row < room;
                if (mine) slots[base + at] = (int)(fits ? part * room + row : parts * room);
                next += __popc(mask);
            }
        }
        bool here = expert < experts && part >= first && part < first + held;
        i64 rows = (next < room ? next : room) - (before < room ? before : room);
        if (lane == 0 && here) counts[((part - first) * groups + group) * stride + expert % own] = (int)rows;
    }
}

// A warp for each group and number.
template <class T>
__global__ void histogram(const int* numbers, T* out, i64 groups, Choices of, i64 per, i64 size, i64 first,
                          i64 width) {
    i64 lane = threadIdx.x % 32, warps = thread_count() / 32;
    for (i64 warp = thread_index() / 32; warp < groups * width; warp += warps) {
        i64 group = warp / width, wanted = first + warp % width, count = 0;
        for (i64 at = lane; at < of.group(); at += 32) {
            i64 number = numbers[group * of.group() + at];
            if (of.holds(at) && number >= 0 && number / per == wanted) count++;
        }
        count = warp_reduce(count, Sum());
        typedef typename Of<T>::Acc A;
        if (lane == 0) out[warp] = Store<T>::of(wanted < size ? A(count) : A(0));
    }
}

// The places of experts that are distributed to `parts` ranks, a thread for each number.
template <class T>
__global__ void deal(const T* numbers, T* out, i64 elements, i64 experts, i64 parts, i64 per) {
    for (i64 at = thread_index(); at < elements; at += thread_count()) {
        i64 number = numbers[at], expert = number / per;
        if (number < 0 || expert >= experts) out[at] = (T)number;
        else out[at] = (T)((expert % parts * (experts / parts) + expert / parts) * per + number % per);
    }
}

// How dispatched rows lie here: all experts and their places; the first expert that is here and how many
// are; groups; rows of an expert and a group.
struct Cells {
    i64 experts, capacity, first, held, groups, rows;

    // The row of a place, or -1 if it is not here.
    __device__ __forceinline__ i64 find(i64 group, i64 slot) const {
        if (slot < 0 || slot >= experts * capacity) return -1;
        i64 expert = slot / capacity - first;
        if (expert < 0 || expert >= held) return -1;
        return (expert * groups + group) * rows + slot % capacity;
    }
};

// Each token's row to its places, which were cleared: a warp for each choice of a token.
template <class T>
__global__ void dispatch(const T* x, const int* slots, const typename Of<T>::Acc* gates, T* out, i64 count,
                         i64 width, Choices of, Cells cells) {
    i64 lane = threadIdx.x % 32, warps = thread_count() / 32;
    for (i64 at = thread_index() / 32; at < count; at += warps) {
        i64 group = at / of.group();
        if (!of.holds(at % of.group())) continue;
        i64 cell = cells.find(group, slots[at]);
        if (cell < 0) continue;
        const T* from = x + at / of.k * width;
        T* to = out + cell * width;
        for (i64 i = lane; i < width; i += 32)
            to[i] = gates ? Store<T>::of(load(from[i]) * gates[at]) : from[i];
    }
}

// The sum of the rows at a token's places: a warp for each token.
template <class T>
__global__ void combine(const T* y, const int* slots, const typename Of<T>::Acc* gates, T* out, i64 tokens,
                        i64 width, Choices of, Cells cells) {
    typedef typename Of<T>::Acc A;
    i64 lane = threadIdx.x % 32, warps = thread_count() / 32;
    for (i64 token = thread_index() / 32; token < tokens; token += warps) {
        i64 group = token / of.tokens;
        for (i64 i = lane; i < width; i += 32) {
            A sum = A(0);
            for (i64 choice = 0; choice < of.valid_k; choice++) {
                i64 at = token * of.k + choice, cell = cells.find(group, slots[at]);
                if (cell >= 0) sum += load(y[cell * width + i]) * (gates ? gates[at] : A(1));
            }
            out[token * width + i] = Store<T>::of(sum);
        }
    }
}

// The product of a token's row with the row at each of its places: a warp for each choice.
template <class T>
__global__ void gate_grad(const T* rows, const T* y, const int* slots, typename Of<T>::Acc* out, i64 count,
                          i64 width, i64 valid, Choices of, Cells cells) {
    typedef typename Of<T>::Acc A;
    i64 lane = threadIdx.x % 32, warps = thread_count() / 32;
    for (i64 at = thread_index() / 32; at < count; at += warps) {
        i64 cell = cells.find(at / of.group(), slots[at]);
        A sum = A(0);
        for (i64 i = lane; cell >= 0 && i < valid; i += 32)
            sum += load(rows[at / of.k * width + i]) * load(y[cell * width + i]);
        sum = warp_reduce(sum, Sum());
        if (lane == 0) out[at] = sum;
    }
}
