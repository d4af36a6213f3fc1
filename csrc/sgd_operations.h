// Local updates, replay and rebase of SGD and of the rules without state of their own.
//
// The schemas are defined with ssd_allreduce/ops.py, where the formulas are documented too.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

#include "apply.h"

namespace ssd_allreduce {

template <typename Backend>
void local_momentum_(at::TensorList weights, at::TensorList gradients, at::TensorList momenta,
                     at::TensorList accumulators, double lr, double momentum, double dampening,
                     double weight_decay, bool nesterov, bool maximize, double gradient_scale,
                     int64_t accumulation, const std::optional<at::Tensor>& found_inf) {
  check_accumulation("local_momentum_", accumulation);
  const ListChecker lists("local_momentum_", Backend::kDevice, "weights", weights);
  lists.parameters("gradients", gradients);
  lists.state("momenta", momenta);
  lists.state_if(accumulation != kNoAccumulation, "accumulators", accumulators);
  apply_local<Backend>(TensorLists<3>{weights, gradients, momenta}, accumulators, accumulation,
                       lists.gate(found_inf), [&](auto compute) {
                         using C = decltype(compute);
                         return LocalMomentum<C>{
                             static_cast<C>(lr),
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
                      double correction_weight, double weight_decay, int64_t accumulation,
                      const std::optional<at::Tensor>& found_inf) {
  check_accumulation("local_corrected_", accumulation);
  const ListChecker lists("local_corrected_", Backend::kDevice, "weights", weights);
  lists.parameters("gradients", gradients);
  lists.state("corrections", corrections);
  lists.state_if(accumulation != kNoAccumulation, "accumulators", accumulators);
  apply_local<Backend>(TensorLists<3>{weights, gradients, corrections}, accumulators, accumulation,
                       lists.gate(found_inf), [&](auto compute) {
                         using C = decltype(compute);
                         return LocalCorrected<C>{
                             static_cast<C>(step_size), static_cast<C>(gradient_weight),
                             static_cast<C>(correction_weight), static_cast<C>(weight_decay)};
                       });
}

template <typename Backend>
void local_plain_(at::TensorList weights, at::TensorList gradients, at::TensorList accumulators,
                  double step_size, double gradient_weight, double weight_decay,
                  int64_t accumulation, const std::optional<at::Tensor>& found_inf) {
  check_accumulation("local_plain_", accumulation);
  const ListChecker lists("local_plain_", Backend::kDevice, "weights", weights);
  lists.parameters("gradients", gradients);
  lists.state_if(accumulation != kNoAccumulation, "accumulators", accumulators);
  apply_local<Backend>(TensorLists<2>{weights, gradients}, accumulators, accumulation,
                       lists.gate(found_inf), [&](auto compute) {
                         using C = decltype(compute);
                         return LocalPlain<C>{static_cast<C>(step_size),
                                              static_cast<C>(gradient_weight),
                                              static_cast<C>(weight_decay)};
                       });
}

// The options of one replayed SGD, as the user gave them.
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
  check_correction("replay_sgd_", correction);
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

}  // namespace ssd_allreduce
