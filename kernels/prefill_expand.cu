// Long prompts, first half: packed tiles -> INT8 [N, K] in the basis of the model, one scale per output. Compiled by NVRTC.
//
// A warp owns one tile of 64 outputs and walks over input tiles. The inverse output rotation is a product with the 64 x 64 matrix
// 8U of whole numbers on the INT8 tensor cores: a plane word gives 16 outputs of ONE input channel, and `codes_of` makes of it four
// words of four outputs each, which is what a lane has to hold of B when outputs are the contraction. So no byte moves between
// lanes. The columns of 8U are permuted to fit (lane t of a quad holds word t). Sums are exact; they start at the bits of
// 1.5 * 2^23, so that they are floats as they come. Columns of the product are spread so that a lane ends up with 8 adjacent inputs.

#define WGMMA 0
#include "prefill_ptx.cu"
#include "prefill_planes.cu"

struct Args {
    Weight w;
    const u8* rotation;       // [., 64, 64] int8, 8U by rows
    const u8* rotation_index; // [n_tiles]
    const float* smoothing;   // [K] or null: inputs are divided by it, so the weight is multiplied
    const float* inverse;     // [N] 1 / scale of the output
    u8* out;                  // [N, K] int8
    int tiles_per_cta;        // input tiles
};

constexpr int WARPS = 4;

extern "C" __global__ void __launch_bounds__(WARPS * 32) expand(const __grid_constant__ Args args) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int k_tiles = args.w.k_tiles, parts = (k_tiles + args.tiles_per_cta - 1) / args.tiles_per_cta;
    const int nt = (blockIdx.x / parts) * WARPS + (threadIdx.x >> 5), first = blockIdx.x % parts * args.tiles_per_cta;
    let_next_start();
    if (nt >= args.w.n_tiles) return;
    const int block = nt >> 3, tile = nt & 7;

    // A: rows 16 m + g (+ 8); slots 4t..4t+3 (+ 16) of step s hold outputs 16t + 4i + 2s (+ 1), i = 0..3
    u32 a[4][2][4];
    const u8* rotation = args.rotation + args.rotation_index[nt] * 4096;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const u8* row = rotation + (16 * m + g + (r & 1) * 8) * 64 + 16 * t + 2 * s + (r >> 1);
                a[m][s][r] = row[0] | row[4] << 8 | row[8] << 16 | (u32)row[12] << 24;
            }
    float inverse[8];  // of rows 16 m + g + 8 h, at 2 m + h
#pragma unroll
    for (int i = 0; i < 8; ++i) inverse[i] = args.inverse[nt * 64 + 8 * i + g];
    const long long k = (long long)k_tiles * 64;
    u8* out = args.out + ((long long)nt * 64 + g) * k + 8 * t;
    const int column = 8 * (g >> 1) + (g & 1);  // channel of this lane's column in B, plus 2 b + 32 half
    const int magic[4] = {0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};

    wait_for_inputs();  // the workspace may still be read by the product before
#pragma unroll 1
    for (int kt = first; kt < min(first + args.tiles_per_cta, k_tiles); ++kt) {
        const u32 at = block * k_tiles + kt;
        const TilePlanes planes = tile_planes(args.w.meta[at], at, tile);
        const float factor = args.w.factor[at * 8 + tile] * 0.25f;  // tile scale * 2^(bits - 8) / 8
        const bool wide = planes.stride[2];
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            u32 p[4][4];
#pragma unroll
            for (int q = 0; q < 4; ++q)
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    const u32 channel = 32 * half + column + 2 * b;
                    const u32* from = (const u32*)(args.w.codes + (u64)(planes.first[q] + channel * planes.stride[q]) * 16) + t;
                    p[q][b] = q < 2 || planes.stride[q] ? __ldg(from) : 0;
                }
            u32 packed[4][2][2];  // rows, 4 adjacent inputs each
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                float q[4][2][4];  // row block, half, adjacent inputs
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int b = 2 * pair + i;
                    u32 code[4];
                    if (wide)
                        codes_of<true>(p[0][b] ^ SIGN, p[1][b], p[2][b], p[3][b], code);
                    else
                        codes_of<false>(p[0][b] ^ SIGN, p[1][b], 0, 0, code);
                    float2 f = make_float2(factor, factor);
                    if (args.smoothing) {
                        const float2 s = *(const float2*)(args.smoothing + kt * 64 + 32 * half + 8 * t + 2 * b);
                        f.x *= s.x;
                        f.y *= s.y;
                    }
#pragma unroll
                    for (int m = 0; m < 4; ++m) {
                        int d[4];
                        mma_s8(d, a[m][0], code[0], code[1], magic);
                        mma_s8(d, a[m][1], code[2], code[3], d);
#pragma unroll
                        for (int c = 0; c < 4; ++c) {
                            const float sum = __int_as_float(d[c]) - 12582912.0f;
                            q[m][c >> 1][2 * i + (c & 1)] = fmaf(sum, (c & 1 ? f.y : f.x) * inverse[2 * m + (c >> 1)], 12582912.0f);
                        }
                    }
                }
#pragma unroll
                for (int m = 0; m < 4; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const u32 low = __byte_perm(__float_as_uint(q[m][h][0]), __float_as_uint(q[m][h][1]), 0x0040);
                        const u32 high = __byte_perm(__float_as_uint(q[m][h][2]), __float_as_uint(q[m][h][3]), 0x0040);
                        packed[m][h][pair] = __byte_perm(low, high, 0x5410);
                    }
            }
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    *(uint2*)(out + (16 * m + 8 * h) * k + kt * 64 + 32 * half) = make_uint2(packed[m][h][0], packed[m][h][1]);
        }
    }
}
