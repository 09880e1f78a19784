// Rows of prefill_batch.cu -> INT8 with one scale per row, `reference.activation_token_ref`, in the order of the tensor core's operand: inputs
// 32 h + 8 i + 2 c + e of 64 stand at place 32 h + 8 c + 2 i + e, and 16-byte pieces of row r change places by r / 2 & 3.
//
// Few long rows: the CTAs of a cluster quantise one. They are small enough to wait beside a CTA of prefill_batch.cu, whose successor they serve:
// four warps of 32 registers, whose factors are loaded by then. Of many, not all would find room, and those that do not keep the next product's
// CTAs waiting: then a CTA has a whole row and as many registers as it likes, so that few multiprocessors hold all of them. So it is with
// short rows, which need no cluster.
// Set by the compiler's command line: XTYPE (of x: 0 bf16, 1 fp16), THREADS, PIECES (of 8 inputs, of a thread: 1 or 2, in clusters; 4).

#define FORM FEW  // of prefill_rows.cu only what is common
#include "prefill_ptx.cu"
#include "prefill_rows.cu"

struct Args {
    const u16* x;             // [rows, K] of XTYPE, rows `stride` elements apart, 16-byte aligned
    const float* unsmoothing; // [K], 1 / smoothing, or null
    u8* q;                    // [K / 64, rows_padded, 64] int8
    float* scale;             // [rows]
    long long stride;
    int k, rows_padded, ctas;  // of a cluster, up to 8
};

// INT8 of two inputs, in the lower bytes.
__device__ __forceinline__ u32 codes(float a, float b, float unit) {
    return __byte_perm(__float_as_uint(fmaf(a, unit, 12582912.0f)), __float_as_uint(fmaf(b, unit, 12582912.0f)), 0x0040) & 0xffff;
}

extern "C" __global__ void __launch_bounds__(THREADS, (PIECES == 4 ? 1024 : 2048) / THREADS) batch_rows(const __grid_constant__ Args args) {
    __shared__ u32 found[32];
    const int ctas = args.ctas, row = blockIdx.x / ctas, rank = blockIdx.x % ctas, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int begin = rank * (PIECES * THREADS * 8) + threadIdx.x * 8;
    if (threadIdx.x < 32) found[threadIdx.x] = 0;
    let_next_start();  // its weights may be on their way meanwhile
    float by[PIECES][8];
    uint4 raw[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int column = begin + i * THREADS * 8 + 4 * h;
            float4 four = make_float4(1, 1, 1, 1);
            if (args.unsmoothing && column < args.k) four = *(const float4*)(args.unsmoothing + column);
            by[i][4 * h] = four.x, by[i][4 * h + 1] = four.y, by[i][4 * h + 2] = four.z, by[i][4 * h + 3] = four.w;
        }
    if (ctas > 1) cluster_arrive(), cluster_wait();
    wait_for_inputs();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int column = begin + i * THREADS * 8;
        raw[i] = column < args.k ? *(const uint4*)(args.x + row * args.stride + column) : make_uint4(0, 0, 0, 0);
    }
    // What is quantised of input j of piece i.
    const auto smoothed = [&](int i, int j) {
        const u32 word = j < 4 ? j < 2 ? raw[i].x : raw[i].y : j < 6 ? raw[i].z : raw[i].w;
        return from_half((u16)(word >> (j & 1) * 16), XTYPE) * by[i][j];
    };
    float size = 0;
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) size = larger(size, smoothed(i, j));
    const u32 most_here = largest_of_warp(__float_as_uint(size));
    if (ctas > 1) {
        if (lane < ctas) {
            const u32 at = address_in(shared_address(found + rank * WARPS + warp), lane);
            asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(at), "r"(most_here) : "memory");
        }
        cluster_arrive();
        cluster_wait();
    } else {
        if (lane == 0) found[warp] = most_here;
        __syncthreads();
    }
    const float most = __uint_as_float(largest_of_warp(found[lane]));
    const float held = most < 0x1p-100f ? 0x1p-100f : most;  // `reference.SMALLEST`; NaN stays
    if (threadIdx.x == 0 && rank == 0) args.scale[row] = held / 127.0f;
    const float unit = 127.0f / held;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int column = begin + i * THREADS * 8;
        const u32 low = codes(smoothed(i, 0), smoothed(i, 1), unit) | codes(smoothed(i, 2), smoothed(i, 3), unit) << 16;
        const u32 high = codes(smoothed(i, 4), smoothed(i, 5), unit) | codes(smoothed(i, 6), smoothed(i, 7), unit) << 16;
        // Of neighbours, the lane with an even eight stores the words of c = 0, 1, the other those of c = 2, 3: four bytes each.
        const bool odd = lane & 1;
        const u32 other = __shfl_xor_sync(FULL, odd ? low : high, 1);
        const u32 even_eight = odd ? other : low, odd_eight = odd ? high : other;
        const int eight = column >> 3 & 7;  // 4 h + i of these inputs
        u8* to = args.q + ((u64)(column >> 6) * args.rows_padded + row) * 64 + 4 * (eight >> 1 & 1);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int c = 2 * odd + k;
            if (column < args.k) *(u32*)(to + (32 * (eight >> 2) + 8 * c ^ (row >> 1 & 3) << 4)) = __byte_perm(even_eight, odd_eight, k ? 0x7632 : 0x5410);
        }
    }
}
