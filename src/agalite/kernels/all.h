/* Everything that is written once and compiled for each type; kernels.c defines REAL and NAME. */

#include "real.h"
#include "columns.h"
#include "product.h"
#include "agalite.h"
#include "galite.h"
#include "stack.h"
#include "convolution.h"
#include "sparse.h"
