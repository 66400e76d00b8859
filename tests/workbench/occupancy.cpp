// NVIDIA's own calculator, from the header of the toolkit. Reads lines "major minor warps_per_sm shared_per_sm
// shared_per_block registers threads shared" and writes the blocks that an SM holds.
#include <climits>
#include <cstdio>
#include <cstring>

#include "cuda_occupancy.h"

int main() {
  int major, minor, warps, registers, threads;
  long per_sm, per_block, shared;
  while (scanf("%d %d %d %ld %ld %d %d %ld", &major, &minor, &warps, &per_sm, &per_block, &registers, &threads,
               &shared) == 8) {
    cudaOccDeviceProp device;
    device.computeMajor = major;
    device.computeMinor = minor;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = warps * 32;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.warpSize = 32;
    device.sharedMemPerBlock = 48 * 1024;
    device.sharedMemPerMultiprocessor = per_sm;
    device.sharedMemPerBlockOptin = per_block;
    device.reservedSharedMemPerBlock = major >= 8 ? 1024 : 0;
    device.numSms = 1;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = INT_MAX;
    kernel.numRegs = registers;
    kernel.sharedSizeBytes = 0;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = per_block;
    kernel.numBlockBarriers = 1;
    cudaOccDeviceState state;
    cudaOccResult result;
    cudaOccError status =
        cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared);
    printf("%d\n", status == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -1);
  }
}
