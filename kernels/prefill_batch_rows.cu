// Rows of prefill_batch.cu -> INT8 with one scale per row, `reference.activation_token_ref`, in the order of the tensor core's operand: inputs
// 32 h + 8 i + 2 c + e of 64 stand at place 16 c + 8 h + 2 i + e, and 16-byte pieces of row r change places by r / 2 & 3.
//
// A CTA quantises one row. It is small enough to wait beside a CTA of prefill_batch.cu, whose successor it serves, and reads its row twice
// rather than keep it. Set by the compiler's command line: XTYPE (of x: 0 bf16, 1 fp16).

constexpr int THREADS = 128;

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

// Eight inputs from `column` on, divided by their smoothing.
__device__ __forceinline__ void load(float (&v)[8], const Args& args, int column) {
    const uint4 raw = *(const uint4*)(args.x + blockIdx.x * args.stride + column);
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = from_half((u16)(words[k >> 1] >> (k & 1) * 16), XTYPE);
    if (!args.unsmoothing) return;
    const float4 low = *(const float4*)(args.unsmoothing + column), high = *(const float4*)(args.unsmoothing + column + 4);
    const float by[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] *= by[k];
}

extern "C" __global__ void __launch_bounds__(THREADS, 2048 / THREADS) batch_rows(const __grid_constant__ Args args) {
    __shared__ u32 found[WARPS];
    const int row = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    let_next_start();  // its weights may be on their way meanwhile
    wait_for_inputs();
    float size = 0, v[8];
#pragma unroll 2
    for (int column = threadIdx.x * 8; column < args.k; column += THREADS * 8) {
        load(v, args, column);
#pragma unroll
        for (int k = 0; k < 8; ++k) size = larger(size, v[k]);
    }
    const u32 most_here = largest_of_warp(__float_as_uint(size));
    if (lane == 0) found[warp] = most_here;
    __syncthreads();
    const float most = __uint_as_float(largest_of_warp(found[lane % WARPS]));
    const float held = most < 0x1p-100f ? 0x1p-100f : most;  // `reference.SMALLEST`; NaN stays
    if (threadIdx.x == 0) args.scale[row] = held / 127.0f;
    const float unit = 127.0f / held;
#pragma unroll 1
    for (int column = threadIdx.x * 8; column < (args.k + 255) / 256 * 256; column += THREADS * 8) {
        u32 two[4] = {};  // inputs 2 c and 2 c + 1
        if (column < args.k) {
            load(v, args, column);
#pragma unroll
            for (int c = 0; c < 4; ++c)
                two[c] = __float_as_uint(fmaf(v[2 * c], unit, 12582912.0f)) & 255 | (__float_as_uint(fmaf(v[2 * c + 1], unit, 12582912.0f)) & 255) << 8;
        }
        // Of neighbours, the lane with an even eight stores the words of c = 0, 1, the other those of c = 2, 3: four bytes each.
        const u32 low = two[0] | two[1] << 16, high = two[2] | two[3] << 16;
        const bool odd = lane & 1;
        const u32 other = __shfl_xor_sync(FULL, odd ? low : high, 1);
        const u32 first = odd ? other : low, second = odd ? high : other;  // of the even and the odd eight
        if (column >= args.k) continue;
        const int eight = column >> 3 & 7;  // 4 h + i of these inputs
        u8* to = args.q + ((u64)(column >> 6) * args.rows_padded + row) * 64 + 8 * (eight >> 2) + 4 * (eight >> 1 & 1);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int c = 2 * odd + k;
            *(u32*)(to + ((c ^ (row >> 1 & 3)) << 4)) = __byte_perm(first, second, k ? 0x7632 : 0x5410);
        }
    }
}
