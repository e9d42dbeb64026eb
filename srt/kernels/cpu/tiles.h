// AMX: eight tiles of up to sixteen rows of 64 bytes, and instructions that multiply them (Intel 64
// and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18).
namespace phloem {
namespace PHLOEM_ISA {

constexpr int TILE = 16;  // rows of a tile, and float32 of a row

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int count, int bytes) {
    rows[tile] = static_cast<uint8_t>(count);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};

// By name: not every compiler's intrinsics tell what memory these read and write.
static inline void tiles_configure(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
}
static inline void tiles_release() { asm volatile("tilerelease" : : : "memory"); }
template <int T>
static inline void tile_load(const void* p, ptrdiff_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
static inline void tile_store(void* p, ptrdiff_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(T) : "memory");
}
// Unsigned bytes of A by signed ones of B.
template <int C, int A, int B>
static inline void tile_dot_u8() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
static inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
// Much faster than the instruction for it.
template <int T>
static inline void tile_clear() {
  alignas(64) static const uint8_t zeros[64] = {};
  tile_load<T>(zeros, 0);
}

}  // namespace PHLOEM_ISA
}  // namespace phloem
