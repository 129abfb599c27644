/* The functions of shim.c over Unix sockets, for tests on machines without MPI. PHALANX_STAND_IN has the rank, the
 * number of ranks and a folder for sockets. Like an MPI library it keeps messages that come before they are asked for,
 * delivers those of one tag in order, and makes progress only inside a call.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define ABI 1

enum { PENDING = 0, DONE = 1, FAILED = -1 };

typedef struct Message {
    struct Message *next;
    int32_t tag;
    int64_t length, at; /* `at`: how much was written or read */
    int64_t request;    /* of a message that is sent */
    unsigned char bytes[];
} Message;

typedef struct {
    int socket;
    Message *out, *in, *reading; /* to be written; read and not asked for; not complete */
    unsigned char head[12];
    int held;
} Peer;

typedef struct {
    int used, done, receives;
    int32_t peer, tag;
    void *bytes;
    int64_t room, length;
    uint64_t order; /* receives are served in the order in which they were started */
} Slot;

static int32_t own, all;
static Peer *peers;
static Slot *slots;
static int64_t count;
static uint64_t orders;

int32_t phx_abi(void) { return ABI; }

static int address(struct sockaddr_un *to, const char *folder, int32_t rank) {
    memset(to, 0, sizeof *to);
    to->sun_family = AF_UNIX;
    int length = snprintf(to->sun_path, sizeof to->sun_path, "%s/%d", folder, rank);
    return length < 0 || length >= (int)sizeof to->sun_path;
}

static int complete(int from, void *bytes, size_t length, int writes) {
    for (size_t at = 0; at < length;) {
        ssize_t moved = writes ? write(from, (char *)bytes + at, length - at) : read(from, (char *)bytes + at, length - at);
        if (moved <= 0) return FAILED;
        at += (size_t)moved;
    }
    return DONE;
}

int32_t phx_init(int32_t *rank, int32_t *ranks) {
    const char *given = getenv("PHALANX_STAND_IN");
    char folder[200];
    struct sockaddr_un place;
    if (!given || sscanf(given, "%d %d %199s", &own, &all, folder) != 3 || own < 0 || own >= all) return FAILED;
    peers = calloc((size_t)all, sizeof *peers);
    int door = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!peers || door < 0 || address(&place, folder, own)) return FAILED;
    if (bind(door, (struct sockaddr *)&place, sizeof place) || listen(door, all)) return FAILED;
    for (int32_t other = 0; other < own; other++) {
        int line = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), tries = 0;
        if (address(&place, folder, other)) return FAILED;
        while (connect(line, (struct sockaddr *)&place, sizeof place)) {
            if (tries++ > 6000) return FAILED;
            usleep(10000);
        }
        if (complete(line, &own, sizeof own, 1) < 0) return FAILED;
        peers[other].socket = line;
    }
    for (int32_t left = all - own - 1; left > 0; left--) {
        int line = accept(door, NULL, NULL);
        int32_t other = 0;
        if (line < 0 || complete(line, &other, sizeof other, 0) < 0 || other <= own || other >= all) return FAILED;
        peers[other].socket = line;
    }
    for (int32_t other = 0; other < all; other++)
        if (other != own) fcntl(peers[other].socket, F_SETFL, O_NONBLOCK);
    close(door);
    *rank = own;
    *ranks = all;
    return DONE;
}

int32_t phx_version(char *out, int32_t room) {
    return room > 0 ? snprintf(out, (size_t)room, "stand-in for MPI, over Unix sockets") : FAILED;
}

static int64_t take(void) {
    int64_t at = 0;
    while (at < count && slots[at].used) at++;
    if (at == count) {
        int64_t more = count ? 2 * count : 64;
        Slot *grown = realloc(slots, (size_t)more * sizeof *slots);
        if (!grown) return FAILED;
        memset(grown + count, 0, (size_t)(more - count) * sizeof *slots);
        slots = grown;
        count = more;
    }
    memset(&slots[at], 0, sizeof *slots);
    slots[at].used = 1;
    return at;
}

static void append(Message **list, Message *message) {
    while (*list) list = &(*list)->next;
    message->next = NULL;
    *list = message;
}

/* Writes what the socket takes. */
static void put(Peer *peer) {
    while (peer->out) {
        Message *first = peer->out;
        unsigned char head[12];
        memcpy(head, &first->tag, 4);
        memcpy(head + 4, &first->length, 8);
        while (first->at < 12 + first->length) {
            const unsigned char *from = first->at < 12 ? head + first->at : first->bytes + first->at - 12;
            int64_t left = first->at < 12 ? 12 - first->at : 12 + first->length - first->at;
            ssize_t moved = send(peer->socket, from, (size_t)left, MSG_NOSIGNAL);
            if (moved < 0 && errno == EAGAIN) return;
            if (moved <= 0) break; /* the other has left: nobody will read it */
            first->at += moved;
        }
        if (first->request >= 0) slots[first->request].done = 1;
        peer->out = first->next;
        free(first);
    }
}

/* Reads what has come. */
static void get(Peer *peer) {
    for (;;) {
        if (!peer->reading) {
            ssize_t moved = read(peer->socket, peer->head + peer->held, (size_t)(12 - peer->held));
            if (moved <= 0) return;
            peer->held += (int)moved;
            if (peer->held < 12) continue;
            int64_t length;
            memcpy(&length, peer->head + 4, 8);
            peer->reading = calloc(1, sizeof(Message) + (size_t)length);
            if (!peer->reading) abort();
            memcpy(&peer->reading->tag, peer->head, 4);
            peer->reading->length = length;
            peer->held = 0;
        }
        Message *message = peer->reading;
        while (message->at < message->length) {
            ssize_t moved = read(peer->socket, message->bytes + message->at, (size_t)(message->length - message->at));
            if (moved <= 0) return;
            message->at += moved;
        }
        append(&peer->in, message);
        peer->reading = NULL;
    }
}

/* Gives a message that has come to the oldest receive that asks for it. */
static void match(int32_t from) {
    for (Message **place = &peers[from].in; *place;) {
        Message *message = *place;
        Slot *best = NULL;
        for (int64_t at = 0; at < count; at++) {
            Slot *slot = &slots[at];
            int fits = slot->used && slot->receives && !slot->done && slot->peer == from && slot->tag == message->tag;
            if (fits && (!best || slot->order < best->order)) best = slot;
        }
        if (!best) {
            place = &message->next;
            continue;
        }
        if (message->length > best->room) abort();
        memcpy(best->bytes, message->bytes, (size_t)message->length);
        best->length = message->length;
        best->done = 1;
        *place = message->next;
        free(message);
    }
}

int64_t phx_send(const void *bytes, int64_t length, int32_t to, int32_t tag) {
    if (to < 0 || to >= all || to == own || length < 0 || length > INT32_MAX) return FAILED;
    int64_t at = take();
    Message *message = calloc(1, sizeof *message + (size_t)length);
    if (at < 0 || !message) return FAILED;
    message->tag = tag;
    message->length = length;
    message->request = at;
    slots[at].peer = to;
    memcpy(message->bytes, bytes, (size_t)length);
    append(&peers[to].out, message);
    put(&peers[to]);
    return at;
}

int64_t phx_receive(void *bytes, int64_t room, int32_t from, int32_t tag) {
    if (from < 0 || from >= all || from == own || room < 0 || room > INT32_MAX) return FAILED;
    int64_t at = take();
    if (at < 0) return FAILED;
    slots[at].receives = 1;
    slots[at].peer = from;
    slots[at].tag = tag;
    slots[at].bytes = bytes;
    slots[at].room = room;
    slots[at].order = orders++;
    return at;
}

int32_t phx_test(int64_t at, int64_t *length) {
    if (at < 0 || at >= count || !slots[at].used) return FAILED;
    if (!slots[at].done) {
        int32_t other = slots[at].peer;
        put(&peers[other]);
        get(&peers[other]);
        match(other);
    }
    if (!slots[at].done) return PENDING;
    *length = slots[at].length;
    slots[at].used = 0;
    return DONE;
}

int32_t phx_cancel(int64_t at) {
    if (at < 0 || at >= count || !slots[at].used || !slots[at].receives) return FAILED;
    slots[at].used = 0;
    return DONE;
}

int32_t phx_abort(int32_t code) { _exit(code); }

int32_t phx_finish(void) { return DONE; }
