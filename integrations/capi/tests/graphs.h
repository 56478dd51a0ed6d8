/* Part of api.c: private pools, graphs and observers of failed allocations. */
static void pools(void) {
    ClaystonePool *pool, *other;
    ClaystonePoolStats stats;
    ClaystoneStorage *inside, *outside;
    uint32_t id, second;
    OK(claystone_pool_new(device, false, false, &pool));
    OK(claystone_pool_new(device, true, true, &other));
    OK(claystone_pool_id(pool, &id));
    OK(claystone_pool_id(other, &second));
    CHECK(id != 0 && id != second);
    OK(claystone_pool_begin(pool));
    OK(claystone_pool_begin(other));
    OK(claystone_pool_end(pool)); /* in another order than they began */
    OK(claystone_storage_new(device, 1000, &inside));
    OK(claystone_pool_end(other));
    CHECK(claystone_pool_end(other) == CLAYSTONE_STATUS_INVALID);
    OK(claystone_storage_new(device, 1000, &outside));
    OK(claystone_pool_stats(other, &stats));
    CHECK(stats.allocations == 1 && stats.allocated_bytes >= 1000 && stats.reserved_bytes >= stats.allocated_bytes);
    OK(claystone_pool_stats(pool, &stats));
    CHECK(stats.allocations == 0 && stats.segments == 0);
    claystone_storage_release(inside);
    claystone_storage_release(outside);
    OK(claystone_pool_empty_cache(other));
    OK(claystone_pool_stats(other, &stats));
    CHECK(stats.segments == 0 && stats.active_bytes == 0);
    CHECK(claystone_pool_new(1000, false, false, &pool) == CLAYSTONE_STATUS_NO_DEVICE);
    claystone_pool_release(pool);
    claystone_pool_release(other);
}

static void graphs(void) {
    ClaystonePool *pool;
    ClaystoneGraph *graph;
    ClaystoneTensor *x = floats(1, 4, (float[]){1, 2, 3, 4}), *y;
    ClaystoneCall twice = {"add", TENSORS(x, x), 2, NULL, 0};
    float values[4];
    size_t commands;
    bool capturing = true;
    OK(claystone_pool_new(device, false, false, &pool));
    OK(claystone_graph_is_capturing(device, &capturing));
    CHECK(!capturing);
    CHECK(claystone_graph_capture_end(&graph) == CLAYSTONE_STATUS_INVALID);
    CHECK(claystone_graph_capture_abandon() == CLAYSTONE_STATUS_INVALID);
    if (device == CLAYSTONE_CPU) {
        CHECK(claystone_graph_capture_begin(pool) == CLAYSTONE_STATUS_INVALID);
        CHECK(strstr(claystone_last_error(), "no queue to record"));
    } else {
        OK(claystone_graph_capture_begin(pool));
        CHECK(claystone_graph_capture_begin(pool) == CLAYSTONE_STATUS_INVALID);
        OK(claystone_graph_is_capturing(device, &capturing));
        CHECK(capturing);
        CHECK(claystone_tensor_read(x, values, sizeof values) == CLAYSTONE_STATUS_INVALID);
        OK(claystone_call(&twice, &y, 1, NULL));
        claystone_tensor_release(y);
        OK(claystone_graph_capture_abandon());
        expect(x, 4, (float[]){1, 2, 3, 4}); /* the device works after an abandoned capture */

        OK(claystone_graph_capture_begin(pool));
        OK(claystone_call(&twice, &y, 1, NULL));
        OK(claystone_graph_capture_end(&graph));
        OK(claystone_graph_commands(graph, &commands));
        CHECK(commands == 1);
        for (float value = 1; value < 4; value++) {
            OK(claystone_tensor_write(x, (float[]){value, value, 0, 0}, sizeof values));
            OK(claystone_graph_replay(graph));
            expect(y, 4, (float[]){2 * value, 2 * value, 0, 0});
        }
        claystone_graph_release(graph);
        expect(y, 4, (float[]){6, 6, 0, 0});
        claystone_tensor_release(y);
    }
    claystone_tensor_release(x);
    claystone_pool_release(pool);
    claystone_pool_release(NULL);
    claystone_graph_release(NULL);
}

static void *count_up(void *data, size_t nbytes) {
    ++*(int *)data;
    return nbytes > (1 << 30) ? NULL : malloc(nbytes);
}

static void count_down(void *data, void *memory, size_t nbytes) {
    (void)nbytes;
    --*(int *)data;
    free(memory);
}

/* Runs last: the allocator stays. */
static void other_allocator(void) {
    static int pieces;
    ClaystoneAllocator counting = {count_up, count_down, &pieces};
    CHECK(claystone_memory_set_allocator(device, &(ClaystoneAllocator){NULL, count_down, NULL}) == CLAYSTONE_STATUS_INVALID);
    if (device != CLAYSTONE_CPU) {
        CHECK(claystone_memory_set_allocator(device, &counting) == CLAYSTONE_STATUS_INVALID);
        CHECK(strstr(claystone_last_error(), "cl_mem"));
        return;
    }
    ClaystoneTensor *before = floats(1, 2, (float[]){1, 2}), *after, *sum;
    OK(claystone_memory_set_allocator(device, &counting));
    after = floats(1, 2, (float[]){3, 4});
    CHECK(pieces == 1 && stat("segment.all.current") == 1);
    OK(claystone_call(&(ClaystoneCall){"add", TENSORS(before, after), 2, NULL, 0}, &sum, 1, NULL));
    expect(sum, 2, (float[]){4, 6});
    claystone_tensor_release(before);
    claystone_tensor_release(after);
    claystone_tensor_release(sum);
    OK(claystone_memory_empty_cache(device));
    CHECK(pieces == 0);
}

static void note_failure(void *data, const ClaystoneOutOfMemory *failed) {
    CHECK(failed->device == device && failed->allowed < failed->requested);
    *(size_t *)data += failed->requested;
}

static void observers(void) {
    ClaystoneObserver *observer;
    ClaystoneStorage *none;
    size_t failed = 0;
    OK(claystone_memory_observe_oom(device, note_failure, &failed, &observer));
    OK(claystone_memory_set_fraction(device, 1e-9));
    CHECK(claystone_storage_new(device, 3 << 20, &none) == CLAYSTONE_STATUS_OUT_OF_MEMORY && failed == 3 << 20);
    claystone_observer_release(observer);
    CHECK(claystone_storage_new(device, 3 << 20, &none) == CLAYSTONE_STATUS_OUT_OF_MEMORY && failed == 3 << 20);
    OK(claystone_memory_set_fraction(device, 1));
    CHECK(claystone_memory_observe_oom(device, NULL, NULL, &observer) == CLAYSTONE_STATUS_INVALID);
    claystone_observer_release(NULL);

    ClaystoneBytes json;
    OK(claystone_pinned_memory_stats(device, &json));
    CHECK(strstr((char *)json.data, "\"active_bytes.current\":") && strstr((char *)json.data, "\"host_alloc_time.avg\":"));
    claystone_bytes_free(&json);
    OK(claystone_pinned_memory_reset_peak(device));
    OK(claystone_pinned_memory_reset_accumulated(device));
    OK(claystone_pinned_memory_empty_cache(device));

    OK(claystone_memory_check_config("max_split_size_mb:128,pinned_max_cached_size_mb:64"));
    CHECK(claystone_memory_check_config("throw_on_cudamalloc_oom:True") == CLAYSTONE_STATUS_INVALID);
    CHECK(strstr(claystone_last_error(), "has no meaning here"));

    OK(claystone_memory_enable_caching(device, true)); /* nothing was disabled */
    CHECK(claystone_memory_enable_caching(1000, false) == CLAYSTONE_STATUS_NO_DEVICE);
}
