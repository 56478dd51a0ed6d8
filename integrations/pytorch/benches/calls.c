// Times calls of claystone's C API, for overhead.py.
#include <claystone.h>
#include <stddef.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Makes an f32 tensor of these sizes, filled with a number; null on failure.
ClaystoneTensor *filled(int32_t device, const int64_t *sizes, size_t rank, double number) {
    ClaystoneTensor *result = NULL;
    const ClaystoneArgument arguments[] = {
        {.tag = CLAYSTONE_TAG_INTS, .length = rank, .value.integers = sizes},
        {.tag = CLAYSTONE_TAG_FLOAT, .value.number = number},
        {.tag = CLAYSTONE_TAG_DTYPE, .value.integer = CLAYSTONE_DTYPE_F32},
        {.tag = CLAYSTONE_TAG_DEVICE, .value.integer = device},
    };
    claystone_call(&(ClaystoneCall){"full", NULL, 0, arguments, 4}, &result, 1, NULL);
    return result;
}

// The average seconds per call of `count` calls; negative on failure.
double seconds_per_call(const ClaystoneCall *call, int count) {
    const double begun = now();
    for (int i = 0; i < count; i++) {
        ClaystoneTensor *results[4] = {NULL, NULL, NULL, NULL};
        if (claystone_call(call, results, 4, NULL) != CLAYSTONE_STATUS_OK)
            return -1;
        for (int k = 0; k < 4; k++)
            claystone_tensor_release(results[k]);
    }
    return (now() - begun) / count;
}
