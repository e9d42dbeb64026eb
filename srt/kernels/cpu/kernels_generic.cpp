// Kernels in plain C++.
#define PHLOEM_ISA generic
#include "vector_generic.h"
#include "kernels_impl.h"
