/* Part of api.c: recurrent layers and recordings. */

/* A tensor of shape [count, 1, 1]. */
static ClaystoneTensor *steps(int64_t count, const float *data) {
    ClaystoneTensor *matrix = floats(count, 1, data), *made;
    OK(claystone_call(&(ClaystoneCall){"reshape", TENSORS(matrix), 1, ARGUMENTS(INTS(count, 1, 1)), 1}, &made, 1, NULL));
    claystone_tensor_release(matrix);
    return made;
}

static void recurrent(void) {
    ClaystoneTensor *x = steps(3, (float[]){1, 2, 3}), *start = steps(1, (float[]){0}), *grad = steps(3, (float[]){0, 0, 1});
    ClaystoneTensor *w = floats(1, 1, (float[]){1}), *u = floats(1, 1, (float[]){2}), *results[3], *grads[4];
    ClaystoneRecurrent layer = {
        .cell = CLAYSTONE_CELL_RNN_RELU, .num_layers = 1, .input = x, .hx = start, .parameters = LIST(w, u)};
    ClaystoneRecording *recording;
    OK(claystone_recurrent(&layer, (uint8_t[]){1, 0, 1, 1}, results, &recording));
    expect(results[0], 3, (float[]){1, 4, 11});
    expect(results[1], 1, (float[]){11});
    CHECK(results[2] == NULL);
    /* Writing into the results changes no gradient, and gradients can be computed repeatedly. */
    OK(claystone_call(&(ClaystoneCall){"zero_", TENSORS(results[0]), 1, NULL, 0}, NULL, 0, NULL));
    for (int again = 0; again < 2; again++) {
        OK(claystone_recording_backward(recording, TENSORS(grad), 1, grads, 4));
        expect(grads[0], 3, (float[]){4, 2, 1});
        CHECK(grads[1] == NULL);
        expect(grads[2], 1, (float[]){11}); /* 3 + 2 (2 + 2) */
        expect(grads[3], 1, (float[]){6});  /* 4 + 2 */
        for (size_t i = 0; i < 4; i++) claystone_tensor_release(grads[i]);
    }
    OK(claystone_recording_backward(recording, TENSORS(NULL, start), 2, grads, 4));
    expect(grads[2], 1, (float[]){0});
    for (size_t i = 0; i < 4; i++) claystone_tensor_release(grads[i]);
    CHECK(claystone_recording_backward(recording, TENSORS(grad), 1, grads, 3) == CLAYSTONE_STATUS_INVALID);
    claystone_recording_release(recording);
    claystone_recording_release(NULL);
    claystone_tensor_release(results[0]);
    claystone_tensor_release(results[1]);

    /* Packed: one sequence of two steps, one of a single step. */
    ClaystoneTensor *rows = floats(3, 1, (float[]){1, 2, 3}), *both = steps(2, (float[]){0, 0}), *pair;
    OK(claystone_call(&(ClaystoneCall){"reshape", TENSORS(both), 1, ARGUMENTS(INTS(1, 2, 1)), 1}, &pair, 1, NULL));
    layer.input = rows, layer.hx = pair, layer.batch_sizes = (int64_t[]){2, 1}, layer.batch_size_count = 2;
    OK(claystone_recurrent(&layer, NULL, results, &recording));
    CHECK(recording == NULL);
    expect(results[0], 3, (float[]){1, 2, 5});
    expect(results[1], 2, (float[]){5, 2});
    claystone_tensor_release(results[0]);
    claystone_tensor_release(results[1]);
    layer.batch_sizes = (int64_t[]){1, 2};
    CHECK(claystone_recurrent(&layer, NULL, results, NULL) == CLAYSTONE_STATUS_INVALID);
    layer.batch_sizes = (int64_t[]){2, -1};
    CHECK(claystone_recurrent(&layer, NULL, results, NULL) == CLAYSTONE_STATUS_INVALID);

    /* LSTM has two states. All weights are 0, so the forget gate is 0.5 and halves the cell state. */
    ClaystoneTensor *zeros = floats(4, 1, (float[]){0, 0, 0, 0}), *one = steps(1, (float[]){1});
    ClaystoneRecurrent lstm = {.cell = CLAYSTONE_CELL_LSTM, .num_layers = 1, .input = x, .hx = start, .cx = one, .parameters = LIST(zeros, zeros)};
    OK(claystone_recurrent(&lstm, NULL, results, NULL));
    expect(results[2], 1, (float[]){0.125f});
    for (size_t i = 0; i < 3; i++) claystone_tensor_release(results[i]);
    lstm.cx = NULL;
    CHECK(claystone_recurrent(&lstm, NULL, results, NULL) == CLAYSTONE_STATUS_INVALID);
    lstm.cell = 9;
    CHECK(claystone_recurrent(&lstm, NULL, results, NULL) == CLAYSTONE_STATUS_INVALID);
    ClaystoneTensor *all[] = {x, start, grad, w, u, rows, both, pair, zeros, one};
    for (size_t i = 0; i < COUNT(all); i++) claystone_tensor_release(all[i]);
}
