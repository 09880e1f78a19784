// Batches and short prompts: y = x W^T for up to 128 rows a CTA, the weight expanded inside, one scale per row and 64 outputs
// (`reference.requantize_block_ref`). Compiled by NVRTC for compute capability 9.0.
//
// A CTA owns 256 outputs (four tiles, half a block of the decode form) and TOKENS rows, and walks over its input tiles, a step each. Three
// kinds of warps work behind each other. Readers fill a ring with plane words (tensor copy, and `cp.async` for planes 2 and 3) and INT8
// rows. Expanding warps, each with one tile of every so manieth step, make codes of plane words, multiply them in half precision by what
// makes one scale of all tiles of 64 outputs, round them to INT8 and write them where the tensor core reads them. Multiplying warps only
// start its products (`wgmma`), whose integer sums over all inputs stay in registers: nothing is rescaled on the way, so that the cost of a
// tile does not grow with the number of rows.
// The CTAs of a cluster split the input tiles and hand their sums, through memory, to the one that finishes a row (prefill_finish.cu).
//
// Set by the compiler's command line: XTYPE (of y: 0 bf16, 1 fp16), TOKENS (16, 32, 64, 128).

#include "prefill_ptx.cu"
#include "prefill_planes.cu"
#include "prefill_batch_ptx.cu"

struct Args {
    Map planes;           // planes 0 and 1: rows of 128 bytes, in boxes of 128 half rows
    Weight w;
    const u32* ratio;     // [blocks, k_tiles, 8] two equal halves: what codes of a tile are multiplied by, beside `smoothing`
    const float* unit;    // [n_tiles] of what results
    const u16* smoothing; // [k_tiles, 64] half, in the order of places 4 i + (0, 2, 1, 3)
    const u8* x;          // [k_tiles, rows_padded, 64] int8, as `batch_rows` writes it
    const float* scale;   // [rows] of rows
    const u8* transform;  // [n_tiles] row of `table`, 255 for the identity
    const u8* table;      // [., 64]: bits 0-5 permutation, 6 left sign, 7 right sign
    const void* bias;     // [n_tiles * 64] or null
    void* y;              // [rows, n_tiles * 64], rows y_stride elements apart
    u8* parts;            // [CTAs][TOKENS][ROW_BYTES], whatever is there: what CTAs of a cluster hand each other
    long long y_stride;
    int rows, rows_padded, splits, bias_type;  // rows_padded: a multiple of 128
};

constexpr int TILES = 4;
// Groups of four warps. The tensor core's sums take 128 registers of a multiplier, and 24 more are out of its reach.
constexpr int MULTIPLIERS = TOKENS == 128 ? 2 : 1, EXPANDERS = TOKENS == 128 ? 1 : 3, GROUPS = MULTIPLIERS + EXPANDERS + 1;
constexpr int THREADS = 128 * GROUPS, READING = 64;  // two of the last group's warps read
constexpr int STAGES = TOKENS == 128 ? 6 : TOKENS == 64 ? 8 : 9, BUFFERS = 3;
constexpr int PLANE = TILES * 1024;  // bytes of a plane of a step: [64 inputs][tiles], a tile at place tile ^ (input / 2 & 3)
constexpr int X_AT = 4 * PLANE, SMOOTHING_AT = X_AT + TOKENS * 64, STAGE_BYTES = (SMOOTHING_AT + 128 + 511) / 512 * 512;
constexpr int TILE_BYTES = 4096, BUFFER_BYTES = TILES * TILE_BYTES;  // codes of a tile, of a step: [64 outputs][64 inputs], swizzled by 64 bytes
// Shared memory, as `batch_geometry` in prefill_cuda.py counts it: the ring, and in the end sums; codes; steps; barriers; what finishing needs.
constexpr int RING_BYTES = (STAGES * STAGE_BYTES + 1023) / 1024 * 1024, SUMS_BYTES = TOKENS * TILES * 256;
constexpr int CODES_AT = RING_BYTES > SUMS_BYTES ? RING_BYTES : SUMS_BYTES;
constexpr int PERIOD = 32;  // steps that are made ready at a time, two periods kept
constexpr int STEPS_AT = CODES_AT + BUFFERS * BUFFER_BYTES, BARRIERS_AT = STEPS_AT + 2 * PERIOD * TILES * 16;
constexpr int FINISH_AT = BARRIERS_AT + (STAGES + BUFFERS) * 16;

#include "prefill_finish.cu"

// What a step needs to know of a tile. x, y: unit of input 0 in planes 2 and 3; z: units from an input to the next in plane 2 (bits
// 0-7) and plane 3 (8-15), and whether the tile lacks plane 2 (16) and 3 (17); w: `ratio`.
typedef uint4 Step;

// Steps `from` + lane of this CTA; origin: number of step 0 among the weight's blocks and input tiles.
__device__ __forceinline__ void make_ready(const Args& args, Step* ready, int origin, int first_tile, int steps, int from, int lane) {
    const int s = from + lane;
    if (s >= steps) return;
    const uint2 meta = args.w.meta[origin + s];
    const uint4 ratio = *(const uint4*)(args.ratio + (u64)(origin + s) * 8 + first_tile);
    const u32 ratios[4] = {ratio.x, ratio.y, ratio.z, ratio.w};
    const u32 with2 = meta.y & 255, with3 = meta.y >> 8 & 255, count2 = __popc(with2), count3 = __popc(with3);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        const u32 tile = first_tile + i, before = (1u << tile) - 1, lacks = (~with2 >> tile & 1) << 16 | (~with3 >> tile & 1) << 17;
        ready[(s & 2 * PERIOD - 1) * TILES + i] =
            make_uint4(meta.x + __popc(with2 & before), meta.x + 64 * count2 + __popc(with3 & before), count2 | count3 << 8 | lacks, ratios[i]);
    }
}

// What the two reading warps do. full, empty: barriers of the places of the ring.
struct Reader {
    const Args& args;
    Step* ready;
    u32 base, full, empty;
    int origin, first_tile, begin, first_row, steps, me;

    __device__ __forceinline__ void read_weight(int s, int slot) const {
        const u32 place = base + slot * STAGE_BYTES, barrier = full + slot * 8;
        if (me == 0) {
            barrier_expect(barrier, 2 * PLANE);
            copy_box(place, args.planes, first_tile * 16, (origin + s) * 128, barrier);
        }
        const Step step = ready[(s & 2 * PERIOD - 1) * TILES + me % TILES];
        const u32 input = me / TILES;  // and all further ones of the thread
        const u32 to = place + input * 64 + ((me % TILES ^ (input >> 1 & 3)) << 4);
        if (__any_sync(FULL, !(step.z & 1 << 16))) {
            read_plane<2, 0>(step.z & 1 << 16, to, args.w.codes + (u64)(step.x + input * (step.z & 255)) * 16, (step.z & 255) * (READING * 4));
            read_plane<3, 0>(step.z & 1 << 17, to, args.w.codes + (u64)(step.y + input * (step.z >> 8 & 255)) * 16, (step.z >> 8 & 255) * (READING * 4));
        }
        barrier_arrive_copied(barrier);
    }

    __device__ __forceinline__ void read_rows(int s, int slot) const {
        if (me) return;
        const u32 place = base + slot * STAGE_BYTES, barrier = full + slot * 8;
        barrier_arrive_expect(barrier, TOKENS * 64 + 128);
        copy_bulk(place + X_AT, args.x + ((u64)(begin + s) * args.rows_padded + first_row) * 64, TOKENS * 64, barrier);
        copy_bulk(place + SMOOTHING_AT, args.smoothing + (begin + s) * 64, 128, barrier);
    }

    __device__ __forceinline__ void run(int lane) const {
        for (int s = 0; s < min(steps, STAGES); ++s) read_weight(s, s);  // the weight may be read before the rows are there
        wait_for_inputs();
        for (int s = 0; s < min(steps, STAGES); ++s) read_rows(s, s);
        int slot = 0;
        u32 parity = 0;
#pragma unroll 1
        for (int s = STAGES; s < steps; ++s) {
            if (s % PERIOD == 0) {  // what stands there was for steps that are behind everybody
                if (s > PERIOD && me < 32) make_ready(args, ready, origin, first_tile, steps, s, lane);
                named_barrier<2, READING>();
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
    __device__ __forceinline__ void read_plane(u32 lacks, u32 to, const u8* from, u32 step) const {
        copy16_unless<P * PLANE + I * READING * 16, 0>(lacks, to, from);
        if constexpr ((I + 1) * READING < 64 * TILES) read_plane<P, I + 1>(lacks, to, from + step, step);
    }
};

// (code - zero) * by of two codes, rounded half to even; as the low bytes of two halves. code: 1024 + code, exact.
__device__ __forceinline__ u32 scaled(u32 code, u32 zero, u32 by) { return half2_fma(half2_sub(code, zero), by, 0x66006600u); }

// Bytes of 4 fields (two bits of outputs j = 0..3 each) of planes, four inputs -> for every j a word of four INT8 codes.
// by: of inputs (0, 2) and (1, 3), two halves each; by16: 16 times that.
template <bool WIDE>
__device__ __forceinline__ void requantise(u32 p0, u32 p1, u32 p2, u32 p3, const u32 (&by)[2], const u32 (&by16)[2], u32 (&out)[4]) {
    constexpr u32 UPPER = 0xccccccccu, HIGH = 0xf0f0f0f0u, ONES = 0x64006400u, ZERO = 0x64806480u;  // 1024, 1152
    const u32 nibbles[2] = {chosen(p0 << 2, p1, UPPER), chosen(p0, p1 >> 2, UPPER)};                // j = 0, 2 and j = 1, 3
    if constexpr (WIDE) {
        const u32 low[2] = {chosen(p2 << 2, p3, UPPER), chosen(p2, p3 >> 2, UPPER)};
#pragma unroll
        for (int odd = 0; odd < 2; ++odd)
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                const u32 code = upper ? chosen(nibbles[odd], low[odd] >> 4, HIGH) : chosen(nibbles[odd] << 4, low[odd], HIGH);
                const u32 a = scaled(__byte_perm(code, ONES, 0x5250), ZERO, by[0]);
                const u32 b = scaled(__byte_perm(code, ONES, 0x5351), ZERO, by[1]);
                out[odd + 2 * upper] = __byte_perm(a, b, 0x6240);
            }
    } else {
        constexpr u32 LOW_ZERO = 0x64086408u;  // 1032
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const u32 w = nibbles[odd], next = w >> 8;
            out[odd] = __byte_perm(scaled(w & 0x000f000fu | ONES, LOW_ZERO, by16[0]), scaled(next & 0x000f000fu | ONES, LOW_ZERO, by16[1]), 0x6240);
            out[odd + 2] = __byte_perm(scaled(w & 0x00f000f0u | ONES, ZERO, by[0]), scaled(next & 0x00f000f0u | ONES, ZERO, by[1]), 0x6240);
        }
    }
}

// A tile: from plane words (this lane's row of plane 0) to codes. Row 8 t + g of the codes is output 8 g + t.
template <bool WIDE>
__device__ __forceinline__ void expand_tile(u32 from, u32 smoothing, u32 ratio, u32 to, u32 buffer_free, u32 parity, int lane) {
    constexpr int PLANES = WIDE ? 4 : 2;
    u32 words[2][PLANES][4];  // [32 inputs each]
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int p = 0; p < PLANES; ++p) load_transposed(words[half][p], from + p * PLANE + half * (PLANE / 2));
    u32 by[4][2], by16[4][2];
#pragma unroll
    for (int q = 0; q < 4; q += 2) {
        const uint4 s = load_shared4(smoothing + q * 8);
        const u32 four[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            by[q + (i >> 1)][i & 1] = half2_mul(four[i], ratio);
            by16[q + (i >> 1)][i & 1] = WIDE ? 0 : half2_mul(by[q + (i >> 1)][i & 1], 0x4c004c00u);
        }
    }
    barrier_wait(buffer_free, parity);
#pragma unroll
    for (int byte = 0; byte < 2; ++byte) {
        u32 code[4][4];  // [four inputs each][j]
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            u32 p[4] = {};
#pragma unroll
            for (int i = 0; i < PLANES; ++i) p[i] = __byte_perm(words[q >> 1][i][2 * (q & 1)], words[q >> 1][i][2 * (q & 1) + 1], byte ? 0x7531 : 0x6420);
            requantise<WIDE>(p[0], p[1], p[2], p[3], by[q], by16[q], code[q]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) store_shared4(to + (4 * byte + j) * 512, code[0][j], code[1][j], code[2][j], code[3][j]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) batch(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = warp >> 2;
    const int splits = args.splits, split = blockIdx.x % splits, row_blocks = (args.rows + TOKENS - 1) / TOKENS;
    const int first_row = blockIdx.x / splits % row_blocks * TOKENS, rows = min(args.rows - first_row, TOKENS);
    const int tiles_before = blockIdx.x / splits / row_blocks * TILES, first_tile = tiles_before & 7;
    const int begin = split * args.w.k_tiles / splits, steps = (split + 1) * args.w.k_tiles / splits - begin;
    const int origin = (tiles_before >> 3) * args.w.k_tiles + begin;

    const u32 base = shared_address(shared), full = base + BARRIERS_AT, empty = full + STAGES * 8, coded = empty + STAGES * 8, used = coded + BUFFERS * 8;
    Step* ready = (Step*)(shared + STEPS_AT);
    Finish& finish = *(Finish*)(shared + FINISH_AT);
    let_next_start();
    if (threadIdx.x < STAGES) {
        barrier_init(full + threadIdx.x * 8, READING + 1);
        barrier_init(empty + threadIdx.x * 8, TILES + 4 * MULTIPLIERS);
        if (threadIdx.x < BUFFERS) {
            barrier_init(coded + threadIdx.x * 8, TILES);
            barrier_init(used + threadIdx.x * 8, 4 * MULTIPLIERS);
        }
        barriers_are_ready();
    }
    if (warp < 2) make_ready(args, ready, origin, first_tile, steps, warp * PERIOD, lane);
    prepare_finish(args, finish, tiles_before);
    __syncthreads();

    if (group == GROUPS - 1) {
        less_registers<32>();
        if (warp < 4 * (GROUPS - 1) + READING / 32) {
            const Reader reader{args, ready, base, full, empty, origin, first_tile, begin, first_row, steps, (int)threadIdx.x - 128 * (GROUPS - 1)};
            reader.run(lane);
        }
        __syncwarp();
        named_barrier<1, THREADS>();
        named_barrier<1, THREADS>();
        exchange(args, shared, split, rows);
    } else if (group < MULTIPLIERS) {
        more_registers<160>();
        constexpr int MINE = TILES / MULTIPLIERS;
        int sum[MINE][TOKENS / 2] = {};
        int slot = 0, buffer = 0;
        u32 parity = 0, buffer_parity = 0;
#pragma unroll 1
        for (int s = 0; s < steps; ++s) {
            barrier_wait(full + slot * 8, parity);
            barrier_wait(coded + buffer * 8, buffer_parity);
            const u64 x = operand(base + slot * STAGE_BYTES + X_AT), codes = operand(base + CODES_AT + buffer * BUFFER_BYTES + group * MINE * TILE_BYTES);
            products_begin();
#pragma unroll
            for (int i = 0; i < MINE; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) multiply(sum[i], codes + (i * TILE_BYTES + half * 32 >> 4), x + (half * 32 >> 4));
            products_end();
            if (s) {
                products_wait<1>();  // those of the step before
                if (lane == 0) {
                    barrier_arrive(empty + (slot ? slot - 1 : STAGES - 1) * 8);
                    barrier_arrive(used + (buffer ? buffer - 1 : BUFFERS - 1) * 8);
                }
            }
            parity ^= slot == STAGES - 1;
            slot = slot == STAGES - 1 ? 0 : slot + 1;
            buffer_parity ^= buffer == BUFFERS - 1;
            buffer = buffer == BUFFERS - 1 ? 0 : buffer + 1;
        }
        products_wait<0>();
        wait_for_inputs();  // scales
        named_barrier<1, THREADS>();  // nobody needs the ring any more
        const int g = lane >> 2, c = lane & 3, w = warp & 3;
        float unit[MINE];
#pragma unroll
        for (int i = 0; i < MINE; ++i) unit[i] = tiles_before + group * MINE + i < args.w.n_tiles ? args.unit[tiles_before + group * MINE + i] : 0.f;
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const int row = 8 * n + 2 * c + side;
                asm volatile("" ::: "memory");  // one row after the other: registers are few
                const float scale = row < rows ? args.scale[first_row + row] : 0.f;
#pragma unroll
                for (int i = 0; i < MINE; ++i)
                    *(float2*)(shared + sum_at(row, group * MINE + i, 2 * g + (w >> 1)) + (w & 1) * 8) =
                        make_float2((float)sum[i][4 * n + side] * (scale * unit[i]), (float)sum[i][4 * n + 2 + side] * (scale * unit[i]));
            }
        named_barrier<1, THREADS>();
        exchange(args, shared, split, rows);
        finish_rows<MULTIPLIERS + EXPANDERS, 4>(args, shared, finish, split, tiles_before, first_row, rows, warp, lane);
    } else {
        const int turn = group - MULTIPLIERS, tile = warp & 3;
        u32 from = base + lane * 64 + ((tile ^ (lane >> 1 & 3)) << 4);
        const int g = lane >> 2, c = lane & 3;
        u32 to = base + CODES_AT + tile * TILE_BYTES + g * 64 + ((c ^ (g >> 1 & 3)) << 4);
        asm("" : "+r"(from), "+r"(to));
        int slot = turn, buffer = turn % BUFFERS;
        u32 parity = 0, buffer_parity = 1;  // a buffer's first use waits for nobody
#pragma unroll 1
        for (int s = turn; s < steps; s += EXPANDERS) {
            const u32 at = slot * STAGE_BYTES, into = to + buffer * BUFFER_BYTES;
            barrier_wait(full + slot * 8, parity);
            const uint2 step = *(const uint2*)&ready[(s & 2 * PERIOD - 1) * TILES + tile].z;
            const u32 smoothing = base + at + SMOOTHING_AT + c * 32;
            if (~step.x & 3 << 16)
                expand_tile<true>(from + at, smoothing, step.y, into, used + buffer * 8, buffer_parity, lane);
            else
                expand_tile<false>(from + at, smoothing, step.y, into, used + buffer * 8, buffer_parity, lane);
            written_for_products();
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(coded + buffer * 8);
                barrier_arrive(empty + slot * 8);
            }
            slot += EXPANDERS;
            if (slot >= STAGES) slot -= STAGES, parity ^= 1;
            buffer += EXPANDERS;
            if (buffer >= BUFFERS) buffer -= BUFFERS, buffer_parity ^= 1;
        }
        __syncwarp();
        named_barrier<1, THREADS>();
        named_barrier<1, THREADS>();
        exchange(args, shared, split, rows);
        finish_rows<MULTIPLIERS + EXPANDERS, 2>(args, shared, finish, split, tiles_before, first_row, rows, warp, lane);
    }
}
