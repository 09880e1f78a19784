// Batches and short prompts: y = x W^T, for blocks of up to 256 rows, the weight expanded inside, one scale per row and rotated output
// (`reference.requantize_block_ref`). Compiled by NVRTC for compute capability 9.0.
//
// A step is four tiles: WIDTH of outputs (half a block of the decode form, or a quarter) by DEPTH of inputs. A range of outputs is WIDTH
// tiles, and steps stand in the order of memory, range by range. Three kinds of warps work behind each other. Readers fill a ring with plane
// words (tensor copy, and `cp.async` for planes 2 and 3), and one of INT8 rows. Expanding warps, each with one tile of a step, make codes of
// plane words, multiply them in half precision by what makes one scale of an output in all tiles, round them to INT8 and write them where
// the tensor core reads them. Multiplying warps only start its products (`wgmma`), whose integer sums over the inputs stay in registers:
// nothing is rescaled on the way, so that the cost of a tile hardly grows with the number of rows.
// The CTAs of a cluster have a range, each an even part of its inputs. In the end each adds up the sums of some rows, its own and those
// in the shared memory of the others: whole numbers, so that the order does not matter. It rotates the outputs back, adds the bias and rounds.
// Several clusters may have a range; they send each other their sums through memory.
// STREAM: a CTA takes as many steps as every other, whatever the shape, and adds its sums of a range to those of others in memory. Who comes
// last takes them (leaving zeros).
//
// Set by the compiler's command line: XTYPE (of y: 0 bf16, 1 fp16), TOKENS (rows of a block: 16, 32, 64, 128, 256), WIDTH (4, 2; with
// 256 rows 2), STREAM (1: steps are cut wherever a range of outputs ends; 0: the CTAs of a cluster have a range, and one block of rows).

#include "prefill_ptx.cu"
#include "prefill_planes.cu"
#include "prefill_batch_ptx.cu"

struct Args {
    Map planes;           // planes 0 and 1: rows of 128 bytes, in boxes of 128 parts of rows, of WIDTH tiles
    Weight w;
    const u32* ratio;     // [blocks, k_tiles, 8] two equal halves: what codes of a tile are multiplied by, beside `smoothing`
    const u32* stretch;   // [n_tiles, 64] two halves: what codes of an output are multiplied by besides, and -1152 times that
    const float* unit;    // [n_tiles, 64] of what results
    const u16* smoothing; // [k_tiles, 64] half, in the order of places 4 i + (0, 2, 1, 3)
    const u8* x;          // [k_tiles, rows_padded, 64] int8, as `batch_rows` writes it
    const float* scale;   // [rows] of rows
    const u8* transform;  // [n_tiles] row of `table`, 255 for the identity
    const u8* table;      // [., 64]: bits 0-5 permutation, 6 left sign, 7 right sign
    const void* bias;     // [n_tiles * 64] or null
    void* y;              // [rows, n_tiles * 64], rows y_stride elements apart
    int* sums;            // [ranges][SUMS], zeros between launches
    u32* arrivals;        // [ranges], likewise
    long long y_stride;
    int rows, rows_padded, steps, bias_type;  // rows_padded: a multiple of 128; steps of all CTAs: below 2^32 / CTAs
    int parts, blocks;                        // CTAs of a cluster; blocks of rows: clusters next to each other that have the same ranges
    int whole;                                // of blocks of 256 rows, clusters whose CTAs have a range each: the first
    int groups;                               // clusters that share a range: of up to two CTAs if more than one; some begin early, some late
};

constexpr int TILES = 4, DEPTH = TILES / WIDTH, SUMS = WIDTH * 64 * TOKENS;
// Groups of four warps. The tensor core's sums take 128 registers of a multiplier, and 24 more are out of its reach.
constexpr int MULTIPLIERS = WIDTH * TOKENS == 512 ? 2 : 1, EXPANDERS = MULTIPLIERS == 2 ? 2 : 3, GROUPS = MULTIPLIERS + EXPANDERS + 1;
constexpr int THREADS = 128 * GROUPS, READERS = TOKENS == 256 ? 2 : 3, WORKERS = 4 * (MULTIPLIERS + EXPANDERS);  // the fourth warp of the last group reads rows
// Places of rings: of plane words, of rows, of codes (what is expanded before there are rows).
constexpr int STAGES = TOKENS == 256 ? 4 : 6, ROW_STAGES = TOKENS < 128 ? 6 : TOKENS == 256 ? 3 : 4;
constexpr int BUFFERS = TOKENS == 256 ? 3 : TOKENS == 128 ? WIDTH == 2 || STREAM ? 3 : 5 : TOKENS == 64 && (WIDTH == 2 || STREAM) ? 4 : 6;
// Of the first places for plane words so many are filled at once, and the others as those of the same reader fill: what all CTAs ask for at their
// start, rows wait behind. Few rows wait for the weight alone.
constexpr int ASKED = !STREAM && (TOKENS == 64 || TOKENS == 128) ? 4 : STAGES;
// Nobody may mistake the last but one use of a place for the last: the same warps take every use, or are never so far ahead.
static_assert(ASKED == STAGES || (ASKED >= READERS && STAGES == 2 * READERS));
static_assert(STAGES % EXPANDERS == 0 && BUFFERS >= EXPANDERS && (STAGES % READERS == 0 || STAGES >= READERS + EXPANDERS + BUFFERS));
// A place of the ring: planes 0 and 1, then 2 and 3, each [DEPTH][two planes][64 inputs][WIDTH], a tile's unit at place tile ^ `twist`.
constexpr int LINE = WIDTH * 16, PLANE = 64 * LINE, STAGE_BYTES = TILES * 4096;
constexpr int X_BYTES = DEPTH * TOKENS * 64, FACTOR_BYTES = DEPTH * 128;  // rows of a step, and the factors of its inputs
constexpr int TILE_BYTES = 4096, BUFFER_BYTES = TILES * TILE_BYTES;  // codes of a tile, of a step: [64 outputs][64 inputs], swizzled by 64 bytes
constexpr int SENT_ROWS = TOKENS < 64 ? TOKENS : 64, SENT = SENT_ROWS * 64;  // bytes that a warp adds to memory at once: 16 outputs of so many rows
// Shared memory, as `batch_bytes` in prefill_batch.py counts it: both rings (in the end, room to permute outputs); codes; sums on their
// way; steps; barriers; ranges of outputs.
constexpr int ROWS_AT = STAGES * STAGE_BYTES, CODES_AT = (ROWS_AT + ROW_STAGES * X_BYTES + 1023) / 1024 * 1024;
constexpr int SENT_AT = CODES_AT + BUFFERS * BUFFER_BYTES, FACTORS_AT = SENT_AT + (STREAM ? 4 * MULTIPLIERS * SENT : 0);
constexpr int STEPS_AT = FACTORS_AT + STAGES * FACTOR_BYTES;
constexpr int PERIOD = 32;  // steps that are made ready at a time, two periods kept
constexpr int KNOWN_AT = STEPS_AT + 2 * PERIOD * sizeof(uint4[TILES + 1]), KNOWN_BYTES = 592;
constexpr int BARRIERS_AT = KNOWN_AT + WIDTH * KNOWN_BYTES, LAST_AT = BARRIERS_AT + (STAGES + ROW_STAGES + BUFFERS + 1) * 16, ONES_AT = LAST_AT - 8;
constexpr int SCALES_AT = LAST_AT + 256;  // behind 64 words: scales of rows

// What is known of a step. tile.x, y: unit of input 0 in planes 2 and 3; z: units from an input to the next in plane 2 (bits 0-7) and
// plane 3 (8-15), and whether the tile lacks plane 2 (16) and 3 (17); w: `ratio`. place.x: number among the weight's blocks and input
// tiles; y: input tile; z: first tile of the block, w: of all.
struct Step {
    uint4 tile[TILES];
    uint4 place;
};

__device__ __forceinline__ constexpr u32 plane_at(int plane) { return (plane >> 1) * (STAGE_BYTES / 2) + (plane & 1) * PLANE; }
__device__ __forceinline__ u32 unit_at(u32 unit, u32 input) {
    const u32 twist = WIDTH == 4 ? input >> 1 & 3 : input >> 2 & 1;  // as the tensor copy swizzles
    return unit / WIDTH * (2 * PLANE) + input * LINE + ((unit % WIDTH ^ twist) << 4);
}

// Which steps a CTA takes.
// (A division of 64 bits would be a call, and a kernel with calls waits for every single product of the tensor core.)
__device__ __forceinline__ u32 first_of(u32 cta, u32 ctas, u32 steps) { return cta * steps / ctas; }
__device__ __forceinline__ u32 cta_of(u32 step, u32 steps) { return ((step + 1) * gridDim.x - 1) / steps; }

// Where a range of outputs lies: its first tile in its block; number of an input tile among all of the weight's blocks.
__device__ __forceinline__ u32 first_tile_of(u32 range) { return range * WIDTH % 8; }
__device__ __forceinline__ u32 block_at(const Args& args, u32 range, u32 kt) { return range * WIDTH / 8 * args.w.k_tiles + kt; }

// The CTA's step s, `first + s` of all.
__device__ __forceinline__ void make_ready(const Args& args, Step* ready, u32 first, int s) {
    const u32 k_steps = args.w.k_tiles / DEPTH, range = (first + s) / k_steps, kt = (first + s) % k_steps * DEPTH;
    const u32 first_tile = first_tile_of(range), at = block_at(args, range, kt);
    Step& to = ready[s & 2 * PERIOD - 1];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        const uint2 meta = args.w.meta[at + d];
        const u32 with2 = meta.y & 255, with3 = meta.y >> 8 & 255, count2 = __popc(with2), count3 = __popc(with3);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const u32 tile = first_tile + i, before = (1u << tile) - 1, lacks = (~with2 >> tile & 1) << 16 | (~with3 >> tile & 1) << 17;
            to.tile[d * WIDTH + i] = make_uint4(meta.x + __popc(with2 & before), meta.x + 64 * count2 + __popc(with3 & before),
                                                count2 | count3 << 8 | lacks, args.ratio[(u64)(at + d) * 8 + tile]);
        }
    }
    to.place = make_uint4(at, kt, first_tile, range * WIDTH);
}

// Bits 1 and 2 change places.
__device__ __forceinline__ constexpr u32 swapped(u32 g) { return g & 1 | (g & 2) << 1 | (g & 4) >> 1; }

// So many steps behind those that read a step is behind everybody.
constexpr int BEHIND = STAGES + 2 * READERS;

// What the warps do that read the weight, a step each in turn. full, empty: barriers of the places of the ring.
struct Reader {
    const Args& args;
    Step* ready;
    u32 base, full, empty, first;
    int steps, lane;

    // Planes 0 and 1 and the inputs' factors, by one thread.
    __device__ __forceinline__ void read_dense(int slot, u32 block_step, u32 kt, u32 first_tile) const {
        barrier_arrive_expect(full + slot * 8, STAGE_BYTES / 2 + FACTOR_BYTES);
        copy_bulk(base + FACTORS_AT + slot * FACTOR_BYTES, args.smoothing + kt * 64, FACTOR_BYTES, full + slot * 8);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            copy_box(base + slot * STAGE_BYTES + d * 2 * PLANE, args.planes, first_tile * 16, (block_step + d) * 128, full + slot * 8);
    }

    // What the first steps have of it, which asks for nothing that must be loaded before.
    __device__ __forceinline__ void read_first() const {
        for (int s = lane; s < min(steps, ASKED); s += 32) {
            const u32 k_steps = args.w.k_tiles / DEPTH, range = (first + s) / k_steps, kt = (first + s) % k_steps * DEPTH;
            read_dense(s, block_at(args, range, kt), kt, first_tile_of(range));
        }
    }

    __device__ __forceinline__ void read_weight(int s, int slot) const {
        const Step& step = ready[s & 2 * PERIOD - 1];
        if (s >= ASKED && lane == 0) read_dense(slot, step.place.x, step.place.y, step.place.z);
        const uint4 tile = step.tile[lane % TILES];
        const u32 input = lane / TILES;  // and all further ones of the lane
        const u32 to = base + slot * STAGE_BYTES + unit_at(lane % TILES, input);
        // What a tile lacks is never looked at.
        if (!(tile.z & 1 << 16)) read_plane<2, 0>(to, args.w.codes + (u64)(tile.x + input * (tile.z & 255)) * 16, (tile.z & 255) * 128);
        if (!(tile.z & 1 << 17)) read_plane<3, 0>(to, args.w.codes + (u64)(tile.y + input * (tile.z >> 8 & 255)) * 16, (tile.z >> 8 & 255) * 128);
        barrier_arrive_copied(full + slot * 8);
    }

    __device__ __forceinline__ void run(int turn) const {
        int slot = turn;
        u32 parity = 1;  // the first use of a place waits for nobody
#pragma unroll 1
        for (int batch = 0, at = -BEHIND; batch < steps; batch += READERS, at += READERS) {
            if (at >= PERIOD) {
                at -= PERIOD;
                const int from = batch - BEHIND - at + PERIOD;
                named_barrier<2, 32 * READERS>();
                if (turn == 0 && from + lane < steps) make_ready(args, ready, first, from + lane);
                named_barrier<2, 32 * READERS>();
            }
            const int s = batch + turn;
            if (s < steps) {
                barrier_wait(empty + slot * 8, parity);
                if (ASKED < STAGES && s >= ASKED && s < STAGES) barrier_wait(full + (s - READERS) * 8, 0);  // this reader's, and so not filled again
                read_weight(s, slot);
            }
            slot += READERS;
            if (slot >= STAGES) slot -= STAGES, parity ^= 1;
        }
    }

private:
    template <int P, int I>
    __device__ __forceinline__ void read_plane(u32 to, const u8* from, u32 step) const {
        copy_unit(to + plane_at(P) + I * 8 * LINE, from);
        if constexpr (I < 7) read_plane<P, I + 1>(to, from + step, step);
    }
};

// One thread that reads rows.
__device__ __forceinline__ void read_rows(const Args& args, const u8* x, u32 at, u32 full, u32 empty, u32 kt, int steps) {
    wait_for_inputs();
    let_next_start();
    int slot = 0;
    u32 parity = 1;
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
        barrier_wait(empty + slot * 8, parity);
        barrier_arrive_expect(full + slot * 8, X_BYTES);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            copy_bulk(at + slot * X_BYTES + d * TOKENS * 64, x + (u64)(kt + d) * args.rows_padded * 64, TOKENS * 64, full + slot * 8);
        kt += DEPTH;
        if (kt == args.w.k_tiles) kt = 0;
        if (++slot == ROW_STAGES) slot = 0, parity ^= 1;
    }
}

#include "prefill_batch_codes.cu"
#include "prefill_batch_finish.cu"

extern "C" __global__ void __launch_bounds__(THREADS, 1) batch(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(FULL, threadIdx.x >> 5, 0), group = warp >> 2;
    // Blocks of rows of a range next to each other: memory is asked once for what they read. One of the two is 1.
    const int blocks = TOKENS == 256 ? args.blocks : 1, groups = TOKENS == 256 || STREAM ? 1 : args.groups;
    const int size = args.parts, cluster = blockIdx.x / size, rank = blockIdx.x % size, row0 = cluster % blocks * TOKENS;
    const int whole = TOKENS == 256 ? args.whole : 0, parts = cluster < whole ? 1 : size, part = rank % parts;
    const int ranges = gridDim.x / (size * groups), team = groups > 1 ? cluster / ranges : 0, among = team * parts + part, all = groups * parts;
    const u32 k_steps = args.w.k_tiles / DEPTH;
    const u32 range = groups > 1 ? cluster % ranges : cluster < whole ? cluster / blocks * size + rank : whole / blocks * size + (cluster - whole) / blocks;
    const auto begin = [&](int of) { return range * k_steps + first_of(of, all, k_steps); };
    const u32 first = STREAM ? first_of(blockIdx.x, gridDim.x, args.steps) : begin(among), first_range = first / k_steps;
    const int steps = (STREAM ? first_of(blockIdx.x + 1, gridDim.x, args.steps) : begin(among + 1)) - first;

    const u32 base = shared_address(shared), full = base + BARRIERS_AT, empty = full + STAGES * 8;
    const u32 rows_full = empty + STAGES * 8, rows_empty = rows_full + ROW_STAGES * 8, coded = rows_empty + ROW_STAGES * 8, used = coded + BUFFERS * 8;
    Share share(row0, min(TOKENS, args.rows - row0), parts, part);
    Known* known = (Known*)(shared + KNOWN_AT);
    float* scales = (float*)(shared + SCALES_AT);
    Step* ready = (Step*)(shared + STEPS_AT);
    u32* last = (u32*)(shared + LAST_AT);  // a number and so many ranges of outputs that this CTA finishes
    const Reader reader{args, ready, base, full, empty, first, steps, lane};
    if (group == GROUPS - 1) {
        const int role = warp & 3;
        if (role == 0) {
            if (lane == 0) {
                for (int i = 0; i < STAGES; ++i) barrier_init(full + i * 8, 32 + 1), barrier_init(empty + i * 8, TILES);
                for (int i = 0; i < ROW_STAGES; ++i) barrier_init(rows_full + i * 8, 1), barrier_init(rows_empty + i * 8, 4 * MULTIPLIERS);
                for (int i = 0; i < BUFFERS; ++i) barrier_init(coded + i * 8, TILES), barrier_init(used + i * 8, 4 * MULTIPLIERS);
                barrier_init(used + BUFFERS * 8, 32);
                barriers_are_ready();
                last[0] = 0, store_shared(base + ONES_AT, 0x64006400u);
            }
            __syncwarp();
            reader.read_first();
        } else if (role <= 2 * PERIOD / 32) {
            const int s = lane + 32 * (role - 1);
            if (s < steps) make_ready(args, ready, first, s);
        }
        named_barrier<4, 128>();
        named_arrive<5, THREADS>();  // the others have rows to do before they need any of it
        less_registers<32>();
        if (role < READERS)
            reader.run(role);
        else if (role == 3) {
            if (lane == 0) read_rows(args, args.x + row0 * 64, base + ROWS_AT, rows_full, rows_empty, first % k_steps * DEPTH, steps);
            __syncwarp();
            if (!STREAM) {
                for (int row = lane; row < TOKENS; row += 32) scales[row] = row < share.rows ? __ldcg(args.scale + row0 + row) : 0.f;
                barrier_arrive(used + BUFFERS * 8);
            }
        }
        return;
    }
    named_barrier<5, THREADS>();
    if (group < MULTIPLIERS) {
        more_registers<160>();
        constexpr int MINE = WIDTH / MULTIPLIERS;
        if (!STREAM) find_known(args, known, first_range, threadIdx.x, 128 * MULTIPLIERS);
        int sum[MINE][TOKENS / 2], slot = 0, buffer = 0, s = 0;
        u32 parity = 0, buffer_parity = 0, range = first_range, arrived = range;
        // Steps up to `end`, of one range.
        const auto multiply_until = [&](int end) {
#pragma unroll 1
            for (; s < end; ++s) {
                barrier_wait(rows_full + slot * 8, parity);
                barrier_wait(coded + buffer * 8, buffer_parity);
                const u64 x = operand(base + ROWS_AT + slot * X_BYTES), codes = operand(base + CODES_AT + buffer * BUFFER_BYTES + group * MINE * TILE_BYTES);
                products_begin();
#pragma unroll
                for (int i = 0; i < MINE; ++i)
#pragma unroll
                    for (int k = 0; k < 2 * DEPTH; ++k)
                        multiply(sum[i], codes + ((k / 2 * WIDTH + i) * TILE_BYTES + k % 2 * 32 >> 4), x + (k / 2 * TOKENS * 64 + k % 2 * 32 >> 4));
                products_end();
                constexpr bool AT_ONCE = TOKENS == 256;  // rows are what others wait for; else it gives back what the step before had
                products_wait<AT_ONCE ? 0 : 1>();
                if (lane == 0 && (AT_ONCE || s)) {
                    barrier_arrive(rows_empty + (AT_ONCE ? slot : slot ? slot - 1 : ROW_STAGES - 1) * 8);
                    barrier_arrive(used + (AT_ONCE ? buffer : buffer ? buffer - 1 : BUFFERS - 1) * 8);
                }
                parity ^= slot == ROW_STAGES - 1;
                slot = slot == ROW_STAGES - 1 ? 0 : slot + 1;
                buffer_parity ^= buffer == BUFFERS - 1;
                buffer = buffer == BUFFERS - 1 ? 0 : buffer + 1;
            }
            products_wait<0>();
        };
        // Of the ranges before `range`, whose sums this warp has sent: says so, and whether it is the last to do it.
        const auto arrive = [&] {
            if (arrived < range && lane == 0) {
                sent_wait<false>();
                __threadfence();
                for (u32 of = arrived; of < range; ++of) {
                    const u32 begin = of * k_steps, ctas = cta_of(begin + k_steps - 1, args.steps) - cta_of(begin, args.steps) + 1;
                    if (atomicAdd(args.arrivals + of, 1) == ctas * 4 * MULTIPLIERS - 1) {
                        args.arrivals[of] = 0;
                        last[1 + atomicAdd(last, 1)] = of;
                    }
                }
                __threadfence();
            }
            arrived = range;
        };
#pragma unroll 1
        while (s < steps) {
            const int end = min(steps, (int)((range + 1) * k_steps - first));
#pragma unroll
            for (int i = 0; i < MINE; ++i)
#pragma unroll
                for (int k = 0; k < TOKENS / 2; ++k) sum[i][k] = 0;
            multiply_until(min(end, s + 2));
            arrive();  // by now what was sent is there
            multiply_until(end);
            const bool at_end = s == steps;  // then nobody needs the ring of plane words
            if constexpr (!STREAM) {
                named_barrier<3, 128 * MULTIPLIERS>();  // nor any other room
#pragma unroll
                for (int i = 0; i < MINE; ++i)
#pragma unroll
                    for (int k = 0; k < TOKENS / 2; k += 4)
                        store_shared4(base + sums_at(group * MINE + i, warp & 3, k / 4, lane) * 4, sum[i][k], sum[i][k + 1], sum[i][k + 2], sum[i][k + 3]);
                break;
            }
            wait_for_inputs();  // the launch before last may still use the sums
            int* to = args.sums + (u64)range * SUMS + (warp & 3) * (TOKENS * 16);
            constexpr int PIECES = TOKENS / SENT_ROWS;  // of a tile's sums
            static_assert(!STREAM || (MINE * PIECES <= 4 && 3 * 4 * MULTIPLIERS * SENT <= ROWS_AT));
#pragma unroll
            for (int j = 0; j < MINE * PIECES; ++j) {
                const int i = j / PIECES, n = j % PIECES * (SENT_ROWS / 8);
                if (8 * n >= args.rows) continue;
                const u32 room = at_end && j < 3 ? base + (3 * warp + j) * SENT : base + SENT_AT + warp * SENT;
                if (lane == 0 && !(at_end && j < 3)) sent_wait<true>();  // the room is free
                __syncwarp();
#pragma unroll
                for (int k = 0; k < SENT_ROWS / 2; k += 4)
                    store_shared4(room + sums_at(0, 0, k / 4, lane) * 4, sum[i][4 * n + k], sum[i][4 * n + k + 1], sum[i][4 * n + k + 2], sum[i][4 * n + k + 3]);
                fence_shared();
                __syncwarp();
                if (lane == 0) add_bulk(to + (group * MINE + i) * (TOKENS * 64) + n * 128, room, min(SENT_ROWS, (args.rows - 8 * n + 7) / 8 * 8) * 64);
            }
            ++range;
        }
        if (STREAM) arrive();
        if constexpr (MULTIPLIERS == 2) less_registers<96>();
    } else {
        if constexpr (MULTIPLIERS == 2) less_registers<64>();
        const int turn = group - MULTIPLIERS, tile = warp & 3;
        u32 from = base + unit_at(tile, lane);
        const int g = lane >> 2, c = lane & 3;
        u32 to = base + CODES_AT + tile * TILE_BYTES + swapped(g) * 64 + (8 * c ^ (swapped(g) >> 1 & 3) << 4);
        asm("" : "+r"(from), "+r"(to));
        u32 stretch[2][4];  // of the lane's outputs
        const auto look_up = [&](u32 first_tile) {
            const u32 nt = min(first_tile + tile % WIDTH, (u32)args.w.n_tiles - 1);  // codes beyond are zeros
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 four = __ldg((const uint4*)(args.stretch + nt * 64 + 8 * g + 4 * i));
                stretch[i][0] = four.x, stretch[i][1] = four.y, stretch[i][2] = four.z, stretch[i][3] = four.w;
            }
        };
        if (!STREAM) look_up(first_range * WIDTH);
        const u32 ones = load_shared(base + ONES_AT);  // from memory, so that the compiler cannot know it
        int slot = turn, buffer = turn;
        u32 parity = 0, buffer_parity = 1;  // a buffer's first use waits for nobody
#pragma unroll 1
        for (int s = turn; s < steps; s += EXPANDERS) {
            const u32 at = slot * STAGE_BYTES, into = to + buffer * BUFFER_BYTES;
            const u32 smoothing = base + FACTORS_AT + slot * FACTOR_BYTES + tile / WIDTH * 128 + c * 32;
            barrier_wait(full + slot * 8, parity);
            const Step& of = ready[s & 2 * PERIOD - 1];
            const uint2 step = *(const uint2*)&of.tile[tile].z;
            if (STREAM) look_up(of.place.w);
            const auto room = [&] { barrier_wait(used + buffer * 8, buffer_parity); };
            const auto read = [&] {
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + slot * 8);
            };
            if (!(step.x & 1 << 17))
                expand_tile<4>(from + at, smoothing, step.y, ones, stretch, into, room, read);
            else if (!(step.x & 1 << 16))
                expand_tile<3>(from + at, smoothing, step.y, ones, stretch, into, room, read);
            else
                expand_tile<2>(from + at, smoothing, step.y, ones, stretch, into, room, read);
            fence_shared();
            __syncwarp();
            if (lane == 0) barrier_arrive(coded + buffer * 8);
            slot += EXPANDERS;
            if (slot >= STAGES) slot -= STAGES, parity ^= 1;
            buffer += EXPANDERS;
            if (buffer >= BUFFERS) buffer -= BUFFERS, buffer_parity ^= 1;
        }
        __syncwarp();
        if constexpr (MULTIPLIERS == 2) more_registers<96>();
    }
    wait_for_inputs();
    float* room = (float*)(shared + SUMS * 4 + warp * (ROOM * 4));
    if constexpr (!STREAM) {
        if (parts > 1)
            cluster_arrive(), cluster_wait();
        else
            named_barrier<1, 32 * WORKERS>();
        barrier_wait(used + BUFFERS * 8);
        if (all > 1) {
            share = meet(args, base, share, groups, team, parts, part, first_range, ranges, warp, lane);
            named_barrier<1, 32 * WORKERS>();
        }
        finish_range<true>(args, nullptr, base, scales, share, known, first_range, room, warp, lane);
        if (parts > 1) cluster_leave(), cluster_wait();  // nobody leaves whose sums are still read
    } else {
        named_barrier<1, 32 * WORKERS>();  // nobody needs the rings any more
        for (u32 i = 1; i <= last[0]; ++i) {
            find_known(args, known, last[i], threadIdx.x, 32 * WORKERS);
            named_barrier<1, 32 * WORKERS>();
            finish_range<false>(args, args.sums + (u64)last[i] * SUMS, 0, nullptr, share, known, last[i], room, warp, lane);
            named_barrier<1, 32 * WORKERS>();
        }
    }
}
