/* certify.c - compares a plan with the float64 reference and writes down what was found. See certify.h. */
#define _GNU_SOURCE
#include "certify.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "cache.h"
#include "harness.h"

enum { CERTIFICATE_BYTES = 2048 };

/* That `attnloom check` runs without options: no tile fits it. */
static const loom_shape SHAPE = {2, 4, 2, 257, 321};

typedef struct certificate {
    char text[CERTIFICATE_BYTES];
    size_t used;
    bool fine;
} certificate;

LOOM__PRINTF(2, 3) static void note(certificate *c, const char *format, ...) {
    va_list list;
    va_start(list, format);
    int length = vsnprintf(c->text + c->used, sizeof c->text - c->used, format, list);
    va_end(list);
    c->used += length > 0 ? (size_t)length : 0;
    if (c->used >= sizeof c->text) c->used = sizeof c->text - 1;
}

/* -- What is known --------------------------------------------------------------------------------------- */

enum { UNKNOWN, FINE, WRONG };

/* What a certificate says of a kernel. One of a forward alone says nothing of a backward. */
static int read_certificate(const loom_kernel *kernel) {
    size_t length = 0;
    const char *result = loom__key_value(kernel->certificate, "result", &length);
    bool backward = strncmp(kernel->name, "backward", strlen("backward")) == 0;
    if (!result || (backward && !strstr(kernel->certificate, "\ndq "))) return UNKNOWN;
    if (length == 4 && !strncmp(result, "fine", 4)) return FINE;
    return length == 5 && !strncmp(result, "wrong", 5) ? WRONG : UNKNOWN;
}

/* Of all kernels: FINE when each is. */
static int read_certificates(loom_context *context, const loom_plan *plan) {
    int worst = FINE;
    loom__context_lock(context); /* which loom_plan_certify holds */
    for (int32_t i = 0; i < plan->num_kernels && worst != WRONG; i++) {
        int found = read_certificate(&plan->kernels[i].facts);
        if (found != FINE) worst = found;
    }
    loom__context_unlock(context);
    return worst;
}

/* -- Comparing ------------------------------------------------------------------------------------------- */

static loom_status check_layout(loom_context *context, const loom_plan *plan, int32_t device,
                                loom__layout layout, certificate *c, loom_error *error) {
    loom_pass last = plan->backward ? LOOM_BACKWARD : LOOM_FORWARD;
    loom__rig_options options = LOOM__RIG_OPTIONS_INIT;
    loom__rig_report report;
    loom__rig *rig = NULL;
    loom_status status = LOOM_OK;
    options.shape = SHAPE;
    options.layout = layout;
    LOOM_TRY(context, loom__rig_create(context, plan, device, &options, &rig, error));
    for (loom_pass pass = LOOM_FORWARD; pass <= last; pass++)
        LOOM_TRY_OUT(context, loom__rig_run(rig, pass, error));
    LOOM_TRY_OUT(context, loom__rig_compare(rig, last, &report, error));
    for (int i = 0; i < report.num_verdicts; i++) {
        char line[LOOM__RIG_LINE_BYTES];
        loom__rig_print_verdict(&report.verdicts[i], loom__layout_names[layout], line);
        note(c, "%s", line);
    }
    c->fine = c->fine && report.fine;
out:
    loom__rig_destroy(rig);
    return status;
}

/* Tensors of both kinds, aligned and not, as launches have kernels for each, unless the plan was promised
 * that all are aligned. */
static loom_status check_layouts(loom_context *context, const loom_plan *plan, int32_t device, certificate *c,
                                 loom_error *error) {
    const loom__plan_pass *forward = &plan->passes[LOOM_FORWARD];
    bool takes_odd = forward->variants[forward->num_variants - 1].alignment == 1;
    loom_error failure = LOOM_ERROR_INIT;
    note(c, "shape batch=%lld heads=%lld:%lld seq=%lld:%lld seed 1\n", (long long)SHAPE.batch,
         (long long)SHAPE.heads_q, (long long)SHAPE.heads_kv, (long long)SHAPE.seq_q, (long long)SHAPE.seq_k);
    loom_status status = check_layout(context, plan, device, LOOM__LAYOUT_DENSE, c, &failure);
    if (status == LOOM_OK && takes_odd)
        status = check_layout(context, plan, device, LOOM__LAYOUT_ODD, c, &failure);
    if (status == LOOM_INTERNAL) { /* it wrote where it must not */
        note(c, "%s: %s\n", failure.field, failure.text);
        c->fine = false;
    } else if (status != LOOM_OK) {
        return loom__fail(error, status, failure.field, "%s", failure.text);
    }
    note(c, "result %s\n", c->fine ? "fine" : "wrong");
    return LOOM_OK;
}

loom_status loom__certify(loom_context *context, loom_plan *plan, int32_t device, loom_error *error) {
    certificate c = {.fine = true};
    int known = read_certificates(context, plan);
    if (known == FINE) return LOOM_OK;
    if (known == UNKNOWN) {
        loom_error unwritten = LOOM_ERROR_INIT;
        LOOM_TRY(context, check_layouts(context, plan, device, &c, error));
        /* A cache that cannot be written has the check made again in the next process. */
        if (loom_plan_certify(plan, c.text, &unwritten) == LOOM_IO)
            loom__cache_warn(context, "does not keep a certificate: %s", unwritten.text);
    }
    if (known != WRONG && c.fine) return LOOM_OK;
    return loom__fail(
        error, LOOM_INTERNAL, "certificate",
        "the kernels of target %s, schedule %s%s%s, give wrong results by their certificate:\n%s",
        plan->texts[LOOM_TEXT_TARGET], plan->texts[LOOM_TEXT_SCHEDULE], plan->backward ? " / " : "",
        plan->texts[LOOM_TEXT_SCHEDULE_BACKWARD],
        known == WRONG ? plan->kernels[0].facts.certificate : c.text);
}
