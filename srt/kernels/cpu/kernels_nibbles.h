// Codes of four bits (U4, see matrix.h).
namespace phloem {
namespace PHLOEM_ISA {

// Where the nibbles and the terms of a block's quarters are.
struct Quarters {
  const uint8_t *nibbles[4], *terms[4];
  Quarters(const Matrix& w, const uint8_t* block) {
    for (int q = 0; q < 4; q++) {
      nibbles[q] = block + static_cast<size_t>(q) * w.quarter_bytes();
      terms[q] = nibbles[q] + w.nibble_bytes();
    }
  }
  Quarters from(int group) const {
    Quarters later = *this;
    for (int q = 0; q < 4; q++) {
      later.nibbles[q] += static_cast<size_t>(group) * GROUP_BYTES;
      later.terms[q] += static_cast<size_t>(group) * TERM_BYTES;
    }
    return later;
  }
};

// Steps [begin, end) of a block as steps of S8.
static void unpack_nibbles(const Matrix& w, const uint8_t* block, int begin, int end,
                           uint8_t* out) {
  const Quarters quarters(w, block);
  for (int g = 2 * begin; g < 2 * end; g++, out += STEP_BYTES / 2) {
    const Quarters here = quarters.from(g);
    for (int q = 0; q < 4; q++) __builtin_prefetch(here.nibbles[q] + 2 * w.stride(), 0, 2);
    unpack_group(here.nibbles, here.terms, out);
  }
}

}  // namespace PHLOEM_ISA
}  // namespace phloem
