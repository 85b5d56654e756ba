/* stand_in.h - plans with LOOM_STAND_IN: kernels that are there serve until the plan's own are compiled and
 * the caller asks for these.
 *
 * Such a plan is two ordinary ones and a pointer to that of them which launches take (loom_plan.serving), so
 * that launches need no lock, and each of the two stays whole until the plan is destroyed. The stand-in is,
 * where packs or the cache have all its kernels, any plan that covers the problem on this device: of another
 * schedule, of another target, or of the problem with the words `backward` and `deterministic`. Else the
 * default schedule of target mma is compiled. Called by plan.c; fails with what the plan's own kernels fail
 * with.
 */
#ifndef LOOM_STAND_IN_H
#define LOOM_STAND_IN_H

#include "plan.h"

/* loom_plan_create for a description that was checked and has the flag. */
loom_status loom__stand_in_create(loom_context *context, const loom_plan_desc *desc, loom_plan **plan,
                                  loom_error *error);

/* Frees what a plan has beside an ordinary one; nothing where it has no stand-in. */
void loom__stand_in_destroy(loom_plan *plan);

#endif
