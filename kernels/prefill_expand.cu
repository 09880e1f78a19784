// Long prompts, first half: packed tiles -> INT8 [N, K] in the basis of the model, one scale per output. Compiled by NVRTC.
//
// A CTA owns a block of 8 tiles of outputs, a warp one of them, and walks over input tiles, whose plane words arrive in a ring
// (cp.async). The inverse output rotation is a product with the 64 x 64 matrix 8U of whole numbers on the INT8 tensor cores: a
// plane word gives 16 outputs of ONE input channel, and `codes_of` makes of it four words of four outputs each, which is what a lane
// has to hold of B when outputs are the contraction. So no byte moves between lanes. The columns of 8U are permuted to fit (lane t
// of a quad holds word t). Sums are exact; they start at the bits of 1.5 * 2^23, so that they are floats as they come. Columns of
// the product are spread so that a lane ends up with 8 adjacent inputs.

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

constexpr int THREADS = 256, STAGES = 3;
constexpr int FACTOR_AT = STAGES * BLOCK_BYTES, META_AT = FACTOR_AT + STAGES * 32;

__device__ __forceinline__ void load_step(const Args& args, u32 base, const uint2* meta, int slot, u32 at) {
    load_planes<THREADS>(args.w.codes, *meta, at, base + slot * BLOCK_BYTES);
    if (threadIdx.x < 2) copy16(base + FACTOR_AT + slot * 32 + threadIdx.x * 16, args.w.factor + (u64)at * 8 + threadIdx.x * 4, 16);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) expand(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, tile = threadIdx.x >> 5;
    const int k_tiles = args.w.k_tiles, parts = (k_tiles + args.tiles_per_cta - 1) / args.tiles_per_cta;
    const int block = blockIdx.x / parts, nt = block * 8 + tile, begin = blockIdx.x % parts * args.tiles_per_cta;
    const int steps = min(args.tiles_per_cta, k_tiles - begin);
    const bool active = nt < args.w.n_tiles;
    const u32 base = shared_address(shared), first = block * k_tiles + begin;
    uint2* meta = (uint2*)(shared + META_AT);
    let_next_start();
    if (threadIdx.x < steps) meta[threadIdx.x] = args.w.meta[first + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < steps) load_step(args, base, meta + s, s, first + s);
        copy_commit();
    }

    // A: rows 16 m + g (+ 8); slots 4t..4t+3 (+ 16) of step s hold outputs 16t + 4i + 2s (+ 1), i = 0..3
    u32 a[4][2][4] = {};
    float inverse[8] = {};  // of rows 16 m + g + 8 h, at 2 m + h
    if (active) {
        const u8* rotation = args.rotation + args.rotation_index[nt] * 4096 + g * 64 + 16 * t;
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint4 row = *(const uint4*)(rotation + (16 * m + 8 * h) * 64);  // bytes 4i + j
                const u32 low01 = __byte_perm(row.x, row.y, 0x5140), low23 = __byte_perm(row.z, row.w, 0x5140);
                const u32 high01 = __byte_perm(row.x, row.y, 0x7362), high23 = __byte_perm(row.z, row.w, 0x7362);
                a[m][0][h] = __byte_perm(low01, low23, 0x5410);
                a[m][0][2 + h] = __byte_perm(low01, low23, 0x7632);
                a[m][1][h] = __byte_perm(high01, high23, 0x5410);
                a[m][1][2 + h] = __byte_perm(high01, high23, 0x7632);
            }
#pragma unroll
        for (int i = 0; i < 8; ++i) inverse[i] = args.inverse[nt * 64 + 8 * i + g];
    }
    const long long k = (long long)k_tiles * 64;
    const int column = 8 * (g >> 1) + (g & 1);  // channel of this lane's column in B, plus 2 b + 32 half
    const u32 turn = twist(column), own = base + column * 128 + t * 4;
    const int magic[4] = {0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};

    wait_for_inputs();  // the workspace may still be read by the product before
    int slot = 0;
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
        copy_wait<STAGES - 2>();
        __syncthreads();  // step s is there, and everybody is through with step s - 1, whose place is the next to be filled
        const int ahead = s + STAGES - 1, to = slot == 0 ? STAGES - 1 : slot - 1;
        if (ahead < steps) load_step(args, base, meta + ahead, to, first + ahead);
        copy_commit();
        const int kt = begin + s;
        const u32 masks = meta[s].y, raw = own + slot * BLOCK_BYTES;
        const float factor = ((const float*)(shared + FACTOR_AT + slot * 32))[tile] * 0.25f;  // tile scale * 2^(bits - 8) / 8
        slot = slot == STAGES - 1 ? 0 : slot + 1;
        if (!active) continue;
        const int rank2 = rank_in(masks & 255, tile), rank3 = rank_in(masks >> 8 & 255, tile);
        const u32 from = raw + (tile ^ turn) * 16;
        const u32 from2 = raw + 2 * PLANE_BYTES + (rank2 ^ turn) * 16, from3 = raw + 3 * PLANE_BYTES + (rank3 ^ turn) * 16;
        const float* smoothing = args.smoothing ? args.smoothing + kt * 64 + 8 * t : nullptr;
        u8* out = args.out + ((long long)nt * 64 + g) * k + kt * 64 + 8 * t;
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            u32 packed[4][2][2];  // rows, 4 adjacent inputs each
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                float q[4][2][4];  // row block, half, adjacent inputs
                float4 f = make_float4(factor, factor, factor, factor);
                if (smoothing) {
                    const float4 by = *(const float4*)(smoothing + 32 * half + 4 * pair);
                    f = make_float4(factor * by.x, factor * by.y, factor * by.z, factor * by.w);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const u32 offset = half * 4096 + (2 * pair + i) * 256;
                    const u32 p0 = load_shared(from + offset), p1 = load_shared(from + PLANE_BYTES + offset);
                    u32 code[4];
                    if (rank2 >= 0)
                        codes_of<true>(p0, p1, load_shared(from2 + offset), rank3 >= 0 ? load_shared(from3 + offset) : 0, code);
                    else
                        codes_of<false>(p0, p1, 0, 0, code);
                    const float left = i ? f.z : f.x, right = i ? f.w : f.y;
#pragma unroll
                    for (int m = 0; m < 4; ++m) {
                        int d[4];
                        mma_s8(d, a[m][0], code[0], code[1], magic);
                        mma_s8(d, a[m][1], code[2], code[3], d);
#pragma unroll
                        for (int c = 0; c < 4; ++c) {
                            const float sum = __int_as_float(d[c]) - 12582912.0f;
                            q[m][c >> 1][2 * i + (c & 1)] = fmaf(sum, (c & 1 ? right : left) * inverse[2 * m + (c >> 1)], 12582912.0f);
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
                    *(uint2*)(out + (16 * m + 8 * h) * k + 32 * half) = make_uint2(packed[m][h][0], packed[m][h][1]);
        }
    }
}
