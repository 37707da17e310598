"""Whether cuda.bindings makes the tensor maps that the driver makes when it is called directly."""

from __future__ import annotations

import sys
from pathlib import Path

from cuda.bindings import driver

sys.path.insert(0, str(Path(__file__).parent))
from trial import tensor_map

from edgellm.engines.cuda_device import CudaDevice

device = CudaDevice()
array = device.empty((300, 2048), "float16")
u32, u64 = driver.cuuint32_t, driver.cuuint64_t
for _ in range(4):
    status, found = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        2,
        array.pointer,
        [u64(2000), u64(300)],
        [u64(4096)],
        [u32(32), u32(64)],
        [u32(1), u32(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    print(status, [int(word) for word in found.opaque] if found is not None else None, flush=True)
print(list(tensor_map(array, 2000, 64, 2)), flush=True)
