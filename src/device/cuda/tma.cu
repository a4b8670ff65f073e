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

/* Of matrices one after the other. deep: how many of them a tile has; 0: there is one, and the map has two dimensions. */
struct matrices {
    int64_t count, rows, cols;
};
static int make_map(CUtensorMap *map, const void *data, struct matrices m, int box, int deep) {
    const int64_t rows = m.rows, cols = m.cols;
    const cuuint64_t size[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)m.count};
    const cuuint64_t stride[2] = {(cuuint64_t)cols * 2, (cuuint64_t)(cols * rows) * 2};
    const cuuint32_t tile[3] = {PANEL_ROW / 2, (cuuint32_t)box, (cuuint32_t)(deep ? deep : 1)}, step[3] = {1, 1, 1};
    encode_fn encode = NULL;
    TRY(find_encode(&encode));
    const CUresult r = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, deep ? 3 : 2, (void *)data, size, stride, tile, step,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        FAIL(ERR_DEVICE, "cuda: a matrix of %lld x %lld at %p has no tensor map (error %d)", (long long)rows, (long long)cols, data,
             (int)r);
    return 0;
}
int cuda_tensor_map(CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int box) {
    return make_map(map, data, (struct matrices){1, rows, cols}, box, 0);
}
int cuda_tensor_map_pair(CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int box) {
    return make_map(map, data, (struct matrices){2, rows, cols}, box, 2);
}
int cuda_tensor_map_stack(CUtensorMap *map, const void *data, int64_t count, int64_t rows, int64_t cols, int box) {
    return make_map(map, data, (struct matrices){count, rows, cols}, box, 1);
}
