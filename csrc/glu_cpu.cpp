// The operations of torch.ops.ssd_allreduce for tensors in host memory.

#include <ATen/Config.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <tuple>
#include <utility>

#include "checksum.h"
#include "operations.h"
#include "vector_cpu.h"

#if AT_PARALLEL_OPENMP && !defined(_OPENMP)
#error "compile and link with -fopenmp: without it at::parallel_for uses one thread"
#endif

namespace ssd_allreduce {
namespace {

// Below this many elements another thread costs more than it brings.
constexpr int64_t kGrainSize = 32768;

// Splits the elements of all items evenly among the threads, whatever the items' sizes, and calls
// function(item index, first element, number of elements).
template <typename Items, typename Function>
void parallel_over_elements(const Items& items, const Function& function) {
  std::vector<int64_t> ends;
  ends.reserve(items.size());
  int64_t total = 0;
  for (const auto& item : items) {
    total += item.numel;
    ends.push_back(total);
  }
  at::parallel_for(0, total, kGrainSize, [&](int64_t begin, int64_t end) {
    auto index = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    while (begin < end) {
      const int64_t stop = std::min(end, ends[index]);
      const int64_t item_begin = ends[index] - items[index].numel;
      function(index, begin - item_begin, stop - begin);
      begin = stop;
      ++index;
    }
  });
}

template <typename T, typename Rule, int kStream>
using ElementOf = std::conditional_t<Rule::kStreams[kStream].is_parameter, T, ComputeType<T>>;

// Applies a rule to the elements [begin, begin + count) of one item, a pair of vectors at a
// time. The last elements go through the same vectors, padded, so that an element's place changes
// no bit of it.
template <int64_t kVectorBytes, typename T, typename Rule, int... kStream>
GLU_INLINE void apply_rule(const Rule rule, void* const* data, int64_t begin, int64_t count,
                           std::integer_sequence<int, kStream...>) {
  using C = ComputeType<T>;
  constexpr int64_t kLanes = kVectorBytes / sizeof(C);
  constexpr int64_t kElements = 2 * kLanes;
  const auto elements =
      std::make_tuple(static_cast<ElementOf<T, Rule, kStream>*>(data[kStream]) + begin...);
  VectorPair<C, kLanes> x[sizeof...(kStream)];

  int64_t i = 0;
  for (; i + kElements <= count; i += kElements) {
    (load_if<Rule::kStreams[kStream].is_read>(x[kStream], std::get<kStream>(elements) + i), ...);
    rule(x);
    (store_if<Rule::kStreams[kStream].is_written>(std::get<kStream>(elements) + i, x[kStream]),
     ...);
  }
  const int64_t rest = count - i;
  if (rest > 0) {
    (load_first_if<Rule::kStreams[kStream].is_read>(x[kStream], std::get<kStream>(elements) + i,
                                                    rest),
     ...);
    rule(x);
    (store_first_if<Rule::kStreams[kStream].is_written>(std::get<kStream>(elements) + i, x[kStream],
                                                        rest),
     ...);
  }
}

template <typename Rule>
using StreamIndices = std::make_integer_sequence<int, Rule::kStreams.size()>;

template <typename T, typename Rule>
void apply_rule_baseline(const Rule& rule, void* const* data, int64_t begin, int64_t count) {
  apply_rule<16, T>(rule, data, begin, count, StreamIndices<Rule>{});
}

#if defined(__x86_64__)
// The same bits as the baseline: AVX2 does not imply fused multiply-adds.
template <typename T, typename Rule>
__attribute__((target("avx2,f16c"))) void apply_rule_avx2(const Rule& rule, void* const* data,
                                                          int64_t begin, int64_t count) {
  apply_rule<32, T>(rule, data, begin, count, StreamIndices<Rule>{});
}
#endif

template <typename T, typename Rule>
auto apply_rule_for_this_processor() {
#if defined(__x86_64__)
  // torch's own choice, which ATEN_CPU_CAPABILITY can lower.
  static const bool use_avx2 = at::get_cpu_capability() != "DEFAULT";
  if (use_avx2) {
    return &apply_rule_avx2<T, Rule>;
  }
#endif
  return &apply_rule_baseline<T, Rule>;
}

template <typename Word>
uint64_t sum_of_mixed_words(const void* data, int64_t begin, int64_t count) {
  const auto* words = static_cast<const Word*>(data);
  uint64_t sum = 0;
  for (int64_t i = begin; i < begin + count; ++i) {
    sum += mixed_word(words[i]);
  }
  return sum;
}

uint64_t sum_of_mixed_words(int64_t word_size, const void* data, int64_t begin, int64_t count) {
  switch (word_size) {
    case 1:
      return sum_of_mixed_words<uint8_t>(data, begin, count);
    case 2:
      return sum_of_mixed_words<uint16_t>(data, begin, count);
    default:
      return sum_of_mixed_words<uint32_t>(data, begin, count);
  }
}

struct CpuBackend {
  static constexpr at::DeviceType kDevice = at::kCPU;

  template <typename T, typename Rule, std::size_t N>
  static void run(const Rule& rule, const std::vector<Item<N>>& items, const float* gate) {
    if (gate != nullptr && *gate != 0) {
      return;
    }
    const auto apply_rule = apply_rule_for_this_processor<T, Rule>();
    parallel_over_elements(items, [&](int64_t index, int64_t begin, int64_t count) {
      apply_rule(rule, items[index].data.data(), begin, count);
    });
  }

  static at::Tensor checksum(at::TensorList tensors) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const std::vector<at::Tensor> dense = checked_and_dense(tensors);
    std::vector<Item<1>> items;
    for (const at::Tensor& tensor : dense) {
      items.push_back({{const_cast<void*>(tensor.const_data_ptr())}, word_count(tensor)});
    }
    std::vector<std::atomic<uint64_t>> sums(tensors.size());
    parallel_over_elements(items, [&](int64_t index, int64_t begin, int64_t count) {
      sums[index] +=
          sum_of_mixed_words(word_size(dense[index]), items[index].data[0], begin, count);
    });
    at::Tensor result = at::zeros({static_cast<int64_t>(sums.size())}, at::kLong);
    std::copy(sums.begin(), sums.end(), result.mutable_data_ptr<int64_t>());
    return result;
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(ssd_allreduce, CPU, library) { register_operations<CpuBackend>(library); }

}  // namespace ssd_allreduce
