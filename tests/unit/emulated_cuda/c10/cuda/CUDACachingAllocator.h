#pragma once

#include <c10/core/CPUAllocator.h>

namespace c10::cuda::CUDACachingAllocator {

inline c10::Allocator* get() { return c10::GetCPUAllocator(); }

}  // namespace c10::cuda::CUDACachingAllocator
