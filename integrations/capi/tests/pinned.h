/* Part of api.c: pinned host memory. */
static void pinned(void) {
    ClaystoneStorage *storage;
    ClaystoneTensor *host, *x = floats(2, 2, NULL);
    void *data;
    int32_t where;
    OK(claystone_storage_new_pinned(device, 16, &storage, &data));
    CHECK((uintptr_t)data % 64 == 0);
    OK(claystone_storage_device(storage, &where));
    CHECK(where == CLAYSTONE_CPU);
    OK(claystone_tensor_new(storage, CLAYSTONE_DTYPE_F32, (int64_t[]){2, 2}, (int64_t[]){2, 1}, 2, 0, &host));
    memcpy(data, (float[]){1, 2, 3, 4}, 16);
    OK(claystone_tensor_copy(x, host));
    expect(x, 4, (float[]){1, 2, 3, 4});
    memset(data, 0, 16);
    OK(claystone_tensor_copy(host, x));
    CHECK(((float *)data)[0] == 1 && ((float *)data)[3] == 4);
    CHECK(claystone_storage_new_pinned(device, SIZE_MAX, &storage, &data) != CLAYSTONE_STATUS_OK);
    CHECK(claystone_storage_new_pinned(-5, 16, &storage, &data) == CLAYSTONE_STATUS_INVALID);
    claystone_tensor_release(host);
    claystone_tensor_release(x);
    claystone_storage_release(storage);
    OK(claystone_storage_new_pinned(device, 0, &storage, &data)); /* a storage of 0 bytes has an address too */
    CHECK(data);
    claystone_storage_release(storage);
}

/* Submits long work to the current stream of an OpenCL device, so that the next command has to wait. */
static void keep_busy(void) {
    if (device == CLAYSTONE_CPU)
        return;
    const int64_t n = 1000;
    static float values[1000 * 1000];
    ClaystoneTensor *x = floats(n, n, values), *y;
    for (int i = 0; i < 4; i++) {
        OK(claystone_call(&(ClaystoneCall){"matmul", TENSORS(x, x), 2, NULL, 0}, &y, 1, NULL));
        claystone_tensor_release(y);
    }
    claystone_tensor_release(x);
}

/* Whether the default stream is idle; always true on the CPU device, which computes within the call. */
static bool is_done(void) {
    ClaystoneStream *stream;
    bool done;
    OK(claystone_stream_default(device, &stream));
    OK(claystone_stream_query(stream, &done));
    claystone_stream_release(stream);
    return done;
}

static ClaystoneTensor *pinned_floats(float **data, float value) {
    ClaystoneStorage *storage;
    ClaystoneTensor *host;
    OK(claystone_storage_new_pinned(device, 4096, &storage, (void **)data));
    OK(claystone_tensor_new(storage, CLAYSTONE_DTYPE_F32, (int64_t[]){1024}, (int64_t[]){1}, 1, 0, &host));
    claystone_storage_release(storage);
    for (int i = 0; i < 1024; i++)
        (*data)[i] = value;
    return host;
}

static void enqueued(void) {
    const bool computes = device == CLAYSTONE_CPU;
    float *data, *other, values[1024];
    ClaystoneTensor *host = pinned_floats(&data, 1), *next, *x, *y;
    ClaystoneStream *stream;
    x = tensor_on(device, CLAYSTONE_DTYPE_F32, 4, 1, 1024, NULL);
    OK(claystone_call(&(ClaystoneCall){"flatten", TENSORS(x), 1, ARGUMENTS(INT(0), INT(1)), 2}, &y, 1, NULL));
    OK(claystone_stream_default(device, &stream));

    /* To the device. Released pinned bytes are not reused before the copy is complete. */
    keep_busy();
    OK(claystone_tensor_copy_non_blocking(y, host));
    CHECK(is_done() == computes);
    claystone_tensor_release(host);
    next = pinned_floats(&other, 2);
    OK(claystone_tensor_read(y, values, sizeof values));
    CHECK(values[0] == 1 && values[1023] == 1);

    /* To the host, after earlier work of the stream. */
    keep_busy();
    OK(claystone_call(&(ClaystoneCall){"add_", TENSORS(y, y), 2, NULL, 0}, NULL, 0, NULL));
    OK(claystone_call(&(ClaystoneCall){"add_", TENSORS(y, y), 2, NULL, 0}, NULL, 0, NULL));
    OK(claystone_tensor_copy_non_blocking(next, y));
    CHECK(is_done() == computes);
    OK(claystone_stream_synchronize(stream));
    CHECK(other[0] == 4 && other[1023] == 4);

    /* A call that uses the pinned tensor waits for the copy. */
    keep_busy();
    OK(claystone_call(&(ClaystoneCall){"zero_", TENSORS(y), 1, NULL, 0}, NULL, 0, NULL));
    OK(claystone_tensor_copy_non_blocking(next, y));
    OK(claystone_tensor_read(next, values, sizeof values));
    CHECK(values[0] == 0 && values[1023] == 0);

    /* Ordinary memory may be reused at once. */
    for (int i = 0; i < 1024; i++)
        values[i] = i;
    keep_busy();
    OK(claystone_tensor_write_non_blocking(y, values, sizeof values));
    CHECK(is_done() == computes);
    memset(values, 0, sizeof values);
    OK(claystone_tensor_read(y, values, sizeof values));
    CHECK(values[1] == 1 && values[1023] == 1023);

    CHECK(claystone_tensor_write_non_blocking(y, values, 23) == CLAYSTONE_STATUS_INVALID);
    CHECK(claystone_tensor_copy_non_blocking(y, NULL) == CLAYSTONE_STATUS_INVALID);
    claystone_stream_release(stream);
    claystone_tensor_release(next);
    claystone_tensor_release(y);
    claystone_tensor_release(x);
}
