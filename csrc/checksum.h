// What the checksums of all backends have in common.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "glu_math.h"

namespace ssd_allreduce {

// One summand of a checksum. A plain sum of words misses too much: scaling 256 doubles by 2^-16, as
// a gradient scaler does, leaves it as it was.
GLU_INLINE uint64_t mixed_word(uint32_t word) {
  constexpr uint32_t kMix = 0x9E3779B9u;
  return static_cast<uint64_t>(word) * (word ^ kMix);
}

// Checksums are sums over 32-bit words, narrower elements zero-extended and wider ones cut in two.
inline int64_t word_size(const at::Tensor& tensor) {
  return std::min<int64_t>(tensor.element_size(), sizeof(uint32_t));
}

inline int64_t word_count(const at::Tensor& tensor) {
  return tensor.numel() * (tensor.element_size() / word_size(tensor));
}

// The tensors, those with gaps or overlaps replaced by copies.
inline std::vector<at::Tensor> checked_and_dense(at::TensorList tensors) {
  std::vector<at::Tensor> dense;
  dense.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const int64_t element_size = tensors[i].element_size();
    TORCH_CHECK_VALUE(
        element_size == 1 || element_size == 2 || element_size == 4 || element_size == 8,
        "ssd_allreduce::checksum: tensors[", i, "] has dtype ",
        c10::getDtypeNames(tensors[i].scalar_type()).first, " with elements of ", element_size,
        " bytes; 1, 2, 4 and 8 are allowed");
    TORCH_CHECK_VALUE(tensors[i].device() == tensors[0].device(),
                      "ssd_allreduce::checksum: tensors[", i, "] is on ", tensors[i].device(),
                      ", tensors[0] is on ", tensors[0].device(),
                      "; all tensors of one call must be on the same device");
    dense.push_back(tensors[i].is_non_overlapping_and_dense() ? tensors[i]
                                                              : tensors[i].contiguous());
  }
  return dense;
}

}  // namespace ssd_allreduce
