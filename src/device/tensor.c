/* tensor.c - see tensor.h. */
#include "device/tensor.h"

#include "base/err.h"

size_t dtype_size(enum dtype dt) {
    switch (dt) {
    case DT_F32:
    case DT_I32: return 4;
    case DT_BF16:
    case DT_F16: return 2;
    case DT_F64:
    case DT_I64: return 8;
    case DT_U8:
    case DT_E4M3: return 1;
    }
    return 0;
}

const char *dtype_name(enum dtype dt) {
    switch (dt) {
    case DT_F32: return "f32";
    case DT_BF16: return "bf16";
    case DT_F16: return "f16";
    case DT_F64: return "f64";
    case DT_I32: return "i32";
    case DT_I64: return "i64";
    case DT_U8: return "u8";
    case DT_E4M3: return "e4m3";
    }
    return "?";
}

int64_t tensor_count(struct tensor t) {
    int64_t n = 1;
    for (int i = 0; i < t.nd; i++) n *= t.dim[i];
    return t.nd == 0 ? 0 : n;
}

struct tensor tensor_rows(struct tensor t, int64_t lo, int64_t n) {
    CHECK(t.nd >= 1 && lo >= 0 && n >= 0 && lo + n <= t.dim[0]);
    int64_t row = 1;
    for (int i = 1; i < t.nd; i++) row *= t.dim[i];
    if (t.data) t.data = (char *)t.data + (size_t)(lo * row) * dtype_size(t.dt);
    t.dim[0] = n;
    return t;
}
