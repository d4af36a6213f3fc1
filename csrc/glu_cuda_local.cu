// For tensors in GPU memory: the local steps of SGD, and accumulating.

#include "multi_tensor.cuh"

namespace ssd_allreduce {

TORCH_LIBRARY_IMPL(ssd_allreduce, CUDA, library) {
  library.impl("local_momentum_", &local_momentum_<CudaBackend>);
  library.impl("local_corrected_", &local_corrected_<CudaBackend>);
  library.impl("local_plain_", &local_plain_<CudaBackend>);
  library.impl("accumulate_", &accumulate_<CudaBackend>);
  library.impl("accumulate_squares_", &accumulate_squares_<CudaBackend>);
}

}  // namespace ssd_allreduce
