// Local update, replay and rebase of Adam and AdamW.
//
// The schemas are defined with ssd_allreduce/ops.py, where the formulas are documented too.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

#include "apply.h"

namespace ssd_allreduce {

// Applies a local rule together with what is to become of the accumulators and the accumulators of
// squares.
template <typename Backend, std::size_t N, typename MakeRule>
void apply_local_with_squares(const TensorLists<N>& lists, at::TensorList accumulators,
                              at::TensorList squares, int64_t accumulation, const float* gate,
                              const MakeRule& make_rule) {
  if (accumulation == kAdd) {
    const auto make_accumulating = [&](auto compute) {
      using Rule = Accumulating<decltype(make_rule(compute))>;
      return AccumulatingSquare<Rule>{Rule{make_rule(compute)}};
    };
    apply<Backend>(append(append(lists, accumulators), squares), make_accumulating, gate);
  } else if (accumulation == kOverwrite) {
    const auto make_overwriting = [&](auto compute) {
      using Rule = Overwriting<decltype(make_rule(compute))>;
      return OverwritingSquare<Rule>{Rule{make_rule(compute)}};
    };
    apply<Backend>(append(append(lists, accumulators), squares), make_overwriting, gate);
  } else {
    apply<Backend>(lists, make_rule, gate);
  }
}

// The options of one group of Adam or AdamW in one step, as the user gave them.
struct AdamOptions {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool decoupled;

  // step counts from 1.
  template <typename C>
  AdamStep<C> at_step(int64_t step) const {
    return AdamStep<C>{static_cast<C>(beta1),
                       static_cast<C>(1 - beta1),
                       static_cast<C>(beta2),
                       static_cast<C>(1 - beta2),
                       static_cast<C>(1 / std::sqrt(bias_correction(beta2, step))),
                       static_cast<C>(lr / bias_correction(beta1, step)),
                       static_cast<C>(decoupled ? 0 : weight_decay),
                       static_cast<C>(decoupled ? 1 - lr * weight_decay : 1),
                       static_cast<C>(eps)};
  }

  static double bias_correction(double beta, int64_t step) {
    return 1 - std::pow(beta, static_cast<double>(step));
  }
};

inline void check_step(const char* operation, int64_t step, int64_t least) {
  TORCH_CHECK_VALUE(step >= least, "ssd_allreduce::", operation, ": step is ", step,
                    "; allowed are integers of at least ", least);
}

template <typename Backend>
void local_adam_(at::TensorList weights, at::TensorList gradients, at::TensorList firsts,
                 at::TensorList seconds, at::TensorList accumulators, at::TensorList squares,
                 double lr, double beta1, double beta2, double eps, double weight_decay,
                 bool decoupled, bool maximize, double gradient_scale, int64_t step,
                 int64_t accumulation, const std::optional<at::Tensor>& found_inf) {
  check_accumulation("local_adam_", accumulation);
  check_step("local_adam_", step, 1);
  const ListChecker lists("local_adam_", Backend::kDevice, "weights", weights);
  lists.parameters("gradients", gradients);
  lists.state("firsts", firsts);
  lists.state("seconds", seconds);
  lists.state_if(accumulation != kNoAccumulation, "accumulators", accumulators);
  lists.state_if(accumulation != kNoAccumulation, "squares", squares);
  const AdamOptions options{lr, beta1, beta2, eps, weight_decay, decoupled};
  apply_local_with_squares<Backend>(
      TensorLists<4>{weights, gradients, firsts, seconds}, accumulators, squares, accumulation,
      lists.gate(found_inf), [&](auto compute) {
        using C = decltype(compute);
        return LocalAdam<C>{options.at_step<C>(step),
                            static_cast<C>(maximize ? -gradient_scale : gradient_scale)};
      });
}

// The options of one replayed Adam or AdamW, as the user gave them.
struct AdamReplayOptions {
  int64_t count;
  double divisor;
  int64_t steps_before;
  c10::ArrayRef<double> lrs;
  c10::ArrayRef<double> beta1s;
  c10::ArrayRef<double> beta2s;
  c10::ArrayRef<double> epsilons;
  c10::ArrayRef<double> weight_decays;
  c10::ArrayRef<double> missing_noises;
  bool decoupled;
  bool maximize;

  double lr_sum() const { return std::accumulate(lrs.begin(), lrs.end(), 0.0); }

  double variance_factor() const {
    const double n = static_cast<double>(count);
    const double gradient_scale = n / divisor;
    return count == 1 ? 0 : gradient_scale * gradient_scale * n / (n - 1);
  }

  template <typename C>
  std::vector<AdamReplayStep<C>> steps() const {
    std::vector<AdamReplayStep<C>> result;
    for (std::size_t j = 0; j < lrs.size(); ++j) {
      const AdamOptions options{lrs[j],      beta1s[j],        beta2s[j],
                                epsilons[j], weight_decays[j], decoupled};
      const int64_t step = steps_before + static_cast<int64_t>(j) + 1;
      result.push_back({options.at_step<C>(step), static_cast<C>(missing_noises[j])});
    }
    return result;
  }

  void check() const {
    TORCH_CHECK_VALUE(count >= 1, "ssd_allreduce::replay_adam_: count is ", count,
                      "; give the number of gradients, at least 1");
    TORCH_CHECK_VALUE(divisor != 0,
                      "ssd_allreduce::replay_adam_: divisor is 0; give the number of "
                      "gradients over the factor on their mean");
    check_step("replay_adam_", steps_before, 0);
    TORCH_CHECK_VALUE(
        beta1s.size() == lrs.size() && beta2s.size() == lrs.size() &&
            epsilons.size() == lrs.size() && weight_decays.size() == lrs.size() &&
            missing_noises.size() == lrs.size(),
        "ssd_allreduce::replay_adam_: lrs, beta1s, beta2s, epsilons, weight_decays and "
        "missing_noises have [",
        lrs.size(), ", ", beta1s.size(), ", ", beta2s.size(), ", ", epsilons.size(), ", ",
        weight_decays.size(), ", ", missing_noises.size(),
        "] entries; give one of each for every replayed step");
  }
};

template <typename Backend, Correction kCorrection, std::size_t N>
void apply_adam_replay(const TensorLists<N>& lists, const AdamReplayOptions& options) {
  // The rules point into these.
  const auto float_steps = options.steps<float>();
  const auto double_steps = options.steps<double>();
  apply<Backend>(lists, [&](auto compute) {
    using C = decltype(compute);
    const AdamReplayStep<C>* steps;
    if constexpr (std::is_same_v<C, double>) {
      steps = double_steps.data();
    } else {
      steps = float_steps.data();
    }
    return ReplayAdam<C, kCorrection>{steps,
                                      static_cast<int64_t>(options.lrs.size()),
                                      static_cast<C>(options.count),
                                      static_cast<C>(options.divisor),
                                      static_cast<C>(options.variance_factor()),
                                      static_cast<C>(options.lr_sum()),
                                      options.maximize};
  });
}

template <typename Backend>
void replay_adam_(at::TensorList weights, at::TensorList firsts, at::TensorList seconds,
                  at::TensorList sums, at::TensorList squares, at::TensorList corrections,
                  int64_t count, double divisor, int64_t steps_before, c10::ArrayRef<double> lrs,
                  c10::ArrayRef<double> beta1s, c10::ArrayRef<double> beta2s,
                  c10::ArrayRef<double> epsilons, c10::ArrayRef<double> weight_decays,
                  c10::ArrayRef<double> missing_noises, bool decoupled, bool maximize,
                  int64_t correction) {
  const AdamReplayOptions options{count,          divisor,   steps_before, lrs,
                                  beta1s,         beta2s,    epsilons,     weight_decays,
                                  missing_noises, decoupled, maximize};
  options.check();
  check_correction("replay_adam_", correction);
  const ListChecker lists("replay_adam_", Backend::kDevice, "weights", weights);
  lists.parameters("firsts", firsts);
  lists.parameters("seconds", seconds);
  lists.state("sums", sums);
  lists.state("squares", squares);
  lists.state_if(correction != 0, "corrections", corrections);

  const TensorLists<5> always{weights, sums, squares, firsts, seconds};
  const Correction kind = static_cast<Correction>(correction);
  if (kind == Correction::kMeanGradient) {
    apply_adam_replay<Backend, Correction::kMeanGradient>(append(always, corrections), options);
  } else if (kind == Correction::kDisplacement && options.lr_sum() != 0) {
    apply_adam_replay<Backend, Correction::kDisplacement>(append(always, corrections), options);
  } else {
    apply_adam_replay<Backend, Correction::kNone>(always, options);
  }
}

template <typename Backend>
void rebase_adam_(at::TensorList weights, at::TensorList firsts, at::TensorList seconds,
                  at::TensorList global_weights, at::TensorList global_firsts,
                  at::TensorList global_seconds, at::TensorList weight_snapshots,
                  at::TensorList first_snapshots, at::TensorList second_snapshots,
                  double first_decay, double second_decay, double displacement_factor, double beta2,
                  double eps, int64_t step) {
  check_step("rebase_adam_", step, 1);
  const ListChecker lists("rebase_adam_", Backend::kDevice, "weights", weights);
  lists.state("firsts", firsts);
  lists.state("seconds", seconds);
  lists.parameters("global_weights", global_weights);
  lists.parameters("global_firsts", global_firsts);
  lists.parameters("global_seconds", global_seconds);
  lists.state("weight_snapshots", weight_snapshots);
  lists.state("first_snapshots", first_snapshots);
  lists.state("second_snapshots", second_snapshots);
  const double scale = 1 / std::sqrt(AdamOptions::bias_correction(beta2, step));
  apply<Backend>(
      TensorLists<9>{weights, firsts, seconds, global_weights, global_firsts, global_seconds,
                     weight_snapshots, first_snapshots, second_snapshots},
      [&](auto compute) {
        using C = decltype(compute);
        return RebaseAdam<C>{static_cast<C>(first_decay), static_cast<C>(second_decay),
                             static_cast<C>(displacement_factor), static_cast<C>(scale),
                             static_cast<C>(eps)};
      });
}

}  // namespace ssd_allreduce
