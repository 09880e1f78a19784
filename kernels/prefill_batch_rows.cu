// Rows of prefill_batch.cu -> INT8 with one scale per row, `reference.activation_token_ref`, in the order of the tensor core's operand: inputs
// 32 h + 8 i + 2 c + e of 64 stand at place 16 c + 8 h + 2 i + e, and 16-byte pieces of row r change places by r / 2 & 3.
//
// A CTA quantises one row. Set by the compiler's command line: XTYPE (of x: 0 bf16, 1 fp16).

constexpr int THREADS = 256;

#include "prefill_ptx.cu"
#include "prefill_rows.cu"

struct Args {
    const u16* x;             // [rows, K] of XTYPE, rows `stride` elements apart, 16-byte aligned
    const float* unsmoothing; // [K], 1 / smoothing, or null
    u8* q;                    // [K / 64, rows_padded, 64] int8
    float* scale;             // [rows]
    long long stride;
    int k, rows_padded;
};

extern "C" __global__ void __launch_bounds__(THREADS) batch_rows(const __grid_constant__ Args args) {
    constexpr int PIECES = SLOTS;  // of 8 inputs, at most, of a thread
    __shared__ u32 found[WARPS];
    const int row = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    let_next_start();  // its weights may be on their way meanwhile
    wait_for_inputs();
    uint4 raw[PIECES];
    const u16* from = args.x + row * args.stride + threadIdx.x * 8;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        raw[i] = make_uint4(0, 0, 0, 0);
        if (threadIdx.x * 8 + i * THREADS * 8 < args.k) raw[i] = *(const uint4*)(from + i * THREADS * 8);
    }
    float v[PIECES][8], size = 0;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int column = threadIdx.x * 8 + i * THREADS * 8;
        float by[8] = {1, 1, 1, 1, 1, 1, 1, 1};
        if (args.unsmoothing && column < args.k) {
            const float4 low = *(const float4*)(args.unsmoothing + column), high = *(const float4*)(args.unsmoothing + column + 4);
            by[0] = low.x, by[1] = low.y, by[2] = low.z, by[3] = low.w, by[4] = high.x, by[5] = high.y, by[6] = high.z, by[7] = high.w;
        }
        const u32 words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            v[i][k] = from_half((u16)(words[k >> 1] >> (k & 1) * 16), XTYPE) * by[k];
            size = larger(size, v[i][k]);
        }
    }
    const u32 most_here = largest_of_warp(__float_as_uint(size));
    if (lane == 0) found[warp] = most_here;
    __syncthreads();
    const float most = __uint_as_float(largest_of_warp(found[lane % WARPS]));
    const float held = most < 0x1p-100f ? 0x1p-100f : most;  // `reference.SMALLEST`; NaN stays
    if (threadIdx.x == 0) args.scale[row] = held / 127.0f;
    const float unit = 127.0f / held;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int column = threadIdx.x * 8 + i * THREADS * 8, kt = column >> 6, eight = column >> 3 & 7;  // 4 h + i of these inputs
        u32 q[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) q[k] = __float_as_uint(fmaf(v[i][k], unit, 12582912.0f)) & 255;
        u32 two[4];  // inputs 2 c and 2 c + 1
#pragma unroll
        for (int c = 0; c < 4; ++c) two[c] = q[2 * c] | q[2 * c + 1] << 8;
        // A lane with an even eight takes the words of c = 0, 1 of itself and the next lane, the other those of c = 2, 3: four bytes each.
        const u32 low = two[0] | two[1] << 16, high = two[2] | two[3] << 16;
        const bool odd = lane & 1;
        const u32 other = __shfl_xor_sync(FULL, odd ? low : high, 1);
        const u32 first = odd ? other : low, second = odd ? high : other;  // of the even and the odd eight
        if (column >= args.k) continue;
        u8* to = args.q + ((u64)kt * args.rows_padded + row) * 64 + 8 * (eight >> 2) + 4 * (eight >> 1 & 1);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int c = 2 * odd + k;
            *(u32*)(to + ((c ^ (row >> 1 & 3)) << 4)) = __byte_perm(first, second, k ? 0x7632 : 0x5410);
        }
    }
}
