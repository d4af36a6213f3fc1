// How an operation of torch.ops.ssd_allreduce applies a rule to lists of tensors, over any backend.
//
// A backend is a struct with a device type and
//   template <typename T, typename Rule>
//   static void run(const Rule& rule, const std::vector<Item<N>>& items, const float* gate);
// which applies the rule to every element of every item, T being the parameters' dtype, or changes
// nothing where there is a gate and the number there, in the device's memory, is not 0.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

#include "glu_math.h"
#include "tensor_lists.h"

namespace ssd_allreduce {

template <typename T>
using ComputeType = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The memory of one parameter's tensors, one for each stream, in one order of elements.
template <std::size_t N>
struct Item {
  std::array<void*, N> data;
  int64_t numel;
  c10::DeviceIndex device_index = -1;
};

template <std::size_t N>
using TensorLists = std::array<at::TensorList, N>;

template <typename Rule, std::size_t N>
std::vector<Item<N>> collect_items(const TensorLists<N>& lists, at::ScalarType parameter_type,
                                   bool is_gated, ReorderedCopies& copies) {
  const at::TensorList leading = lists[0];
  std::vector<Item<N>> items;
  items.reserve(leading.size());
  for (std::size_t i = 0; i < leading.size(); ++i) {
    const at::Tensor& leader = leading[i];
    if (leader.scalar_type() != parameter_type || leader.numel() == 0) {
      continue;
    }
    Item<N> item{{}, leader.numel(), leader.device().index()};
    for (std::size_t s = 0; s < N; ++s) {
      const Stream& stream = Rule::kStreams[s];
      // What a closed gate leaves in a copy is written back.
      item.data[s] = copies.data_in_order_of(leader, lists[s][i], stream.is_read || is_gated,
                                             stream.is_written);
    }
    items.push_back(item);
  }
  return items;
}

template <typename Backend, typename T, std::size_t N, typename MakeRule>
void apply_to_type(const TensorLists<N>& lists, const MakeRule& make_rule, const float* gate) {
  const auto rule = make_rule(ComputeType<T>{});
  using Rule = std::decay_t<decltype(rule)>;
  static_assert(Rule::kStreams.size() == N, "one list for each stream of the rule");

  ReorderedCopies copies;
  const auto items =
      collect_items<Rule>(lists, c10::CppTypeToScalarType<T>::value, gate != nullptr, copies);
  if (items.empty()) {
    return;
  }
  Backend::template run<T>(rule, items, gate);
  copies.write_back();
}

// Applies a rule to lists in the order of its streams. make_rule(C{}) makes it for the compute type
// C; the lists may hold parameters of several dtypes.
template <typename Backend, std::size_t N, typename MakeRule>
void apply(const TensorLists<N>& lists, const MakeRule& make_rule, const float* gate = nullptr) {
  // Reordering copies must neither be recorded by autograd nor refused on parameters.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  apply_to_type<Backend, float>(lists, make_rule, gate);
  apply_to_type<Backend, double>(lists, make_rule, gate);
  apply_to_type<Backend, at::Half>(lists, make_rule, gate);
  apply_to_type<Backend, at::BFloat16>(lists, make_rule, gate);

  using Rule = decltype(make_rule(float{}));
  for (std::size_t s = 0; s < N; ++s) {
    if (Rule::kStreams[s].is_written) {
      bump_versions(lists[s]);
    }
  }
}

enum Accumulation : int64_t { kNoAccumulation, kAdd, kOverwrite };

inline void check_accumulation(const char* operation, int64_t accumulation) {
  TORCH_CHECK_VALUE(kNoAccumulation <= accumulation && accumulation <= kOverwrite,
                    "ssd_allreduce::", operation, ": accumulation is ", accumulation,
                    "; allowed are 0 (none), 1 (add), 2 (overwrite)");
}

template <std::size_t N>
TensorLists<N + 1> append(const TensorLists<N>& lists, at::TensorList last) {
  TensorLists<N + 1> result{};
  std::copy(lists.begin(), lists.end(), result.begin());
  result[N] = last;
  return result;
}

template <typename Backend, std::size_t N, typename MakeRule>
void apply_accumulating(const TensorLists<N>& lists, at::TensorList accumulators,
                        const MakeRule& make_rule, const float* gate) {
  const auto make_accumulating = [&](auto compute) {
    return Accumulating<decltype(make_rule(compute))>{make_rule(compute)};
  };
  apply<Backend>(append(lists, accumulators), make_accumulating, gate);
}

template <typename Backend, std::size_t N, typename MakeRule>
void apply_overwriting(const TensorLists<N>& lists, at::TensorList accumulators,
                       const MakeRule& make_rule, const float* gate) {
  const auto make_overwriting = [&](auto compute) {
    return Overwriting<decltype(make_rule(compute))>{make_rule(compute)};
  };
  apply<Backend>(append(lists, accumulators), make_overwriting, gate);
}

// Applies a local rule together with what is to become of the accumulators.
template <typename Backend, std::size_t N, typename MakeRule>
void apply_local(const TensorLists<N>& lists, at::TensorList accumulators, int64_t accumulation,
                 const float* gate, const MakeRule& make_rule) {
  if (accumulation == kAdd) {
    apply_accumulating<Backend>(lists, accumulators, make_rule, gate);
  } else if (accumulation == kOverwrite) {
    apply_overwriting<Backend>(lists, accumulators, make_rule, gate);
  } else {
    apply<Backend>(lists, make_rule, gate);
  }
}

inline void check_correction(const char* operation, int64_t correction) {
  TORCH_CHECK_VALUE(0 <= correction && correction <= 2, "ssd_allreduce::", operation,
                    ": correction is ", correction,
                    "; allowed are 0 (none), 1 (mean_gradient), 2 (displacement)");
}

}  // namespace ssd_allreduce
