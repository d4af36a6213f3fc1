#include "tensor_lists.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <string>

namespace ssd_allreduce {
namespace {

bool is_parameter_type(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

at::ScalarType compute_type(at::ScalarType parameter_type) {
  return parameter_type == at::kDouble ? at::kDouble : at::kFloat;
}

// As in torch.float32.
std::string dtype_name(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

using Strides = c10::SmallVector<int64_t, 5>;

Strides row_major_strides(at::IntArrayRef sizes) {
  Strides strides(sizes.size());
  int64_t stride = 1;
  for (int64_t dim = static_cast<int64_t>(sizes.size()) - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= sizes[dim];
  }
  return strides;
}

bool same_order(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous()) {
    return true;
  }
  if (!a.is_non_overlapping_and_dense() || !b.is_non_overlapping_and_dense()) {
    return false;
  }
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    // The stride of a dimension of one element says nothing.
    if (a.size(dim) != 1 && a.stride(dim) != b.stride(dim)) {
      return false;
    }
  }
  return true;
}

}  // namespace

ListChecker::ListChecker(const char* operation, at::DeviceType device, const char* name,
                         at::TensorList leading)
    : operation_(operation), leading_name_(name), leading_(leading) {
  for (int64_t i = 0; i < static_cast<int64_t>(leading.size()); ++i) {
    TORCH_CHECK_VALUE(is_parameter_type(leading[i].scalar_type()), "ssd_allreduce::", operation,
                      ": ", name, "[", i, "] has dtype ", dtype_name(leading[i].scalar_type()),
                      "; allowed are float16, bfloat16, float32 and float64");
    TORCH_CHECK_VALUE(leading[i].device().type() == device, "ssd_allreduce::", operation, ": ",
                      name, "[", i, "] is on ", leading[i].device(),
                      "; all tensors of one call must be on one type of device");
  }
}

void ListChecker::parameters(const char* name, at::TensorList tensors) const {
  compare(name, tensors, true);
}

void ListChecker::state(const char* name, at::TensorList tensors) const {
  compare(name, tensors, false);
}

void ListChecker::parameters_if(bool needed, const char* name, at::TensorList tensors) const {
  if (needed || !tensors.empty()) {
    parameters(name, tensors);
  }
}

void ListChecker::state_if(bool needed, const char* name, at::TensorList tensors) const {
  if (needed || !tensors.empty()) {
    state(name, tensors);
  }
}

const float* ListChecker::gate(const std::optional<at::Tensor>& found_inf) const {
  if (!found_inf.has_value()) {
    return nullptr;
  }
  TORCH_CHECK_VALUE(found_inf->scalar_type() == at::kFloat && found_inf->numel() == 1,
                    "ssd_allreduce::", operation_, ": found_inf has dtype ",
                    dtype_name(found_inf->scalar_type()), " and ", found_inf->numel(),
                    " elements; it must be one float32");
  for (int64_t i = 0; i < static_cast<int64_t>(leading_.size()); ++i) {
    TORCH_CHECK_VALUE(found_inf->device() == leading_[i].device(), "ssd_allreduce::", operation_,
                      ": found_inf is on ", found_inf->device(), ", ", leading_name_, "[", i,
                      "] is on ", leading_[i].device(), "; they must be on the same device");
  }
  return found_inf->const_data_ptr<float>();
}

void ListChecker::compare(const char* name, at::TensorList tensors, bool is_parameter) const {
  TORCH_CHECK_VALUE(tensors.size() == leading_.size(), "ssd_allreduce::", operation_, ": ", name,
                    " has ", tensors.size(), " tensors, ", leading_name_, " has ", leading_.size(),
                    "; give one for each");
  for (int64_t i = 0; i < static_cast<int64_t>(tensors.size()); ++i) {
    compare_one(name, i, tensors[i], is_parameter);
  }
}

void ListChecker::compare_one(const char* name, int64_t index, const at::Tensor& tensor,
                              bool is_parameter) const {
  const at::Tensor& leader = leading_[index];
  TORCH_CHECK_VALUE(tensor.sizes() == leader.sizes(), "ssd_allreduce::", operation_, ": ", name,
                    "[", index, "] has shape ", tensor.sizes(), ", ", leading_name_, "[", index,
                    "] has ", leader.sizes(), "; they must be equal");
  const at::ScalarType required =
      is_parameter ? leader.scalar_type() : compute_type(leader.scalar_type());
  TORCH_CHECK_VALUE(tensor.scalar_type() == required, "ssd_allreduce::", operation_, ": ", name,
                    "[", index, "] has dtype ", dtype_name(tensor.scalar_type()), "; with ",
                    leading_name_, "[", index, "] of ", dtype_name(leader.scalar_type()),
                    " it must be ", dtype_name(required));
  TORCH_CHECK_VALUE(tensor.device() == leader.device(), "ssd_allreduce::", operation_, ": ", name,
                    "[", index, "] is on ", tensor.device(), ", ", leading_name_, "[", index,
                    "] is on ", leader.device(), "; they must be on the same device");
}

void* ReorderedCopies::data_in_order_of(const at::Tensor& leader, const at::Tensor& tensor,
                                        bool is_read, bool is_written) {
  if (same_order(leader, tensor)) {
    return is_written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
  }
  const bool leader_has_gaps = !leader.is_non_overlapping_and_dense();
  const Strides strides = leader_has_gaps
                              ? row_major_strides(leader.sizes())
                              : Strides(leader.strides().begin(), leader.strides().end());
  at::Tensor copy = at::empty_strided(tensor.sizes(), strides, tensor.options());
  if (is_read) {
    copy.copy_(tensor);
  }
  void* data = copy.mutable_data_ptr();
  if (is_written) {
    written_.push_back({std::move(copy), tensor});
  } else {
    read_only_.push_back(std::move(copy));
  }
  return data;
}

void ReorderedCopies::write_back() const {
  for (const WriteBack& entry : written_) {
    entry.destination.copy_(entry.copy);
  }
}

void bump_versions(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    // Inference tensors have no version; nothing saves them for backward.
    if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

}  // namespace ssd_allreduce
