// CUTLASS's element types, for a source whose host half needs more of them than their size (sm90_launch.h).

#pragma once

#include "cutlass_ops/tma.h"

#define CUTLASS_OPS_TYPES_OF_CUTLASS

#include "cutlass/numeric_types.h"
