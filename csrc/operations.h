// The operations of torch.ops.ssd_allreduce over any backend.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "adam_operations.h"
#include "apply.h"
#include "sgd_operations.h"

namespace ssd_allreduce {

template <typename Backend>
void accumulate_(at::TensorList accumulators, at::TensorList gradients, bool overwrite,
                 const std::optional<at::Tensor>& found_inf) {
  const ListChecker lists("accumulate_", Backend::kDevice, "gradients", gradients);
  lists.state("accumulators", accumulators);
  const float* gate = lists.gate(found_inf);
  const auto make_rule = [](auto) { return OnlyGradient{}; };
  if (overwrite) {
    apply_overwriting<Backend>(TensorLists<1>{gradients}, accumulators, make_rule, gate);
  } else {
    apply_accumulating<Backend>(TensorLists<1>{gradients}, accumulators, make_rule, gate);
  }
}

template <typename Backend>
void accumulate_squares_(at::TensorList squares, at::TensorList gradients, bool overwrite,
                         const std::optional<at::Tensor>& found_inf) {
  const ListChecker lists("accumulate_squares_", Backend::kDevice, "gradients", gradients);
  lists.state("squares", squares);
  const float* gate = lists.gate(found_inf);
  const TensorLists<2> both{gradients, squares};
  if (overwrite) {
    apply<Backend>(both, [](auto) { return OverwritingSquare<OnlyGradient>{}; }, gate);
  } else {
    apply<Backend>(both, [](auto) { return AccumulatingSquare<OnlyGradient>{}; }, gate);
  }
}

template <typename Backend>
void register_operations(torch::Library& library) {
  library.impl("local_momentum_", &local_momentum_<Backend>);
  library.impl("local_corrected_", &local_corrected_<Backend>);
  library.impl("local_plain_", &local_plain_<Backend>);
  library.impl("local_adam_", &local_adam_<Backend>);
  library.impl("accumulate_", &accumulate_<Backend>);
  library.impl("accumulate_squares_", &accumulate_squares_<Backend>);
  library.impl("replay_sgd_", &replay_sgd_<Backend>);
  library.impl("replay_adam_", &replay_adam_<Backend>);
  library.impl("rebase_momentum_", &rebase_momentum_<Backend>);
  library.impl("rebase_adam_", &rebase_adam_<Backend>);
  library.impl("rebase_shift_", &rebase_shift_<Backend>);
  library.impl("checksum", &Backend::checksum);
}

}  // namespace ssd_allreduce
