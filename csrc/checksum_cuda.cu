// Checksums of tensors in GPU memory.

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "checksum.h"
#include "launch.cuh"

namespace ssd_allreduce {
namespace {

// Words that one block adds up.
constexpr int64_t kTileWords = kThreads * 64;

// The arguments of one launch.
struct ChecksumBatch {
  static constexpr int kCapacity = static_cast<int>((kArgumentBytes - 32) / 21);

  unsigned long long* sums;  // of the first item and those after it
  int32_t count;
  int32_t tile_ends[kCapacity];  // number of tiles of this and all earlier items
  int64_t word_counts[kCapacity];
  const void* data[kCapacity];
  int8_t word_sizes[kCapacity];

  int32_t tiles() const { return count == 0 ? 0 : tile_ends[count - 1]; }
};

template <typename Word>
__device__ __forceinline__ uint64_t sum_of_words(const void* data, int64_t begin, int64_t end) {
  const Word* words = static_cast<const Word*>(data);
  uint64_t sum = 0;
#pragma unroll 4
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    sum += mixed_word(words[i]);
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads) add_checksums(const ChecksumBatch batch) {
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  int item = 0;
  while (batch.tile_ends[item] <= block) {
    ++item;
  }
  const int64_t begin = (block - (item > 0 ? batch.tile_ends[item - 1] : 0)) * kTileWords;
  const int64_t word_count = batch.word_counts[item];
  const int64_t end = begin + kTileWords < word_count ? begin + kTileWords : word_count;
  const void* data = batch.data[item];
  uint64_t sum = 0;
  if (batch.word_sizes[item] == 1) {
    sum = sum_of_words<uint8_t>(data, begin, end);
  } else if (batch.word_sizes[item] == 2) {
    sum = sum_of_words<uint16_t>(data, begin, end);
  } else {
    sum = sum_of_words<uint32_t>(data, begin, end);
  }
  // Sums of integers do not depend on the order of the threads.
  atomicAdd(batch.sums + item, static_cast<unsigned long long>(sum));
}

// The sums stay on the device: reading them waits for it, and that is the caller's to time.
at::Tensor checksum(at::TensorList tensors) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::vector<at::Tensor> dense = checked_and_dense(tensors);
  const c10::cuda::CUDAGuard guard(tensors[0].device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  at::Tensor result = at::zeros({static_cast<int64_t>(dense.size())},
                                tensors[0].options().dtype(at::kLong).requires_grad(false));
  auto* sums = reinterpret_cast<unsigned long long*>(result.mutable_data_ptr<int64_t>());
  ChecksumBatch batch{};
  const auto launch = [&](std::size_t next) {
    if (batch.tiles() > 0) {
      launch_kernel(add_checksums, batch.tiles(), batch, stream);
    }
    batch.count = 0;
    batch.sums = sums + next;
  };
  launch(0);
  for (std::size_t i = 0; i < dense.size(); ++i) {
    const int64_t tiles = (word_count(dense[i]) + kTileWords - 1) / kTileWords;
    if (batch.count == ChecksumBatch::kCapacity || batch.tiles() + tiles > INT32_MAX) {
      launch(i);
    }
    batch.tile_ends[batch.count] = batch.tiles() + static_cast<int32_t>(tiles);
    batch.word_counts[batch.count] = word_count(dense[i]);
    batch.data[batch.count] = dense[i].const_data_ptr();
    batch.word_sizes[batch.count] = static_cast<int8_t>(word_size(dense[i]));
    ++batch.count;
  }
  launch(dense.size());
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(ssd_allreduce, CUDA, library) { library.impl("checksum", &checksum); }

}  // namespace ssd_allreduce
