/* tma.cu - tensor maps: the host's description of a matrix for TMA.
 *
 * cuTensorMapEncodeTiled is the driver's (cuda_driver_entry). */
#include "device/cuda/tma.cuh"

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                              const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static int find_encode(encode_fn *out) {
    static encode_fn found;
    if (!found) TRY(cuda_driver_entry("cuTensorMapEncodeTiled", (void **)&found));
    *out = found;
    return 0;
}

static int make_map(CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int box, bool pair) {
    const cuuint64_t size[3] = {(cuuint64_t)cols, (cuuint64_t)rows, 2};
    const cuuint64_t stride[2] = {(cuuint64_t)cols * 2, (cuuint64_t)(cols * rows) * 2};
    const cuuint32_t tile[3] = {PANEL_ROW / 2, (cuuint32_t)box, 2}, step[3] = {1, 1, 1};
    encode_fn encode = NULL;
    TRY(find_encode(&encode));
    const CUresult r = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, pair ? 3 : 2, (void *)data, size, stride, tile, step,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        FAIL(ERR_DEVICE, "cuda: a matrix of %lld x %lld at %p has no tensor map (error %d)", (long long)rows, (long long)cols, data,
             (int)r);
    return 0;
}
int cuda_tensor_map(CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int box) {
    return make_map(map, data, rows, cols, box, false);
}
int cuda_tensor_map_pair(CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int box) {
    return make_map(map, data, rows, cols, box, true);
}
