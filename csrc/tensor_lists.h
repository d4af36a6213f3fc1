// What every backend does with the lists of tensors of one call before and after it computes:
// compare them, bring the tensors of one parameter to one memory order, note what was changed.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace ssd_allreduce {

// Compares an operation's lists of tensors with its first one.
class ListChecker {
 public:
  ListChecker(const char* operation, at::DeviceType device, const char* name,
              at::TensorList leading);

  void parameters(const char* name, at::TensorList tensors) const;
  void state(const char* name, at::TensorList tensors) const;
  // The same for lists that may be empty where they are not needed.
  void parameters_if(bool needed, const char* name, at::TensorList tensors) const;
  void state_if(bool needed, const char* name, at::TensorList tensors) const;
  // The number that keeps the operation from changing anything where it is not 0, in the memory of
  // the tensors' device; nullptr where there is none.
  const float* gate(const std::optional<at::Tensor>& found_inf) const;

 private:
  void compare(const char* name, at::TensorList tensors, bool is_parameter) const;
  void compare_one(const char* name, int64_t index, const at::Tensor& tensor,
                   bool is_parameter) const;

  const char* operation_;
  const char* leading_name_;
  at::TensorList leading_;
};

// Copies of the tensors whose memory order is not that of their parameter.
//
// Tensors that share their strides and fill their memory are computed on where they lie, whatever
// the order of their dimensions (channels_last too).
class ReorderedCopies {
 public:
  // Memory in which the elements of `tensor` lie in the order of `leader` (of its dimensions if
  // `leader` has gaps): the tensor's own, or a copy's.
  void* data_in_order_of(const at::Tensor& leader, const at::Tensor& tensor, bool is_read,
                         bool is_written);
  // Stores what was computed in copies of written tensors.
  void write_back() const;

 private:
  struct WriteBack {
    at::Tensor copy;
    at::Tensor destination;
  };

  std::vector<at::Tensor> read_only_;
  std::vector<WriteBack> written_;
};

// Marks the tensors as changed, for autograd's check of tensors saved for backward.
void bump_versions(at::TensorList tensors);

}  // namespace ssd_allreduce
