// Mid-size batches: y = x W^T for some rows, the weight expanded inside. Compiled by NVRTC for compute capability 9.0.
//
// A CTA owns 256 outputs (four tiles, half a block of the decode form) and TOKENS rows, and walks over its input tiles, a step each. Plane
// words and INT8 rows arrive in a ring, read by a warp of their own or by all. Eight warps multiply, each half the outputs of one tile:
// `ldmatrix.trans` gives a lane both bytes of eight outputs for two inputs, a `prmt` of two such registers picks the warp's byte of four
// inputs, and merging the planes makes of it the A operand of the tensor core, so that codes never pass through memory. The integer sums of
// 64 inputs are scaled by row and tile and added in float32, tiles in ascending order. Warps do not wait for each other: every place of the
// ring has a barrier that tells when its bytes are there, and one that tells when all are through with it.
// The CTAs of a cluster split the input tiles and hand their sums, through memory, to the one that finishes a row: it adds them in
// ascending order, rotates the outputs back, adds the bias, rounds once.
// Inputs of a tile stand in the order that `prefill_triton.quantize_groups` writes, which is that of the B operand: 16 bytes a lane.
//
// Set by the compiler's command line: XTYPE (of y: 0 bf16, 1 fp16, 2 float32), TOKENS (16, 32, 64, 128).

#include "prefill_ptx.cu"
#include "prefill_planes.cu"

struct Args {
    Map planes;          // planes 0 and 1: rows of 128 bytes, in boxes of 128 half rows
    Weight w;
    const u8* x;         // [k_tiles, rows_padded, 64] int8, in the order above
    const float* scale;  // [k_tiles, rows_padded] of rows
    const u8* transform; // [n_tiles] row of `table`, 255 for the identity
    const u8* table;     // [., 64]: bits 0-5 permutation, 6 left sign, 7 right sign
    const void* bias;    // [n_tiles * 64] or null
    void* y;             // [rows, n_tiles * 64], rows y_stride elements apart
    u8* parts;           // [CTAs][TOKENS][ROW_BYTES], whatever is there: what CTAs of a cluster hand each other
    long long y_stride;
    int rows, rows_padded, splits, bias_type;  // rows_padded: a multiple of 128
};

constexpr int TILES = 4, WARPS = 8, RESIDENT = TOKENS == 128 ? 1 : 2;  // of a CTA; CTAs of a multiprocessor
constexpr int STAGES = TOKENS == 128 ? 6 : 4;  // of the ring
constexpr int READERS = TOKENS < 64 ? 1 : 0;  // warps that read and do nothing else; with many rows there is no register for them
constexpr int THREADS = 32 * (WARPS + READERS), READING = READERS ? 32 * READERS : THREADS;
constexpr int GROUP = TOKENS == 128 ? 32 : TOKENS;  // rows that are computed or left out together
constexpr int PLANE = TILES * 1024;  // bytes of a plane of a step: [64 inputs][tiles], a tile at place tile ^ (input / 2 & 3)
constexpr int X_AT = 4 * PLANE, SCALE_AT = X_AT + TOKENS * 64, STAGE_BYTES = (SCALE_AT + TOKENS * 4 + 511) / 512 * 512;
constexpr int ROW_BYTES = TILES * 256;  // of a row of sums
// Shared memory, as `shared_bytes` in prefill_cuda.py counts it: the ring, and in the end sums; steps; barriers; what finishing needs.
constexpr int RING_BYTES = STAGES * STAGE_BYTES, STEPS_AT = RING_BYTES > TOKENS * ROW_BYTES ? RING_BYTES : TOKENS * ROW_BYTES;
constexpr int PERIOD = 32;  // steps that are made ready at a time, two periods kept
constexpr int BARRIERS_AT = STEPS_AT + 2 * PERIOD * TILES * 16, FINISH_AT = BARRIERS_AT + STAGES * 16;

#if XTYPE == 2
typedef float Output;
__device__ __forceinline__ float rounded(float f) { return f; }
#else
typedef u16 Output;
__device__ __forceinline__ u16 rounded(float f) { return to_half(f, XTYPE); }
#endif

// What a step needs to know of a tile. x, y: unit of input 0 in planes 2 and 3; z: units from an input to the next in plane 2 (bits
// 0-7) and plane 3 (8-15), and whether the tile lacks plane 2 (16) and 3 (17); w: the value of a step of 8-bit codes.
typedef uint4 Step;

// Of the CTA's outputs: bias, an entry of the table (the identity's is i, without signs); what rotated sums are multiplied with.
struct Finish {
    float bias[TILES * 64];
    u8 code[TILES * 64];
    float factor[TILES];  // 0 for the identity
};

__device__ __forceinline__ void prepare_finish(const Args& args, Finish& finish, int tiles_before) {
    if (threadIdx.x >= TILES * 64) return;
    const int tile = threadIdx.x >> 6, i = threadIdx.x & 63, nt = tiles_before + tile;
    if (nt >= args.w.n_tiles) return;
    const u32 transform = args.transform[nt];
    finish.code[threadIdx.x] = transform != 255 ? args.table[transform * 64 + i] : i;
    if (i == 0) finish.factor[tile] = transform != 255 ? 0.125f : 0.f;
    float bias = 0;
    if (args.bias) bias = args.bias_type == 2 ? ((const float*)args.bias)[nt * 64 + i] : from_half(((const u16*)args.bias)[nt * 64 + i], args.bias_type);
    finish.bias[threadIdx.x] = bias;
}

// A step of four tiles, from `first_tile` of the block on, of what the weight says about all eight.
__device__ __forceinline__ void make_step(Step* ready, uint2 meta, float4 factor, int first_tile) {
    const u32 with2 = meta.y & 255, with3 = meta.y >> 8 & 255, count2 = __popc(with2), count3 = __popc(with3);
    const float factors[4] = {factor.x, factor.y, factor.z, factor.w};
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        const u32 tile = first_tile + i, before = (1u << tile) - 1, lacks = (~with2 >> tile & 1) << 16 | (~with3 >> tile & 1) << 17;
        ready[i] = make_uint4(meta.x + __popc(with2 & before), meta.x + 64 * count2 + __popc(with3 & before), count2 | count3 << 8 | lacks,
                              __float_as_uint(2 * factors[i]));
    }
}

// What a warp or all threads read. full, empty: barriers of the places of the ring; origin: number of step 0 among the weight's blocks and
// input tiles; first: place of this thread among those who read.
struct Reader {
    const Args& args;
    Step* ready;
    u32 base, full, empty;
    int origin, first_tile, begin, first_row, steps, first;

    // The steps from `from` on, one to a lane.
    __device__ __forceinline__ void make_ready(int from, int lane) {
        const int s = from + lane;
        if (s < steps)
            make_step(ready + (s & 2 * PERIOD - 1) * TILES, args.w.meta[origin + s],
                      *(const float4*)(args.w.factor + (u64)(origin + s) * 8 + first_tile), first_tile);
    }

    // Starts reading the weight of step s to place `slot`.
    __device__ __forceinline__ void read_weight(int s, int slot) {
        const u32 place = base + slot * STAGE_BYTES, barrier = full + slot * 8;
        if (first == 0) {
            barrier_expect(barrier, 2 * PLANE);
            copy_box(place, args.planes, first_tile * 16, (origin + s) * 128, barrier);
        }
        const Step step = ready[(s & 2 * PERIOD - 1) * TILES + first % TILES];
        const u32 input = first / TILES;  // and all further ones of the thread
        const u32 to = place + input * 64 + ((first % TILES ^ (input >> 1 & 3)) << 4);
        if (__any_sync(FULL, !(step.z & 1 << 16))) {
            read_plane<2, 0>(step.z & 1 << 16, to, args.w.codes + (u64)(step.x + input * (step.z & 255)) * 16, (step.z & 255) * (READING * 4));
            read_plane<3, 0>(step.z & 1 << 17, to, args.w.codes + (u64)(step.y + input * (step.z >> 8 & 255)) * 16, (step.z >> 8 & 255) * (READING * 4));
        }
        barrier_arrive_copied(barrier);
    }

    __device__ __forceinline__ void read_rows(int s, int slot) {
        if (first) return;
        const u32 place = base + slot * STAGE_BYTES, barrier = full + slot * 8;
        const u64 row = (u64)(begin + s) * args.rows_padded + first_row;
        barrier_arrive_expect(barrier, TOKENS * 68);
        copy_bulk(place + X_AT, args.x + row * 64, TOKENS * 64, barrier);
        copy_bulk(place + SCALE_AT, args.scale + row, TOKENS * 4, barrier);
    }

    __device__ __forceinline__ void fill() {
        for (int s = 0; s < min(steps, STAGES); ++s) read_weight(s, s);  // the weight may be read before the rows are there
        wait_for_inputs();
        let_next_start();
        for (int s = 0; s < min(steps, STAGES); ++s) read_rows(s, s);
    }

    // Reads what is left, as places get free.
    __device__ __forceinline__ void run(int lane) {
        int slot = 0;
        u32 parity = 0;
#pragma unroll 1
        for (int s = STAGES; s < steps; ++s) {
            if (s % PERIOD == 0) {  // what stands there was for steps that are behind everybody
                if (s > PERIOD) make_ready(s, lane);
                __syncwarp();
            }
            barrier_wait(empty + slot * 8, parity);
            read_weight(s, slot);
            read_rows(s, slot);
            parity ^= slot == STAGES - 1;
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }
    }

private:
    template <int P, int I>
    __device__ __forceinline__ void read_plane(u32 lacks, u32 to, const u8* from, u32 step) {
        copy16_unless<P * PLANE + I * READING * 16, 0>(lacks, to, from);
        if constexpr ((I + 1) * READING < 64 * TILES) read_plane<P, I + 1>(lacks, to, from + step, step);
    }
};

// The warp's half of a tile: [32 inputs each][16 inputs each][output j of the byte], codes of four inputs in a word.
template <bool WIDE>
__device__ __forceinline__ void expand(u32 from, u32 select, u32 (&code)[2][2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 bytes[4][2] = {};
#pragma unroll
        for (int p = 0; p < (WIDE ? 4 : 2); ++p) {
            u32 r[4];
            load_transposed(r, from + p * PLANE + half * (PLANE / 2));
            bytes[p][0] = __byte_perm(r[0], r[1], select);
            bytes[p][1] = __byte_perm(r[2], r[3], select);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) codes_of<WIDE>(bytes[0][i], bytes[1][i], bytes[2][i], bytes[3][i], code[half][i]);
    }
}

// 32 outputs by 8 N rows: products of a step's codes and rows, scaled, added to `total`. A unit is 16 outputs by 8 rows; the products
// of the units ahead are under way while one is scaled.
template <int N>
__device__ __forceinline__ void add_products(const u32 (&code)[2][2][4], const u8* x, const u8* scales, float factor, float (*total)[8]) {
    uint4 b[N];
    int sum[2 * N][4];
    float scale[N][2];
#pragma unroll
    for (int unit = 0; unit < 2 * N + 2; ++unit) {
        if (unit < 2 * N) {
            const int n = unit / 2, i = unit % 2;
            if (i == 0) {
                b[n] = *(const uint4*)(x + n * 512);
                const float2 two = *(const float2*)(scales + n * 32);
                scale[n][0] = two.x * factor;
                scale[n][1] = two.y * factor;
            }
            const u32 a[4] = {code[0][0][2 * i], code[0][0][2 * i + 1], code[0][1][2 * i], code[0][1][2 * i + 1]};
            const int zero[4] = {};
            mma_s8(sum[unit], a, b[n].x, b[n].y, zero);
        }
        if (unit >= 1 && unit < 2 * N + 1) {
            const int n = (unit - 1) / 2, i = (unit - 1) % 2;
            const u32 a[4] = {code[1][0][2 * i], code[1][0][2 * i + 1], code[1][1][2 * i], code[1][1][2 * i + 1]};
            mma_s8(sum[unit - 1], a, b[n].z, b[n].w, sum[unit - 1]);
        }
        if (unit >= 2) {
            const int n = (unit - 2) / 2, i = (unit - 2) % 2;
#pragma unroll
            for (int k = 0; k < 4; ++k) total[n][4 * i + k] = fmaf((float)sum[unit - 2][k], scale[n][k & 1], total[n][4 * i + k]);
        }
    }
}

// Where a row's sums of 4 outputs stand among those of a CTA: twisted, so that eight lanes that write or read meet every bank.
__device__ __forceinline__ u32 sum_at(int row, int tile, int four) {
    return row * ROW_BYTES + tile * 256 + ((four ^ (row >> 1 & 1 | (row << 2 ^ row) & 4)) << 4);
}

// The rows of `mine` from first_mine on, finished under one tile, by a warp that takes `rounds` of eight: the parts of the CTAs are added
// up, `own` being here and the others in `parts`, multiplied by the Hadamard matrix, permuted, rounded.
__device__ __forceinline__ void finish_tile(u8* sums, const u8* parts, const Finish& finish, int splits, int own, int first_mine, int mine, int round, int tile,
                                            Output* y, long long y_stride, int lane) {
    const int g = lane >> 2, part = lane & 3;  // four lanes to a row: outputs 16 i + 4 part + e
    const bool rotated = finish.factor[tile] != 0;
    const float low = part & 1 ? -1.f : 1.f, high = part & 2 ? -1.f : 1.f;
    u32 at[2], e[2];  // of the sums that become outputs `lane` and `lane + 32`
    float factor[2], bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 code = finish.code[tile * 64 + 32 * i + lane];
        at[i] = (code & 63) >> 2;
        e[i] = (code & 3) * 4;
        factor[i] = !rotated ? 1.f : code & 64 ? -0.125f : 0.125f;
        bias[i] = finish.bias[tile * 64 + 32 * i + lane];
    }
#pragma unroll 1
    for (int first = round * 8; first < mine; first += 16) {
        const int row = first_mine + min(first + g, mine - 1);
        float v[16];
#pragma unroll
        for (int k = 0; k < 16; ++k) v[k] = 0;
#pragma unroll 1
        for (int s = 0; s < splits; s += 4) {  // four parts under way
            float4 more[4][4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if (s + k < splits)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const u32 from = sum_at(row, tile, 4 * i + part);
                        more[k][i] = s + k == own ? *(const float4*)(sums + from) : load_fresh(parts + (u64)(s + k) * TOKENS * ROW_BYTES + from);
                    }
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if (s + k < splits)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        v[4 * i] += more[k][i].x;
                        v[4 * i + 1] += more[k][i].y;
                        v[4 * i + 2] += more[k][i].z;
                        v[4 * i + 3] += more[k][i].w;
                    }
        }
        if (rotated) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 signs = *(const u32*)(finish.code + tile * 64 + 16 * i + 4 * part);
#pragma unroll
                for (int k = 0; k < 4; ++k) v[4 * i + k] = __uint_as_float(__float_as_uint(v[4 * i + k]) ^ (signs << (24 - 8 * k) & 0x80000000u));
            }
#pragma unroll
            for (int d = 1; d < 16; d *= 2)
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    if (!(i & d)) {
                        const float a = v[i], b = v[i + d];
                        v[i] = a + b;
                        v[i + d] = a - b;
                    }
#pragma unroll
            for (int i = 0; i < 16; ++i) v[i] = fmaf(v[i], low, __shfl_xor_sync(FULL, v[i], 1));
#pragma unroll
            for (int i = 0; i < 16; ++i) v[i] = fmaf(v[i], high, __shfl_xor_sync(FULL, v[i], 2));
        }
        if (first + g < mine)
#pragma unroll
            for (int i = 0; i < 4; ++i) *(float4*)(sums + sum_at(row, tile, 4 * i + part)) = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
        __syncwarp();
#pragma unroll
        for (int k = 0; k < 8; ++k)
            if (first + k < mine) {
                const int done = first_mine + first + k;
#pragma unroll
                for (int i = 0; i < 2; ++i) y[done * y_stride + 32 * i + lane] = rounded(fmaf(*(const float*)(sums + sum_at(done, tile, at[i]) + e[i]), factor[i], bias[i]));
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) short_rows(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tile = warp >> 1, half = warp & 1, g = lane >> 2, c = lane & 3;
    const int splits = args.splits, split = blockIdx.x % splits, row_blocks = (args.rows + TOKENS - 1) / TOKENS;
    const int first_row = blockIdx.x / splits % row_blocks * TOKENS, rows = min(args.rows - first_row, TOKENS);
    const int tiles_before = blockIdx.x / splits / row_blocks * TILES;
    const int begin = split * args.w.k_tiles / splits, steps = (split + 1) * args.w.k_tiles / splits - begin;

    const u32 base = shared_address(shared), full = base + BARRIERS_AT, empty = full + STAGES * 8;
    Step* ready = (Step*)(shared + STEPS_AT);
    Finish& finish = *(Finish*)(shared + FINISH_AT);
    if (threadIdx.x < STAGES) {
        barrier_init(full + threadIdx.x * 8, READING + 1);
        barrier_init(empty + threadIdx.x * 8, WARPS);
        barriers_are_ready();
    }
    Reader reader{args, ready, base, full, empty, (tiles_before >> 3) * args.w.k_tiles + begin, tiles_before & 7, begin, first_row, steps,
                  READERS ? (int)threadIdx.x - 32 * WARPS : (int)threadIdx.x};
    if (warp < 2) reader.make_ready(warp * PERIOD, lane);
    __syncthreads();
    float total[TOKENS / 8][8];  // [..][4 i + 2 h + side]: row 8 n + 2 c + side, output 8 g + 4 half + 2 i + h of the tile
#pragma unroll
    for (int n = 0; n < TOKENS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) total[n][i] = 0;
    if (!READERS) reader.fill();
    if (warp >= WARPS) {
        reader.fill();
        reader.run(lane);
        __syncwarp();
    } else {
        prepare_finish(args, finish, tiles_before);
        u32 select = half ? 0x7531 : 0x6420;
        u32 from = base + lane * 64 + ((tile ^ (lane >> 1 & 3)) << 4);
        u32 at = 0, slot = 0, parity = 0;  // the place in the ring, how often it has been filled
        asm("" : "+r"(from), "+r"(select));  // kept, not computed again at every step
#pragma unroll 1
        for (int s = 0; s < steps; ++s) {
            if (!READERS) {
                if (s % PERIOD == 0 && s) {
                    __syncthreads();
                    if (warp == 0) reader.make_ready(s + PERIOD, lane);
                    __syncthreads();
                }
                if (s >= 2 && s - 2 + STAGES < steps) {  // the step before the last is behind nearly everybody, and its place filled again
                    const int free = slot < 2 ? slot + STAGES - 2 : slot - 2;
                    barrier_wait(empty + free * 8, slot < 2 ? parity ^ 1 : parity);
                    reader.read_weight(s - 2 + STAGES, free);
                    reader.read_rows(s - 2 + STAGES, free);
                }
            }
            barrier_wait(full + slot * 8, parity);
            const uint2 step = *(const uint2*)&ready[(s & 2 * PERIOD - 1) * TILES + tile].z;
            u32 code[2][2][4];
            if (~step.x & 3 << 16)
                expand<true>(from + at, select, code);
            else
                expand<false>(from + at, select, code);
            const float factor = __uint_as_float(step.y);
            const u8* x = shared + at + X_AT + lane * 16;
            const u8* scales = shared + at + SCALE_AT + c * 8;
#pragma unroll
            for (int first = 0; first < TOKENS; first += GROUP) {
                if (first && first >= rows) break;
                add_products<GROUP / 8>(code, x + first * 64, scales + first * 4, factor, &total[first / 8]);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + slot * 8);
            parity ^= slot == STAGES - 1;
            at = slot == STAGES - 1 ? 0 : at + STAGE_BYTES;
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }
    }

    // Sums of the CTA, over the ring, which nobody needs any more. Rows that another CTA finishes go through memory.
    __syncthreads();
    if (warp < WARPS)
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n)
#pragma unroll
            for (int side = 0; side < 2; ++side)
                *(float4*)(shared + sum_at(8 * n + 2 * c + side, tile, 2 * g + half)) =
                    make_float4(total[n][side], total[n][2 + side], total[n][4 + side], total[n][6 + side]);
    __syncthreads();
    const int rows_here = (rows + splits - 1) / splits, first_mine = split * rows_here, mine = min(rows_here, rows - first_mine);
    if (splits > 1) {
        u8* to = args.parts + (u64)blockIdx.x * TOKENS * ROW_BYTES;
        for (int i = threadIdx.x * 16; i < rows * ROW_BYTES; i += THREADS * 16)
            if ((u32)(i / ROW_BYTES - first_mine) >= (u32)rows_here) *(float4*)(to + i) = *(const float4*)(shared + i);
        cluster_arrive();
        cluster_wait();
    }
    if (warp < WARPS && tiles_before + warp % TILES < args.w.n_tiles)
        finish_tile(shared, args.parts + (u64)(blockIdx.x - split) * TOKENS * ROW_BYTES, finish, splits, split, first_mine, mine, warp / TILES, warp % TILES,
                    (Output*)args.y + first_row * args.y_stride + (tiles_before + warp % TILES) * 64, args.y_stride, lane);
}
