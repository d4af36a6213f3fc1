// For tensors in GPU memory: Adam replayed.

#include "multi_tensor.cuh"

namespace ssd_allreduce {

TORCH_LIBRARY_IMPL(ssd_allreduce, CUDA, library) {
  library.impl("replay_adam_", &replay_adam_<CudaBackend>);
}

}  // namespace ssd_allreduce
