// From PHLOEM_TARGET to PHLOEM_TARGET_END, functions may use the named instructions. Everything of
// the standard library has to be included before, so that no inline function of it is compiled so.
#pragma once
#define PHLOEM_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define PHLOEM_TARGET(isa) \
  PHLOEM_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define PHLOEM_TARGET_END PHLOEM_PRAGMA(clang attribute pop)
#else
#define PHLOEM_TARGET(isa) PHLOEM_PRAGMA(GCC push_options) PHLOEM_PRAGMA(GCC target(isa))
#define PHLOEM_TARGET_END PHLOEM_PRAGMA(GCC pop_options)
#endif
