// The operations of torch.ops.ssd_allreduce over any backend.
//
// A backend is a struct with a device type and
//   template <typename T, typename Rule>
//   static void run(const Rule& rule, const std::vector<Item<N>>& items);
// which applies the rule to every element of every item, T being the parameters' dtype. The schemas
// are defined in ssd_allreduce/ops.py, where the formulas are documented too.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <numeric>
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
};

template <std::size_t N>
using TensorLists = std::array<at::TensorList, N>;

template <typename Rule, std::size_t N>
std::vector<Item<N>> collect_items(const TensorLists<N>& lists, at::ScalarType parameter_type,
                                   ReorderedCopies& copies) {
  const at::TensorList leading = lists[0];
  std::vector<Item<N>> items;
  items.reserve(leading.size());
  for (std::size_t i = 0; i < leading.size(); ++i) {
    const at::Tensor& leader = leading[i];
    if (leader.scalar_type() != parameter_type || leader.numel() == 0) {
      continue;
    }
    Item<N> item{{}, leader.numel()};
    for (std::size_t s = 0; s < N; ++s) {
      const Stream& stream = Rule::kStreams[s];
      item.data[s] =
          copies.data_in_order_of(leader, lists[s][i], stream.is_read, stream.is_written);
    }
    items.push_back(item);
  }
  return items;
}

template <typename Backend, typename T, std::size_t N, typename MakeRule>
void apply_to_type(const TensorLists<N>& lists, const MakeRule& make_rule) {
  const auto rule = make_rule(ComputeType<T>{});
  using Rule = std::decay_t<decltype(rule)>;
  static_assert(Rule::kStreams.size() == N, "one list for each stream of the rule");

  ReorderedCopies copies;
  const auto items = collect_items<Rule>(lists, c10::CppTypeToScalarType<T>::value, copies);
  if (items.empty()) {
    return;
  }
  Backend::template run<T>(rule, items);
  copies.write_back();
}

// Applies a rule to lists in the order of its streams. make_rule(C{}) makes it for the compute type
// C; the lists may hold parameters of several dtypes.
template <typename Backend, std::size_t N, typename MakeRule>
void apply(const TensorLists<N>& lists, const MakeRule& make_rule) {
  // Reordering copies must neither be recorded by autograd nor refused on parameters.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  apply_to_type<Backend, float>(lists, make_rule);
  apply_to_type<Backend, double>(lists, make_rule);
  apply_to_type<Backend, at::Half>(lists, make_rule);
  apply_to_type<Backend, at::BFloat16>(lists, make_rule);

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
                        const MakeRule& make_rule) {
  apply<Backend>(append(lists, accumulators), [&](auto compute) {
    return Accumulating<decltype(make_rule(compute))>{make_rule(compute)};
  });
}

template <typename Backend, std::size_t N, typename MakeRule>
void apply_overwriting(const TensorLists<N>& lists, at::TensorList accumulators,
                       const MakeRule& make_rule) {
  apply<Backend>(append(lists, accumulators), [&](auto compute) {
    return Overwriting<decltype(make_rule(compute))>{make_rule(compute)};
  });
}

// Applies a local rule together with what is to become of the accumulators.
template <typename Backend, std::size_t N, typename MakeRule>
void apply_local(const TensorLists<N>& lists, at::TensorList accumulators, int64_t accumulation,
                 const MakeRule& make_rule) {
  if (accumulation == kAdd) {
    apply_accumulating<Backend>(lists, accumulators, make_rule);
  } else if (accumulation == kOverwrite) {
    apply_overwriting<Backend>(lists, accumulators, make_rule);
  } else {
    apply<Backend>(lists, make_rule);
  }
}

template <typename Backend>
void local_momentum_(at::TensorList weights, at::TensorList gradients, at::TensorList momenta,
                     at::TensorList accumulators, double lr, double momentum, double dampening,
                     double weight_decay, bool nesterov, bool maximize, double gradient_scale,
                     int64_t accumulation) {
  check_accumulation("local_momentum_", accumulation);
  const ListChecker lists("local_momentum_", Backend::kDevice, "weights", weights);
  lists.parameters("gradients", gradients);
  lists.state("momenta", momenta);
  lists.state_if(accumulation != kNoAccumulation, "accumulators", accumulators);
  apply_local<Backend>(
      TensorLists<3>{weights, gradients, momenta}, accumulators, accumulation, [&](auto compute) {
        using C = decltype(compute);
        return LocalMomentum<C>{static_cast<C>(lr),
                                static_cast<C>(momentum),
                                static_cast<C>(1 - dampening),
                                static_cast<C>(maximize ? -gradient_scale : gradient_scale),
                                static_cast<C>(weight_decay),
                                nesterov};
      });
}

template <typename Backend>
void local_corrected_(at::TensorList weights, at::TensorList gradients, at::TensorList corrections,
                      at::TensorList accumulators, double step_size, double gradient_weight,
                      double correction_weight, double weight_decay, int64_t accumulation) {
  check_accumulation("local_corrected_", accumulation);
  const ListChecker lists("local_corrected_", Backend::kDevice, "weights", weights);
  lists.parameters("gradients", gradients);
  lists.state("corrections", corrections);
  lists.state_if(accumulation != kNoAccumulation, "accumulators", accumulators);
  apply_local<Backend>(TensorLists<3>{weights, gradients, corrections}, accumulators, accumulation,
                       [&](auto compute) {
                         using C = decltype(compute);
                         return LocalCorrected<C>{
                             static_cast<C>(step_size), static_cast<C>(gradient_weight),
                             static_cast<C>(correction_weight), static_cast<C>(weight_decay)};
                       });
}

template <typename Backend>
void local_plain_(at::TensorList weights, at::TensorList gradients, at::TensorList accumulators,
                  double step_size, double gradient_weight, double weight_decay,
                  int64_t accumulation) {
  check_accumulation("local_plain_", accumulation);
  const ListChecker lists("local_plain_", Backend::kDevice, "weights", weights);
  lists.parameters("gradients", gradients);
  lists.state_if(accumulation != kNoAccumulation, "accumulators", accumulators);
  apply_local<Backend>(
      TensorLists<2>{weights, gradients}, accumulators, accumulation, [&](auto compute) {
        using C = decltype(compute);
        return LocalPlain<C>{static_cast<C>(step_size), static_cast<C>(gradient_weight),
                             static_cast<C>(weight_decay)};
      });
}

template <typename Backend>
void accumulate_(at::TensorList accumulators, at::TensorList gradients, bool overwrite) {
  const ListChecker lists("accumulate_", Backend::kDevice, "gradients", gradients);
  lists.state("accumulators", accumulators);
  const auto make_rule = [](auto) { return OnlyGradient{}; };
  if (overwrite) {
    apply_overwriting<Backend>(TensorLists<1>{gradients}, accumulators, make_rule);
  } else {
    apply_accumulating<Backend>(TensorLists<1>{gradients}, accumulators, make_rule);
  }
}

// The options of one replayed optimizer, as the user gave them.
struct ReplayOptions {
  double divisor;
  c10::ArrayRef<double> lrs;
  c10::ArrayRef<double> momentum_factors;
  c10::ArrayRef<double> dampenings;
  c10::ArrayRef<double> weight_decays;
  bool nesterov;
  bool maximize;
  bool momentum_initialised;

  double lr_sum() const { return std::accumulate(lrs.begin(), lrs.end(), 0.0); }

  bool has_momentum() const {
    return std::any_of(momentum_factors.begin(), momentum_factors.end(),
                       [](double factor) { return factor != 0; });
  }

  template <typename C>
  std::vector<ReplayStep<C>> steps() const {
    std::vector<ReplayStep<C>> result;
    bool initialised = momentum_initialised;
    for (std::size_t j = 0; j < lrs.size(); ++j) {
      MomentumUse use = MomentumUse::kNone;
      if (momentum_factors[j] != 0) {
        use = initialised ? MomentumUse::kUpdate : MomentumUse::kInitialise;
        initialised = true;
      }
      result.push_back({static_cast<C>(lrs[j]), static_cast<C>(momentum_factors[j]),
                        static_cast<C>(1 - dampenings[j]), static_cast<C>(weight_decays[j]), use});
    }
    return result;
  }

  void check() const {
    TORCH_CHECK_VALUE(divisor != 0,
                      "ssd_allreduce::replay_sgd_: divisor is 0; give the number of gradients");
    TORCH_CHECK_VALUE(
        momentum_factors.size() == lrs.size() && dampenings.size() == lrs.size() &&
            weight_decays.size() == lrs.size(),
        "ssd_allreduce::replay_sgd_: lrs, momentum_factors, dampenings and weight_decays have [",
        lrs.size(), ", ", momentum_factors.size(), ", ", dampenings.size(), ", ",
        weight_decays.size(), "] entries; give one of each for every replayed step");
  }
};

template <typename Backend, bool kHasMomentum, Correction kCorrection, std::size_t N>
void apply_replay(const TensorLists<N>& lists, const ReplayOptions& options) {
  // The rules point into these.
  const auto float_steps = options.steps<float>();
  const auto double_steps = options.steps<double>();
  apply<Backend>(lists, [&](auto compute) {
    using C = decltype(compute);
    const ReplayStep<C>* steps;
    if constexpr (std::is_same_v<C, double>) {
      steps = double_steps.data();
    } else {
      steps = float_steps.data();
    }
    return ReplaySgd<C, kHasMomentum, kCorrection>{steps,
                                                   static_cast<int64_t>(options.lrs.size()),
                                                   static_cast<C>(options.divisor),
                                                   static_cast<C>(options.lr_sum()),
                                                   options.nesterov,
                                                   options.maximize};
  });
}

template <typename Backend, bool kHasMomentum, std::size_t N>
void apply_replay(const TensorLists<N>& lists, at::TensorList corrections, Correction correction,
                  const ReplayOptions& options) {
  switch (correction) {
    case Correction::kNone:
      return apply_replay<Backend, kHasMomentum, Correction::kNone>(lists, options);
    case Correction::kMeanGradient:
      return apply_replay<Backend, kHasMomentum, Correction::kMeanGradient>(
          append(lists, corrections), options);
    case Correction::kDisplacement:
      return apply_replay<Backend, kHasMomentum, Correction::kDisplacement>(
          append(lists, corrections), options);
  }
}

template <typename Backend>
void replay_sgd_(at::TensorList weights, at::TensorList momenta, at::TensorList sums,
                 at::TensorList corrections, double divisor, c10::ArrayRef<double> lrs,
                 c10::ArrayRef<double> momentum_factors, c10::ArrayRef<double> dampenings,
                 c10::ArrayRef<double> weight_decays, bool nesterov, bool maximize,
                 bool momentum_initialised, int64_t correction) {
  const ReplayOptions options{divisor,       lrs,      momentum_factors, dampenings,
                              weight_decays, nesterov, maximize,         momentum_initialised};
  options.check();
  TORCH_CHECK_VALUE(0 <= correction && correction <= 2,
                    "ssd_allreduce::replay_sgd_: correction is ", correction,
                    "; allowed are 0 (none), 1 (mean_gradient), 2 (displacement)");
  const ListChecker lists("replay_sgd_", Backend::kDevice, "weights", weights);
  lists.parameters_if(options.has_momentum(), "momenta", momenta);
  lists.state("sums", sums);
  lists.state_if(correction != 0, "corrections", corrections);

  Correction kind = static_cast<Correction>(correction);
  if (kind == Correction::kDisplacement && options.lr_sum() == 0) {
    kind = Correction::kNone;
  }
  if (options.has_momentum()) {
    apply_replay<Backend, true>(TensorLists<3>{weights, sums, momenta}, corrections, kind, options);
  } else {
    apply_replay<Backend, false>(TensorLists<2>{weights, sums}, corrections, kind, options);
  }
}

template <typename Backend>
void rebase_momentum_(at::TensorList weights, at::TensorList momenta, at::TensorList global_weights,
                      at::TensorList global_momenta, at::TensorList weight_snapshots,
                      at::TensorList momentum_snapshots, double momentum_decay,
                      double displacement_factor) {
  const ListChecker lists("rebase_momentum_", Backend::kDevice, "weights", weights);
  lists.state("momenta", momenta);
  lists.parameters("global_weights", global_weights);
  lists.parameters("global_momenta", global_momenta);
  lists.state("weight_snapshots", weight_snapshots);
  lists.state("momentum_snapshots", momentum_snapshots);
  apply<Backend>(TensorLists<6>{weights, momenta, global_weights, global_momenta, weight_snapshots,
                                momentum_snapshots},
                 [&](auto compute) {
                   using C = decltype(compute);
                   return RebaseMomentum<C>{static_cast<C>(momentum_decay),
                                            static_cast<C>(displacement_factor)};
                 });
}

template <typename Backend>
void rebase_shift_(at::TensorList weights, at::TensorList global_weights,
                   at::TensorList weight_snapshots) {
  const ListChecker lists("rebase_shift_", Backend::kDevice, "weights", weights);
  lists.parameters("global_weights", global_weights);
  lists.state("weight_snapshots", weight_snapshots);
  apply<Backend>(TensorLists<3>{weights, global_weights, weight_snapshots},
                 [](auto) { return RebaseShift{}; });
}

template <typename Backend>
void register_operations(torch::Library& library) {
  library.impl("local_momentum_", &local_momentum_<Backend>);
  library.impl("local_corrected_", &local_corrected_<Backend>);
  library.impl("local_plain_", &local_plain_<Backend>);
  library.impl("accumulate_", &accumulate_<Backend>);
  library.impl("replay_sgd_", &replay_sgd_<Backend>);
  library.impl("rebase_momentum_", &rebase_momentum_<Backend>);
  library.impl("rebase_shift_", &rebase_shift_<Backend>);
  library.impl("checksum", &Backend::checksum);
}

}  // namespace ssd_allreduce
