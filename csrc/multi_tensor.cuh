// Applies a rule to the elements of many CUDA tensors in few launches, as one backend of the
// operations.
//
// A launch takes as many tensors as fit a kernel's arguments, cut into tiles of equal size; each
// block computes one tile. Everything runs on the current stream of the tensors' device, nothing
// waits for the device, and nothing of the host's memory is read after a call returns: a CUDA graph
// can capture it.

#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>
#include <utility>

#include "launch.cuh"
#include "operations.h"
#include "vector_cuda.cuh"

namespace ssd_allreduce {

constexpr int8_t kUnaligned = -1;

// How a rule's streams are cut into lines, packs and tiles.
template <typename T, typename Rule>
struct Shape {
  static constexpr int kStreamCount = static_cast<int>(Rule::kStreams.size());
  // Elements in a line: 16 bytes of parameters, and of state of the same dtype.
  static constexpr int kWidth = kAccessBytes / static_cast<int>(sizeof(T));
  // Two lines of each stream under way at a time hide the memory's latency; with many streams, or
  // state wider than the parameters, one is as good and spares registers.
  static constexpr int kLines = kStreamCount <= 6 && sizeof(T) == sizeof(ComputeType<T>) ? 2 : 1;
  static constexpr int kPack = kLines * kWidth;
  static constexpr int kTile = kThreads * kPack;
};

// The arguments of one launch.
template <typename T, typename Rule>
struct Batch {
  static constexpr int kStreamCount = Shape<T, Rule>::kStreamCount;
  static constexpr std::size_t kItemBytes =
      sizeof(void*) * kStreamCount + sizeof(int64_t) + sizeof(int32_t) + sizeof(int8_t);
  // 16 bytes for the count and for padding.
  static constexpr int kCapacity = static_cast<int>(
      (kArgumentBytes - sizeof(Rule) - sizeof(const float*) - 16 - alignof(Rule)) / kItemBytes);

  Rule rule;
  const float* gate;  // keeps everything as it is where the number there is not 0; may be nullptr
  int32_t count = 0;
  int32_t tile_ends[kCapacity];  // number of tiles of this and all earlier items
  int64_t numels[kCapacity];
  void* data[kCapacity][kStreamCount];
  int8_t heads[kCapacity];  // elements before the first line of all streams, or kUnaligned

  Batch(const Rule& rule_on_device, const float* gate_on_device)
      : rule(rule_on_device), gate(gate_on_device) {}

  bool empty() const { return count == 0; }
  __device__ __forceinline__ bool is_closed() const { return gate != nullptr && *gate != 0; }
  int32_t tiles() const { return count == 0 ? 0 : tile_ends[count - 1]; }

  // Whether another item of so many tiles fits.
  bool fits(int64_t tile_count) const {
    return count < kCapacity && tiles() + tile_count <= std::numeric_limits<int32_t>::max();
  }

  void push_back(const Item<kStreamCount>& item, int8_t head, int64_t tile_count) {
    tile_ends[count] = tiles() + static_cast<int32_t>(tile_count);
    numels[count] = item.numel;
    std::copy(item.data.begin(), item.data.end(), data[count]);
    heads[count] = head;
    ++count;
  }

  __device__ __forceinline__ int find_item(int32_t tile) const {
    int low = 0;
    int high = count - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (tile < tile_ends[middle]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

template <typename T, typename Rule, int kStream>
using ElementOf = std::conditional_t<Rule::kStreams[kStream].is_parameter, T, ComputeType<T>>;

template <typename T, typename Rule>
using StreamIndices = std::make_integer_sequence<int, Shape<T, Rule>::kStreamCount>;

template <typename T, typename Rule, int kStream, int kWidth, typename V>
__device__ __forceinline__ void load_if_read(V& value, void* const* data, int64_t first,
                                             int stride) {
  if constexpr (Rule::kStreams[kStream].is_read) {
    using Element = ElementOf<T, Rule, kStream>;
    load_lines<kWidth>(value, static_cast<const Element*>(data[kStream]) + first, stride);
  }
}

template <typename T, typename Rule, int kStream, int kWidth, typename V>
__device__ __forceinline__ void store_if_written(void* const* data, const V& value, int64_t first,
                                                 int stride) {
  if constexpr (Rule::kStreams[kStream].is_written) {
    using Element = ElementOf<T, Rule, kStream>;
    store_lines<kWidth>(static_cast<Element*>(data[kStream]) + first, value, stride);
  }
}

// Applies a rule to the tile of aligned lines that begins at an element.
template <typename T, typename Rule, int... kStream>
__device__ __forceinline__ void apply_to_lines(const Rule& rule, void* const* data, int64_t begin,
                                               std::integer_sequence<int, kStream...>) {
  using S = Shape<T, Rule>;
  constexpr int kStride = kThreads * S::kWidth;
  const int64_t first = begin + static_cast<int64_t>(threadIdx.x) * S::kWidth;
  Pack<ComputeType<T>, S::kPack> x[S::kStreamCount];
  (load_if_read<T, Rule, kStream, S::kWidth>(x[kStream], data, first, kStride), ...);
  rule(x);
  (store_if_written<T, Rule, kStream, S::kWidth>(data, x[kStream], first, kStride), ...);
}

template <typename T, typename Rule, int kStream, typename V>
__device__ __forceinline__ void load_one_if_read(V& value, void* const* data, int64_t index) {
  if constexpr (Rule::kStreams[kStream].is_read) {
    using Element = ElementOf<T, Rule, kStream>;
    value.lanes[0] = static_cast<ComputeType<T>>(static_cast<const Element*>(data[kStream])[index]);
  }
}

template <typename T, typename Rule, int kStream, typename V>
__device__ __forceinline__ void store_one_if_written(void* const* data, const V& value,
                                                     int64_t index) {
  if constexpr (Rule::kStreams[kStream].is_written) {
    using Element = ElementOf<T, Rule, kStream>;
    static_cast<Element*>(data[kStream])[index] = static_cast<Element>(value.lanes[0]);
  }
}

// Applies a rule to one element, however it is aligned.
template <typename T, typename Rule, int... kStream>
__device__ __forceinline__ void apply_to_one(const Rule& rule, void* const* data, int64_t index,
                                             std::integer_sequence<int, kStream...>) {
  Pack<ComputeType<T>, 1> x[sizeof...(kStream)];
  (load_one_if_read<T, Rule, kStream>(x[kStream], data, index), ...);
  rule(x);
  (store_one_if_written<T, Rule, kStream>(data, x[kStream], index), ...);
}

template <typename T, typename Rule>
__global__ void __launch_bounds__(kThreads, 2) apply_rule(const Batch<T, Rule> batch) {
  if (batch.is_closed()) {
    return;
  }
  constexpr int kTile = Shape<T, Rule>::kTile;
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  const int item = batch.find_item(block);
  const int64_t tile = block - (item > 0 ? batch.tile_ends[item - 1] : 0);
  const int64_t numel = batch.numels[item];
  const int head = batch.heads[item];
  const int64_t begin = (head > 0 ? head : 0) + tile * kTile;
  void* const* data = batch.data[item];

  // Elements that are left to be computed one by one.
  int64_t rest_begin = tile == 0 ? 0 : begin;
  int64_t rest_end = begin + kTile < numel ? begin + kTile : numel;
  if (head != kUnaligned && begin + kTile <= numel) {
    apply_to_lines<T>(batch.rule, data, begin, StreamIndices<T, Rule>{});
    rest_end = tile == 0 ? begin : rest_begin;
  }
#pragma unroll 1
  for (int64_t i = rest_begin + threadIdx.x; i < rest_end; i += kThreads) {
    apply_to_one<T>(batch.rule, data, i, StreamIndices<T, Rule>{});
  }
}

template <typename T, typename Rule, int... kStream>
bool lines_begin_at(const Item<sizeof...(kStream)>& item, int64_t index,
                    std::integer_sequence<int, kStream...>) {
  return ((reinterpret_cast<uintptr_t>(
               static_cast<ElementOf<T, Rule, kStream>*>(item.data[kStream]) + index) %
               kAccessBytes ==
           0) &&
          ...);
}

// The first element from which on lines of all streams are aligned, or kUnaligned.
template <typename T, typename Rule, std::size_t N>
int8_t find_head(const Item<N>& item) {
  for (int head = 0; head < Shape<T, Rule>::kWidth; ++head) {
    if (lines_begin_at<T, Rule>(item, head, StreamIndices<T, Rule>{})) {
      return static_cast<int8_t>(head);
    }
  }
  return kUnaligned;
}

// Part of an array of options, as a kernel's argument.
template <typename Step>
struct Steps {
  static constexpr int kCapacity = static_cast<int>((kArgumentBytes - 32) / sizeof(Step));

  Step* destination;
  int count;
  Step values[kCapacity];
};

template <typename Step>
__global__ void __launch_bounds__(kThreads) store_steps(const Steps<Step> steps) {
  for (int i = static_cast<int>(threadIdx.x); i < steps.count; i += kThreads) {
    steps.destination[i] = steps.values[i];
  }
}

// A rule as the device can use it: itself, if all of it travels by value.
template <typename Rule, typename = void>
class RuleOnDevice {
 public:
  RuleOnDevice(const Rule& rule, cudaStream_t) : rule_(rule) {}

  const Rule& rule() const { return rule_; }

 private:
  Rule rule_;
};

// A rule with an array `steps` of `step_count` options on the host: they travel by value too, in
// the arguments of a kernel that stores them in device memory. A copy from host memory would have
// to keep that memory until the stream comes to it, or wait.
template <typename Rule>
class RuleOnDevice<Rule, std::void_t<decltype(std::declval<const Rule&>().steps)>> {
 public:
  RuleOnDevice(const Rule& rule, cudaStream_t stream) : rule_(rule) {
    using Step = std::decay_t<decltype(*rule.steps)>;
    static_assert(std::is_trivially_copyable_v<Step>);
    if (rule.step_count == 0) {
      return;
    }
    memory_ = c10::cuda::CUDACachingAllocator::get()->allocate(rule.step_count * sizeof(Step));
    auto* stored = static_cast<Step*>(memory_.get());
    for (int64_t begin = 0; begin < rule.step_count; begin += Steps<Step>::kCapacity) {
      Steps<Step> steps{};
      steps.destination = stored + begin;
      steps.count =
          static_cast<int>(std::min<int64_t>(rule.step_count - begin, Steps<Step>::kCapacity));
      std::copy_n(rule.steps + begin, steps.count, steps.values);
      launch_kernel(store_steps<Step>, 1, steps, stream);
    }
    rule_.steps = stored;
  }

  const Rule& rule() const { return rule_; }

 private:
  Rule rule_;
  // Given back when the last launch has been queued: the allocator hands it out again to what is
  // queued later on the same stream.
  c10::DataPtr memory_;
};

template <typename T, typename Rule>
void launch(Batch<T, Rule>& batch, cudaStream_t stream) {
  if (!batch.empty()) {
    launch_kernel(apply_rule<T, Rule>, batch.tiles(), batch, stream);
    batch.count = 0;
  }
}

struct CudaBackend {
  static constexpr at::DeviceType kDevice = at::kCUDA;

  template <typename T, typename Rule, std::size_t N>
  static void run(const Rule& rule, const std::vector<Item<N>>& items, const float* gate) {
    for (auto first = items.begin(); first != items.end();) {
      const auto last = std::find_if(first, items.end(), [&](const Item<N>& item) {
        return item.device_index != first->device_index;
      });
      run_on_one_device<T>(rule, first, last, gate);
      first = last;
    }
  }

 private:
  template <typename T, typename Rule, typename Iterator>
  static void run_on_one_device(const Rule& rule, Iterator first, Iterator last,
                                const float* gate) {
    constexpr int64_t kTile = Shape<T, Rule>::kTile;
    const c10::cuda::CUDAGuard guard(first->device_index);
    const auto stream = c10::cuda::getCurrentCUDAStream();
    const RuleOnDevice<Rule> on_device(rule, stream);
    Batch<T, Rule> batch(on_device.rule(), gate);
    for (auto item = first; item != last; ++item) {
      const int8_t head = find_head<T, Rule>(*item);
      const int64_t in_tiles = item->numel - std::max<int64_t>(head, 0);
      const int64_t tiles = std::max<int64_t>(1, (in_tiles + kTile - 1) / kTile);
      if (!batch.fits(tiles)) {
        launch(batch, stream);
      }
      batch.push_back(*item, head, tiles);
    }
    launch(batch, stream);
  }
};

}  // namespace ssd_allreduce
