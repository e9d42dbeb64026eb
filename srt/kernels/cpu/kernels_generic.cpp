// Kernels in plain C++.
#define PHLOEM_ISA generic
#include "kernels.h"
#include "vector_generic.h"
#include "kernels_impl.h"
