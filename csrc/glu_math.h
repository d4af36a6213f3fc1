// The elementwise arithmetic of SSD-SGD, once, for host and device.
//
// A *rule* is a small struct of options with an operator() that computes one element: it receives
// an array with one value for each of the rule's *streams* (the lists of tensors that it walks
// over) and updates it in place. Backends load the streams that a rule reads, call it, and store
// those that it writes; kStreams tells them which. Streams of parameters are kept in the
// parameters' dtype, streams of state in the compute dtype C (float, or double for double
// parameters), and all arithmetic is in C.
//
// operator() takes C itself or a vector of C as its value type V. It must not depend on the number
// of lanes, so that results do not depend on chunking, threads or vector width: elementwise
// operators, square_root() and positive_part() only, and compile with -ffp-contract=off.

#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define GLU_INLINE __host__ __device__ __forceinline__
#else
#define GLU_INLINE inline __attribute__((always_inline))
#endif

namespace ssd_allreduce {

struct Stream {
  bool is_parameter;
  bool is_read;
  bool is_written;
};

inline constexpr Stream kReadParameter{true, true, false};
inline constexpr Stream kUpdateParameter{true, true, true};
inline constexpr Stream kReadState{false, true, false};
inline constexpr Stream kUpdateState{false, true, true};
inline constexpr Stream kWriteState{false, false, true};

template <std::size_t N>
using Streams = std::array<Stream, N>;

template <std::size_t N>
constexpr Streams<N + 1> append(const Streams<N>& streams, Stream last) {
  Streams<N + 1> result{};
  for (std::size_t i = 0; i < N; ++i) {
    result[i] = streams[i];
  }
  result[N] = last;
  return result;
}

// Functions of one element, which backends overload for their vectors.
GLU_INLINE float square_root(float x) { return ::sqrtf(x); }
GLU_INLINE double square_root(double x) { return ::sqrt(x); }

// max(0, x) that keeps NaN.
GLU_INLINE float positive_part(float x) { return x < 0 ? 0 : x; }
GLU_INLINE double positive_part(double x) { return x < 0 ? 0 : x; }

// w -= lr * u, with the momentum recursion of torch.optim.SGD.
template <typename C>
struct LocalMomentum {
  enum : int { kWeight, kGradient, kMomentum };
  static constexpr Streams<3> kStreams{{kUpdateParameter, kReadParameter, kUpdateState}};

  C lr;
  C momentum;
  C undampened;       // 1 - dampening
  C gradient_factor;  // gradient_scale, negated to maximize
  C weight_decay;
  bool nesterov;

  template <typename V>
  GLU_INLINE void operator()(V* x) const {
    const V direction = gradient_factor * x[kGradient] + weight_decay * x[kWeight];
    x[kMomentum] = momentum * x[kMomentum] + undampened * direction;
    if (nesterov) {
      x[kWeight] = x[kWeight] - lr * (direction + momentum * x[kMomentum]);
    } else {
      x[kWeight] = x[kWeight] - lr * x[kMomentum];
    }
  }
};

// w -= step_size * (gradient_weight * g + correction_weight * s + weight_decay * w).
template <typename C>
struct LocalCorrected {
  enum : int { kWeight, kGradient, kCorrection };
  static constexpr Streams<3> kStreams{{kUpdateParameter, kReadParameter, kReadState}};

  C step_size;
  C gradient_weight;
  C correction_weight;
  C weight_decay;

  template <typename V>
  GLU_INLINE void operator()(V* x) const {
    const V direction = gradient_weight * x[kGradient] + correction_weight * x[kCorrection] +
                        weight_decay * x[kWeight];
    x[kWeight] = x[kWeight] - step_size * direction;
  }
};

// w -= step_size * (gradient_weight * g + weight_decay * w).
template <typename C>
struct LocalPlain {
  enum : int { kWeight, kGradient };
  static constexpr Streams<2> kStreams{{kUpdateParameter, kReadParameter}};

  C step_size;
  C gradient_weight;
  C weight_decay;

  template <typename V>
  GLU_INLINE void operator()(V* x) const {
    const V direction = gradient_weight * x[kGradient] + weight_decay * x[kWeight];
    x[kWeight] = x[kWeight] - step_size * direction;
  }
};

// What Adam divides by; scale is 1 / sqrt(bias correction of the second moment).
template <typename C, typename V>
GLU_INLINE V adam_denominator(const V& second, C scale, C eps) {
  return scale * square_root(second) + eps;
}

// The numbers of one step of torch.optim.Adam or AdamW.
template <typename C>
struct AdamStep {
  C first_decay;
  C first_input;  // 1 - first_decay
  C second_decay;
  C second_input;         // 1 - second_decay
  C second_scale;         // of adam_denominator
  C step_size;            // lr / bias correction of the first moment
  C coupled_decay;        // weight decay added to the gradient, as Adam does
  C decoupled_retention;  // 1 - lr * weight decay, as AdamW does; 1 without
  C eps;

  // Moves the weight and its moments; extra_variance is added to the square that the second moment
  // takes in.
  template <typename V>
  GLU_INLINE void advance(V& weight, V& first, V& second, const V& gradient,
                          const V& extra_variance) const {
    const V direction = gradient + coupled_decay * weight;
    weight = decoupled_retention * weight;
    first = first_decay * first + first_input * direction;
    second = second_decay * second + second_input * (direction * direction + extra_variance);
    weight = weight - step_size * (first / adam_denominator(second, second_scale, eps));
  }
};

// One step of Adam or AdamW.
template <typename C>
struct LocalAdam {
  enum : int { kWeight, kGradient, kFirst, kSecond };
  static constexpr Streams<4> kStreams{
      {kUpdateParameter, kReadParameter, kUpdateState, kUpdateState}};

  AdamStep<C> step;
  C gradient_factor;  // gradient_scale, negated to maximize

  template <typename V>
  GLU_INLINE void operator()(V* x) const {
    const V gradient = gradient_factor * x[kGradient];
    step.advance(x[kWeight], x[kFirst], x[kSecond], gradient, V{});
  }
};

// A local rule that adds its gradient, as given, to an accumulator in the same pass.
template <typename Rule>
struct Accumulating {
  static constexpr int kGradient = Rule::kGradient;
  static constexpr int kAccumulator = Rule::kStreams.size();
  static constexpr auto kStreams = append(Rule::kStreams, kUpdateState);

  Rule rule;

  template <typename V>
  GLU_INLINE void operator()(V* x) const {
    x[kAccumulator] = x[kAccumulator] + x[Rule::kGradient];
    rule(x);
  }
};

// A local rule that starts an accumulator afresh with its gradient, as given, in the same pass.
template <typename Rule>
struct Overwriting {
  static constexpr int kGradient = Rule::kGradient;
  static constexpr int kAccumulator = Rule::kStreams.size();
  static constexpr auto kStreams = append(Rule::kStreams, kWriteState);

  Rule rule;

  template <typename V>
  GLU_INLINE void operator()(V* x) const {
    x[kAccumulator] = x[Rule::kGradient];
    rule(x);
  }
};

// A local rule that adds the square of its gradient, as given, to an accumulator in the same pass.
template <typename Rule>
struct AccumulatingSquare {
  static constexpr int kSquares = Rule::kStreams.size();
  static constexpr auto kStreams = append(Rule::kStreams, kUpdateState);

  Rule rule;

  template <typename V>
  GLU_INLINE void operator()(V* x) const {
    x[kSquares] = x[kSquares] + x[Rule::kGradient] * x[Rule::kGradient];
    rule(x);
  }
};

// A local rule that starts an accumulator of squares afresh, in the same pass.
template <typename Rule>
struct OverwritingSquare {
  static constexpr int kSquares = Rule::kStreams.size();
  static constexpr auto kStreams = append(Rule::kStreams, kWriteState);

  Rule rule;

  template <typename V>
  GLU_INLINE void operator()(V* x) const {
    x[kSquares] = x[Rule::kGradient] * x[Rule::kGradient];
    rule(x);
  }
};

// Does nothing with a gradient, for Accumulating and Overwriting to do their part alone.
struct OnlyGradient {
  enum : int { kGradient };
  static constexpr Streams<1> kStreams{{kReadParameter}};

  template <typename V>
  GLU_INLINE void operator()(V*) const {}
};

enum class MomentumUse { kNone, kInitialise, kUpdate };
enum class Correction { kNone, kMeanGradient, kDisplacement };

template <typename C>
struct ReplayStep {
  C lr;
  C momentum;
  C undampened;  // 1 - dampening
  C weight_decay;
  MomentumUse momentum_use;
};

// torch.optim.SGD replayed with the mean gradient, all steps in registers.
template <typename C, bool kHasMomentum, Correction kCorrectionKind>
struct ReplaySgd {
  static constexpr bool kHasCorrection = kCorrectionKind != Correction::kNone;
  enum : int { kWeight, kSum, kMomentum, kCorrection = kHasMomentum ? 3 : 2 };
  static constexpr auto streams() {
    constexpr Streams<2> always{{kUpdateParameter, kReadState}};
    if constexpr (kHasMomentum && kHasCorrection) {
      return append(append(always, kUpdateParameter), kWriteState);
    } else if constexpr (kHasMomentum) {
      return append(always, kUpdateParameter);
    } else if constexpr (kHasCorrection) {
      return append(always, kWriteState);
    } else {
      return always;
    }
  }
  static constexpr auto kStreams = streams();

  const ReplayStep<C>* steps;
  int64_t step_count;
  C divisor;
  C lr_sum;
  bool nesterov;
  bool maximize;

  template <typename V>
  GLU_INLINE void operator()(V* x) const {
    const V mean = x[kSum] / divisor;
    const V gradient = maximize ? V(-mean) : mean;
    const V before = x[kWeight];
    V weight = before;
    V momentum{};
    if constexpr (kHasMomentum) {
      momentum = x[kMomentum];
    }
    for (int64_t j = 0; j < step_count; ++j) {
      const ReplayStep<C>& step = steps[j];
      const V direction = gradient + step.weight_decay * weight;
      V update = direction;
      if (kHasMomentum && step.momentum_use != MomentumUse::kNone) {
        momentum = step.momentum_use == MomentumUse::kInitialise
                       ? direction
                       : V(step.momentum * momentum + step.undampened * direction);
        update = nesterov ? V(direction + step.momentum * momentum) : momentum;
      }
      weight = weight - step.lr * update;
    }
    x[kWeight] = weight;
    if constexpr (kHasMomentum) {
      x[kMomentum] = momentum;
    }
    if constexpr (kCorrectionKind == Correction::kMeanGradient) {
      x[kCorrection] = mean;
    } else if constexpr (kCorrectionKind == Correction::kDisplacement) {
      x[kCorrection] = (before - weight) / lr_sum;
    }
  }
};

template <typename C>
struct AdamReplayStep {
  AdamStep<C> step;
  C missing_noise;  // share of a gradient's variance that a mean over the period hides
};

// Adam or AdamW replayed with the mean gradient, all steps in registers. The second moment takes in
// the noise that a mean over a period hides, estimated from the summed squares.
template <typename C, Correction kCorrectionKind>
struct ReplayAdam {
  enum : int { kWeight, kSum, kSquares, kFirst, kSecond, kCorrection };
  static constexpr auto streams() {
    constexpr Streams<5> always{
        {kUpdateParameter, kReadState, kReadState, kUpdateParameter, kUpdateParameter}};
    if constexpr (kCorrectionKind != Correction::kNone) {
      return append(always, kWriteState);
    } else {
      return always;
    }
  }
  static constexpr auto kStreams = streams();

  const AdamReplayStep<C>* steps;
  int64_t step_count;
  C count;            // gradients in each sum
  C divisor;          // count over the scale of the mean
  C variance_factor;  // of the biased variance of gradients; 0: one gradient has no variance
  C lr_sum;
  bool maximize;

  template <typename V>
  GLU_INLINE void operator()(V* x) const {
    const V mean = x[kSum] / divisor;
    const V gradient = maximize ? V(-mean) : mean;
    V variance{};
    if (variance_factor != 0) {
      const V unscaled = x[kSum] / count;
      variance = variance_factor * positive_part(V(x[kSquares] / count - unscaled * unscaled));
    }
    const V before = x[kWeight];
    for (int64_t j = 0; j < step_count; ++j) {
      steps[j].step.advance(x[kWeight], x[kFirst], x[kSecond], gradient,
                            V(steps[j].missing_noise * variance));
    }
    if constexpr (kCorrectionKind == Correction::kMeanGradient) {
      x[kCorrection] = mean;
    } else if constexpr (kCorrectionKind == Correction::kDisplacement) {
      x[kCorrection] = (before - x[kWeight]) / lr_sum;
    }
  }
};

// Local weights and momenta moved onto a new global state, the local steps since kept.
template <typename C>
struct RebaseMomentum {
  enum : int {
    kWeight,
    kMomentum,
    kGlobalWeight,
    kGlobalMomentum,
    kWeightSnapshot,
    kMomentumSnapshot
  };
  static constexpr Streams<6> kStreams{
      {kUpdateParameter, kUpdateState, kReadParameter, kReadParameter, kReadState, kReadState}};

  C momentum_decay;
  C displacement_factor;

  template <typename V>
  GLU_INLINE void operator()(V* x) const {
    const V momentum_change = x[kGlobalMomentum] - x[kMomentumSnapshot];
    const V weight_change = x[kGlobalWeight] - x[kWeightSnapshot];
    x[kMomentum] = x[kMomentum] + momentum_decay * momentum_change;
    x[kWeight] = x[kWeight] + (weight_change - displacement_factor * momentum_change);
  }
};

// Local weights and Adam's moments moved onto a new global state, the local steps since kept.
template <typename C>
struct RebaseAdam {
  enum : int {
    kWeight,
    kFirst,
    kSecond,
    kGlobalWeight,
    kGlobalFirst,
    kGlobalSecond,
    kWeightSnapshot,
    kFirstSnapshot,
    kSecondSnapshot
  };
  static constexpr Streams<9> kStreams{{kUpdateParameter, kUpdateState, kUpdateState,
                                        kReadParameter, kReadParameter, kReadParameter, kReadState,
                                        kReadState, kReadState}};

  C first_decay;
  C second_decay;
  C displacement_factor;
  C second_scale;  // of adam_denominator
  C eps;

  template <typename V>
  GLU_INLINE void operator()(V* x) const {
    const V first_change = x[kGlobalFirst] - x[kFirstSnapshot];
    const V second_change = x[kGlobalSecond] - x[kSecondSnapshot];
    const V weight_change = x[kGlobalWeight] - x[kWeightSnapshot];
    const V direction = first_change / adam_denominator(x[kSecond], second_scale, eps);
    x[kWeight] = x[kWeight] + (weight_change - displacement_factor * direction);
    x[kFirst] = x[kFirst] + first_decay * first_change;
    x[kSecond] = positive_part(V(x[kSecond] + second_decay * second_change));
  }
};

// Local weights moved by the change of the global weights.
struct RebaseShift {
  enum : int { kWeight, kGlobalWeight, kWeightSnapshot };
  static constexpr Streams<3> kStreams{{kUpdateParameter, kReadParameter, kReadState}};

  template <typename V>
  GLU_INLINE void operator()(V* x) const {
    x[kWeight] = x[kWeight] + (x[kGlobalWeight] - x[kWeightSnapshot]);
  }
};

}  // namespace ssd_allreduce
