// Long prompts, first half: packed tiles -> INT8 [N, K] in the basis of the model, one scale per output. Compiled by NVRTC.
//
// A step is a block of 8 tiles of outputs at one input tile, one for each warp; its plane words arrive in a ring (cp.async). A CTA
// takes as many steps as every other, without regard to where a block ends.
// The inverse output rotation is a product with the 64 x 64 matrix 8U of whole numbers on the INT8 tensor cores: a plane word gives 16
// outputs of ONE input channel, and `codes_of` makes of it four words of four outputs each, which is what a lane has to hold of B when
// outputs are the contraction. So no byte moves between lanes. The columns of 8U are permuted to fit (lane t of a quad holds word t).
// Sums are exact; they start at the bits of 1.5 * 2^23, so that they are floats as they come, and this start leaves again in the
// multiplication by 1 / scale, which has 22 bits so that start times it is a float (`reference.coarse`). Columns of the product are
// spread so that a lane ends up with 8 adjacent inputs.

#include "prefill_ptx.cu"
#include "prefill_planes.cu"

struct Args {
    Weight w;
    const u8* rotation;       // [., 64, 64] int8, 8U by rows
    const u8* rotation_index; // [n_tiles]
    const float* smoothing;   // [K] or null: inputs are divided by it, so the weight is multiplied
    const float* inverse;     // [N] 1 / scale of the output
    u8* out;                  // [N, K] int8
    int steps_per_cta;        // of blocks x input tiles, in the order of memory: the last input tile of a block, the first of the next
};

constexpr int THREADS = 256, STAGES = 3;
constexpr int FACTOR_AT = STAGES * BLOCK_BYTES, SMOOTHING_AT = FACTOR_AT + STAGES * 32, META_AT = SMOOTHING_AT + STAGES * 256;

__device__ __forceinline__ void load_step(const Args& args, const PlaneReader<THREADS>& planes, u32 base, int first, int s, int slot, const uint2* meta, int kt) {
    planes.load(s, meta[s], slot);
    if (threadIdx.x < 2) copy16(base + FACTOR_AT + slot * 32 + threadIdx.x * 16, args.w.factor + (u64)(first + s) * 8 + threadIdx.x * 4, 16);
    const int i = threadIdx.x - 32;
    if (args.smoothing && i >= 0 && i < 16) copy16(base + SMOOTHING_AT + slot * 256 + i * 16, args.smoothing + kt * 64 + i * 4, 16);
}

// One tile by a warp. from: of the planes, at this lane's column; smoothing: of its 8 inputs, and of the 8 that are 32 further.
template <bool WIDE>
__device__ __forceinline__ void expand_tile(const u32 (&from)[4], bool has3, const u32 (&a)[4][2][4], const float (&inverse)[8], const float (&start)[8], float factor,
                                            const float* smoothing, u8* out, long long k) {
    const int magic[4] = {0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        u32 packed[4][2][2];  // rows, 4 adjacent inputs each
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            float q[4][2][4];  // row block, half, adjacent inputs
            const float4 by = *(const float4*)(smoothing + 32 * half + 4 * pair);
            const float4 f = make_float4(factor * by.x, factor * by.y, factor * by.z, factor * by.w);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 offset = half * 4096 + (2 * pair + i) * 256;
                u32 code[4];
                codes_of<WIDE>(load_shared(from[0] + offset), load_shared(from[1] + offset), WIDE ? load_shared(from[2] + offset) : 0,
                               WIDE && has3 ? load_shared(from[3] + offset) : 0, code);
                const float left = i ? f.z : f.x, right = i ? f.w : f.y;
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    int d[4];
                    mma_s8(d, a[m][0], code[0], code[1], magic);
                    mma_s8(d, a[m][1], code[2], code[3], d);
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        const int row = 2 * m + (c >> 1);
                        const float scaled = fmaf(__int_as_float(d[c]), inverse[row], start[row]);  // the sum's, rounded once
                        q[m][c >> 1][2 * i + (c & 1)] = fmaf(scaled, c & 1 ? right : left, 12582912.0f);
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

// What belongs to a tile's outputs: A of the product, 1 / scale of rows 16 m + g + 8 h (at 2 m + h) and 1.5 * 2^23 times it, negative.
// Slots 4t..4t+3 (+ 16) of step s of A hold outputs 16t + 4i + 2s (+ 1), i = 0..3.
__device__ __forceinline__ void load_outputs(const Args& args, int nt, int g, int t, u32 (&a)[4][2][4], float (&inverse)[8], float (&start)[8]) {
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
    for (int i = 0; i < 8; ++i) {
        inverse[i] = args.inverse[nt * 64 + 8 * i + g];
        start[i] = -12582912.0f * inverse[i];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) expand(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, tile = threadIdx.x >> 5, k_tiles = args.w.k_tiles;
    const int first = blockIdx.x * args.steps_per_cta, steps = min(args.steps_per_cta, (args.w.n_tiles + 7) / 8 * k_tiles - first);
    const u32 base = shared_address(shared);
    uint2* meta = (uint2*)(shared + META_AT);
    const PlaneReader<THREADS> planes(args.w.codes, first, base);
    let_next_start();
    for (int i = threadIdx.x; i < steps; i += THREADS) meta[i] = args.w.meta[first + i];
    if (!args.smoothing && threadIdx.x < STAGES * 64) ((float*)(shared + SMOOTHING_AT))[threadIdx.x] = 1;
    __syncthreads();
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < steps) load_step(args, planes, base, first, s, s, meta, (first + s) % k_tiles);
        copy_commit();
    }

    u32 a[4][2][4] = {};
    float inverse[8] = {}, start[8] = {};
    const long long k = (long long)k_tiles * 64;
    const int column = 8 * (g >> 1) + (g & 1);  // channel of this lane's column in B, plus 2 b + 32 half
    const u32 turn = twist(column), own = base + column * 128 + t * 4;

    wait_for_inputs();  // the workspace may still be read by the product before
    int slot = 0, kt = first % k_tiles, nt = first / k_tiles * 8 + tile, kt_ahead = (first + STAGES - 1) % k_tiles;
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
        if ((s == 0 || kt == 0) && nt < args.w.n_tiles) load_outputs(args, nt, g, t, a, inverse, start);
        copy_wait<STAGES - 2>();
        __syncthreads();  // step s is there, and everybody is through with step s - 1, whose place is the next to be filled
        const int ahead = s + STAGES - 1, to = slot == 0 ? STAGES - 1 : slot - 1;
        if (ahead < steps) load_step(args, planes, base, first, ahead, to, meta, kt_ahead);
        copy_commit();
        kt_ahead = kt_ahead + 1 == k_tiles ? 0 : kt_ahead + 1;
        if (nt < args.w.n_tiles) {
            const u32 masks = meta[s].y, raw = own + slot * BLOCK_BYTES;
            const int rank2 = rank_in(masks & 255, tile), rank3 = rank_in(masks >> 8 & 255, tile);
            const u32 from[4] = {raw + (tile ^ turn) * 16, raw + PLANE_BYTES + (tile ^ turn) * 16, raw + 2 * PLANE_BYTES + (rank2 ^ turn) * 16,
                                 raw + 3 * PLANE_BYTES + (rank3 ^ turn) * 16};
            const float factor = ((const float*)(shared + FACTOR_AT + slot * 32))[tile] * 0.25f;  // tile scale * 2^(bits - 8) / 8
            const float* smoothing = (const float*)(shared + SMOOTHING_AT + slot * 256) + 8 * t;
            u8* out = args.out + ((long long)nt * 64 + g) * k + kt * 64 + 8 * t;
            if (rank2 >= 0)
                expand_tile<true>(from, rank3 >= 0, a, inverse, start, factor, smoothing, out, k);
            else
                expand_tile<false>(from, false, a, inverse, start, factor, smoothing, out, k);
        }
        slot = slot == STAGES - 1 ? 0 : slot + 1;
        if (++kt == k_tiles) {
            kt = 0;
            nt += 8;
        }
    }
}
