/* All kernels, for the type that kernels.c defines as REAL. */

#include "real.h"
#include "columns.h"
#include "product.h"
#include "agalite.h"
#include "galite.h"
#include "trace.h"
#include "eligibility.h"
#include "stack.h"
#include "convolution.h"
#include "sparse.h"
#include "bits.h"
