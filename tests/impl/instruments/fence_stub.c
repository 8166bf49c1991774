/* A CUDA driver of host memory, for the functions that the fence calls: unmapped is PROT_NONE, so a stray access
 * is a segmentation fault. It is strict: a call that the real driver would refuse, or that is unsafe on a GPU,
 * ends the process with a message. STUB_GRANULE in the environment is the granule in bytes (2 MiB if unset).
 *
 * Not modelled: what memory holds from one mapping to the next, streams other than the default, and more than
 * two devices.
 */
#define _GNU_SOURCE

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef unsigned long long u64;

#define MUST(condition)                                                                                       \
    do                                                                                                        \
        if (!(condition)) {                                                                                   \
            fprintf(stderr, "stub driver, %s: not so: %s\n", __func__, #condition);                           \
            abort();                                                                                          \
        }                                                                                                     \
    while (0)

struct range {
    u64 base, start, memory;
    size_t size, mapped;
    int pending; /* the device may still use what is mapped */
    struct range *next;
};

struct memory {
    u64 id;
    size_t size;
    int device;
    struct memory *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range *ranges;
static struct memory *memories;
static int ranges_now, memories_now, creates;
static u64 last_memory;
static char failing[64];
static int failing_with, failing_times;
static int initialised, contexts[2]; /* a context is the address of its retain count */

static _Thread_local void *stack[8];
static _Thread_local int depth;

/* What a test asks for: the call of that name ("*": any) fails with `error`, `times` times (-1: always). */
void stub_fail(const char *name, int error, int times)
{
    snprintf(failing, sizeof failing, "%s", name);
    failing_with = error;
    failing_times = times;
}

int stub_ranges(void) { return ranges_now; }
int stub_memories(void) { return memories_now; }
int stub_creates(void) { return creates; }
int stub_depth(void) { return depth; }
int stub_retains(int device) { return contexts[device]; }

static int fails(const char *name)
{
    int mine = !strcmp(failing, "*") || !strcmp(failing, name);
    if (!mine || !failing_times)
        return 0;
    if (failing_times > 0)
        failing_times--;
    return failing_with;
}

#define MAY_FAIL()                                                                                            \
    do {                                                                                                      \
        pthread_mutex_lock(&lock);                                                                            \
        int error = fails(__func__);                                                                          \
        pthread_mutex_unlock(&lock);                                                                          \
        if (error)                                                                                            \
            return error;                                                                                     \
    } while (0)

static size_t granule(void)
{
    const char *set = getenv("STUB_GRANULE");
    return set ? strtoul(set, NULL, 10) : 2u << 20;
}

/* With the lock held. */
static struct range *range_of(u64 address)
{
    struct range *range = ranges;
    while (range && !(range->base <= address && address < range->base + range->size))
        range = range->next;
    return range;
}

static struct memory *memory_of(u64 id)
{
    struct memory *memory = memories;
    while (memory && memory->id != id)
        memory = memory->next;
    return memory;
}

/* CUmemAllocationProp by its bytes: two ints, a location of two ints, a pointer, eight bytes of flags. */
static int device_of(const void *properties)
{
    static const char none[16];
    int words[4];
    memcpy(words, properties, sizeof words);
    MUST(words[0] == 1 && words[1] == 0);                    /* pinned, not to be exported */
    MUST(words[2] == 1 && words[3] >= 0 && words[3] < 2);    /* on a device */
    MUST(!memcmp((const char *)properties + 16, none, 16));
    return words[3];
}

int cuInit(unsigned flags)
{
    MUST(flags == 0);
    MAY_FAIL();
    initialised = 1;
    return 0;
}

int cuGetErrorString(int error, const char **text)
{
    *text = error == 2 ? "out of memory" : error == 700 ? "an illegal memory access was encountered" : NULL;
    return *text ? 0 : 1;
}

int cuDeviceGet(int *device, int ordinal)
{
    MUST(initialised);
    MAY_FAIL();
    if (ordinal < 0 || ordinal > 1)
        return 101;
    *device = ordinal;
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    MAY_FAIL();
    *context = &contexts[device];
    contexts[device]++;
    return 0;
}

int cuCtxPushCurrent_v2(void *context)
{
    MAY_FAIL();
    MUST(context == &contexts[0] || context == &contexts[1]);
    MUST(depth < 8);
    stack[depth++] = context;
    return 0;
}

int cuCtxPopCurrent_v2(void **context)
{
    MAY_FAIL();
    MUST(depth > 0);
    *context = stack[--depth];
    return 0;
}

int cuCtxSynchronize(void)
{
    MAY_FAIL();
    MUST(depth > 0);
    pthread_mutex_lock(&lock);
    for (struct range *range = ranges; range; range = range->next)
        range->pending = 0;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuMemGetAllocationGranularity(size_t *size, const void *properties, int option)
{
    MAY_FAIL();
    MUST(option == 0);
    device_of(properties);
    *size = granule();
    return 0;
}

int cuMemAddressReserve(u64 *base, size_t size, size_t alignment, u64 wish, u64 flags)
{
    MAY_FAIL();
    MUST(size && size % granule() == 0 && !alignment && !wish && !flags);
    if (size >> 47)
        return 1; /* no address space is that large */
    char *all = mmap(NULL, size + granule(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED)
        return 2;
    size_t before = (granule() - (u64)all % granule()) % granule();
    if (before)
        munmap(all, before);
    munmap(all + before + size, granule() - before);
    struct range *range = calloc(1, sizeof *range);
    range->base = *base = (u64)(all + before);
    range->size = size;
    pthread_mutex_lock(&lock);
    range->next = ranges;
    ranges = range;
    ranges_now++;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuMemAddressFree(u64 base, size_t size)
{
    MAY_FAIL();
    pthread_mutex_lock(&lock);
    struct range **link = &ranges;
    while (*link && (*link)->base != base)
        link = &(*link)->next;
    struct range *range = *link;
    MUST(range && range->size == size && !range->mapped);
    *link = range->next;
    ranges_now--;
    munmap((void *)base, size);
    pthread_mutex_unlock(&lock);
    free(range);
    return 0;
}

int cuMemCreate(u64 *id, size_t size, const void *properties, u64 flags)
{
    MAY_FAIL();
    MUST(size && size % granule() == 0 && !flags);
    struct memory *memory = calloc(1, sizeof *memory);
    memory->size = size;
    memory->device = device_of(properties);
    MUST(depth > 0 && stack[depth - 1] == &contexts[memory->device]);
    pthread_mutex_lock(&lock);
    memory->id = *id = ++last_memory;
    memory->next = memories;
    memories = memory;
    memories_now++;
    creates++;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuMemRelease(u64 id)
{
    MAY_FAIL();
    pthread_mutex_lock(&lock);
    struct memory **link = &memories;
    while (*link && (*link)->id != id)
        link = &(*link)->next;
    struct memory *memory = *link;
    MUST(memory);
    *link = memory->next;
    memories_now--;
    pthread_mutex_unlock(&lock);
    free(memory);
    return 0;
}

int cuMemMap(u64 start, size_t size, size_t offset, u64 id, u64 flags)
{
    MAY_FAIL();
    pthread_mutex_lock(&lock);
    struct range *range = range_of(start);
    struct memory *memory = memory_of(id);
    MUST(!offset && !flags && range && !range->mapped && memory && memory->size == size);
    MUST(start % granule() == 0 && start - range->base >= granule());
    MUST(range->base + range->size - (start + size) >= granule() && start + size < range->base + range->size);
    for (struct range *other = ranges; other; other = other->next)
        MUST(!other->mapped || other->memory != id);
    range->start = start;
    range->mapped = size;
    range->memory = id;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuMemSetAccess(u64 start, size_t size, const void *access, size_t count)
{
    MAY_FAIL();
    int words[3];
    memcpy(words, access, sizeof words);
    pthread_mutex_lock(&lock);
    struct range *range = range_of(start);
    MUST(count == 1 && range && range->start == start && range->mapped == size);
    MUST(words[0] == 1 && words[1] == memory_of(range->memory)->device && words[2] == 3);
    pthread_mutex_unlock(&lock);
    return mprotect((void *)start, size, PROT_READ | PROT_WRITE) ? 2 : 0;
}

int cuMemUnmap(u64 start, size_t size)
{
    MAY_FAIL();
    pthread_mutex_lock(&lock);
    struct range *range = range_of(start);
    MUST(range && range->start == start && range->mapped == size && !range->pending);
    range->mapped = 0;
    void *again = mmap((void *)start, size, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    MUST(again == (void *)start);
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuMemsetD8Async(u64 start, unsigned char value, size_t size, void *stream)
{
    MAY_FAIL();
    MUST(depth > 0 && !stream);
    pthread_mutex_lock(&lock);
    struct range *range = range_of(start);
    MUST(range && range->start <= start && start + size <= range->start + range->mapped);
    range->pending = 1;
    pthread_mutex_unlock(&lock);
    memset((void *)start, value, size);
    return 0;
}
