/* The only file that knows mpi.h. The cluster's mpicc builds it, and Phalanx opens it at run time: so Phalanx itself is
 * built without MPI, and one binary runs over any MPI library. It moves bytes and nothing else; all arithmetic is done
 * by Phalanx.
 *
 * Phalanx calls one function at a time, from any thread. Messages between two ranks with the same tag arrive in order.
 */
#include <limits.h>
#include <mpi.h>
#include <stdint.h>
#include <stdlib.h>

/* The number changes with the meaning of any function here; tools/mpi/stand_in.c has the same functions. */
#define ABI 1

enum { PENDING = 0, DONE = 1, FAILED = -1, TOO_FEW_THREADS = -2 };

typedef struct {
    MPI_Request request;
    int64_t next; /* the next vacant slot */
    int used, receives;
} Slot;

static MPI_Comm world;
static Slot *slots;
static int64_t count, vacant = -1;

static void finish_at_exit(void);

int32_t phx_abi(void) { return ABI; }

/* Joins the job that mpirun or srun has started. */
int32_t phx_init(int32_t *rank, int32_t *ranks) {
    int begun = 0, level = MPI_THREAD_SINGLE, own = 0, all = 0;
    if (MPI_Initialized(&begun)) return FAILED;
    if (begun ? MPI_Query_thread(&level) : MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level)) return FAILED;
    if (level < MPI_THREAD_SERIALIZED) return TOO_FEW_THREADS;
    /* Messages of other code in this process are kept apart. */
    if (MPI_Comm_dup(MPI_COMM_WORLD, &world)) return FAILED;
    if (MPI_Comm_set_errhandler(world, MPI_ERRORS_RETURN)) return FAILED;
    if (MPI_Comm_rank(world, &own) || MPI_Comm_size(world, &all)) return FAILED;
    *rank = own;
    *ranks = all;
    return atexit(finish_at_exit) ? FAILED : DONE;
}

/* The library's own name, its first line; returns its length. */
int32_t phx_version(char *out, int32_t room) {
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0, at = 0;
    if (room <= 0 || MPI_Get_library_version(text, &length)) return FAILED;
    for (; at < length && at < room - 1 && text[at] && text[at] != '\n'; at++) out[at] = text[at];
    out[at] = 0;
    return at;
}

/* A free slot, or -1 if there is no memory. */
static int64_t take(int receives) {
    if (vacant < 0) {
        int64_t more = count ? 2 * count : 64;
        Slot *grown = realloc(slots, (size_t)more * sizeof *slots);
        if (!grown) return FAILED;
        slots = grown;
        for (; count < more; count++) {
            slots[count].used = 0;
            slots[count].next = vacant;
            vacant = count;
        }
    }
    int64_t at = vacant;
    vacant = slots[at].next;
    slots[at].used = 1;
    slots[at].receives = receives;
    return at;
}

static void leave(int64_t at) {
    slots[at].used = 0;
    slots[at].next = vacant;
    vacant = at;
}

/* Starts to send; the bytes must stay until the request is done. Returns the request. */
int64_t phx_send(const void *bytes, int64_t length, int32_t to, int32_t tag) {
    int64_t at = length < 0 || length > INT_MAX ? FAILED : take(0);
    if (at < 0) return FAILED;
    if (MPI_Isend((void *)bytes, (int)length, MPI_BYTE, to, tag, world, &slots[at].request)) {
        leave(at);
        return FAILED;
    }
    return at;
}

/* Starts to receive at most this many bytes. Returns the request. */
int64_t phx_receive(void *bytes, int64_t room, int32_t from, int32_t tag) {
    int64_t at = room < 0 || room > INT_MAX ? FAILED : take(1);
    if (at < 0) return FAILED;
    if (MPI_Irecv(bytes, (int)room, MPI_BYTE, from, tag, world, &slots[at].request)) {
        leave(at);
        return FAILED;
    }
    return at;
}

/* Whether a request is done; then it is over, and `length` says how many bytes a receive got. */
int32_t phx_test(int64_t at, int64_t *length) {
    MPI_Status status;
    int done = 0, bytes = 0;
    if (at < 0 || at >= count || !slots[at].used) return FAILED;
    if (MPI_Test(&slots[at].request, &done, &status)) return FAILED;
    if (!done) return PENDING;
    if (slots[at].receives && MPI_Get_count(&status, MPI_BYTE, &bytes)) return FAILED;
    leave(at);
    *length = bytes;
    return DONE;
}

/* Gives up a receive; its memory is free then. */
int32_t phx_cancel(int64_t at) {
    if (at < 0 || at >= count || !slots[at].used || !slots[at].receives) return FAILED;
    int failed = MPI_Cancel(&slots[at].request) || MPI_Wait(&slots[at].request, MPI_STATUS_IGNORE);
    leave(at);
    return failed ? FAILED : DONE;
}

/* Ends all processes of the job at once. */
int32_t phx_abort(int32_t code) { return MPI_Abort(MPI_COMM_WORLD, code) ? FAILED : DONE; }

/* Leaves the job, together with all others; also called at exit. */
int32_t phx_finish(void) {
    int over = 0;
    if (MPI_Finalized(&over) || over) return DONE;
    for (int64_t at = 0; at < count; at++) phx_cancel(at);
    MPI_Barrier(world);
    /* Last words that nobody asked for: some libraries warn of messages that stay. */
    for (;;) {
        MPI_Status status;
        int waiting = 0, bytes = 0;
        if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, world, &waiting, &status) || !waiting) break;
        if (MPI_Get_count(&status, MPI_BYTE, &bytes)) break;
        void *waste = malloc((size_t)bytes + 1);
        if (!waste) break;
        MPI_Recv(waste, bytes, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, world, MPI_STATUS_IGNORE);
        free(waste);
    }
    return MPI_Finalize() ? FAILED : DONE;
}

static void finish_at_exit(void) { phx_finish(); }
