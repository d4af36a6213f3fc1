// What one thread of the CUDA kernels holds of each stream, loaded and stored 16 bytes at a time.

#pragma once

#include <cstdint>

#include "glu_math.h"

namespace ssd_allreduce {

// Values that a rule computes on together. All loops are unrolled, so that they stay in registers.
template <typename C, int kSize>
struct Pack {
  C lanes[kSize];
};

#define SSD_ALLREDUCE_EACH_LANE(expression)                                           \
  Pack<C, kSize> result;                                                              \
  _Pragma("unroll") for (int i = 0; i < kSize; ++i) { result.lanes[i] = expression; } \
  return result;

#define SSD_ALLREDUCE_PACK_OPERATOR(op)                                                     \
  template <typename C, int kSize>                                                          \
  GLU_INLINE Pack<C, kSize> operator op(const Pack<C, kSize>& a, const Pack<C, kSize>& b) { \
    SSD_ALLREDUCE_EACH_LANE(a.lanes[i] op b.lanes[i])                                       \
  }                                                                                         \
  template <typename C, int kSize>                                                          \
  GLU_INLINE Pack<C, kSize> operator op(C a, const Pack<C, kSize>& b) {                     \
    SSD_ALLREDUCE_EACH_LANE(a op b.lanes[i])                                                \
  }                                                                                         \
  template <typename C, int kSize>                                                          \
  GLU_INLINE Pack<C, kSize> operator op(const Pack<C, kSize>& a, C b) {                     \
    SSD_ALLREDUCE_EACH_LANE(a.lanes[i] op b)                                                \
  }

SSD_ALLREDUCE_PACK_OPERATOR(+)
SSD_ALLREDUCE_PACK_OPERATOR(-)
SSD_ALLREDUCE_PACK_OPERATOR(*)
SSD_ALLREDUCE_PACK_OPERATOR(/)

template <typename C, int kSize>
GLU_INLINE Pack<C, kSize> operator-(const Pack<C, kSize>& a) {
  SSD_ALLREDUCE_EACH_LANE(-a.lanes[i])
}

template <typename C, int kSize>
GLU_INLINE Pack<C, kSize> square_root(const Pack<C, kSize>& a) {
  SSD_ALLREDUCE_EACH_LANE(square_root(a.lanes[i]))
}

template <typename C, int kSize>
GLU_INLINE Pack<C, kSize> positive_part(const Pack<C, kSize>& a) {
  SSD_ALLREDUCE_EACH_LANE(positive_part(a.lanes[i]))
}

#undef SSD_ALLREDUCE_PACK_OPERATOR
#undef SSD_ALLREDUCE_EACH_LANE

constexpr int kAccessBytes = 16;

// Neighbouring elements in memory that starts at a multiple of 16 bytes.
template <typename Element, int kSize>
struct alignas(kAccessBytes) Line {
  Element elements[kSize];
};

// Loads kSize / kWidth lines, `stride` elements apart, into the lanes of a pack.
template <int kWidth, typename Element, typename C, int kSize>
__device__ __forceinline__ void load_lines(Pack<C, kSize>& pack, const Element* from, int stride) {
#pragma unroll
  for (int line = 0; line < kSize / kWidth; ++line) {
    const auto loaded = *reinterpret_cast<const Line<Element, kWidth>*>(from + line * stride);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      pack.lanes[line * kWidth + i] = static_cast<C>(loaded.elements[i]);
    }
  }
}

template <int kWidth, typename Element, typename C, int kSize>
__device__ __forceinline__ void store_lines(Element* to, const Pack<C, kSize>& pack, int stride) {
#pragma unroll
  for (int line = 0; line < kSize / kWidth; ++line) {
    Line<Element, kWidth> stored;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      stored.elements[i] = static_cast<Element>(pack.lanes[line * kWidth + i]);
    }
    *reinterpret_cast<Line<Element, kWidth>*>(to + line * stride) = stored;
  }
}

}  // namespace ssd_allreduce
