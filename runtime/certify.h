/* certify.h - whether kernels compute the right thing, before launches are theirs: by the certificates that
 * `attnloom check` or an earlier upgrade left beside them, else by a comparison with the float64 reference on
 * tensors made here. Called by stand_in.c; a library of packs alone has certificates only. */
#ifndef LOOM_CERTIFY_H
#define LOOM_CERTIFY_H

#include "plan.h"

/* Makes sure that all kernels of a plan that is ready have a certificate of results that are fine, and stores
 * one where they lack it. INTERNAL with field "certificate" when results are wrong, also by an older
 * certificate. */
loom_status loom__certify(loom_context *context, loom_plan *plan, int32_t device, loom_error *error);

#endif
