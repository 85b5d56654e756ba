/* tune.h - chooses among the schedules of a problem's pass by timing them on a device; wisdom remembers.
 *
 * Candidates are the generator's. Those that its model takes for hopeless are left out; the others compile on
 * all processors while the device times those that are ready, on tensors made here: the caller's are never
 * touched. All that remain are then timed in turns, round after round, so that each meets the same clock. Who
 * falls behind is dropped, who does not compile, launch or compute the right thing is recorded and passed
 * over. The fastest is compared with the float64 reference before it becomes wisdom. Called by plan.c and the
 * command line. One tuning a context at a time: two would time each other.
 *
 * What wisdom has for the same class already is timed beside the others, so the winner replaces it even where
 * that was measured faster, at another shape of the class or by hand, and where it fails.
 */
#ifndef LOOM_TUNE_H
#define LOOM_TUNE_H

#include <stdatomic.h>

#include "common.h"
#include "wisdom.h"

typedef enum loom__trial_state {
    LOOM__TRIAL_LATE,    /* the time was over before it was timed */
    LOOM__TRIAL_PRUNED,  /* left out by the model */
    LOOM__TRIAL_FAILED,  /* does not compile, launch or compute the right thing */
    LOOM__TRIAL_STOPPED, /* timed, and too slow to go on */
    LOOM__TRIAL_TIMED
} loom__trial_state;

typedef struct loom__trial {
    const char *schedule;
    int32_t
        rank;    /* by the model, 1 its choice; 0: wisdom of another generator had it, the model does not know it */
    double cost; /* by the model */
    loom__trial_state state;
    double ms; /* median of its launches, of a first look the least; 0: not timed */
    int32_t num_launches;
    const char *reason; /* why not TIMED, "" else */
} loom__trial;

/* What became of a pass. Texts lie in the arena. */
typedef struct loom__tuning {
    loom_pass pass;
    loom_shape shape;         /* that was timed */
    loom__wisdom_entry entry; /* without ns and schedule while there is no winner */
    loom__trial *trials;      /* what was tried first comes first */
    int32_t num_trials;
    int32_t best; /* the fastest so far, at the end the winner; -1: none */
} loom__tuning;

typedef struct loom__tune_options {
    const loom_param *params; /* of the problem, on the device; NULL: made up */
    double seconds;           /* most that it may take; what has begun is not cut short */
    bool only_unknown; /* time nothing where wisdom has the class already, with one of the candidates */
    const atomic_bool *stop;  /* true: end soon, with what was measured; NULL: never */
    void (*progress)(void *user, const loom__tuning *tuning); /* after each step; NULL: nobody looks */
    void *user;
} loom__tune_options;

/* Times the schedules of a pass of desc's problem at desc->hint on desc->device, with desc's target and the
 * other pass's schedule as a plan would choose it. The winner is learnt. Fails where nothing can be timed, as
 * when the problem is wrong or the device is lost; that all candidates failed is no failure, but no winner.
 */
loom_status loom__tune(loom_context *context, const loom_plan_desc *desc, loom_pass pass,
                       const loom__tune_options *options, loom__arena *arena, loom__tuning *tuning,
                       loom_error *error);

/* Rounds that a trial has when nothing stops it, and its launches in each. */
enum { LOOM__TUNE_ROUNDS = 6, LOOM__TUNE_ROUND_LAUNCHES = 5 };

/* The seconds that LOOM_MEASURE takes where none are given. */
#define LOOM__TUNE_SECONDS 10.0

#endif
