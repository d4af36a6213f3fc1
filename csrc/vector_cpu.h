// Vectors of values for the CPU kernels: GCC's and Clang's vector extension, which the compiler
// maps to the instructions of the target, loaded from and stored to memory in a narrower dtype.
//
// Conversions are plain vector arithmetic that rounds to nearest even, as c10's scalar ones do.

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "glu_math.h"

// Vectors are returned by inlined functions only, so that no ABI is at stake.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace ssd_allreduce {

template <typename Element, int64_t kLanes>
struct VectorOf {
  typedef Element type __attribute__((vector_size(kLanes * sizeof(Element))));
};

template <typename Element, int64_t kLanes>
using Vector = typename VectorOf<Element, kLanes>::type;

template <typename To, typename From>
GLU_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// How kLanes elements of dtype T become a vector of the compute dtype, and back.
template <typename T, int64_t kLanes>
struct Packed {
  using Stored = Vector<T, kLanes>;
  using Value = Vector<T, kLanes>;

  static GLU_INLINE Value unpack(const Stored& stored) { return stored; }
  static GLU_INLINE Stored pack(const Value& value) { return value; }
};

template <int64_t kLanes>
struct Packed<c10::BFloat16, kLanes> {
  using Stored = Vector<uint16_t, kLanes>;
  using Value = Vector<float, kLanes>;
  using Bits = Vector<uint32_t, kLanes>;

  static GLU_INLINE Value unpack(const Stored& stored) {
    return bit_cast<Value>(__builtin_convertvector(stored, Bits) << 16);
  }

  static GLU_INLINE Stored pack(const Value& value) {
    const Bits bits = bit_cast<Bits>(value);
    const Bits rounded = (bits + (0x7FFFu + ((bits >> 16) & 1u))) >> 16;
    const Bits is_nan = bit_cast<Bits>(value != value);
    return __builtin_convertvector((rounded & ~is_nan) | (0x7FC0u & is_nan), Stored);
  }
};

// The scaling tricks are those of c10/util/Half.h, after Maratyszcza's FP16 library.
template <int64_t kLanes>
struct Packed<c10::Half, kLanes> {
  using Stored = Vector<uint16_t, kLanes>;
  using Value = Vector<float, kLanes>;
  using Bits = Vector<uint32_t, kLanes>;

  static GLU_INLINE Value unpack(const Stored& stored) {
    const Bits shifted = __builtin_convertvector(stored, Bits) << 16;
    const Bits sign = shifted & 0x80000000u;
    const Bits magnitude = shifted + shifted;
    const Value normal = bit_cast<Value>((magnitude >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
    const Value subnormal = bit_cast<Value>((magnitude >> 17) | (126u << 23)) - 0.5f;
    const Bits is_subnormal = bit_cast<Bits>(magnitude < (1u << 27));
    return bit_cast<Value>(sign | (bit_cast<Bits>(subnormal) & is_subnormal) |
                           (bit_cast<Bits>(normal) & ~is_subnormal));
  }

  static GLU_INLINE Stored pack(const Value& value) {
    const Bits bits = bit_cast<Bits>(value);
    const Bits sign = bits & 0x80000000u;
    const Bits magnitude = bits + bits;
    // Overflows to infinity what half cannot hold.
    const Value scaled = (bit_cast<Value>(bits & 0x7FFFFFFFu) * 0x1.0p+112f) * 0x1.0p-110f;
    const Bits exponent = magnitude & 0xFF000000u;
    const Bits is_tiny = bit_cast<Bits>(exponent < 0x71000000u);
    const Bits bias = (exponent & ~is_tiny) | (0x71000000u & is_tiny);
    // The addition rounds to the mantissa bits that half has at this exponent.
    const Bits rounded = bit_cast<Bits>(bit_cast<Value>((bias >> 1) + 0x07800000u) + scaled);
    const Bits half = ((rounded >> 13) & 0x7C00u) + (rounded & 0x0FFFu);
    const Bits is_nan = bit_cast<Bits>(magnitude > 0xFF000000u);
    return __builtin_convertvector((sign >> 16) | (half & ~is_nan) | (0x7E00u & is_nan), Stored);
  }
};

#if defined(__x86_64__)
// Eight lanes mean AVX2 here, and every processor that has AVX2 has these instructions. They are
// inlined where the target allows them.
template <>
struct Packed<c10::Half, 8> {
  using Stored = Vector<uint16_t, 8>;
  using Value = Vector<float, 8>;

  __attribute__((target("avx2,f16c"))) static inline Value unpack(const Stored& stored) {
    return bit_cast<Value>(_mm256_cvtph_ps(bit_cast<__m128i>(stored)));
  }

  __attribute__((target("avx2,f16c"))) static inline Stored pack(const Value& value) {
    return bit_cast<Stored>(_mm256_cvtps_ph(bit_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
  }
};
#endif

// Square roots, correctly rounded as the scalar ones are.
template <typename C, int64_t kLanes>
struct SquareRoot {
  static GLU_INLINE Vector<C, kLanes> of(const Vector<C, kLanes>& x) {
    Vector<C, kLanes> result;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      result[lane] = square_root(x[lane]);
    }
    return result;
  }
};

#if defined(__x86_64__)
template <>
struct SquareRoot<float, 4> {
  static GLU_INLINE Vector<float, 4> of(const Vector<float, 4>& x) {
    return bit_cast<Vector<float, 4>>(_mm_sqrt_ps(bit_cast<__m128>(x)));
  }
};

template <>
struct SquareRoot<double, 2> {
  static GLU_INLINE Vector<double, 2> of(const Vector<double, 2>& x) {
    return bit_cast<Vector<double, 2>>(_mm_sqrt_pd(bit_cast<__m128d>(x)));
  }
};

template <>
struct SquareRoot<float, 8> {
  __attribute__((target("avx2,f16c"))) static inline Vector<float, 8> of(
      const Vector<float, 8>& x) {
    return bit_cast<Vector<float, 8>>(_mm256_sqrt_ps(bit_cast<__m256>(x)));
  }
};

template <>
struct SquareRoot<double, 4> {
  __attribute__((target("avx2,f16c"))) static inline Vector<double, 4> of(
      const Vector<double, 4>& x) {
    return bit_cast<Vector<double, 4>>(_mm256_sqrt_pd(bit_cast<__m256d>(x)));
  }
};
#endif

// Two vectors side by side: rules whose operations wait for each other's results interleave.
template <typename C, int64_t kLanes>
struct VectorPair {
  using Half = Vector<C, kLanes>;

  Half low;
  Half high;
};

#define SSD_ALLREDUCE_PAIR_OPERATOR(op)                                               \
  template <typename C, int64_t kLanes>                                               \
  GLU_INLINE VectorPair<C, kLanes> operator op(const VectorPair<C, kLanes>& a,        \
                                               const VectorPair<C, kLanes>& b) {      \
    return {a.low op b.low, a.high op b.high};                                        \
  }                                                                                   \
  template <typename C, int64_t kLanes>                                               \
  GLU_INLINE VectorPair<C, kLanes> operator op(C a, const VectorPair<C, kLanes>& b) { \
    return {a op b.low, a op b.high};                                                 \
  }                                                                                   \
  template <typename C, int64_t kLanes>                                               \
  GLU_INLINE VectorPair<C, kLanes> operator op(const VectorPair<C, kLanes>& a, C b) { \
    return {a.low op b, a.high op b};                                                 \
  }

SSD_ALLREDUCE_PAIR_OPERATOR(+)
SSD_ALLREDUCE_PAIR_OPERATOR(-)
SSD_ALLREDUCE_PAIR_OPERATOR(*)
SSD_ALLREDUCE_PAIR_OPERATOR(/)
#undef SSD_ALLREDUCE_PAIR_OPERATOR

template <typename C, int64_t kLanes>
GLU_INLINE VectorPair<C, kLanes> operator-(const VectorPair<C, kLanes>& a) {
  return {-a.low, -a.high};
}

template <typename C, int64_t kLanes>
GLU_INLINE VectorPair<C, kLanes> square_root(const VectorPair<C, kLanes>& x) {
  return {SquareRoot<C, kLanes>::of(x.low), SquareRoot<C, kLanes>::of(x.high)};
}

template <typename C, int64_t kLanes>
GLU_INLINE VectorPair<C, kLanes> positive_part(const VectorPair<C, kLanes>& x) {
  const Vector<C, kLanes> zero{};
  return {x.low < zero ? zero : x.low, x.high < zero ? zero : x.high};
}

template <typename T, int64_t kLanes>
GLU_INLINE typename Packed<T, kLanes>::Value load(const T* from) {
  typename Packed<T, kLanes>::Stored stored;
  std::memcpy(&stored, from, sizeof(stored));
  return Packed<T, kLanes>::unpack(stored);
}

template <typename T, int64_t kLanes>
GLU_INLINE void store(T* to, const typename Packed<T, kLanes>::Value& value) {
  const typename Packed<T, kLanes>::Stored stored = Packed<T, kLanes>::pack(value);
  std::memcpy(to, &stored, sizeof(stored));
}

template <bool kCondition, typename T, typename C, int64_t kLanes>
GLU_INLINE void load_if(VectorPair<C, kLanes>& value, const T* from) {
  if constexpr (kCondition) {
    value.low = load<T, kLanes>(from);
    value.high = load<T, kLanes>(from + kLanes);
  }
}

template <bool kCondition, typename T, typename C, int64_t kLanes>
GLU_INLINE void store_if(T* to, const VectorPair<C, kLanes>& value) {
  if constexpr (kCondition) {
    store<T, kLanes>(to, value.low);
    store<T, kLanes>(to + kLanes, value.high);
  }
}

// The same for the first `count` lanes; the others read as 0.
template <bool kCondition, typename T, typename C, int64_t kLanes>
GLU_INLINE void load_first_if(VectorPair<C, kLanes>& value, const T* from, int64_t count) {
  if constexpr (kCondition) {
    T padded[2 * kLanes]{};
    std::memcpy(padded, from, count * sizeof(T));
    load_if<true>(value, padded);
  }
}

template <bool kCondition, typename T, typename C, int64_t kLanes>
GLU_INLINE void store_first_if(T* to, const VectorPair<C, kLanes>& value, int64_t count) {
  if constexpr (kCondition) {
    T padded[2 * kLanes];
    store_if<true>(padded, value);
    std::memcpy(to, padded, count * sizeof(T));
  }
}

}  // namespace ssd_allreduce
