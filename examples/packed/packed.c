/* packed.c - kernels that were compiled when this program was built; CMakeLists.txt says how.
 *
 *     packed                   takes them from the program itself
 *     packed kernels.pack      takes them from that file
 *
 * On a GPU it makes a plan that is ready to launch, and without one it looks at the kernels for sm_80. It never compiles.
 */
#include <attnloom.h>
#include <stdio.h>
#include <string.h>

extern const unsigned char kernels_pack[];
extern const size_t kernels_pack_bytes;

static int fail(const loom_error *error) {
    fprintf(stderr, "%s: %s\n", error->field, error->text);
    return 1;
}

int main(int argc, char **argv) {
    loom_context *context = NULL;
    loom_plan *plan = NULL;
    loom_error error = LOOM_ERROR_INIT;
    loom_options options = LOOM_OPTIONS_INIT;
    options.cache_dir = ""; /* nothing but the pack */
    if (loom_context_create(&options, &context, &error)) return fail(&error);
    loom_status status = argc > 1
                             ? loom_context_add_pack(context, argv[1], NULL, 0, &error)
                             : loom_context_add_pack(context, "kernels", kernels_pack, kernels_pack_bytes, &error);
    if (status) return fail(&error);

    loom_plan_desc desc = LOOM_PLAN_DESC_INIT;
    desc.problem = "bf16 d=128 causal";
    desc.flags = LOOM_NO_COMPILE;
    status = loom_plan_create(context, &desc, &plan, &error);
    if (status == LOOM_DRIVER && strcmp(error.field, "driver") == 0) {
        printf("no GPU here: %s\n", error.text);
        desc.device = LOOM_DEVICE_NONE;
        desc.arch = "sm_80";
        status = loom_plan_create(context, &desc, &plan, &error);
    }
    if (status) return fail(&error);
    for (int32_t i = 0; i < loom_plan_num_kernels(plan); i++) {
        loom_kernel kernel = LOOM_KERNEL_INIT;
        if (loom_plan_kernel(plan, i, &kernel, &error)) return fail(&error);
        printf("%s %s for %s from %s: %zu bytes\n", kernel.name, kernel.variant,
               loom_plan_text(plan, LOOM_TEXT_ARCH), kernel.pack, kernel.binary_bytes);
    }
    loom_plan_destroy(plan);
    loom_context_destroy(context);
    return 0;
}
