// Part of prefill_expand.cu: rows of a long prompt -> INT8 with one scale per row, `reference.activation_token_ref`.
//
// A thread holds SLOTS pieces of 8 adjacent inputs: CHUNKS of a row (a chunk is 8 inputs of every thread), SLOTS / CHUNKS rows at once.
// The next rows are on their way while these are looked at; where there are many, those after them are on their way to the L2 cache.

#define FEW 0
#define SOME 1
#define MANY 2
#ifndef FORM  // in prefill_batch_rows.cu, which takes what is common
#define FORM SOME
#endif

constexpr int SLOTS = FORM == FEW ? 4 : 16384 / (8 * THREADS), WARPS = THREADS / 32;

struct Rows {
    const u16* x;             // [rows, K] of XTYPE
    const float* unsmoothing; // [K], 1 / smoothing, or null
    u8* q;                    // [rows, K] int8
    float* scale;             // [rows]
    long long stride;         // of x
    int count, first_cta, per_cta;  // rows of CTA b: per_cta from (b - first_cta) * per_cta on
    u32* asked;               // MANY: how often CTAs asked for rows; 0 between launches
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

__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
// Rows [first, first + count), those below `last`.
__device__ __forceinline__ void prefetch_rows(const Rows& rows, u32 k, int first, int last, int count) {
#pragma unroll
    for (int r = 0; r < count; ++r)
        if (first + r < last && threadIdx.x * 64 < k) prefetch(rows.x + (first + r) * rows.stride + threadIdx.x * 64);
}

// Asks for rows [first, last), as many as are looked at at once: 2^chunks_log chunks of each.
__device__ __forceinline__ void ask_for(const Rows& rows, u32 k, int first, int last, u32 chunks_log, uint4 (&next)[SLOTS]) {
#pragma unroll
    for (u32 s = 0; s < SLOTS; ++s) {
        const int row = first + (s >> chunks_log);
        const u32 column = threadIdx.x * 8 + (s & ((1u << chunks_log) - 1)) * (THREADS * 8);
        next[s] = make_uint4(0, 0, 0, 0);
        if (row < last && column < k) next[s] = __ldcs((const uint4*)(rows.x + row * rows.stride + column));
    }
}

// What a thread's inputs are multiplied by, two pieces of a row.
__device__ __forceinline__ void ask_for_factors(const Rows& rows, u32 k, uint4 (&factors)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 column = threadIdx.x * 8 + (i >> 1) * (THREADS * 8) + (i & 1) * 4;
        factors[i] = make_uint4(0x3f800000, 0x3f800000, 0x3f800000, 0x3f800000);
        if (rows.unsmoothing && column < k) factors[i] = *(const uint4*)(rows.unsmoothing + column);
    }
}

// Rows [row, last), the first of which `ask_for` has asked for. What inputs are multiplied by: FEW: `factors`, else at `by` in shared
// memory, zeros beyond K. found: 2 * SLOTS * WARPS + 2 words there.
// MANY: AT_ONCE rows at a time; the first three times are a CTA's own, further rows go to whoever asks first, three times ahead.
template <int CHUNKS_LOG>
__device__ __forceinline__ void quantize(const Rows& rows, u32 k, int row, int last, u32 by, u32 found, uint4 (&next)[SLOTS], const uint4* factors = nullptr) {
    constexpr int CHUNKS = 1 << CHUNKS_LOG, AT_ONCE = SLOTS / CHUNKS, CHUNK = THREADS * 8;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = threadIdx.x * 8, tickets = found + 2 * SLOTS * WARPS * 4;
    int following = row + (FORM == MANY ? gridDim.x : 1) * AT_ONCE, drawn = following + gridDim.x * AT_ONCE;
    u32 turn = 0;
    if (FORM == MANY && threadIdx.x == 0) store_shared(tickets, drawn);
#pragma unroll 1
    for (u32 half = 0; row < last; half ^= SLOTS * WARPS) {
        float v[SLOTS][8], size[AT_ONCE] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const uint4 low = FORM == FEW ? factors[2 * c] : load_shared4(by + (column + c * CHUNK) * 4);
            const uint4 high = FORM == FEW ? factors[2 * c + 1] : load_shared4(by + (column + c * CHUNK) * 4 + 16);
            const u32 multiply[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int r = 0; r < AT_ONCE; ++r) {
                if (FORM == FEW && r && row + r >= last) continue;
                const uint4 raw = next[r * CHUNKS + c];
                const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float x = from_half((u16)(words[i >> 1] >> (i & 1) * 16), XTYPE) * __uint_as_float(multiply[i]);
                    v[r * CHUNKS + c][i] = x, size[r] = larger(size[r], x);
                }
            }
        }
        if (FORM != FEW || following < last) ask_for(rows, k, following, last, CHUNKS_LOG, next);
        if (FORM == MANY && threadIdx.x == 0 && drawn < last) {
            const u32 ticket = atomicAdd(rows.asked, 1u), times = (last + AT_ONCE - 1) / AT_ONCE;
            drawn = (int)(ticket + 3 * gridDim.x) * AT_ONCE;
            if (ticket == times - 2 * gridDim.x - 1) *rows.asked = 0;  // everybody asks once in vain, and this was the last
        }
#pragma unroll
        for (int r = 0; r < AT_ONCE; ++r) {
            const u32 most = largest_of_warp(__float_as_uint(size[r]));
            if (lane == 0) store_shared(found + (half + r * WARPS + warp) * 4, most);
        }
        __syncthreads();
        const int after = FORM == MANY ? load_shared(tickets + turn) : following + AT_ONCE;
        if (FORM == MANY) prefetch_rows(rows, k, after, last, AT_ONCE);
        turn ^= 4;
#pragma unroll
        for (int r = 0; r < AT_ONCE; ++r) {
            if (row + r >= last) continue;
            const float most = __uint_as_float(largest_of_warp(load_shared(found + (half + r * WARPS + lane % WARPS) * 4)));
            const float held = most < 0x1p-100f ? 0x1p-100f : most;  // `reference.SMALLEST`; NaN stays
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
        if (FORM == MANY && threadIdx.x == 0) store_shared(tickets + turn, drawn);
        row = following, following = after;
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

// log2 of the chunks of a row.
__device__ __forceinline__ u32 chunks_log(u32 k) { return 31 - __clz(padded(k) / (THREADS * 8)); }

#if FORM != FEW
// This CTA's rows; `by`, `found` and `next` as in `quantize`.
__device__ __forceinline__ void quantize_rows(const Rows& rows, u32 k, int row, int last, u32 by, u32 found, uint4 (&next)[SLOTS]) {
    switch (chunks_log(k)) {
        case 0: return quantize<0>(rows, k, row, last, by, found, next);
        case 1: return quantize<1>(rows, k, row, last, by, found, next);
        case 2: return quantize<2>(rows, k, row, last, by, found, next);
        default: return quantize<3>(rows, k, row, last, by, found, next);
    }
}
#endif
