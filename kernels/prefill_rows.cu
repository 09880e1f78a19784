// Part of prefill_expand.cu: rows of a long prompt -> INT8 with one scale per row, `reference.activation_token_ref`.
//
// A thread holds SLOTS pieces of 8 adjacent inputs: CHUNKS of a row (a chunk is 8 inputs of every thread), SLOTS / CHUNKS rows at once.
// The next rows are on their way while these are looked at.

constexpr int SLOTS = 16384 / (8 * THREADS), WARPS = THREADS / 32;

struct Rows {
    const u16* x;             // [rows, K] of XTYPE
    const float* unsmoothing; // [K], 1 / smoothing, or null
    u8* q;                    // [rows, K] int8
    float* scale;             // [rows]
    long long stride;         // of x
    int count, first_cta, per_cta;  // rows of CTA b: per_cta from (b - first_cta) * per_cta on
};

// The larger magnitude; NaN where either is.
__device__ __forceinline__ float larger(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(fabsf(b)));
    return r;
}
// Of a warp, as bits: those of NaN are above all.
__device__ __forceinline__ u32 largest_of_warp(u32 v) {
    u32 r;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
    return r;
}

__device__ __forceinline__ void store_shared(u32 at, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
__device__ __forceinline__ void store_shared4(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void store_shared4(u32 at, float a, float b, float c, float d) {
    store_shared4(at, __float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
}
__device__ __forceinline__ uint4 load_shared4(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

// Rows [row, last). by: in shared memory, what inputs are multiplied by, zeros beyond K; found: 2 * SLOTS * WARPS words there.
template <int CHUNKS>
__device__ __forceinline__ void quantize(const Rows& rows, u32 k, int row, int last, u32 by, u32 found) {
    constexpr int AT_ONCE = SLOTS / CHUNKS, CHUNK = THREADS * 8;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = threadIdx.x * 8;
    uint4 next[SLOTS];
    const auto load = [&](int first) {
#pragma unroll
        for (int r = 0; r < AT_ONCE; ++r) {
            const u16* from = rows.x + (first + r) * rows.stride + column;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                next[r * CHUNKS + c] = make_uint4(0, 0, 0, 0);
                if (first + r < last && column + c * CHUNK < k) next[r * CHUNKS + c] = __ldcs((const uint4*)(from + c * CHUNK));
            }
        }
    };
    load(row);
#pragma unroll 1
    for (u32 half = 0; row < last; row += AT_ONCE, half ^= SLOTS * WARPS) {
        float v[SLOTS][8], size[AT_ONCE] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const uint4 low = load_shared4(by + (column + c * CHUNK) * 4), high = load_shared4(by + (column + c * CHUNK) * 4 + 16);
            const u32 factors[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int r = 0; r < AT_ONCE; ++r) {
                const uint4 raw = next[r * CHUNKS + c];
                const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float x = from_half((u16)(words[i >> 1] >> (i & 1) * 16), XTYPE) * __uint_as_float(factors[i]);
                    v[r * CHUNKS + c][i] = x, size[r] = larger(size[r], x);
                }
            }
        }
        load(row + AT_ONCE);
#pragma unroll
        for (int r = 0; r < AT_ONCE; ++r) {
            const u32 most = largest_of_warp(__float_as_uint(size[r]));
            if (lane == 0) store_shared(found + (half + r * WARPS + warp) * 4, most);
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < AT_ONCE; ++r) {
            const float most = __uint_as_float(largest_of_warp(load_shared(found + (half + r * WARPS + lane % WARPS) * 4)));
            const float held = most < 0x1p-100f ? 0x1p-100f : most;  // `reference.SMALLEST`; NaN stays
            if (row + r >= last) continue;
            if (threadIdx.x == r) rows.scale[row + r] = held / 127.0f;
            const float unit = 127.0f / held;
            u8* to = rows.q + (u64)(row + r) * k + column;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                u32 q[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) q[i] = __float_as_uint(fmaf(v[r * CHUNKS + c][i], unit, 12582912.0f));
                const u32 low = __byte_perm(__byte_perm(q[0], q[1], 0x0040), __byte_perm(q[2], q[3], 0x0040), 0x5410);
                const u32 high = __byte_perm(__byte_perm(q[4], q[5], 0x0040), __byte_perm(q[6], q[7], 0x0040), 0x5410);
                if (column + c * CHUNK < k) *(uint2*)(to + c * CHUNK) = make_uint2(low, high);
            }
        }
    }
}

// Inputs that `quantize_rows` takes K for: SLOTS pieces of a thread are a power of two of rows.
__device__ __forceinline__ u32 padded(u32 k) {
    u32 size = THREADS * 8;
    while (size < k) size *= 2;
    return size;
}

// What inputs are multiplied by, to shared memory at `by`, and zeros behind.
__device__ __forceinline__ void load_factors(const Rows& rows, u32 k, u32 by) {
    for (u32 i = threadIdx.x * 4, end = padded(k); i < end; i += THREADS * 4)
        if (rows.unsmoothing)
            copy16(by + i * 4, rows.unsmoothing + (i < k ? i : 0), i < k ? 16 : 0);
        else
            store_shared4(by + i * 4, 1.0f, 1.0f, 1.0f, 1.0f);
}

// This CTA's rows; `by` and `found` as in `quantize`.
__device__ __forceinline__ void quantize_rows(const Rows& rows, u32 k, u32 by, u32 found) {
    const int row = ((int)blockIdx.x - rows.first_cta) * rows.per_cta, last = min(row + rows.per_cta, rows.count);
    if (row < 0) return;
    switch (padded(k) / (THREADS * 8)) {
        case 1: return quantize<1>(rows, k, row, last, by, found);
        case 2: return quantize<2>(rows, k, row, last, by, found);
        case 4: return quantize<4>(rows, k, row, last, by, found);
        default: return quantize<8>(rows, k, row, last, by, found);
    }
}
