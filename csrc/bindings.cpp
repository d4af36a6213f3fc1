// Makes the library importable as ssd_allreduce._C; loading it registers the kernels.

#include <Python.h>

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT,
                               "_C",
                               "Compiled kernels of torch.ops.ssd_allreduce.",
                               -1,
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr};
  return PyModule_Create(&module);
}
