/* attention_kernels_tmpl.h - one tile of keys against a block of query rows,
 * forward and backward; compiled by each kernels_ISA.c.
 *
 * All GEMMs are one function, mm: each element of the result is one chain of
 * multiply-adds, k ascending, so that its bits depend neither on the register
 * block it falls into nor on the neighbouring rows and columns.  A masked score
 * becomes a weight of exactly 0, and adding 0 times a finite number changes
 * nothing (the sign of a zero sum aside, which attn_out settles). */

/* How B is stored: f32 rows, bf16 rows, or 32-bit lanes that hold rows 2x and 2x + 1 as bf16 pairs. */
enum mm_kind { MM_F32, MM_BF16, MM_PAIRS };

/* C (mr, nv vectors) of one register block. The last vector has `last` columns in memory. ldb is in
 * elements of B (pairs for MM_PAIRS). */
VEC_FN void mm_block(const int mr, const int nv, const enum mm_kind kind, int64_t k, const float *a, int64_t row, int64_t col,
                     const void *bv, int64_t ldb, ptrdiff_t prefetch, float *c, int64_t ldc, int64_t last, bool add) {
    const float *b = bv;
    const uint16_t *h = bv;
    vec s[MM_ROWS][VEC_NV];
    VEC_UNROLL for (int i = 0; i < mr; i++) VEC_UNROLL for (int j = 0; j < nv; j++) s[i][j] =
        !add                        ? vset1(0)
        : j == nv - 1 && last < VEC ? vload_n(c + i * ldc + j * VEC, last)
                                    : vload(c + i * ldc + j * VEC);
    for (int64_t x = 0; x < k; x += kind == MM_PAIRS ? 2 : 1) {
        vec y[VEC_NV], z[VEC_NV];
        VEC_UNROLL for (int j = 0; j < nv; j++) {
            if (kind == MM_BF16 && j % 2 == 0) /* two vectors are a line of 64 bytes */
                __builtin_prefetch((const void *)((uintptr_t)(h + x * ldb + j * VEC) + (uintptr_t)prefetch));
            y[j] = kind == MM_BF16 ? vload_bf16(h + x * ldb + j * VEC) : vload(b + (kind == MM_PAIRS ? x / 2 : x) * ldb + j * VEC);
            if (kind == MM_PAIRS) {
                z[j] = vpair_hi(y[j]);
                y[j] = vpair_lo(y[j]);
            }
        }
        VEC_UNROLL for (int i = 0; i < mr; i++) {
            const vec w = vset1(a[i * row + x * col]);
            VEC_UNROLL for (int j = 0; j < nv; j++) s[i][j] = vfma(w, y[j], s[i][j]);
        }
        if (kind != MM_PAIRS) continue;
        VEC_UNROLL for (int i = 0; i < mr; i++) {
            const vec w = vset1(a[i * row + (x + 1) * col]);
            VEC_UNROLL for (int j = 0; j < nv; j++) s[i][j] = vfma(w, z[j], s[i][j]);
        }
    }
    VEC_UNROLL for (int i = 0; i < mr; i++) VEC_UNROLL for (int j = 0; j < nv; j++) {
        if (j == nv - 1 && last < VEC) vstore_n(c + i * ldc + j * VEC, s[i][j], last);
        else vstore(c + i * ldc + j * VEC, s[i][j]);
    }
}

/* A (m, k) with A[i][x] at a + i row + x col; B (k, n) with n padded to 16; C (m, n). */
struct mm {
    int64_t m, n, k;
    const float *a;
    int64_t row, col;
    const void *b;
    int64_t ldb;
    float *c;
    int64_t ldc;
    bool add;           /* C += instead of = */
    ptrdiff_t prefetch; /* MM_BF16: bytes from an element of b to one that is worth fetching */
};

VEC_FN void mm_dispatch(const enum mm_kind kind, int mr, int nv, const struct mm *p, const float *a, const void *b, float *c,
                        int64_t last) {
/* blocks over the limits are never asked for; the clamps keep them from being compiled */
#define MM_FITS(I, J) ((J) <= ((I) <= VEC_MR ? VEC_NV : MM_WIDE_NV) && (I) <= (kind == MM_F32 ? VEC_MR : MM_ROWS))
#define MM_CASE(I, J)                                                                                                            \
    case (I)*8 + (J):                                                                                                            \
        if (MM_FITS(I, J))                                                                                                       \
            mm_block(MM_FITS(I, J) ? (I) : 1, MM_FITS(I, J) ? (J) : 1, kind, p->k, a, p->row, p->col, b, p->ldb, p->prefetch, c, \
                     p->ldc, last, p->add);                                                                                      \
        break;
#define MM_ROW(I) MM_CASE(I, 1) MM_CASE(I, 2) MM_CASE(I, 3) MM_CASE(I, 4)
    switch (mr * 8 + nv) { MM_ROW(1) MM_ROW(2) MM_ROW(3) MM_ROW(4) MM_ROW(5) MM_ROW(6) MM_ROW(7) MM_ROW(8) }
#undef MM_ROW
#undef MM_CASE
#undef MM_FITS
}

/* The size of block number `i` when n is cut into the fewest, evenest blocks of at most `most`. */
VEC_FN int64_t even_blocks(int64_t n, int64_t most) { return (n + most - 1) / most; }
VEC_FN int64_t even_size(int64_t n, int64_t blocks, int64_t i) { return n / blocks + (i < n % blocks); }

VEC_FN void mm_of(const enum mm_kind kind, const struct mm *p) {
    const int64_t blocks = even_blocks(p->m, kind == MM_F32 ? VEC_MR : MM_ROWS), nv = even_blocks(p->n, VEC);
    for (int64_t i = 0, r = 0, mr; i < blocks; i++, r += mr) {
        mr = even_size(p->m, blocks, i);
        const int64_t most = mr <= VEC_MR ? VEC_NV : MM_WIDE_NV;
        for (int64_t j = 0, w; j < nv; j += w) {
            w = nv - j < most ? nv - j : most;
            const void *b = (const char *)p->b + j * VEC * (kind == MM_BF16 ? 2 : 4);
            mm_dispatch(kind, (int)mr, (int)w, p, p->a + r * p->row, b, p->c + r * p->ldc + j * VEC,
                        j + w == nv ? p->n - (nv - 1) * VEC : VEC);
        }
    }
}
static __attribute__((noinline)) void mm(const struct mm *p) { mm_of(MM_F32, p); }
static __attribute__((noinline)) void mm_bf16(const struct mm *p) { mm_of(MM_BF16, p); }
static __attribute__((noinline)) void mm_pairs(const struct mm *p) { mm_of(MM_PAIRS, p); }

/* ---- packing ---- */

/* 16 rows of 64 bytes of D, which are 16 f32 or 32 bf16, become as many columns. */
VEC_FN void pack_block(float *kt, const char *src, int64_t row_bytes, enum dtype dt) {
    vec r[VEC];
    VEC_UNROLL for (int i = 0; i < VEC; i++) r[i] = vload((const float *)(const void *)(src + i * row_bytes));
    vtranspose(r);
    VEC_UNROLL for (int i = 0; i < VEC; i++) {
        if (dt == DT_BF16) { /* a lane is two neighbours of D */
            vstore(kt + 2 * i * DEV_KEY_TILE, vpair_lo(r[i]));
            vstore(kt + (2 * i + 1) * DEV_KEY_TILE, vpair_hi(r[i]));
        } else {
            vstore(kt + i * DEV_KEY_TILE, r[i]);
        }
    }
}
VEC_FN void pack_rows(float *kt, const void *src, int64_t dim, enum dtype dt) {
    const int64_t size = dt == DT_BF16 ? 2 : 4, step = 64 / size;
    int64_t d = 0;
    for (; d + step <= dim; d += step) pack_block(kt + d * DEV_KEY_TILE, (const char *)src + d * size, dim * size, dt);
    for (; d < dim; d++)
        for (int64_t i = 0; i < VEC; i++)
            kt[d * DEV_KEY_TILE + i] =
                dt == DT_BF16 ? bf16_to_f32(((const uint16_t *)src)[i * dim + d]) : ((const float *)src)[i * dim + d];
}
static void kern_pack_kt(float *kt, const void *src, enum dtype dt, int64_t dim) {
    if (dt == DT_BF16) pack_rows(kt, src, dim, DT_BF16);
    else pack_rows(kt, src, dim, DT_F32);
}

VEC_FN void widen_row(float *dst, const void *src, int64_t at, int64_t dim, enum dtype dt) {
    int64_t d = 0;
    for (; d + 4 * VEC <= dim; d += 4 * VEC)
        VEC_UNROLL for (int i = 0; i < 4; i++) vstore(dst + d + i * VEC, vload_act(src, dt, at + d + i * VEC));
    for (; d + VEC <= dim; d += VEC) vstore(dst + d, vload_act(src, dt, at + d));
    if (d < dim) vstore(dst + d, vload_act_n(src, dt, at + d, dim - d));
}
static void kern_widen(float *dst, const void *src, enum dtype dt, int64_t n, int64_t dim) {
    const int64_t up = vec_up(dim);
    if (dt == DT_BF16)
        for (int64_t i = 0; i < n; i++) widen_row(dst + i * up, src, i * dim, dim, DT_BF16);
    else
        for (int64_t i = 0; i < n; i++) widen_row(dst + i * up, src, i * dim, dim, DT_F32);
}

/* ---- which keys of the tile rows see ---- */

struct range {
    int64_t lo, hi; /* within the tile; hi <= lo: none */
};
VEC_FN struct range keys_of(const struct cpu_attn_tile *t, int64_t row) {
    const int64_t p = t->pos[row], end = p + 1 - t->key0;
    struct range r = {0, end < t->n_keys ? end : t->n_keys};
    if (t->window > 0 && p + 1 - t->window > t->key0) r.lo = p + 1 - t->window - t->key0;
    return r;
}
/* Keys that any of rows [row, row + n) sees: positions ascend with the rows. */
VEC_FN struct range keys_of_rows(const struct cpu_attn_tile *t, int64_t row, int64_t n) {
    return (struct range){keys_of(t, row).lo, keys_of(t, row + n - 1).hi};
}

/* Lanes of vector v that lie in r keep their value, others become `fill`. */
VEC_FN vec keep_keys(vec x, struct range r, int64_t v, float fill) {
    const int64_t lo = r.lo - v * VEC, hi = r.hi - v * VEC;
    if (lo <= 0 && hi >= VEC) return x;
    return vkeep(x, lo < 0 ? 0 : lo > VEC ? VEC : lo, hi < 0 ? 0 : hi > VEC ? VEC : hi, fill);
}

enum { TILE_VECS = DEV_KEY_TILE / VEC };

/* tanh(x), to an absolute error of some 1e-7; NaN stays. */
VEC_FN vec soft_tanh(vec x) {
    const vec least = vmax(vset1(-20), x), by = vsub(vset1(0), vmax(vset1(-20), vsub(vset1(0), least)));
    const vec e = vexp(vmul(vset1(-2), by));
    return vdiv(vsub(vset1(1), e), vadd(vset1(1), e));
}
/* Raw scores of n rows, nv vectors each, so that times scale they are under the softcap; slope: its derivative, or NULL. */
static __attribute__((noinline)) void cap_scores(const struct cpu_attn_tile *t, float *s, int64_t n, int64_t nv, float *slope) {
    const vec in = vset1(t->scale / t->softcap), out = vset1(t->softcap / t->scale);
    for (int64_t r = 0; r < n; r++)
        for (int64_t v = 0; v < nv; v++) {
            const int64_t at = r * DEV_KEY_TILE + v * VEC;
            const vec tanh_of = soft_tanh(vmul(vload(s + at), in));
            vstore(s + at, vmul(tanh_of, out));
            if (slope) vstore(slope + at, vsub(vset1(1), vmul(tanh_of, tanh_of)));
        }
}

/* ---- forward ---- */

/* Scores s (nv vectors) of one row become weights; its running sums take them in. */
VEC_FN void softmax_row(const struct cpu_attn_tile *t, int64_t row, float *s, int64_t nv) {
    const struct range r = keys_of(t, row);
    if (r.hi <= r.lo) {
        for (int64_t v = 0; v < nv; v++) vstore(s + v * VEC, vset1(0));
        return;
    }
    const vec scale = vset1(t->scale * 1.44269504088896341f); /* exponents are powers of 2 */
    vec z[TILE_VECS], top = vset1(-INFINITY), sum[TILE_VECS];
    for (int64_t v = 0; v < TILE_VECS; v++) {
        sum[v] = vset1(0);
        if (v >= nv) continue;
        z[v] = keep_keys(vmul(vload(s + v * VEC), scale), r, v, -INFINITY);
        top = vmax(top, z[v]);
    }
    const float old = t->max[row], top1 = vmax_lanes(top), max = old > top1 ? old : top1;
    for (int64_t v = 0; v < nv; v++) {
        sum[v] = vexp2(vsub(z[v], vset1(max)));
        vstore(s + v * VEC, sum[v]);
    }
    const float add = vsum(vadd(vadd(sum[0], sum[1]), vadd(sum[2], sum[3])));
    if (max != old) { /* otherwise the factor is exactly 1 */
        const vec shrink = vexp2(vset1(old - max));
        float one[VEC];
        vstore(one, shrink);
        t->sum[row] *= one[0];
        const int64_t up = vec_up(t->dim);
        for (int64_t d = 0; d < up; d += VEC) vstore(t->acc + row * up + d, vmul(vload(t->acc + row * up + d), shrink));
        t->max[row] = max;
    }
    t->sum[row] += add;
}

static void kern_attn_fwd(const struct cpu_attn_tile *t) {
    const int64_t up = vec_up(t->dim), blocks = even_blocks(t->rows, VEC_MR);
    float s[VEC_MR * DEV_KEY_TILE] __attribute__((aligned(64)));
    for (int64_t i = 0, r = 0, mr; i < blocks; i++, r += mr) {
        mr = even_size(t->rows, blocks, i);
        const struct range keys = keys_of_rows(t, r, mr);
        if (keys.hi <= keys.lo) continue;
        const int64_t nv = (keys.hi + VEC - 1) / VEC;
        mm(&(struct mm){mr, nv * VEC, t->dim, t->q + r * up, up, 1, t->kt, DEV_KEY_TILE, s, DEV_KEY_TILE, false, 0});
        if (t->softcap > 0) cap_scores(t, s, mr, nv, NULL);
        for (int64_t j = 0; j < mr; j++) softmax_row(t, r + j, s + j * DEV_KEY_TILE, nv);
        mm(&(struct mm){mr, up, keys.hi, s, DEV_KEY_TILE, 1, t->v, up, t->acc + r * up, up, true, 0});
    }
}

/* Decode: a tile against the rows of one token, straight from bf16: only a block of 32 of D is transposed at a time, as
 * pairs.  The chains of multiply-adds are those of kern_attn_fwd, cut by stores that lose nothing. */
static void kern_attn_decode(const struct cpu_attn_tile *t) {
    enum { STEP = 32 };
    const int64_t up = t->dim, groups = even_blocks(t->n_keys, VEC);
    float s[CPU_ATTN_DECODE_ROWS * DEV_KEY_TILE] __attribute__((aligned(64)));
    float pairs[STEP / 2 * DEV_KEY_TILE] __attribute__((aligned(64)));
    for (int64_t d = 0; d < t->dim; d += STEP) {
        for (int64_t g = 0; g < groups; g++) {
            vec r[VEC];
            VEC_UNROLL for (int i = 0; i < VEC; i++) {
                __builtin_prefetch(t->k_next[g] + i * t->dim + d);
                r[i] = vload((const float *)(const void *)(t->k_rows[g] + i * t->dim + d));
            }
            vtranspose(r);
            VEC_UNROLL for (int i = 0; i < VEC; i++) vstore(pairs + i * DEV_KEY_TILE + g * VEC, r[i]);
        }
        mm_pairs(&(struct mm){t->rows, groups * VEC, STEP, t->q + d, up, 1, pairs, DEV_KEY_TILE, s, DEV_KEY_TILE, d > 0, 0});
    }
    if (t->softcap > 0) cap_scores(t, s, t->rows, groups, NULL);
    for (int64_t r = 0; r < t->rows; r++) softmax_row(t, r, s + r * DEV_KEY_TILE, groups);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t k = t->n_keys - g * VEC < VEC ? t->n_keys - g * VEC : VEC;
        const ptrdiff_t prefetch = (ptrdiff_t)((uintptr_t)t->v_next[g] - (uintptr_t)t->v_rows[g]);
        mm_bf16(&(struct mm){t->rows, up, k, s + g * VEC, DEV_KEY_TILE, 1, t->v_rows[g], up, t->acc, up, true, prefetch});
    }
}

static void kern_attn_out(void *out, enum dtype dt, const float *acc, float by, int64_t dim) {
    for (int64_t d = 0; d < dim; d += VEC) {
        const vec y = vadd(vmul(vload(acc + d), vset1(by)), vset1(0)); /* -0 + 0 is 0 */
        vstore_act_n(out, dt, d, y, dim - d < VEC ? dim - d : VEC);
    }
}

/* ---- backward (Dao et al. 2022, appendix B.4) ---- */

/* The dot product of a row goes in the order of mm, so that a row that sees one key gets exactly 0. */
static void kern_row_dots(float *dots, const float *a, const float *b, int64_t rows, int64_t dim) {
    enum { N = 8 }; /* chains that run side by side */
    const int64_t up = vec_up(dim);
    for (int64_t r = 0; r < rows; r += N) {
        const int64_t n = rows - r < N ? rows - r : N;
        float s[N] = {0};
        for (int64_t d = 0; d < dim; d++) {
            if (n == N) VEC_UNROLL for (int64_t i = 0; i < N; i++) s[i] = fma1(a[(r + i) * up + d], b[(r + i) * up + d], s[i]);
            else
                for (int64_t i = 0; i < n; i++) s[i] = fma1(a[(r + i) * up + d], b[(r + i) * up + d], s[i]);
        }
        memcpy(dots + r, s, (size_t)n * sizeof *s);
    }
}

/* p = 2^(scale' q.k - lse), ds = scale p (dp - delta); keys that the row does not see get 0. */
VEC_FN void weights_row(const struct cpu_attn_tile *t, int64_t row, int64_t nv) {
    const struct range r = keys_of(t, row);
    float *p = t->p + row * DEV_KEY_TILE, *ds = t->ds + row * DEV_KEY_TILE;
    const vec scale = vset1(t->scale), scale2 = vset1(t->scale * 1.44269504088896341f);
    const vec lse = vset1(t->lse[row]), delta = vset1(t->delta[row]);
    for (int64_t v = 0; v < TILE_VECS; v++) {
        vec w = vset1(0), g = w;
        if (v < nv) {
            w = keep_keys(vexp2(vsub(vmul(vload(p + v * VEC), scale2), lse)), r, v, 0);
            g = keep_keys(vmul(vmul(w, vsub(vload(ds + v * VEC), delta)), scale), r, v, 0);
        }
        vstore(p + v * VEC, w);
        vstore(ds + v * VEC, g);
    }
}

static void kern_attn_bwd(const struct cpu_attn_tile *t) {
    const int64_t up = vec_up(t->dim), blocks = even_blocks(t->rows, VEC_MR), tile = DEV_KEY_TILE;
    for (int64_t i = 0, r = 0, mr; i < blocks; i++, r += mr) {
        mr = even_size(t->rows, blocks, i);
        const struct range keys = keys_of_rows(t, r, mr);
        const int64_t nv = keys.hi <= keys.lo ? 0 : (keys.hi + VEC - 1) / VEC;
        float *p = t->p + r * tile, *ds = t->ds + r * tile;
        if (nv > 0) {
            mm(&(struct mm){mr, nv * VEC, t->dim, t->q + r * up, up, 1, t->kt, tile, p, tile, false, 0});
            mm(&(struct mm){mr, nv * VEC, t->dim, t->dout + r * up, up, 1, t->vt, tile, ds, tile, false, 0});
        }
        float slope[VEC_MR * DEV_KEY_TILE] __attribute__((aligned(64)));
        if (t->softcap > 0) cap_scores(t, p, mr, nv, slope);
        for (int64_t j = 0; j < mr; j++) weights_row(t, r + j, nv);
        for (int64_t x = 0; t->softcap > 0 && x < mr * tile; x += VEC)
            if (x % tile < nv * VEC) vstore(ds + x, vmul(vload(ds + x), vload(slope + x)));
        if (nv > 0) mm(&(struct mm){mr, up, keys.hi, ds, tile, 1, t->k, up, t->dq + r * up, up, true, 0});
    }
    const int64_t key_blocks = even_blocks(t->n_keys, VEC_MR);
    for (int64_t i = 0, k = 0, mr; i < key_blocks; i++, k += mr) {
        mr = even_size(t->n_keys, key_blocks, i);
        /* rows before the first key's own position see none of these keys */
        const int64_t first = t->key0 + k - t->pos[0], r = first > 0 ? first * t->group : 0;
        if (r >= t->rows) break;
        mm(&(struct mm){mr, t->dim, t->rows - r, t->p + r * tile + k, 1, tile, t->dout + r * up, up, t->dv + k * t->dim, t->dim,
                        true, 0});
        mm(&(struct mm){mr, t->dim, t->rows - r, t->ds + r * tile + k, 1, tile, t->q + r * up, up, t->dk + k * t->dim, t->dim, true,
                        0});
    }
}
