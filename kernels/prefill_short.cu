// Mid-size batches: y = x W^T for some rows, the weight expanded inside. Compiled by NVRTC for compute capability 9.0.
//
// A CTA of two warpgroups owns 128 outputs (one tile a warpgroup) and TOKENS rows, and walks over its input tiles two at a time:
// plane words and INT8 rows arrive in a ring (cp.async); the warps transpose and merge the words of step s + 1 into INT8 codes
// in shared memory while the matrix units (wgmma, rows of 128 bytes) multiply step s. The integer sums of each 64 inputs are
// scaled by row and tile and added in float32, tiles in ascending order. The CTAs of a cluster split the input tiles and send their
// sums to the one that finishes a row: adds them in ascending order, rotates the outputs back, adds the bias, rounds once.
// Inputs of a tile stand in the order that `prefill_triton.quantize` writes: position 4q + i holds input q + 16 i.
//
// Set by the compiler's command line: XTYPE (of y: 0 bf16, 1 fp16, 2 float32), TOKENS (16, 32, 64).

#define WGMMA 1
#include "prefill_ptx.cu"
#include "prefill_planes.cu"

struct Args {
    Weight w;
    const u8* x;         // [rows, k_tiles * 64] int8, in the order above
    const float* scale;  // [k_tiles, scale_stride] of rows
    const u8* transform; // [n_tiles] row of `table`, 255 for the identity
    const u8* table;     // [., 64]: bits 0-5 permutation, 6 left sign, 7 right sign
    const void* bias;    // [n_tiles * 64] or null
    void* y;             // [rows, n_tiles * 64], rows y_stride elements apart
    long long y_stride;
    int rows, scale_stride, splits, bias_type;
};

constexpr int STAGES = 3, THREADS = 256;
constexpr int CODE_BYTES = 2 * 64 * 128;         // [2 tiles][64 outputs][128 inputs], 128-byte swizzle
constexpr int X_BYTES = TOKENS * 128;            // [TOKENS][128 inputs], 128-byte swizzle
constexpr int RAW_BYTES = 4 * 2 * 2 * 64 * 16;   // [plane][input tile][tile][64 channels][4 words]
constexpr int SCALE_BYTES = 2 * TOKENS * 4;      // [input tile][TOKENS]
constexpr int RECEIVED = 132;                    // floats of a received row: 128 and a shift of banks
constexpr int X_AT = 2 * CODE_BYTES, RAW_AT = X_AT + STAGES * X_BYTES, SCALE_AT = RAW_AT + STAGES * RAW_BYTES;
constexpr int LIST_AT = SCALE_AT + STAGES * SCALE_BYTES;  // [steps * 2] uint4: meta, and the factors of two tiles
static_assert(TOKENS * RECEIVED * 4 <= LIST_AT);

#if XTYPE == 2
typedef float Output;
__device__ __forceinline__ float rounded(float f) { return f; }
#else
typedef u16 Output;
__device__ __forceinline__ u16 rounded(float f) { return to_half(f, XTYPE); }
#endif

// Planes of two input tiles and two output tiles, one step: 16 bytes per thread and plane.
__device__ __forceinline__ void load_planes(const Weight& w, const uint4* list, u32 raw, int kt, int block, int pair, int missing) {
    const int tile = threadIdx.x & 1, channel = threadIdx.x >> 1 & 63, half = threadIdx.x >> 7;
    const bool there = kt + half < w.k_tiles && !(tile && missing);
    const uint4 entry = list[half];
    const TilePlanes planes = tile_planes(make_uint2(entry.x, entry.y), block * w.k_tiles + kt + half, 2 * pair + tile);
    const u32 to = raw + (half * 2 + tile) * 1024 + channel * 16;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const bool wanted = there && planes.stride[p];
        const u64 unit = wanted ? planes.first[p] + channel * planes.stride[p] : 0;
        copy16(to + p * 4096, w.codes + unit * 16, wanted ? 16 : 0);
    }
}

__device__ __forceinline__ void load_rows(const Args& args, u32 x, u32 scale, int kt, int first_row) {
    const long long k = (long long)args.w.k_tiles * 64;
#pragma unroll
    for (int i = threadIdx.x; i < TOKENS * 8; i += THREADS) {
        const int row = i >> 3, chunk = i & 7;
        const bool wanted = first_row + row < args.rows && kt + (chunk >> 2) < args.w.k_tiles;
        const u8* from = wanted ? args.x + (first_row + row) * k + kt * 64 + chunk * 16 : args.x;
        copy16(x + row * 128 + ((chunk ^ row & 7) << 4), from, wanted ? 16 : 0);
    }
    if (threadIdx.x < 2 * TOKENS) {
        const int row = threadIdx.x % TOKENS, half = threadIdx.x / TOKENS;
        const bool wanted = first_row + row < args.rows && kt + half < args.w.k_tiles;
        const float* from = wanted ? args.scale + (long long)(kt + half) * args.scale_stride + first_row + row : args.scale;
        copy4(scale + threadIdx.x * 4, from, wanted ? 4 : 0);
    }
}

// Words of one step -> codes of a tile. A lane takes four channels (q + 16 i of one input tile) and 16 outputs: word `word` of each.
__device__ __forceinline__ void expand(u32 raw, u32 codes, bool wide, int tile, int task, int lane) {
    const int q = lane & 15, half = lane >> 4, word = (task + (lane >> 3)) & 3;
    const u32 from = raw + (half * 2 + tile) * 1024 + q * 16 + word * 4;
    u32 bytes[4][4];  // plane, byte of the words: four channels
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        if (p >= 2 && !wide) break;
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = load_shared(from + p * 4096 + i * 256);
        const u32 a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
        const u32 c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
        bytes[p][0] = __byte_perm(a, b, 0x5410);
        bytes[p][1] = __byte_perm(a, b, 0x7632);
        bytes[p][2] = __byte_perm(c, d, 0x5410);
        bytes[p][3] = __byte_perm(c, d, 0x7632);
    }
    const u32 chunk = half * 4 + (q >> 2), to = codes + tile * 8192 + word * 2048 + (q & 3) * 4;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        u32 code[4];
        if (wide)
            codes_of<true>(bytes[0][t] ^ SIGN, bytes[1][t], bytes[2][t], bytes[3][t], code);
        else
            codes_of<false>(bytes[0][t] ^ SIGN, bytes[1][t], 0, 0, code);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = 4 * t + j;  // of the word's 16 outputs
            store_shared(to + row * 128 + ((chunk ^ row & 7) << 4), code[j]);
        }
    }
}

__device__ __forceinline__ void scale_sums(float (&total)[TOKENS / 2], const int (&sums)[TOKENS / 2], const float* scale, float factor, int t) {
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j) {
        const float2 s = *(const float2*)(scale + 8 * j + 2 * t);
        const float left = s.x * factor, right = s.y * factor;
        total[4 * j] = fmaf((float)sums[4 * j], left, total[4 * j]);
        total[4 * j + 1] = fmaf((float)sums[4 * j + 1], right, total[4 * j + 1]);
        total[4 * j + 2] = fmaf((float)sums[4 * j + 2], left, total[4 * j + 2]);
        total[4 * j + 3] = fmaf((float)sums[4 * j + 3], right, total[4 * j + 3]);
    }
}

// One row of one tile by a warp: lane holds sums of outputs `lane` and `lane + 32`.
__device__ __forceinline__ void finish_row(const Args& args, float lo, float hi, int nt, long long row, int lane) {
    const u32 transform = args.transform[nt];
    if (transform != 255) {
        const u32 code_lo = args.table[transform * 64 + lane], code_hi = args.table[transform * 64 + lane + 32];
        lo = code_lo & 128 ? -lo : lo;
        hi = code_hi & 128 ? -hi : hi;
        const float sum = lo + hi, difference = lo - hi;
        lo = sum;
        hi = difference;
#pragma unroll
        for (int d = 16; d; d >>= 1) {
            const float lo_there = __shfl_xor_sync(FULL, lo, d), hi_there = __shfl_xor_sync(FULL, hi, d);
            lo = lane & d ? lo_there - lo : lo + lo_there;
            hi = lane & d ? hi_there - hi : hi + hi_there;
        }
        const float a = __shfl_sync(FULL, lo, code_lo & 31), b = __shfl_sync(FULL, hi, code_lo & 31);
        const float c = __shfl_sync(FULL, lo, code_hi & 31), d = __shfl_sync(FULL, hi, code_hi & 31);
        lo = (code_lo & 32 ? b : a) * (code_lo & 64 ? -0.125f : 0.125f);
        hi = (code_hi & 32 ? d : c) * (code_hi & 64 ? -0.125f : 0.125f);
    }
    const int n = nt * 64 + lane;
    if (args.bias) {
        if (args.bias_type == 2) {
            lo += ((const float*)args.bias)[n];
            hi += ((const float*)args.bias)[n + 32];
        } else {
            lo += from_half(((const u16*)args.bias)[n], args.bias_type);
            hi += from_half(((const u16*)args.bias)[n + 32], args.bias_type);
        }
    }
    Output* y = (Output*)args.y + row * args.y_stride;
    y[n] = rounded(lo);
    y[n + 32] = rounded(hi);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) short_rows(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = warp >> 2, g = lane >> 2, t = lane & 3;
    const int splits = args.splits, split = blockIdx.x % splits, row_blocks = (args.rows + TOKENS - 1) / TOKENS;
    const int first_row = blockIdx.x / splits % row_blocks * TOKENS, part = blockIdx.x / splits / row_blocks;
    const int block = part >> 2, pair = part & 3, missing = 2 * part + 1 >= args.w.n_tiles;
    const int all_steps = (args.w.k_tiles + 1) >> 1, per_split = (all_steps + splits - 1) / splits;
    const int begin = min(split * per_split, all_steps), steps = min(begin + per_split, all_steps) - begin;

    const u32 base = shared_address(shared);
    uint4* list = (uint4*)(shared + LIST_AT);
    for (int i = threadIdx.x; i < 2 * steps; i += THREADS) {
        const int kt = 2 * begin + i;
        uint4 entry = make_uint4(0, 0, 0, 0);
        if (kt < args.w.k_tiles) {
            const int at = block * args.w.k_tiles + kt;
            const uint2 meta = args.w.meta[at];
            const float2 factors = *(const float2*)(args.w.factor + (long long)at * 8 + 2 * pair);
            entry = make_uint4(meta.x, meta.y, __float_as_uint(2 * factors.x), __float_as_uint(2 * factors.y));
        }
        list[i] = entry;
    }
    __syncthreads();
    // the weight may be read before the rows are there
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
        if (s < steps) load_planes(args.w, list + 2 * s, base + RAW_AT + s * RAW_BYTES, 2 * (begin + s), block, pair, missing);
    wait_for_inputs();
    let_next_start();
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < steps) load_rows(args, base + X_AT + s * X_BYTES, base + SCALE_AT + s * SCALE_BYTES, 2 * (begin + s), first_row);
        copy_commit();  // the planes of both go with the first: it waits for a little more than it needs
    }

    float total[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) total[i] = 0;
    auto is_wide = [&](int s) { return (list[2 * s].y | list[2 * s + 1].y) >> (2 * pair + group) & 1; };
    if (steps > 0) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        expand(base + RAW_AT, base, is_wide(0), group, warp & 3, lane);
        fence_shared_for_wgmma();
        __syncthreads();
    }
    int slot = 0;
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
        int first[TOKENS / 2], second[TOKENS / 2];
        const u32 codes = base + (s & 1) * CODE_BYTES + group * 8192, x = base + X_AT + slot * X_BYTES;
        wgmma_fence();
        wgmma_s8<TOKENS, 0>(first, matrix_128(codes), matrix_128(x));
        wgmma_s8<TOKENS, 1>(first, matrix_128(codes + 32), matrix_128(x + 32));
        wgmma_commit();
        wgmma_s8<TOKENS, 0>(second, matrix_128(codes + 64), matrix_128(x + 64));
        wgmma_s8<TOKENS, 1>(second, matrix_128(codes + 96), matrix_128(x + 96));
        wgmma_commit();
        // everybody is through with step s - 1, whose place in the ring is the next to be filled
        const int ahead = s + STAGES - 1, to = slot == 0 ? STAGES - 1 : slot - 1, next = slot == STAGES - 1 ? 0 : slot + 1;
        if (ahead < steps) {
            load_planes(args.w, list + 2 * ahead, base + RAW_AT + to * RAW_BYTES, 2 * (begin + ahead), block, pair, missing);
            load_rows(args, base + X_AT + to * X_BYTES, base + SCALE_AT + to * SCALE_BYTES, 2 * (begin + ahead), first_row);
        }
        copy_commit();
        copy_wait<STAGES - 2>();
        __syncthreads();
        if (s + 1 < steps) expand(base + RAW_AT + next * RAW_BYTES, base + ((s + 1) & 1) * CODE_BYTES, is_wide(s + 1), group, warp & 3, lane);
        const float* scale = (const float*)(shared + SCALE_AT + slot * SCALE_BYTES);
        const float* factor = (const float*)(list + 2 * s) + 2 + group;
        wgmma_wait<1>();
        wgmma_arrived(first);
        scale_sums(total, first, scale, factor[0], t);
        wgmma_wait<0>();
        wgmma_arrived(second);
        scale_sums(total, second, scale + TOKENS, factor[4], t);
        fence_shared_for_wgmma();
        __syncthreads();
        slot = next;
    }

    // rows of this CTA's share: [splits][rows_here][RECEIVED] float32 over the ring, which nobody in the cluster needs any more
    const int rows_here = TOKENS / splits;
    if (splits > 1) {
        cluster_arrive();
        cluster_wait();
    }
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
        const int row = 8 * (i >> 2) + 2 * t + (i & 1), n = group * 64 + (warp & 3) * 16 + g + (i >> 1 & 1) * 8;
        const u32 at = base + ((split * rows_here + row % rows_here) * RECEIVED + n) * 4;
        if (splits > 1)
            store_cluster(address_in(at, row / rows_here), total[i]);
        else
            *(float*)(shared + (at - base)) = total[i];
    }
    if (splits > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    const float* received = (const float*)shared;
#pragma unroll 1
    for (int task = warp; task < 2 * rows_here; task += THREADS / 32) {
        const int tile = task & 1, row = task >> 1, nt = 2 * part + tile;
        const long long to = first_row + split * rows_here + row;
        if (nt >= args.w.n_tiles || to >= args.rows) continue;
        float lo = 0, hi = 0;
        for (int s = 0; s < splits; ++s) {
            const float* from = received + (s * rows_here + row) * RECEIVED + tile * 64 + lane;
            lo += from[0];
            hi += from[32];
        }
        finish_row(args, lo, hi, nt, to, lane);
    }
}
