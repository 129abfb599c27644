// What kernels of CUDA C see when a processor runs them: every thread of a block is a coroutine, and the threads
// of a block take turns at barriers. This text stands before the kernels that are compiled.
//
// What it finds beside wrong numbers: threads of a block that wait at different barriers, and shuffles of warps
// that have already lost a thread. STAND_IN_ORDER=reverse runs threads and blocks in the other order, which shows
// missing barriers.

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __restrict__

namespace stand_in {

struct Dim3 {
    unsigned x, y, z;
};

struct Launch {
    Dim3 grid, block;
    unsigned shared;
};

enum State { READY, AT_WARP, AT_BLOCK, OVER };

struct Thread {
    void* stack;
    State state;
    unsigned phase;
};

const unsigned MOST = 1024, STACK = 128 << 10;

struct Block {
    Thread threads[MOST];
    unsigned count, current;
    void* scheduler;
    // What threads of a warp exchange: of two exchanges in turns, by warp and lane.
    alignas(16) char exchanged[2][MOST][16];
    char* stacks;
    char* shared;
    unsigned shared_bytes;
    void (*run)(void*);
    void* context;
};

static thread_local Block* block;

// Memory of the calling thread of the host, from the stand-in for the driver: the same for all kernels.
extern "C" void* stand_in_memory(size_t bytes);

// Saves the registers that a call keeps, and continues on another stack.
extern "C" void stand_in_switch(void** from, void* to);
asm(R"(
.text
.local stand_in_switch
.type stand_in_switch, @function
stand_in_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

static void wait(State state) {
    Thread& own = block->threads[block->current];
    own.state = state;
    stand_in_switch(&own.stack, block->scheduler);
}

static void wrong(const char* what) {
    fprintf(stderr, "stand-in: %s\n", what);
    abort();
}

static bool copies_left();

static void first() {
    block->run(block->context);
    if (copies_left()) wrong("a thread ended with copies that it did not wait for");
    wait(OVER);
    abort();
}

static bool reversed() {
    static const bool is = getenv("STAND_IN_ORDER") && !strcmp(getenv("STAND_IN_ORDER"), "reverse");
    return is;
}

}  // namespace stand_in

static thread_local stand_in::Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace stand_in {

static void start(unsigned t) {
    // As if `first` had been called, with its stack aligned as calls find it.
    void** top = (void**)(block->stacks + (size_t)(t + 1) * STACK);
    *--top = 0;
    *--top = (void*)&first;
    for (int i = 0; i < 6; i++) *--top = 0;
    block->threads[t] = Thread{top, READY, 0};
}

// Lets threads of a warp go on once all that are left have met.
static bool release_warp(unsigned from, unsigned end) {
    unsigned met = 0, over = 0;
    for (unsigned t = from; t < end; t++) {
        met += block->threads[t].state == AT_WARP;
        over += block->threads[t].state == OVER;
    }
    if (met == 0 || met + over < end - from) return false;
    if (over) wrong("a warp shuffles after one of its threads ended");
    for (unsigned t = from; t < end; t++) block->threads[t].state = READY;
    return true;
}

static void run_block() {
    unsigned count = block->count;
    for (unsigned t = 0; t < count; t++) start(t);
    memset(block->shared, 0xff, block->shared_bytes);
    for (;;) {
        bool ran = false;
        for (unsigned w = 0; w < count; w += 32) {
            unsigned from = reversed() ? (count - 1 - w) / 32 * 32 : w;
            unsigned end = from + 32 < count ? from + 32 : count;
            do {
                for (unsigned i = from; i < end; i++) {
                    unsigned t = reversed() ? end - 1 - (i - from) : i;
                    if (block->threads[t].state != READY) continue;
                    ran = true;
                    block->current = t;
                    threadIdx = Dim3{t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
                    stand_in_switch(&block->scheduler, block->threads[t].stack);
                }
            } while (release_warp(from, end));
        }
        unsigned at = 0, over = 0;
        for (unsigned t = 0; t < count; t++) {
            at += block->threads[t].state == AT_BLOCK;
            over += block->threads[t].state == OVER;
        }
        if (over == count) return;
        if (at + over == count) {
            if (over) wrong("a block has a barrier after one of its threads ended");
            for (unsigned t = 0; t < count; t++) block->threads[t].state = READY;
        } else if (!ran) {
            wrong("threads of a block wait at different barriers");
        }
    }
}

static void each_block(const Launch& launch, void (*run)(void*), void* context) {
    const size_t kept = (sizeof(Block) + 4095) / 4096 * 4096, shared = 256 << 10;
    char* memory = (char*)stand_in_memory(kept + shared + (size_t)MOST * STACK);
    block = (Block*)memory, block->shared = memory + kept, block->stacks = memory + kept + shared;
    block->count = launch.block.x * launch.block.y * launch.block.z;
    block->shared_bytes = launch.shared;
    block->run = run, block->context = context;
    blockDim = launch.block, gridDim = launch.grid;
    uint64_t all = (uint64_t)gridDim.x * gridDim.y * gridDim.z;
    for (uint64_t i = 0; i < all; i++) {
        uint64_t b = reversed() ? all - 1 - i : i;
        blockIdx = Dim3{unsigned(b % gridDim.x), unsigned(b / gridDim.x % gridDim.y), unsigned(b / gridDim.x / gridDim.y)};
        run_block();
    }
}

template <class A> static A exchange(A value, unsigned lane) {
    static_assert(sizeof(A) <= 16, "too wide for a shuffle");
    Thread& own = block->threads[block->current];
    char(*at)[16] = block->exchanged[own.phase++ & 1];
    unsigned current = block->current;
    memcpy(at[current], &value, sizeof(A));
    wait(AT_WARP);
    unsigned from = current / 32 * 32 + lane % 32;
    memcpy(&value, at[from < block->count ? from : current], sizeof(A));
    return value;
}

// Copies to shared memory that a thread has issued and not waited for. They happen when they are waited for, or, in
// the reverse order, at once: a kernel that forgets to wait, or that overwrites what others still read, is found.
struct Copies {
    enum { MOST = 64 };
    struct Copy {
        void* to;
        const void* from;
        int bytes;
        unsigned group;
    } waiting[MOST];
    unsigned first, count, group;
};

static thread_local Copies* of_threads;

static Copies& copies() {
    if (!of_threads) of_threads = (Copies*)calloc(stand_in::MOST, sizeof(Copies));
    return of_threads[block->current];
}

static void copy_now(const Copies::Copy& copy) {
    memset(copy.to, 0, 16);
    memcpy(copy.to, copy.from, copy.bytes);
}

static void copy_later(void* to, const void* from, int bytes) {
    Copies& own = copies();
    Copies::Copy copy = {to, from, bytes, own.group};
    if (((uintptr_t)to | (uintptr_t)from) & 15 || bytes < 0 || bytes > 16) wrong("a copy of 16 bytes is not aligned");
    if (own.count == Copies::MOST) wrong("a thread has too many copies that it did not wait for");
    if (reversed()) copy_now(copy);
    else own.waiting[(own.first + own.count++) % Copies::MOST] = copy;
}

static bool copies_left() { return of_threads && copies().count != 0; }

static void end_copies() { copies().group++; }

static void await_copies(unsigned last) {
    Copies& own = copies();
    while (own.count && own.waiting[own.first].group + last < own.group) {
        copy_now(own.waiting[own.first]);
        own.first = (own.first + 1) % Copies::MOST, own.count--;
    }
}

// What a warp gets of four matrices of 8 by 8 numbers of 16 bits; each lane has the address of a row.
static void load_matrices(uint32_t* to, const void* row, bool turned) {
    unsigned lane = block->current % 32;
    for (unsigned i = 0; i < 4; i++) {
        const uint16_t* of[2];
        for (unsigned e = 0; e < 2; e++)
            of[e] = exchange((const uint16_t*)row, 8 * i + (turned ? lane % 4 * 2 + e : lane / 4));
        unsigned first = turned ? lane / 4 : lane % 4 * 2, second = turned ? first : first + 1;
        to[i] = (uint32_t)of[1][second] << 16 | of[0][first];
    }
}

// Adds the product of 16 by 16 and 16 by 8 numbers of 16 bits, which the lanes of a warp share: of row l / 4 and of the
// eighth row behind it, and of column l / 4, lane l has the neighbours 2 (l % 4) and the eighth ones behind them. Of
// the sums, it has those of its rows and of the columns 2 (l % 4).
template <class Number> static void multiply(float* sum, const uint32_t* a, uint32_t b0, uint32_t b1, Number number) {
    struct Left {
        uint32_t v[4];
    } left = {{a[0], a[1], a[2], a[3]}};
    struct Right {
        uint32_t v[2];
    } right = {{b0, b1}};
    unsigned lane = block->current % 32;
    for (unsigned at = 0; at < 4; at++) {
        Left rows = exchange(left, lane / 4 * 4 + at);
        for (unsigned column = 0; column < 2; column++) {
            Right found = exchange(right, (lane % 4 * 2 + column) * 4 + at);
            for (unsigned k = 0; k < 4; k++)
                for (unsigned row = 0; row < 2; row++) {
                    uint16_t x = (uint16_t)(rows.v[k / 2 * 2 + row] >> 16 * (k % 2));
                    uint16_t y = (uint16_t)(found.v[k / 2] >> 16 * (k % 2));
                    sum[row * 2 + column] += number(x) * number(y);
                }
        }
    }
}

template <int... I> struct Indices {};
template <int N, int... I> struct Upto : Upto<N - 1, N - 1, I...> {};
template <int... I> struct Upto<0, I...> { typedef Indices<I...> type; };

template <class... A, int... I> static void apply(void (*kernel)(A...), void** arguments, Indices<I...>) {
    kernel(*(A*)arguments[I]...);
}

template <class... A> static void** copied(void (*)(A...), void** arguments) {
    const size_t sizes[] = {sizeof(A)..., 0};
    void** copies = (void**)malloc(sizeof(sizes));
    for (size_t i = 0; i < sizeof...(A); i++) {
        copies[i] = aligned_alloc(64, (sizes[i] + 63) / 64 * 64);
        memcpy(copies[i], arguments[i], sizes[i]);
    }
    return copies;
}

// Runs a kernel; or, without a launch, only copies its arguments.
template <class... A> static void** enter(void (*kernel)(A...), const Launch* launch, void** arguments) {
    if (!launch) return copied(kernel, arguments);
    struct Call {
        void (*kernel)(A...);
        void** arguments;
    } call = {kernel, arguments};
    each_block(*launch, [](void* c) {
        Call* call = (Call*)c;
        apply(call->kernel, call->arguments, typename Upto<sizeof...(A)>::type());
    }, &call);
    return 0;
}

}  // namespace stand_in

static inline void __syncthreads() { stand_in::wait(stand_in::AT_BLOCK); }
static inline void __threadfence_system() {}
static inline void __threadfence() {}

template <class A> static inline A __shfl_sync(unsigned, A x, int lane) { return stand_in::exchange(x, lane); }
template <class A> static inline A __shfl_xor_sync(unsigned, A x, int apart) {
    return stand_in::exchange(x, stand_in::block->current % 32 ^ apart);
}
template <class A> static inline A __shfl_down_sync(unsigned, A x, int apart) {
    unsigned lane = stand_in::block->current % 32;
    return stand_in::exchange(x, lane + apart < 32 ? lane + apart : lane);
}
template <class A> static inline A __shfl_up_sync(unsigned, A x, int apart) {
    unsigned lane = stand_in::block->current % 32;
    return stand_in::exchange(x, (int)lane >= apart ? lane - apart : lane);
}
static inline unsigned __ballot_sync(unsigned, int yes) {
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= (stand_in::exchange(yes ? 1u : 0u, lane)) << lane;
    return bits;
}

template <class To, class From> static inline To stand_in_bits(From x) {
    To y;
    static_assert(sizeof(x) == sizeof(y), "bits are as many");
    memcpy(&y, &x, sizeof(y));
    return y;
}
static inline float __uint_as_float(unsigned x) { return stand_in_bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return stand_in_bits<unsigned>(x); }
static inline float __int_as_float(int x) { return stand_in_bits<float>(x); }
static inline int __float_as_int(float x) { return stand_in_bits<int>(x); }
static inline double __longlong_as_double(long long x) { return stand_in_bits<double>(x); }
static inline long long __double_as_longlong(double x) { return stand_in_bits<long long>(x); }
static inline int stand_in_int(double x) {
    return x != x ? 0 : x >= 2147483647.0 ? 2147483647 : x <= -2147483648.0 ? -2147483647 - 1 : (int)x;
}
static inline int __float2int_rz(float x) { return stand_in_int(x); }
static inline int __double2int_rz(double x) { return stand_in_int(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
#define __expf expf
#define __logf logf
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / ::sqrt(x); }
template <class A> static inline A min(A a, A b) { return b < a ? b : a; }
template <class A> static inline A max(A a, A b) { return a < b ? b : a; }
