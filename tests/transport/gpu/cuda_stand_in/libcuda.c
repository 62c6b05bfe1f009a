/* A stand-in for libcuda.so.1 on machines without a GPU: the calls that hpcpar makes, for its tests.
 *
 * Device memory   pages of a memfd, mapped twice: without any right where the "device" address says, so that a
 *                 host access ends the process as it would with a real one, and readable elsewhere for the
 *                 "device". Fresh memory is full of 0xA5.
 * Streams         a worker thread each, in order, beside each other.
 * Events          wait captures the record made before the call; one never recorded holds nobody up.
 * Other processes open memory and events by /proc/PID/fd/N; a process cannot open what it exported itself.
 * Errors          as the driver's where a caller can make them: no cuInit, a forked child, no context in this
 *                 thread, an address beyond its allocation, a freed one, a stale handle.
 *
 * STAND_IN_DEVICES=n     devices, 1 if not said
 * STAND_IN_JITTER_US=j   every operation of a stream first sleeps less than j microseconds
 * STAND_IN_DROP_WAITS=1  cuStreamWaitEvent does nothing, so that what relies on it goes wrong visibly
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

typedef int result;
typedef int device;
typedef uint64_t address;

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    ALREADY_MAPPED = 208,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
};

#define MOST_DEVICES 16
#define PAGE 4096UL
#define PAGES(nbytes) (((nbytes) + PAGE - 1) / PAGE * PAGE)

static long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? atol(value) : otherwise;
}

/* ---- how often each call was made ---- */

typedef struct counter { const char *name; uint64_t calls; struct counter *next; } counter;
static counter *counters;

static void count(counter *one) {
    if (__atomic_fetch_add(&one->calls, 1, __ATOMIC_ACQ_REL)) return;
    counter *head = __atomic_load_n(&counters, __ATOMIC_ACQUIRE);
    do one->next = head;
    while (!__atomic_compare_exchange_n(&counters, &head, one, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
}

#define COUNT() \
    do { \
        static counter here = {__func__, 0, NULL}; \
        count(&here); \
    } while (0)

/* The calls of this name so far, of all threads. */
EXPORT uint64_t stand_in_calls(const char *name) {
    for (counter *one = __atomic_load_n(&counters, __ATOMIC_ACQUIRE); one; one = one->next)
        if (!strcmp(one->name, name)) return __atomic_load_n(&one->calls, __ATOMIC_ACQUIRE);
    return 0;
}

/* ---- devices and contexts ---- */

typedef struct { device of; } context;

static context contexts[MOST_DEVICES];
static __thread context *current;
static pid_t initialized_in;

static int are_hidden;

/* Whether the devices are there: a process that goes on to other tests cannot lose the library again. */
EXPORT void stand_in_show(int is_shown) { are_hidden = !is_shown; }

static int devices(void) {
    if (are_hidden) return 0;
    long n = setting("STAND_IN_DEVICES", 1);
    return n < 0 ? 0 : n > MOST_DEVICES ? MOST_DEVICES : (int)n;
}

static result check_initialized(void) { return initialized_in == getpid() ? SUCCESS : NOT_INITIALIZED; }

static result check_context(void) {
    result found = check_initialized();
    return found ? found : current ? SUCCESS : INVALID_CONTEXT;
}

#define NEEDS(check) \
    do { \
        COUNT(); \
        result found_ = check(); \
        if (found_) return found_; \
    } while (0)

EXPORT result cuInit(unsigned flags) {
    COUNT();
    if (flags) return INVALID_VALUE;
    if (initialized_in && initialized_in != getpid()) return NOT_INITIALIZED; /* forked */
    if (!devices()) return NO_DEVICE;
    for (int i = 0; i < MOST_DEVICES; i++) contexts[i].of = i;
    initialized_in = getpid();
    return SUCCESS;
}

/* By this cuda-bindings finds all other calls; as with the driver, "cuMemAlloc" is cuMemAlloc_v2. */
EXPORT result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    Dl_info here;
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    void *library = dladdr((void *)&cuInit, &here) ? dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (!library) return NOT_FOUND;
    *function = dlsym(library, versioned);
    if (!*function) *function = dlsym(library, name);
    if (status) *status = !*function;
    return *function ? SUCCESS : NOT_FOUND;
}

EXPORT result cuDriverGetVersion(int *version) { COUNT(); *version = 13000; return SUCCESS; }

EXPORT result cuDeviceGetCount(int *n) { NEEDS(check_initialized); *n = devices(); return SUCCESS; }

EXPORT result cuDeviceGet(device *found, int ordinal) {
    NEEDS(check_initialized);
    if (ordinal < 0 || ordinal >= devices()) return INVALID_DEVICE;
    *found = ordinal;
    return SUCCESS;
}

/* The same device of the same machine in every process: 16 bytes, the last of which is its number. */
EXPORT result cuDeviceGetUuid_v2(unsigned char uuid[16], device of) {
    NEEDS(check_initialized);
    if (of < 0 || of >= devices()) return INVALID_DEVICE;
    memset(uuid, 0x51, 15);
    uuid[15] = (unsigned char)of;
    return SUCCESS;
}

EXPORT result cuDevicePrimaryCtxRetain(context **found, device of) {
    NEEDS(check_initialized);
    if (of < 0 || of >= devices()) return INVALID_DEVICE;
    *found = &contexts[of];
    return SUCCESS;
}

EXPORT result cuCtxGetCurrent(context **found) { NEEDS(check_initialized); *found = current; return SUCCESS; }

EXPORT result cuCtxSetCurrent(context *one) { NEEDS(check_initialized); current = one; return SUCCESS; }

/* ---- memory ---- */

typedef struct {
    enum { GONE, DEVICE, POOLED, MANAGED, PINNED, IMPORTED } kind;
    address base;      /* where its user sees it */
    char *real;        /* where it can be read and written */
    size_t nbytes;     /* as asked for; 0: nothing here */
    int file;
    device of;
    uint64_t id;
    pid_t owner;       /* of imported memory: who has exported it, where it lies there, its id there */
    address owners_base;
    uint64_t owners_id;
    int opened;
} region;

static region *regions;
static size_t n_regions;
static uint64_t last_id;
static pthread_mutex_t table = PTHREAD_MUTEX_INITIALIZER;

static int find(address at, region *found) {
    int is_there = 0;
    pthread_mutex_lock(&table);
    for (size_t i = 0; i < n_regions && !is_there; i++)
        if (at >= regions[i].base && at - regions[i].base < PAGES(regions[i].nbytes)) {
            is_there = 1;
            *found = regions[i];
        }
    pthread_mutex_unlock(&table);
    return is_there;
}

/* Room without any right, one page longer than the memory. That of freed memory is used again. */
static void *reserve(size_t nbytes) {
    void *room = mmap(NULL, PAGES(nbytes) + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return room == MAP_FAILED ? NULL : room;
}

/* With the table locked. */
static region *slot_for(size_t nbytes) {
    for (size_t i = n_regions; i-- > 0;)
        if (regions[i].kind == GONE && PAGES(regions[i].nbytes) == PAGES(nbytes)) return &regions[i];
    region *more = realloc(regions, (n_regions + 1) * sizeof *regions);
    if (!more) return NULL;
    regions = more;
    void *base = reserve(nbytes);
    if (!base) return NULL;
    regions[n_regions] = (region){.base = (address)(uintptr_t)base};
    return &regions[n_regions++];
}

/* Take over the file: its memory appears at a device address. */
static result add(region one, address *base) {
    char *real = reserve(one.nbytes);
    if (!real) return OUT_OF_MEMORY;
    if (mmap(real, PAGES(one.nbytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, one.file, 0) == MAP_FAILED) {
        munmap(real, PAGES(one.nbytes) + PAGE);
        return OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&table);
    region *slot = slot_for(one.nbytes);
    if (slot) {
        one.base = slot->base;
        one.real = real;
        one.id = ++last_id;
        *slot = one;
        *base = one.base;
        if (one.kind == MANAGED) {
            void *there = (void *)(uintptr_t)one.base;
            mmap(there, PAGES(one.nbytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, one.file, 0);
        }
    }
    pthread_mutex_unlock(&table);
    if (!slot) munmap(real, PAGES(one.nbytes) + PAGE);
    return slot ? SUCCESS : OUT_OF_MEMORY;
}

static result allocate(int kind, size_t nbytes, address *base) {
    if (!nbytes || !base) return INVALID_VALUE;
    int file = memfd_create("stand-in", MFD_CLOEXEC);
    if (file < 0) return OUT_OF_MEMORY;
    result found = ftruncate(file, (off_t)PAGES(nbytes)) ? OUT_OF_MEMORY : SUCCESS;
    if (!found) found = add((region){.kind = kind, .nbytes = nbytes, .file = file, .of = current->of}, base);
    if (found) {
        close(file);
        return found;
    }
    region one;
    if (find(*base, &one)) memset(one.real, 0xA5, nbytes < (1UL << 20) ? nbytes : 1UL << 20);
    return SUCCESS;
}

static void drain_all(void);

/* Forget the memory at this base if it is of one of these kinds; its address may come again. */
static result drop(address base, unsigned kinds) {
    region one = {0};
    pthread_mutex_lock(&table);
    for (size_t i = 0; i < n_regions; i++)
        if (regions[i].base == base && kinds >> regions[i].kind & 1) {
            if (--regions[i].opened > 0) {
                pthread_mutex_unlock(&table);
                return SUCCESS;
            }
            one = regions[i];
        }
    pthread_mutex_unlock(&table);
    if (!one.base) return INVALID_VALUE;
    drain_all(); /* as the driver does: what is under way may use it */
    pthread_mutex_lock(&table);
    for (size_t i = 0; i < n_regions; i++)
        if (regions[i].base == base) {
            void *there = (void *)(uintptr_t)base;
            mmap(there, PAGES(one.nbytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
            regions[i].kind = GONE;
        }
    pthread_mutex_unlock(&table);
    munmap(one.real, PAGES(one.nbytes) + PAGE);
    close(one.file);
    return SUCCESS;
}

EXPORT result cuMemAlloc_v2(address *base, size_t nbytes) {
    NEEDS(check_context);
    return allocate(DEVICE, nbytes, base);
}

/* Of a pool: cannot be exported. At once rather than in the stream's order. */
EXPORT result cuMemAllocAsync(address *base, size_t nbytes, void *stream) {
    NEEDS(check_context);
    (void)stream;
    return allocate(POOLED, nbytes, base);
}

EXPORT result cuMemAllocManaged(address *base, size_t nbytes, unsigned flags) {
    NEEDS(check_context);
    (void)flags;
    return allocate(MANAGED, nbytes, base);
}

EXPORT result cuMemFree_v2(address base) {
    NEEDS(check_context);
    return base ? drop(base, 1 << DEVICE | 1 << POOLED | 1 << MANAGED) : SUCCESS;
}

EXPORT result cuMemHostAlloc(void **base, size_t nbytes, unsigned flags) {
    NEEDS(check_context);
    if (!nbytes || flags > 7) return INVALID_VALUE;
    void *memory = mmap(NULL, PAGES(nbytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return OUT_OF_MEMORY;
    memset(memory, 0xA5, nbytes < (1UL << 20) ? nbytes : 1UL << 20);
    pthread_mutex_lock(&table);
    region *more = realloc(regions, (n_regions + 1) * sizeof *regions);
    if (more) {
        regions = more;
        regions[n_regions++] = (region){
            .kind = PINNED, .base = (address)(uintptr_t)memory, .real = memory, .nbytes = nbytes, .file = -1,
            .of = current->of, .id = ++last_id,
        };
    }
    pthread_mutex_unlock(&table);
    *base = memory;
    return more ? SUCCESS : OUT_OF_MEMORY;
}

static result drop_pinned(address at) {
    region one;
    if (!find(at, &one) || one.kind != PINNED || one.base != at) return INVALID_VALUE;
    drain_all();
    pthread_mutex_lock(&table);
    for (size_t i = 0; i < n_regions; i++)
        if (regions[i].base == at) regions[i] = regions[--n_regions];
    pthread_mutex_unlock(&table);
    munmap(one.real, PAGES(one.nbytes));
    return SUCCESS;
}

EXPORT result cuMemFreeHost(void *base) {
    NEEDS(check_context);
    return drop_pinned((address)(uintptr_t)base);
}

/* Device or pinned memory, from whatever thread, if it is still the one of this id: for a finalizer. */
EXPORT result stand_in_release(address base, uint64_t id) {
    region one;
    if (check_initialized() || !find(base, &one) || one.id != id) return INVALID_VALUE;
    return one.kind == PINNED ? drop_pinned(base) : drop(base, 1 << DEVICE | 1 << POOLED | 1 << MANAGED);
}

EXPORT result cuMemGetAddressRange_v2(address *base, size_t *nbytes, address at) {
    NEEDS(check_context);
    region one;
    if (!find(at, &one) || one.kind == GONE || one.kind == PINNED) return NOT_FOUND;
    if (base) *base = one.base;
    if (nbytes) *nbytes = one.nbytes;
    return SUCCESS;
}

EXPORT result cuPointerGetAttribute(void *value, int attribute, address at) {
    NEEDS(check_context);
    region one;
    if (!find(at, &one) || one.kind == GONE) return INVALID_VALUE;
    switch (attribute) {
        case 2: *(unsigned *)value = one.kind == PINNED ? 1 : 2; return SUCCESS;
        case 7: *(uint64_t *)value = one.id; return SUCCESS;
        case 8: *(unsigned *)value = one.kind == MANAGED; return SUCCESS;
        case 9: *(int *)value = one.of; return SUCCESS;
        case 10: *(int *)value = one.kind == DEVICE; return SUCCESS;
        default: return INVALID_VALUE;
    }
}

/* Where `nbytes` from a device address or a pinned one can be read and written; NULL if they are not all there. */
EXPORT void *stand_in_reach(address at, uint64_t nbytes) {
    region one;
    if (!find(at, &one) || one.kind == GONE) return NULL;
    uint64_t offset = at - one.base;
    return offset > one.nbytes || nbytes > one.nbytes - offset ? NULL : one.real + offset;
}

EXPORT void *stand_in_translate(address at) { return stand_in_reach(at, 1); }

/* Ordinary host memory may be copied too, while the caller waits. */
static int is_readable(address at) {
    char octet;
    struct iovec here = {&octet, 1}, there = {(void *)(uintptr_t)at, 1};
    return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == 1;
}

static void *memory_of(address at, size_t nbytes, int *is_ordinary) {
    region one;
    if (find(at, &one)) return stand_in_reach(at, nbytes);
    if (!is_readable(at) || !is_readable(at + nbytes - 1)) return NULL;
    *is_ordinary = 1;
    return (void *)(uintptr_t)at;
}

/* ---- events ---- */

#define REMEMBERED 500

typedef struct {                       /* shared by the processes that have the event */
    uint32_t wakes;
    uint64_t recorded;                 /* how often */
    uint64_t complete[REMEMBERED];     /* record i is complete if its place holds i or a later one */
} shared_state;

typedef struct {
    uint32_t magic;
    uint32_t users;
    shared_state *state;
    int file;
    device of;
    int is_interprocess;
} event;

#define EVENT_MAGIC 0x45564e54u
#define STREAM_MAGIC 0x5354524du

static int is_event(event *one) { return one && one->magic == EVENT_MAGIC; }

/* The few octets of an event are never given back, so that one destroyed is told from one that lives. */
static void leave(event *one) {
    if (__atomic_sub_fetch(&one->users, 1, __ATOMIC_ACQ_REL)) return;
    munmap(one->state, PAGE);
    close(one->file);
}

static event *new_event(int file, int is_interprocess) {
    event *one = calloc(1, sizeof *one);
    shared_state *state = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (!one || state == MAP_FAILED) return NULL;
    *one = (event){EVENT_MAGIC, 1, state, file, current->of, is_interprocess};
    return one;
}

static int is_done(shared_state *state, uint64_t record) {
    return __atomic_load_n(&state->complete[record % REMEMBERED], __ATOMIC_ACQUIRE) >= record;
}

static void complete(shared_state *state, uint64_t record) {
    uint64_t *place = &state->complete[record % REMEMBERED];
    uint64_t before = __atomic_load_n(place, __ATOMIC_ACQUIRE);
    while (before < record
           && !__atomic_compare_exchange_n(place, &before, record, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    __atomic_add_fetch(&state->wakes, 1, __ATOMIC_ACQ_REL);
    syscall(SYS_futex, &state->wakes, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void await(shared_state *state, uint64_t record) {
    for (;;) {
        uint32_t seen = __atomic_load_n(&state->wakes, __ATOMIC_ACQUIRE);
        if (is_done(state, record)) return;
        syscall(SYS_futex, &state->wakes, FUTEX_WAIT, seen, NULL, NULL, 0);
    }
}

/* ---- streams ---- */

typedef struct operation {
    enum { COPY, CALL, RECORD, WAIT, END } kind;
    void *target;
    const void *source;
    size_t nbytes;
    void (*function)(void *);
    event *of;
    uint64_t record;
    long jitter_us;
    struct operation *next;
} operation;

typedef struct stream {
    uint32_t magic;
    device of;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    operation *first, *last;
    int is_busy, has_ended;
    unsigned seed;
    struct stream *next;
} stream;

static __thread stream *own; /* of a stream's thread */
static stream *streams; /* never given back, as events */
static stream *default_streams[MOST_DEVICES];
static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;

static void perform(stream *on, operation *one) {
    if (one->jitter_us > 0) usleep((useconds_t)(rand_r(&on->seed) % one->jitter_us));
    switch (one->kind) {
        case COPY: memmove(one->target, one->source, one->nbytes); break;
        case CALL: one->function(one->target); break;
        case RECORD: complete(one->of->state, one->record); break;
        case WAIT: await(one->of->state, one->record); break;
        case END: break;
    }
    if (one->of) leave(one->of);
}

static void *work(void *argument) {
    stream *on = own = argument;
    for (int has_ended = 0; !has_ended;) {
        pthread_mutex_lock(&on->lock);
        while (!on->first) pthread_cond_wait(&on->changed, &on->lock);
        operation *one = on->first;
        on->first = one->next;
        on->is_busy = 1;
        pthread_mutex_unlock(&on->lock);
        perform(on, one);
        has_ended = one->kind == END;
        free(one);
        pthread_mutex_lock(&on->lock);
        on->is_busy = 0;
        on->has_ended = has_ended;
        pthread_cond_broadcast(&on->changed);
        pthread_mutex_unlock(&on->lock);
    }
    return NULL;
}

static stream *new_stream(void) {
    stream *one = calloc(1, sizeof *one);
    pthread_t thread;
    if (!one) return NULL;
    one->magic = STREAM_MAGIC;
    one->of = current->of;
    one->seed = (unsigned)getpid() * 2654435761u ^ (unsigned)(uintptr_t)one;
    pthread_mutex_init(&one->lock, NULL);
    pthread_cond_init(&one->changed, NULL);
    if (pthread_create(&thread, NULL, work, one)) return NULL;
    pthread_detach(thread);
    pthread_mutex_lock(&streams_lock);
    one->next = streams;
    streams = one;
    pthread_mutex_unlock(&streams_lock);
    return one;
}

/* 0 and the two names of a default stream are one stream of the current device. */
static stream *stream_of(void *handle) {
    if ((uintptr_t)handle > 2) {
        stream *one = handle;
        return one->magic == STREAM_MAGIC ? one : NULL;
    }
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&once);
    stream **place = &default_streams[current->of];
    if (!*place) *place = new_stream();
    stream *found = *place;
    pthread_mutex_unlock(&once);
    return found;
}

static result push(stream *on, operation asked) {
    operation *one = malloc(sizeof *one);
    if (!one) return OUT_OF_MEMORY;
    *one = asked;
    one->jitter_us = setting("STAND_IN_JITTER_US", 0);
    one->next = NULL;
    if (one->of) __atomic_add_fetch(&one->of->users, 1, __ATOMIC_ACQ_REL);
    pthread_mutex_lock(&on->lock);
    if (on->first) on->last->next = one;
    else on->first = one;
    on->last = one;
    pthread_cond_broadcast(&on->changed);
    pthread_mutex_unlock(&on->lock);
    return SUCCESS;
}

static void drain(stream *on) {
    pthread_mutex_lock(&on->lock);
    while ((on->first || on->is_busy) && !on->has_ended) pthread_cond_wait(&on->changed, &on->lock);
    pthread_mutex_unlock(&on->lock);
}

static void drain_all(void) {
    pthread_mutex_lock(&streams_lock);
    stream *one = streams;
    pthread_mutex_unlock(&streams_lock);
    for (; one; one = one->next)
        if (one != own) drain(one);
}

EXPORT result cuStreamCreate(void **created, unsigned flags) {
    NEEDS(check_context);
    if (flags != 1) return NOT_SUPPORTED; /* one that the default stream would hold up */
    *created = new_stream();
    return *created ? SUCCESS : OUT_OF_MEMORY;
}

EXPORT result cuStreamDestroy_v2(void *handle) {
    NEEDS(check_context);
    stream *one = (uintptr_t)handle > 2 ? stream_of(handle) : NULL;
    if (!one) return INVALID_HANDLE;
    one->magic = 0;
    return push(one, (operation){.kind = END});
}

EXPORT result cuStreamSynchronize(void *handle) {
    NEEDS(check_context);
    stream *one = stream_of(handle);
    if (!one) return INVALID_HANDLE;
    drain(one);
    return SUCCESS;
}

EXPORT result cuMemcpyAsync(address target, address source, size_t nbytes, void *handle) {
    NEEDS(check_context);
    stream *on = stream_of(handle);
    if (!on) return INVALID_HANDLE;
    if (!nbytes) return SUCCESS;
    int is_ordinary = 0;
    void *to = memory_of(target, nbytes, &is_ordinary);
    const void *from = memory_of(source, nbytes, &is_ordinary);
    if (!to || !from) return INVALID_VALUE;
    result found = push(on, (operation){.kind = COPY, .target = to, .source = from, .nbytes = nbytes});
    if (!found && is_ordinary) drain(on);
    return found;
}

/* Run a function on the stream's thread, in order: a kernel. */
EXPORT result stand_in_enqueue(void *handle, void (*function)(void *), void *argument) {
    NEEDS(check_context);
    stream *on = stream_of(handle);
    return on ? push(on, (operation){.kind = CALL, .function = function, .target = argument}) : INVALID_HANDLE;
}

/* ---- events, as called ---- */

EXPORT result cuEventCreate(event **created, unsigned flags) {
    NEEDS(check_context);
    if (flags & ~7u || (flags & 4 && !(flags & 2))) return INVALID_VALUE; /* another process has no timing */
    int file = memfd_create("stand-in-event", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, PAGE)) return OUT_OF_MEMORY;
    *created = new_event(file, (flags & 4) != 0);
    return *created ? SUCCESS : OUT_OF_MEMORY;
}

EXPORT result cuEventDestroy_v2(event *one) {
    NEEDS(check_context);
    if (!is_event(one)) return INVALID_HANDLE;
    one->magic = 0;
    leave(one);
    return SUCCESS;
}

EXPORT result cuEventRecord(event *one, void *handle) {
    NEEDS(check_context);
    stream *on = stream_of(handle);
    if (!on || !is_event(one) || one->of != on->of) return INVALID_HANDLE;
    uint64_t record = __atomic_add_fetch(&one->state->recorded, 1, __ATOMIC_ACQ_REL);
    return push(on, (operation){.kind = RECORD, .of = one, .record = record});
}

EXPORT result cuStreamWaitEvent(void *handle, event *one, unsigned flags) {
    NEEDS(check_context);
    stream *on = stream_of(handle);
    if (!on || !is_event(one)) return INVALID_HANDLE;
    if (flags) return INVALID_VALUE;
    uint64_t record = __atomic_load_n(&one->state->recorded, __ATOMIC_ACQUIRE);
    if (!record || setting("STAND_IN_DROP_WAITS", 0)) return SUCCESS;
    return push(on, (operation){.kind = WAIT, .of = one, .record = record});
}

EXPORT result cuEventQuery(event *one) {
    NEEDS(check_context);
    if (!is_event(one)) return INVALID_HANDLE;
    uint64_t record = __atomic_load_n(&one->state->recorded, __ATOMIC_ACQUIRE);
    return !record || is_done(one->state, record) ? SUCCESS : NOT_READY;
}

/* ---- other processes ---- */

typedef struct { unsigned char octets[64]; } handle64;

typedef struct {
    char magic[8];
    int32_t pid, file;
    uint64_t base, id, nbytes, inode;
    int32_t of;
} ticket;

_Static_assert(sizeof(ticket) <= sizeof(handle64), "a handle has 64 bytes");

static uint64_t inode_of(int file) {
    struct stat found;
    return fstat(file, &found) ? 0 : found.st_ino;
}

static result write_ticket(handle64 *handle, const char *magic, ticket one) {
    memcpy(one.magic, magic, sizeof one.magic);
    one.pid = getpid();
    one.inode = inode_of(one.file);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &one, sizeof one);
    return SUCCESS;
}

/* The exporter's file, open here; its number may have been given to another file since: that is refused. */
static result read_ticket(const handle64 *handle, const char *magic, ticket *one, int *file) {
    char path[64];
    memcpy(one, handle, sizeof *one);
    if (memcmp(one->magic, magic, sizeof one->magic)) return INVALID_VALUE;
    if (one->pid == getpid()) return INVALID_CONTEXT;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)one->pid, (int)one->file);
    *file = open(path, O_RDWR | O_CLOEXEC);
    if (*file < 0) return INVALID_HANDLE;
    if (inode_of(*file) == one->inode) return SUCCESS;
    close(*file);
    return INVALID_HANDLE;
}

EXPORT result cuIpcGetMemHandle(handle64 *handle, address at) {
    NEEDS(check_context);
    region one;
    if (!find(at, &one) || one.kind != DEVICE) return INVALID_VALUE;
    ticket of = {.file = one.file, .base = one.base, .id = one.id, .nbytes = one.nbytes, .of = one.of};
    return write_ticket(handle, "SI-MEMRY", of);
}

/* A second time: the same address, to be closed once more. A later allocation at a place that is still open is
 * refused, where the driver promises nothing. */
EXPORT result cuIpcOpenMemHandle_v2(address *base, handle64 handle, unsigned flags) {
    NEEDS(check_context);
    ticket of;
    int file;
    if (flags != 1) return INVALID_VALUE;
    result found = read_ticket(&handle, "SI-MEMRY", &of, &file);
    if (found) return found;
    pthread_mutex_lock(&table);
    int is_open = 0, is_stale = 0;
    for (size_t i = 0; i < n_regions && !is_open; i++)
        if (regions[i].kind == IMPORTED && regions[i].owner == of.pid && regions[i].owners_base == of.base) {
            is_open = 1;
            is_stale = regions[i].owners_id != of.id;
            if (!is_stale) {
                regions[i].opened++;
                *base = regions[i].base;
            }
        }
    pthread_mutex_unlock(&table);
    if (!is_open) {
        region one = {.kind = IMPORTED, .nbytes = of.nbytes, .file = file, .of = of.of, .owner = of.pid,
                      .owners_base = of.base, .owners_id = of.id, .opened = 1};
        found = add(one, base);
    }
    if (is_open || found) close(file);
    return is_stale ? ALREADY_MAPPED : found;
}

EXPORT result cuIpcCloseMemHandle(address base) {
    NEEDS(check_context);
    return drop(base, 1 << IMPORTED);
}

EXPORT result cuIpcGetEventHandle(handle64 *handle, event *one) {
    NEEDS(check_context);
    if (!is_event(one)) return INVALID_HANDLE;
    if (!one->is_interprocess) return INVALID_VALUE;
    return write_ticket(handle, "SI-EVENT", (ticket){.file = one->file});
}

EXPORT result cuIpcOpenEventHandle(event **opened, handle64 handle) {
    NEEDS(check_context);
    ticket of;
    int file;
    result found = read_ticket(&handle, "SI-EVENT", &of, &file);
    if (found) return found;
    *opened = new_event(file, 0);
    return *opened ? SUCCESS : OUT_OF_MEMORY;
}
