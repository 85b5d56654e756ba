#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

//@ text(constants)

//@ text(arguments)

//@ part("work")
