/* tensors.h - dense tensors and params of launches that are timed. Called by tune.c and the command line; one
 * thread. Fails with MEMORY or DRIVER.
 */
#ifndef LOOM_TENSORS_H
#define LOOM_TENSORS_H

#include "memory.h"
#include "reference.h"

/* Bytes of the tensors of a launch of args->shape. */
size_t loom__tensors_bytes(const loom__reference *facts, const loom_shape *shape);

/* Gives args, whose shape is set, dense tensors, inputs N(0,1). */
loom_status loom__tensors_make(loom__device_memory *memory, const loom__reference *facts, loom_args *args,
                               loom_error *error);

/* Made-up values for a param: sets strides or the scalar and, where `data` is host memory with room for them,
 * the elements. Arrays of whole numbers grow along their last dimension in a few steps, as document numbers
 * do. Returns how many elements there are, 0 of a scalar. */
int64_t loom__param_invent(const loom__param_facts *facts, const loom_shape *shape, uint64_t *state,
                           loom_param *param, void *data);

/* Made-up params of a problem on a device, one a slot. */
loom_status loom__params_make(loom__device_memory *memory, const loom__reference *facts,
                              const loom_shape *shape, loom_param *params, loom_error *error);

/* SplitMix64: the next number, of (0, 1], and of N(0,1). */
uint64_t loom__random_bits(uint64_t *state);
double loom__random_uniform(uint64_t *state);
double loom__random_normal(uint64_t *state);

#endif
