// For tensors in GPU memory: Adam's local step.

#include "multi_tensor.cuh"

namespace ssd_allreduce {

TORCH_LIBRARY_IMPL(ssd_allreduce, CUDA, library) {
  library.impl("local_adam_", &local_adam_<CudaBackend>);
}

}  // namespace ssd_allreduce
