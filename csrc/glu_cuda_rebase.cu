// For tensors in GPU memory: the moves onto a new global state.

#include "multi_tensor.cuh"

namespace ssd_allreduce {

TORCH_LIBRARY_IMPL(ssd_allreduce, CUDA, library) {
  library.impl("rebase_momentum_", &rebase_momentum_<CudaBackend>);
  library.impl("rebase_adam_", &rebase_adam_<CudaBackend>);
  library.impl("rebase_shift_", &rebase_shift_<CudaBackend>);
}

}  // namespace ssd_allreduce
