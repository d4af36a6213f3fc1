// For tensors in GPU memory: SGD replayed.

#include "multi_tensor.cuh"

namespace ssd_allreduce {

TORCH_LIBRARY_IMPL(ssd_allreduce, CUDA, library) {
  library.impl("replay_sgd_", &replay_sgd_<CudaBackend>);
}

}  // namespace ssd_allreduce
