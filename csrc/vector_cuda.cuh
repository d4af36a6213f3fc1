// What one thread of the CUDA kernels holds of each stream, loaded and stored 16 bytes at a time.

#pragma once

#include <cuda_runtime.h>

#include <cstring>

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

constexpr int kAccessBytes = sizeof(uint4);

// An ordinary store to global memory that the compiler does not take apart.
__device__ __forceinline__ void store_16_bytes(uint4* to, const uint4& words) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
#else
  *to = words;
#endif
}

// Loads kSize / kWidth lines of kWidth elements, `stride` elements apart, into the lanes of a pack.
// Lines begin at multiples of 16 bytes and are accessed 16 bytes at a time: left to itself, the
// compiler takes elements of class type apart.
template <int kWidth, typename Element, typename C, int kSize>
__device__ __forceinline__ void load_lines(Pack<C, kSize>& pack, const Element* from, int stride) {
  constexpr int kAccesses = kWidth * sizeof(Element) / kAccessBytes;
#pragma unroll
  for (int line = 0; line < kSize / kWidth; ++line) {
    uint4 words[kAccesses];
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      words[i] = reinterpret_cast<const uint4*>(from + line * stride)[i];
    }
    Element elements[kWidth];
    std::memcpy(elements, words, sizeof(words));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      pack.lanes[line * kWidth + i] = static_cast<C>(elements[i]);
    }
  }
}

template <int kWidth, typename Element, typename C, int kSize>
__device__ __forceinline__ void store_lines(Element* to, const Pack<C, kSize>& pack, int stride) {
  constexpr int kAccesses = kWidth * sizeof(Element) / kAccessBytes;
#pragma unroll
  for (int line = 0; line < kSize / kWidth; ++line) {
    Element elements[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      elements[i] = static_cast<Element>(pack.lanes[line * kWidth + i]);
    }
    uint4 words[kAccesses];
    std::memcpy(words, elements, sizeof(words));
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      store_16_bytes(reinterpret_cast<uint4*>(to + line * stride) + i, words[i]);
    }
  }
}

}  // namespace ssd_allreduce
