// Stands in for the CUDA driver: memory of the host, kernels that are functions of the host, and streams that run
// what they are given at once. Captured streams keep it instead, with what each piece waits for, and a graph runs it
// again: what other streams captured as late as their events allow, or, with STAND_IN_ORDER=reverse, as early.
//
// It knows what was allocated: memory behind an allocation that a kernel wrote is reported when it is freed, and
// free memory is what is left of STAND_IN_MEMORY bytes (16 GiB). STAND_IN_FAIL="function=status" lets calls of a
// function fail with a status; "function=status@n" only the n-th one.

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

typedef unsigned long long Address;

struct Dim3 {
    unsigned x, y, z;
};
struct Launch {
    Dim3 grid, block;
    unsigned shared;
};
typedef void** (*Entry)(const Launch*, void**);

// What was captured: each piece with the pieces before it, and whether it came from the stream that began.
struct Piece {
    std::function<void()> work;
    std::vector<size_t> after;
    bool own;
};
struct Graph {
    std::vector<Piece> pieces;
    void* begun;
};
struct Stream {
    Graph* captured = nullptr;
    // The pieces that the next one comes after.
    std::vector<size_t> after;
};
struct Event {
    double at = 0;
    Graph* captured = nullptr;
    std::vector<size_t> after;
};
struct Function {
    Entry entry;
    unsigned most_shared = 48 << 10;
};

static std::mutex lock;
static std::map<Address, size_t> memory;
static size_t taken = 0;

static const size_t GUARD = 4096, PAGE = 2 << 20;

static size_t total() {
    static const size_t bytes = getenv("STAND_IN_MEMORY") ? strtoull(getenv("STAND_IN_MEMORY"), 0, 10) : 16ull << 30;
    return bytes;
}

static size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// The status that a call of a function must fail with.
static int failure(const char* function) {
    static const char* plan = getenv("STAND_IN_FAIL");
    static std::atomic<int> calls{0};
    if (!plan) return 0;
    const char* equals = strchr(plan, '=');
    size_t length = equals ? equals - plan : 0;
    if (!equals || strlen(function) != length || strncmp(plan, function, length)) return 0;
    const char* at = strchr(equals, '@');
    int call = ++calls;
    return at && atoi(at + 1) != call ? 0 : atoi(equals + 1);
}
#define MAY_FAIL() \
    if (int status = failure(__func__)) return status

static int issue(void* stream, std::function<void()> work) {
    Stream* s = (Stream*)stream;
    if (!s || !s->captured) return work(), 0;
    std::vector<Piece>& pieces = s->captured->pieces;
    pieces.push_back({work, s->after, stream == s->captured->begun});
    return s->after = {pieces.size() - 1}, 0;
}

// Runs what was captured in an order that its events allow.
static void run(const Graph& graph, void* stream) {
    static const bool early = getenv("STAND_IN_ORDER") && !strcmp(getenv("STAND_IN_ORDER"), "reverse");
    const std::vector<Piece>& pieces = graph.pieces;
    std::vector<bool> done(pieces.size());
    for (size_t left = pieces.size(), first = 0; left > 0; left--) {
        size_t next = pieces.size();
        for (size_t i = first; i < pieces.size(); i++) {
            bool ready = !done[i];
            for (size_t before : pieces[i].after) ready = ready && done[before];
            if (ready && (next == pieces.size() || pieces[next].own == early)) next = i;
            if (next != pieces.size() && pieces[next].own != early) break;
        }
        issue(stream, pieces[next].work);
        done[next] = true;
        while (first < pieces.size() && done[first]) first++;
    }
}

struct Mapping {
    void* at = nullptr;
    size_t bytes = 0;
    ~Mapping() {
        if (at) munmap(at, bytes);
    }
};

extern "C" {

// Memory for the blocks that a thread of the host runs.
void* stand_in_memory(size_t bytes) {
    static thread_local Mapping own;
    if (!own.at) {
        own.bytes = bytes;
        own.at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (own.at == MAP_FAILED) abort();
    }
    return own.at;
}

// What the stand-ins for other libraries do on a stream.
int stand_in_issue(void* stream, void (*work)(void*), void* context) {
    return issue(stream, [=] { work(context); });
}

int cuInit(unsigned) { MAY_FAIL(); return 0; }
int cuDeviceGetCount(int* count) { MAY_FAIL(); return *count = 1, 0; }
int cuDeviceGet(int* device, int) { MAY_FAIL(); return *device = 0, 0; }
int cuDeviceGetName(char* name, int length, int) { return snprintf(name, length, "stand-in"), 0; }
int cuDeviceGetUuid_v2(unsigned char* uuid, int) { return memset(uuid, 7, 16), 0; }
int cuDeviceGetAttribute(int* value, int which, int) {
    // Few processors: every block of a launch is run here.
    *value = which == 16 ? 2 : which == 75 ? 9 : 0;
    return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) { MAY_FAIL(); return *context = (void*)1, 0; }
int cuCtxSetCurrent(void*) { return 0; }

int cuMemGetInfo_v2(size_t* free, size_t* all) {
    std::lock_guard<std::mutex> held(lock);
    *all = total(), *free = total() - taken;
    return 0;
}
int cuMemAlloc_v2(Address* address, size_t bytes) {
    MAY_FAIL();
    std::lock_guard<std::mutex> held(lock);
    if (taken + pages(bytes) > total()) return 2;
    char* at = (char*)aligned_alloc(4096, (bytes + GUARD + 4095) / 4096 * 4096);
    if (!at) return 2;
    memset(at, 0xff, bytes);
    memset(at + bytes, 0x5a, GUARD);
    memory[*address = (Address)at] = bytes;
    taken += pages(bytes);
    return 0;
}
int cuMemFree_v2(Address address) {
    std::lock_guard<std::mutex> held(lock);
    auto found = memory.find(address);
    if (found == memory.end()) return 1;
    const unsigned char* guard = (unsigned char*)address + found->second;
    for (size_t i = 0; i < GUARD; i++)
        if (guard[i] != 0x5a) fprintf(stderr, "stand-in: byte %zu behind an allocation was written\n", i), abort();
    taken -= pages(found->second);
    memory.erase(found);
    free((void*)address);
    return 0;
}
int cuMemGetAddressRange_v2(Address* base, size_t* bytes, Address inside) {
    std::lock_guard<std::mutex> held(lock);
    auto after = memory.upper_bound(inside);
    if (after == memory.begin()) return 500;
    --after;
    if (inside >= after->first + after->second) return 500;
    if (base) *base = after->first;
    if (bytes) *bytes = after->second;
    return 0;
}
int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
    MAY_FAIL();
    return *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096), *address ? 0 : 2;
}
int cuMemFreeHost(void* address) { return free(address), 0; }

int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
    MAY_FAIL();
    return issue(stream, [=] { memcpy((void*)to, from, bytes); });
}
int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
    return issue(stream, [=] { memcpy(to, (void*)from, bytes); });
}
int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* stream) {
    return issue(stream, [=] { memcpy((void*)to, (void*)from, bytes); });
}
int cuMemsetD8Async(Address to, unsigned char byte, size_t bytes, void* stream) {
    return issue(stream, [=] { memset((void*)to, byte, bytes); });
}

// Processes cannot open each other's memory here.
int cuIpcGetMemHandle(void*, Address) { return 801; }
struct IpcHandle {
    uint64_t words[8];
};
int cuIpcOpenMemHandle_v2(Address*, IpcHandle, unsigned) { return 801; }
int cuIpcCloseMemHandle(Address) { return 801; }
int cuIpcGetEventHandle(void*, void*) { return 801; }
int cuIpcOpenEventHandle(void**, IpcHandle) { return 801; }

int cuStreamCreate(void** stream, unsigned) { MAY_FAIL(); return *stream = new Stream, 0; }
int cuStreamDestroy_v2(void* stream) { return delete (Stream*)stream, 0; }
int cuStreamSynchronize(void*) { MAY_FAIL(); return 0; }
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
    Stream* s = (Stream*)stream;
    Event* e = (Event*)event;
    if (!e->captured) return 0;
    s->captured = e->captured;
    return s->after.insert(s->after.end(), e->after.begin(), e->after.end()), 0;
}
int cuStreamWriteValue32_v2(void* stream, Address to, uint32_t value, unsigned) {
    return issue(stream, [=] { *(volatile uint32_t*)to = value; });
}

int cuEventCreate(void** event, unsigned) { return *event = new Event, 0; }
int cuEventDestroy_v2(void* event) { return delete (Event*)event, 0; }
int cuEventRecord(void* event, void* stream) {
    Stream* s = (Stream*)stream;
    if (s && s->captured) return ((Event*)event)->captured = s->captured, ((Event*)event)->after = s->after, 0;
    ((Event*)event)->captured = nullptr;
    return issue(stream, [=] {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        ((Event*)event)->at = now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
    });
}
int cuEventElapsedTime(float* milliseconds, void* from, void* to) {
    return *milliseconds = ((Event*)to)->at - ((Event*)from)->at, 0;
}

int cuModuleLoadData(void** module, const void* image) {
    MAY_FAIL();
    if (memcmp(image, "STANDIN1", 8)) return 200;
    uint64_t length;
    memcpy(&length, (const char*)image + 8, 8);
    // The loader knows libraries by their paths: each has its own.
    char path[] = "/tmp/stand_in_XXXXXX";
    int file = mkstemp(path);
    const char* bytes = (const char*)image + 16;
    for (uint64_t done = 0; done < length;) {
        ssize_t wrote = write(file, bytes + done, length - done);
        if (wrote <= 0) return 2;
        done += wrote;
    }
    *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!*module) fprintf(stderr, "stand-in: %s\n", dlerror());
    close(file), unlink(path);
    return *module ? 0 : 200;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    Entry entry = (Entry)dlsym(module, name);
    if (!entry) return 500;
    Function* made = new Function;
    made->entry = entry;
    return *function = made, 0;
}
int cuFuncSetAttribute(void* function, int which, int value) {
    if (which != 8 || value < 0 || value > 227 << 10) return 1;
    ((Function*)function)->most_shared = value;
    return 0;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned x, unsigned y, unsigned z,
                   unsigned shared, void* stream, void** arguments, void**) {
    MAY_FAIL();
    Function* f = (Function*)function;
    // The limits of a GPU.
    bool possible = gx && gy && gz && x && y && z && x * y * z <= 1024 && gx <= 2147483647u && gy <= 65535 && gz <= 65535;
    if (!possible || shared > f->most_shared) return 1;
    Launch launch = {{gx, gy, gz}, {x, y, z}, shared};
    Stream* s = (Stream*)stream;
    if (!s->captured) return f->entry(&launch, arguments), 0;
    void** kept = f->entry(nullptr, arguments);
    return issue(stream, [=] { f->entry(&launch, kept); });
}

int cuStreamBeginCapture_v2(void* stream, int) {
    Stream* s = (Stream*)stream;
    s->captured = new Graph, s->captured->begun = stream, s->after.clear();
    return 0;
}
int cuStreamEndCapture(void* stream, void** graph) {
    Stream* s = (Stream*)stream;
    Graph* made = s->captured;
    // What nothing comes after must be the end of this stream; else another stream was not joined.
    std::vector<bool> followed(made->pieces.size());
    for (const Piece& piece : made->pieces)
        for (size_t before : piece.after) followed[before] = true;
    for (size_t last : s->after) followed[last] = true;
    s->captured = nullptr, *graph = made;
    for (bool one : followed)
        if (!one) return 904;
    return 0;
}
int cuGraphInstantiateWithFlags(void** made, void* graph, uint64_t) { return *made = new Graph(*(Graph*)graph), 0; }
int cuGraphLaunch(void* graph, void* stream) { return run(*(Graph*)graph, stream), 0; }
int cuGraphDestroy(void* graph) { return delete (Graph*)graph, 0; }
int cuGraphExecDestroy(void* graph) { return delete (Graph*)graph, 0; }

int cuGetErrorString(int status, const char** text) {
    switch (status) {
        case 2: *text = "out of memory"; break;
        case 35: *text = "CUDA driver version is insufficient for CUDA runtime version"; break;
        case 46: *text = "CUDA-capable device(s) is/are busy or unavailable"; break;
        case 100: *text = "no CUDA-capable device is detected"; break;
        case 904: *text = "capturing stream has unjoined work"; break;
        case 700: *text = "an illegal memory access was encountered"; break;
        default: *text = "an error of the stand-in";
    }
    return 0;
}

}  // extern "C"
