// How the CUDA kernels are started: blocks of one size, with one argument.

#pragma once

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace ssd_allreduce {

constexpr int kThreads = 256;
// What every toolkit and driver allows. Newer ones allow 32764 bytes, of which all would have to be
// copied with each launch.
constexpr std::size_t kArgumentBytes = 4096;

template <typename Argument>
void launch_kernel(void (*kernel)(Argument), int32_t blocks, const Argument& argument,
                   cudaStream_t stream) {
  static_assert(sizeof(Argument) <= kArgumentBytes);
  void* arguments[] = {const_cast<Argument*>(&argument)};
  C10_CUDA_CHECK(
      cudaLaunchKernel(kernel, dim3(blocks), dim3(kThreads), arguments, /*sharedMem=*/0, stream));
}

}  // namespace ssd_allreduce
