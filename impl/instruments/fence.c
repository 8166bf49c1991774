/* Fenced device memory for torch: every allocation is a mapping of its own between two unmapped granules.
 *
 * Built and loaded by fence.py; torch calls kvproof_fence_alloc and kvproof_fence_free.
 *
 *     base                                              side "end"                     side "begin"
 *     | unmapped | mapped: size rounded to granules | unmapped |
 *                |------------- slack ------[request]|          the request ends where the mapping ends
 *                |[request]------ slack -------------|          the request begins where the mapping begins
 *
 * A granule is the driver's smallest mapping, 2 MiB on the GPUs of today. At side "end" the request is rounded
 * up to 8 bytes, so the fence stands exactly behind elements of 8 bytes, and up to 7 bytes behind smaller ones.
 * Mapped memory is filled with 0xA5. A freed range stays reserved and unmapped while FREED_MAX more are freed.
 *
 * Needs no CUDA header: the few types of the driver's binary interface are declared here, and the functions are
 * looked up in the driver when the process starts to use the fence. Not covered: capture into CUDA graphs (a
 * free waits for the device, which a capture forbids), access from another GPU, sharing between processes, and
 * strays that land inside another mapping or inside the slack.
 */
#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>

enum {
    FILL = 0xA5,
    ALIGNMENT = 8,      /* bytes; what side "end" rounds to */
    FREED_MAX = 4096,   /* ranges kept unmapped after their free, oldest given back first */
    SPARE_MAX = 64,     /* pieces of memory of one granule kept per device instead of going back to the driver */
    DEVICES_MAX = 64,
    BUCKETS = 4096,     /* of the table of live blocks; a power of two */
};

/* A request beyond any address space is refused before it is rounded. */
static const size_t SIZE_MAX_BYTES = (size_t)1 << 46;

/* --- the driver's interface (cuda.h, CUDA 10.2 and later) -------------------------------------------------- */

typedef int result; /* CUresult */
typedef unsigned long long address; /* CUdeviceptr */
typedef unsigned long long memory_handle; /* CUmemGenericAllocationHandle */

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101 };
enum { LOCATION_DEVICE = 1, ALLOCATION_PINNED = 1, ACCESS_READWRITE = 3, GRANULARITY_MINIMUM = 0 };

struct location {
    int type;
    int id;
};

struct allocation_properties { /* CUmemAllocationProp */
    int type;
    int requested_handle_types;
    struct location location;
    void *win32_handle_metadata;
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
};

struct access { /* CUmemAccessDesc */
    struct location location;
    int flags;
};

_Static_assert(sizeof(struct allocation_properties) == 32, "CUmemAllocationProp has 32 bytes");
_Static_assert(sizeof(struct access) == 12, "CUmemAccessDesc has 12 bytes");

/* The names are those of the library; cuda.h maps cuCtxPushCurrent and its like to the ones with _v2. */
#define DRIVER(X)                                                                                             \
    X(cuInit, (unsigned flags))                                                                               \
    X(cuGetErrorString, (result error, const char **text))                                                    \
    X(cuDeviceGet, (int *device, int ordinal))                                                                \
    X(cuDevicePrimaryCtxRetain, (void **context, int device))                                                 \
    X(cuCtxPushCurrent_v2, (void *context))                                                                   \
    X(cuCtxPopCurrent_v2, (void **context))                                                                   \
    X(cuCtxSynchronize, (void))                                                                               \
    X(cuMemGetAllocationGranularity,                                                                          \
      (size_t *granule, const struct allocation_properties *properties, int option))                          \
    X(cuMemAddressReserve, (address *base, size_t size, size_t alignment, address wish, unsigned long long))  \
    X(cuMemAddressFree, (address base, size_t size))                                                          \
    X(cuMemCreate,                                                                                            \
      (memory_handle *memory, size_t size, const struct allocation_properties *, unsigned long long flags))   \
    X(cuMemRelease, (memory_handle memory))                                                                   \
    X(cuMemMap, (address start, size_t size, size_t offset, memory_handle memory, unsigned long long flags))  \
    X(cuMemSetAccess, (address start, size_t size, const struct access *access, size_t count))                \
    X(cuMemUnmap, (address start, size_t size))                                                               \
    X(cuMemsetD8Async, (address start, unsigned char value, size_t size, void *stream))

#define DECLARE(name, arguments) static result(*name) arguments;
DRIVER(DECLARE)

/* --- state, all of it behind one lock; the driver is called without it where it may wait ------------------- */

struct block {
    address pointer; /* what the caller has */
    address base;    /* of the reserved range; the mapping begins a granule later */
    size_t granule;
    size_t mapped;
    memory_handle memory;
    struct block *next; /* in its bucket while it lives, in the queue of the freed afterwards */
};

struct device {
    void *context; /* the primary one, which is torch's; NULL: not looked at yet */
    size_t granule;
    struct allocation_properties properties;
    struct access access;
    memory_handle spare[SPARE_MAX];
    int spares;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct device devices[DEVICES_MAX];
static struct block *live[BUCKETS];
static struct block *freed_oldest, **freed_end = &freed_oldest;
static int freed;

static int opened;
static atomic_int at_begin;
static atomic_ullong allocations;
static void (*throw_error)(const char *); /* does not return; NULL: a failed allocation is just NULL */
static _Thread_local const char *step;    /* the driver call that this thread tried last, for the message */

#define CALL(function, ...) (step = #function, function(__VA_ARGS__))

static size_t rounded_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

static size_t reserved(const struct block *block) { return block->mapped + 2 * block->granule; }

static address start(const struct block *block) { return block->base + block->granule; }

static struct block **bucket(address pointer) { return &live[(pointer >> 3 ^ pointer >> 21) & (BUCKETS - 1)]; }

static const char *words(result error)
{
    const char *text = NULL;
    return cuGetErrorString(error, &text) || !text ? "unknown error" : text;
}

/* --- devices ----------------------------------------------------------------------------------------------- */

/* With the lock held: fill in what is asked of the driver once per device. */
static result look_at(struct device *device, int ordinal)
{
    int id;
    void *context;
    result error = CALL(cuInit, 0);
    if (error)
        return error;
    error = CALL(cuDeviceGet, &id, ordinal);
    if (error)
        return error;
    device->properties = (struct allocation_properties){
        .type = ALLOCATION_PINNED,
        .location = {.type = LOCATION_DEVICE, .id = id},
    };
    device->access = (struct access){.location = device->properties.location, .flags = ACCESS_READWRITE};
    error = CALL(cuMemGetAllocationGranularity, &device->granule, &device->properties, GRANULARITY_MINIMUM);
    if (error)
        return error;
    error = CALL(cuDevicePrimaryCtxRetain, &context, id);
    if (!error)
        device->context = context;
    return error;
}

/* Make the device's primary context current, whatever this thread has; `leave` restores it. torch frees from
 * threads that have no context, and tensors of one device while another is current. */
static result enter(int ordinal, struct device **found)
{
    result error = SUCCESS;
    step = "device";
    if (ordinal < 0 || ordinal >= DEVICES_MAX)
        return INVALID_DEVICE;
    struct device *device = &devices[ordinal];
    pthread_mutex_lock(&lock);
    if (!device->context)
        error = look_at(device, ordinal);
    pthread_mutex_unlock(&lock);
    if (!error)
        error = CALL(cuCtxPushCurrent_v2, device->context);
    *found = device;
    return error;
}

static void leave(void)
{
    void *context;
    cuCtxPopCurrent_v2(&context);
}

/* --- memory and ranges ------------------------------------------------------------------------------------- */

/* Take a spare piece of memory; 0 when there is none. */
static int take_spare(struct device *device, memory_handle *memory)
{
    pthread_mutex_lock(&lock);
    int found = device->spares > 0;
    if (found)
        *memory = device->spare[--device->spares];
    pthread_mutex_unlock(&lock);
    return found;
}

static result take_memory(struct device *device, size_t size, memory_handle *memory)
{
    if (size == device->granule && take_spare(device, memory))
        return SUCCESS;
    result error = CALL(cuMemCreate, memory, size, &device->properties, 0);
    if (error != OUT_OF_MEMORY)
        return error;
    for (memory_handle spare; take_spare(device, &spare);)
        cuMemRelease(spare);
    return CALL(cuMemCreate, memory, size, &device->properties, 0);
}

static void give_memory(struct device *device, size_t size, memory_handle memory)
{
    pthread_mutex_lock(&lock);
    int keep = size == device->granule && device->spares < SPARE_MAX;
    if (keep)
        device->spare[device->spares++] = memory;
    pthread_mutex_unlock(&lock);
    if (!keep)
        cuMemRelease(memory);
}

/* Give the range that was freed longest ago back to the driver, if more than `keep` are kept. */
static int forget_oldest(int keep)
{
    pthread_mutex_lock(&lock);
    struct block *oldest = freed > keep ? freed_oldest : NULL;
    if (oldest) {
        freed_oldest = oldest->next;
        if (!freed_oldest)
            freed_end = &freed_oldest;
        freed--;
    }
    pthread_mutex_unlock(&lock);
    if (!oldest)
        return 0;
    cuMemAddressFree(oldest->base, reserved(oldest));
    free(oldest);
    return 1;
}

static result reserve(struct block *block)
{
    result error;
    do
        error = CALL(cuMemAddressReserve, &block->base, reserved(block), 0, 0, 0);
    while (error == OUT_OF_MEMORY && forget_oldest(0));
    return error;
}

/* --- blocks ------------------------------------------------------------------------------------------------ */

/* Reserve, map and fill `block`, whose granule and mapped size are set. On an error nothing is kept. */
static result map_block(struct block *block, struct device *device, void *stream)
{
    result error = reserve(block);
    if (error)
        return error;
    error = take_memory(device, block->mapped, &block->memory);
    if (error)
        goto no_memory;
    error = CALL(cuMemMap, start(block), block->mapped, 0, block->memory, 0);
    if (error)
        goto not_mapped;
    error = CALL(cuMemSetAccess, start(block), block->mapped, &device->access, 1);
    if (!error)
        error = CALL(cuMemsetD8Async, start(block), FILL, block->mapped, stream);
    if (!error)
        return SUCCESS;
    cuMemUnmap(start(block), block->mapped);
not_mapped:
    give_memory(device, block->mapped, block->memory);
no_memory:
    cuMemAddressFree(block->base, reserved(block));
    return error;
}

static result new_block(size_t size, int ordinal, void *stream, struct block **made)
{
    struct device *device;
    result error = enter(ordinal, &device);
    if (error)
        return error;
    struct block *block = malloc(sizeof *block);
    step = "malloc";
    error = OUT_OF_MEMORY;
    if (block) {
        block->granule = device->granule;
        block->mapped = rounded_up(size, device->granule);
        error = map_block(block, device, stream);
    }
    leave();
    if (error) {
        free(block);
        return error;
    }
    block->pointer = start(block);
    if (!atomic_load(&at_begin))
        block->pointer += block->mapped - rounded_up(size, ALIGNMENT);
    pthread_mutex_lock(&lock);
    block->next = *bucket(block->pointer);
    *bucket(block->pointer) = block;
    pthread_mutex_unlock(&lock);
    *made = block;
    return SUCCESS;
}

/* Take the live block with this pointer out of the table; NULL when there is none. */
static struct block *take_block(address pointer)
{
    pthread_mutex_lock(&lock);
    struct block **link = bucket(pointer);
    while (*link && (*link)->pointer != pointer)
        link = &(*link)->next;
    struct block *block = *link;
    if (block)
        *link = block->next;
    pthread_mutex_unlock(&lock);
    return block;
}

static void keep_freed(struct block *block)
{
    pthread_mutex_lock(&lock);
    block->next = NULL;
    *freed_end = block;
    freed_end = &block->next;
    freed++;
    pthread_mutex_unlock(&lock);
    forget_oldest(FREED_MAX);
}

/* Tell the caller of an allocation: by an exception where one can be thrown, else by NULL alone. torch does not
 * look at NULL, and would hand out a tensor at address zero. */
static void *failed(result error, ssize_t size, int ordinal)
{
    char message[256];
    if (!throw_error)
        return NULL;
    snprintf(message, sizeof message, "CUDA %s%s (fence: %s, for %zd bytes on device %d)",
             error == OUT_OF_MEMORY ? "" : "error: ", words(error), step, size, ordinal);
    throw_error(message);
    return NULL;
}

/* --- what fence.py and torch call -------------------------------------------------------------------------- */

/* Load the driver. NULL when it is there, else what is wrong, in words. Called by one thread, before any other. */
const char *kvproof_fence_open(const char *library)
{
    static char message[256];
    if (opened)
        return NULL;
    void *driver = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!driver) {
        snprintf(message, sizeof message, "%s", dlerror());
        return message;
    }
#define LOOK_UP(name, arguments)                                                                              \
    *(void **)&name = dlsym(driver, #name);                                                                   \
    if (!name) {                                                                                              \
        snprintf(message, sizeof message, "%s has no %s", library, #name);                                    \
        return message;                                                                                       \
    }
    DRIVER(LOOK_UP)
    /* Not initialised here: a process that has done that cannot fork others that use the GPU. */
    opened = 1;
    return NULL;
}

/* Where requests of later allocations stand: 0 at the end of their mapping, 1 at its beginning. */
void kvproof_fence_side(int begin) { atomic_store(&at_begin, begin); }

/* What a failed allocation calls with a message; it must not return. NULL: allocations return NULL instead. */
void kvproof_fence_throw(void (*function)(const char *)) { throw_error = function; }

/* Allocations made so far; failed and empty ones are not counted. */
unsigned long long kvproof_fence_allocations(void) { return atomic_load(&allocations); }

/* Memory for `size` bytes on the device, filled on the stream; NULL for no bytes, or see kvproof_fence_throw. */
void *kvproof_fence_alloc(ssize_t size, int device, void *stream)
{
    struct block *block = NULL;
    if (size == 0)
        return NULL;
    step = "size";
    result error = size < 0 ? INVALID_VALUE : OUT_OF_MEMORY;
    if (size > 0 && (size_t)size <= SIZE_MAX_BYTES)
        error = new_block((size_t)size, device, stream, &block);
    if (error)
        return failed(error, size, device);
    atomic_fetch_add(&allocations, 1);
    return (void *)(uintptr_t)block->pointer;
}

/* Unmap what `pointer` stands in, once the device has done everything asked of it so far: any of its streams may
 * use the memory. Errors are ignored. They come with a lost context, whose memory is lost as well. */
void kvproof_fence_free(void *pointer, ssize_t size, int ordinal, void *stream)
{
    (void)size;
    (void)stream;
    struct device *device;
    struct block *block = take_block((address)(uintptr_t)pointer);
    if (!block)
        return;
    if (enter(ordinal, &device)) {
        free(block);
        return;
    }
    if (cuCtxSynchronize() || cuMemUnmap(start(block), block->mapped)) {
        free(block);
    } else {
        give_memory(device, block->mapped, block->memory);
        keep_freed(block);
    }
    leave();
}
