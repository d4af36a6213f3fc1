// Just enough of the CUDA runtime to run the kernels' own source on the host, thread after thread:
// they neither communicate within a block nor wait for each other.

#pragma once

#include <cstddef>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x;
  explicit dim3(unsigned count = 1) : x(count) {}
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

using cudaStream_t = int;
using cudaError_t = int;

inline dim3 threadIdx;
inline dim3 blockIdx;

inline unsigned long long atomicAdd(unsigned long long* sum, unsigned long long summand) {
  const unsigned long long before = *sum;
  *sum += summand;
  return before;
}

template <typename Argument>
cudaError_t cudaLaunchKernel(void (*kernel)(Argument), dim3 blocks, dim3 threads, void** arguments,
                             std::size_t, cudaStream_t) {
  for (blockIdx.x = 0; blockIdx.x < blocks.x; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < threads.x; ++threadIdx.x) {
      kernel(*static_cast<Argument*>(arguments[0]));
    }
  }
  return 0;
}
