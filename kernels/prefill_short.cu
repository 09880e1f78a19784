// Mid-size batches: y = x W^T for some rows, the weight expanded inside. Compiled by NVRTC for compute capability 9.0.
//
// A CTA of two warpgroups owns a block of 512 outputs and TOKENS rows, and walks over its input tiles. Plane words and INT8 rows
// arrive in a ring (cp.async). A lane takes word 8 w + g of the block (w its warp in the group) for the 16 inputs of its quads,
// transposes bytes, and merges planes: what comes out is, with outputs and inputs suitably numbered, the A operand of the matrix unit
// (wgmma) as a lane has to hold it, so that codes never pass through memory. A warpgroup takes two of the four bytes of each word.
// The integer sums of 64 inputs are scaled by row and tile and added in float32, tiles in ascending order. The CTAs of a cluster
// split the input tiles and send their sums to the one that finishes a row: it adds them in ascending order, rotates the outputs
// back, adds the bias, rounds once.
// Inputs of a tile stand in the order that `prefill_triton.quantize_groups` writes: `load_shared` offsets below are its inverse.
//
// Set by the compiler's command line: XTYPE (of y: 0 bf16, 1 fp16, 2 float32), TOKENS (16, 32, 64).

#define WGMMA 1
#include "prefill_ptx.cu"
#include "prefill_planes.cu"

struct Args {
    Weight w;
    const u8* x;         // [rows, k_tiles * 64] int8, in the order above
    const float* scale;  // [k_tiles, scale_stride] of rows, padded to 64
    const u8* transform; // [n_tiles] row of `table`, 255 for the identity
    const u8* table;     // [., 64]: bits 0-5 permutation, 6 left sign, 7 right sign
    const void* bias;    // [n_tiles * 64] or null
    void* y;             // [rows, n_tiles * 64], rows y_stride elements apart
    long long y_stride;
    int rows, scale_stride, splits, bias_type;
};

constexpr int STAGES = TOKENS == 64 ? 4 : 3, THREADS = 256;
constexpr u32 ODD = 128;  // from an even input's words to the next one's
constexpr int X_BYTES = TOKENS * 64;                        // [TOKENS][64 inputs], 64-byte swizzle
constexpr int RECEIVED = 532;                               // floats of a received row: [16 outputs of a word][33], and a shift of banks
constexpr int RAW_AT = STAGES * X_BYTES, SCALE_AT = RAW_AT + STAGES * BLOCK_BYTES;
constexpr int FACTOR_AT = SCALE_AT + STAGES * TOKENS * 4, RING_BYTES = FACTOR_AT + STAGES * 32;  // then the sums, or meta

#if XTYPE == 2
typedef float Output;
__device__ __forceinline__ float rounded(float f) { return f; }
#else
typedef u16 Output;
__device__ __forceinline__ u16 rounded(float f) { return to_half(f, XTYPE); }
#endif

__device__ __forceinline__ void load_rows(const Args& args, u32 base, int slot, int kt, int first_row) {
    const int row = threadIdx.x >> 2, chunk = threadIdx.x & 3;
    if (threadIdx.x < TOKENS * 4) {
        const bool wanted = first_row + row < args.rows;
        const u8* from = args.x + (wanted ? (first_row + row) * (long long)args.w.k_tiles * 64 + kt * 64 + chunk * 16 : 0);
        copy16(base + slot * X_BYTES + row * 64 + ((chunk ^ row >> 1 & 3) << 4), from, wanted ? 16 : 0);
    }
    if (threadIdx.x < TOKENS / 4)
        copy16(base + SCALE_AT + slot * TOKENS * 4 + threadIdx.x * 16, args.scale + (long long)kt * args.scale_stride + first_row + threadIdx.x * 4, 16);
}

__device__ __forceinline__ void load_weight(const Args& args, const PlaneReader<THREADS>& planes, u32 base, u32 first, int s, int slot, const uint2* meta) {
    planes.load(s, meta[s], slot);
    if (threadIdx.x < 2) copy16(base + FACTOR_AT + slot * 32 + threadIdx.x * 16, args.w.factor + (u64)(first + s) * 8 + threadIdx.x * 4, 16);
}

// Words of one input tile -> codes of the group's two bytes: [byte][inputs u][output j of the byte]. `from`: of planes 0 and 1 at even
// and odd inputs; `from2`, `from3` of the others.
template <bool WIDE>
__device__ __forceinline__ void expand(const u32 (&from)[2], const u32 (&from2)[2], const u32 (&from3)[2], bool has2, bool has3, u32 select, u32 (&code)[2][4][4]) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        const int offset = (4 * (u & 1) + 32 * (u >> 1)) * 128;
        u32 bytes[4][2] = {};
#pragma unroll
        for (int p = 0; p < (WIDE ? 4 : 2); ++p) {
            u32 w[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 at = (p < 2 ? from[i & 1] + p * PLANE_BYTES : p == 2 ? from2[i & 1] : from3[i & 1]) + offset + (i & 2) * 128;
                w[i] = p < 2 || (p == 2 ? has2 : has3) ? load_shared(at) : 0;
            }
            const u32 a = __byte_perm(w[0], w[1], select), b = __byte_perm(w[2], w[3], select);
            bytes[p][0] = __byte_perm(a, b, 0x5410);
            bytes[p][1] = __byte_perm(a, b, 0x7632);
        }
#pragma unroll
        for (int byte = 0; byte < 2; ++byte) codes_of<WIDE>(bytes[0][byte], bytes[1][byte], bytes[2][byte], bytes[3][byte], code[byte][u]);
    }
}

__device__ __forceinline__ void multiply(int (&sums)[TOKENS / 2], const u32 (&code)[4][4], int j, u64 x) {
    wgmma_fence();
    wgmma_s8<TOKENS, 0>(sums, code[0][j], code[0][j + 1], code[1][j], code[1][j + 1], x);
    wgmma_s8<TOKENS, 1>(sums, code[2][j], code[2][j + 1], code[3][j], code[3][j + 1], x + (32 >> 4));
    wgmma_commit();
}

__device__ __forceinline__ void add_sums(float (&total)[TOKENS / 2], int (&sums)[TOKENS / 2], const float (&scale)[TOKENS / 4]) {
    wgmma_arrived(sums);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) total[i] = fmaf((float)sums[i], scale[(i >> 2) * 2 + (i & 1)], total[i]);
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

extern "C" __global__ void __launch_bounds__(THREADS, TOKENS == 16 ? 2 : 1) short_rows(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = warp >> 2, w = warp & 3, g = lane >> 2, t = lane & 3;
    const int splits = args.splits, split = blockIdx.x % splits, row_blocks = (args.rows + TOKENS - 1) / TOKENS;
    const int first_row = blockIdx.x / splits % row_blocks * TOKENS, block = blockIdx.x / splits / row_blocks;
    const int per_split = (args.w.k_tiles + splits - 1) / splits, begin = min(split * per_split, args.w.k_tiles);
    const int steps = min(begin + per_split, args.w.k_tiles) - begin;

    const u32 base = shared_address(shared);
    uint2* meta = (uint2*)(shared + RING_BYTES);
    const u32 first = block * args.w.k_tiles + begin;
    const PlaneReader<THREADS> planes(args.w.codes, first, base + RAW_AT);
    for (int i = threadIdx.x; i < steps; i += THREADS) meta[i] = args.w.meta[first + i];
    __syncthreads();
    // the weight may be read before the rows are there
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
        if (s < steps) load_weight(args, planes, base, first, s, s, meta);
    wait_for_inputs();
    let_next_start();
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < steps) load_rows(args, base, s, begin + s, first_row);
        copy_commit();  // the weight of all these steps goes with the first
    }

    // this lane: word 8 w + g of the block, inputs 8 t + i + 4 (u & 1) + 32 (u >> 1), i = 0..3, of quad u
    const int tile = 2 * w + (g >> 2);
    u32 select = group ? 0x7362 : 0x5140, own = RAW_AT + base + 8 * t * 128 + (g & 3) * 4, before = (1u << tile) - 1, pair = 0x303u << 2 * w;
    u32 turn = twist(8 * t);  // of even inputs; that of odd ones has bit 0 set
    u32 from = own + (tile ^ turn) * 16, from_odd = own + ODD + (tile ^ turn ^ 1) * 16;
    asm("" : "+r"(select), "+r"(own), "+r"(before), "+r"(pair), "+r"(turn), "+r"(from), "+r"(from_odd));  // kept, not computed at every step
    float total[4][TOKENS / 2];  // rows of a product: outputs 16 g + 4 (2 group + (m >> 1)) + 2 (m & 1) (+ 1) of the warp's 128
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) total[m][i] = 0;

    int slot = 0;
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
        copy_wait<STAGES - 2>();
        if (threadIdx.x < TOKENS * 4) fence_shared_for_wgmma();  // who copied rows
        __syncthreads();  // step s is there, and everybody is through with step s - 1, whose place is the next to be filled
        const int ahead = s + STAGES - 1, to = slot == 0 ? STAGES - 1 : slot - 1;
        if (ahead < steps) {
            load_weight(args, planes, base, first, ahead, to, meta);
            load_rows(args, base, to, begin + ahead, first_row);
        }
        copy_commit();

        u32 code[2][4][4];
        const u32 raw = slot * BLOCK_BYTES, masks = meta[s].y;
        const u32 here[2] = {from + raw, from_odd + raw};
        if (masks & pair) {
            const u32 turn2 = __popc(masks & before) ^ turn, turn3 = __popc(masks >> 8 & before) ^ turn;  // ranks of this tile
            const u32 at2 = own + raw + 2 * PLANE_BYTES, at3 = own + raw + 3 * PLANE_BYTES;
            u32 from2[2] = {at2 + turn2 * 16, at2 + ODD + (turn2 ^ 1) * 16};
            u32 from3[2] = {at3 + turn3 * 16, at3 + ODD + (turn3 ^ 1) * 16};
            asm("" : "+r"(from2[0]), "+r"(from2[1]), "+r"(from3[0]), "+r"(from3[1]));  // not computed again for every load
            expand<true>(here, from2, from3, masks & before + 1, masks >> 8 & before + 1, select, code);
        } else {
            expand<false>(here, here, here, false, false, select, code);
        }
        float scale[TOKENS / 4];  // of this lane's rows, times the tile's
        const float factor = 2 * ((const float*)(shared + FACTOR_AT + slot * 32))[tile];
        const float* scales = (const float*)(shared + SCALE_AT + slot * TOKENS * 4) + 2 * t;
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i) {
            const float2 two = *(const float2*)(scales + 8 * i);
            scale[2 * i] = two.x * factor;
            scale[2 * i + 1] = two.y * factor;
        }
        const u64 x = matrix_64(base + slot * X_BYTES);
        if constexpr (TOKENS == 64) {
            int sums[TOKENS / 2];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                multiply(sums, code[m >> 1], 2 * (m & 1), x);
                wgmma_wait<0>();
                add_sums(total[m], sums, scale);
            }
        } else {
            int sums[4][TOKENS / 2];
#pragma unroll
            for (int m = 0; m < 4; ++m) multiply(sums[m], code[m >> 1], 2 * (m & 1), x);
            wgmma_wait<3>();
            add_sums(total[0], sums[0], scale);
            wgmma_wait<2>();
            add_sums(total[1], sums[1], scale);
            wgmma_wait<1>();
            add_sums(total[2], sums[2], scale);
            wgmma_wait<0>();
            add_sums(total[3], sums[3], scale);
        }
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    }

    // sums of this CTA's share of the rows: [splits][rows_here][RECEIVED] float32 over the ring, which nobody needs any more
    const int rows_here = (TOKENS + splits - 1) / splits;
    if (splits > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const int row = 8 * i + 2 * t + side, owner = row / rows_here;
            const u32 at = base + ((split * rows_here + row - owner * rows_here) * RECEIVED + 8 * w + g) * 4;
            const u32 there = splits > 1 ? address_in(at, owner) : at;
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int output = 4 * (2 * group + (m >> 1)) + 2 * (m & 1) + h;  // of the word's 16
                    store_cluster(there + output * 33 * 4, total[m][4 * i + 2 * h + side]);
                }
        }
    if (splits > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    const float* received = (const float*)shared;
#pragma unroll 1
    for (int task = warp; task < 8 * rows_here; task += THREADS / 32) {
        const int row = task >> 3, nt = 8 * block + (task & 7), in_block = split * rows_here + row;
        if (nt >= args.w.n_tiles || in_block >= TOKENS || first_row + in_block >= args.rows) continue;
        float lo = 0, hi = 0;
        for (int s = 0; s < splits; ++s) {
            const float* part = received + (s * rows_here + row) * RECEIVED + (lane & 15) * 33 + 4 * (task & 7) + (lane >> 4);
            lo += part[0];
            hi += part[2];
        }
        finish_row(args, lo, hi, nt, first_row + in_block, lane);
    }
}
