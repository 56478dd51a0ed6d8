/* Part of api.c: operations on lists of tensors. */
#define LIST(...) (ClaystoneTensors){TENSORS(__VA_ARGS__), COUNT(((const ClaystoneTensor *const[]){__VA_ARGS__}))}

static void call_exp(void *x) {
    ClaystoneTensor *y;
    OK(claystone_call(&(ClaystoneCall){"exp", TENSORS(x), 1, NULL, 0}, &y, 1, NULL));
    claystone_tensor_release(y);
}

static void many(void) {
    const ClaystoneTensors none = {NULL, 0};
    ClaystoneTensor *x = floats(1, 2, (float[]){1, 2}), *y = floats(1, 3, (float[]){3, 4, 5}), *two = floats(1, 1, (float[]){2});
    ClaystoneTensor *out = floats(1, 2, NULL), *out3 = floats(1, 3, NULL);
    OK(claystone_foreach("mul", (ClaystoneTensors[]){LIST(x, y), LIST(two)}, 2, NULL, 0, LIST(out, out3)));
    expect(out, 2, (float[]){2, 4});
    expect(out3, 3, (float[]){6, 8, 10});
    OK(claystone_foreach("add_scalar", (ClaystoneTensors[]){LIST(x, y)}, 1, (double[]){-1}, 1, LIST(x, y)));
    expect(y, 3, (float[]){2, 3, 4});
    CHECK(claystone_foreach("mul", (ClaystoneTensors[]){LIST(x)}, 1, NULL, 0, LIST(x)) == CLAYSTONE_STATUS_INVALID);
    CHECK(claystone_foreach("mul", (ClaystoneTensors[]){LIST(x), LIST(NULL)}, 2, NULL, 0, LIST(x)) == CLAYSTONE_STATUS_INVALID);

    ClaystoneTensor *g = floats(1, 2, (float[]){8, 4}), *found = floats(1, 1, (float[]){0}), *quarter = floats(1, 1, (float[]){0.25f});
    OK(claystone_unscale(LIST(g), found, quarter));
    expect(g, 2, (float[]){2, 1});
    expect(found, 1, (float[]){0});

    ClaystoneStep step = {.parameters = LIST(x), .gradients = LIST(g), .found_inf = found};
    ClaystoneSgd sgd = {.lr = 0.5, .first = true};
    OK(claystone_fused_sgd(&step, none, &sgd)); /* x was 0, 1 */
    expect(x, 2, (float[]){-1, 0.5f});
    CHECK(claystone_fused_sgd(NULL, none, &sgd) == CLAYSTONE_STATUS_INVALID);
    step.lr = two;
    ClaystoneTensor *velocity = floats(1, 2, NULL);
    sgd.momentum = 0.5;
    OK(claystone_fused_sgd(&step, LIST(velocity), &sgd));
    expect(velocity, 2, (float[]){2, 1});
    expect(x, 2, (float[]){-5, -1.5f});

    ClaystoneTensor *m = floats(1, 2, (float[]){0, 0}), *v = floats(1, 2, (float[]){0, 0}), *count = floats(1, 1, (float[]){1});
    ClaystoneAdamState state = {.exp_avgs = LIST(m), .exp_avg_sqs = LIST(v), .steps = LIST(count)};
    ClaystoneAdam adam = {.beta1 = 0.9, .beta2 = 0.999, .decoupled = true};
    step.lr = quarter;
    OK(claystone_fused_adam(&step, &state, &adam));
    expect(x, 2, (float[]){-5.25f, -1.75f});
    adam.amsgrad = true; /* but its state is missing */
    CHECK(claystone_fused_adam(&step, &state, &adam) == CLAYSTONE_STATUS_INVALID);
    const ClaystoneAdagrad adagrad = {.eps = 0};
    OK(claystone_call(&(ClaystoneCall){"zero_", TENSORS(v), 1, NULL, 0}, NULL, 0, NULL));
    OK(claystone_fused_adagrad(&step, LIST(v), LIST(count), &adagrad));
    expect(x, 2, (float[]){-5.5f, -2});
    expect(v, 2, (float[]){4, 1});
    CHECK(claystone_fused_adagrad(&step, none, LIST(count), &adagrad) == CLAYSTONE_STATUS_INVALID);
    ClaystoneTensor *all[] = {x, y, two, out, out3, g, found, quarter, velocity, m, v, count};
    for (size_t i = 0; i < COUNT(all); i++) claystone_tensor_release(all[i]);
}
