// Graded bit-planar GEMV for 1 to 8 rows: one launch from activations to outputs. Compiled at first use by NVRTC, so it includes nothing
// but its own parts.
//
// A warp owns 64*TILES outputs and walks over whole 64-input tiles. Per tile it quantises the rows, finds every channel's level, sorts
// the channels by level, and streams only the planes that a channel's level asks for through a private ring in shared memory
// (cp.async, zero-filled where nothing is wanted). Plane words go to the INT8 tensor cores as they lie: a byte of `word & (3 << 2j)`
// is output 4t + j of ONE channel, scaled by 4^j, so four bytes of one channel fill four k-slots of the multiply, and the activation
// stands in B only where k-slot t meets column t. That needs no byte transposition, and any eight channels form a step.
// Sums inside a tile are integers (exact); tiles, warps and CTAs add in one fixed float order, the same for every M.
//
// Set by the compiler's command line: XTYPE (0 bf16, 1 fp16, 2 float32), STAGES (ring depth), SUMS (1: also write the integer sums),
// STREAM. Without it the CTAs of a cluster share a range of outputs (decode_cluster.cu); with it they share the whole weight evenly
// (decode_finish.cu). All this is for one and two rows; three and more take decode_dense.cu.

#include "decode_rows.cu"

#if STAMP  // for `sums`: when a warp was where, and (number 15) on which multiprocessor
#define MARK(i) if (lane == 0) args.sums[(blockIdx.x * (blockDim.x >> 5) + warp) * 16 + (i)] = (i) < 15 ? (int)clock64() : multiprocessor()
#else
#define MARK(i)
#endif

#if STREAM
#include "decode_finish.cu"
#else
#include "decode_cluster.cu"
#endif

#include "decode_inputs.cu"
#include "decode_dense.cu"

// A warp (k, n) of the CTA's warps_k x warps_n takes every (splits * warps_k)-th input tile and the n-th range of outputs; with STREAM a
// run of the CTA's items, which may cross from one block to the next. Shared memory, as tuning.py counts it: sums and rings of all warps;
// with STREAM sums of blocks that end inside a warp's run; inputs; parts; steps; what the exchange needs (with STREAM where runs begin).
template <int TILES, int ROWS>
__device__ __forceinline__ void decode(const Args& args) {
    constexpr int WORDS = TILES / 2;  // words of a channel that one lane works on
    // One row needs half of B's columns, so its other half takes the next word: k-slots 0-15 and 16-31 are then two words of the same
    // channels instead of eight channels of one word, and there are half as many accumulators.
    constexpr int SUMS_PER_LANE = ROWS == 1 ? WORDS / 2 : WORDS;
    constexpr int STAGE = TILES * STEP * 16, QUADS = SUMS_PER_LANE * 2, SUM_BYTES = QUADS * 512;
    extern __shared__ __align__(16) u8 shared[];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
#if STREAM
    const int tpw = args.tiles_per_warp, sub = 0;
    const Stretch cta(args, ROWS == 1 ? args.parts : 1, warp, warps);
    const int item_first = cta.item_first, mine = cta.mine, my_block = item_first / args.k_tiles, my_kt = item_first - my_block * args.k_tiles;
#else
    const int warps_k = args.warps_k, warps_n = warps / warps_k, warp_k = warp % warps_k, warp_n = warp / warps_k;
    const int splits = args.splits, split = blockIdx.x % splits, first_part = blockIdx.x / splits * warps_n;
    const int first_tile = (first_part + warp_n) * TILES, block = first_tile >> 3, sub = first_tile & 7;  // sub: 0, or 4 for the upper half
    const int stride = splits * warps_k, k_first = split * warps_k + warp_k, tpw = args.tiles_per_warp;
    const bool active = first_tile < args.n_tiles;
    const int k_end = active ? args.k_tiles : 0;
#endif

    // [QUADS][32] accumulators of the tensor core as they lie; a warp with one tile needs them when its ring is no longer needed
    const int ring_bytes = tpw > 1 ? SUM_BYTES + STAGES * STAGE : max(SUM_BYTES, STAGES * STAGE);
    float4* warp_sums = (float4*)(shared + warp * ring_bytes);
    u8* own_ring = shared + warp * ring_bytes + (tpw > 1 ? SUM_BYTES : 0);
#if STREAM
    float4* ended = (float4*)(shared + warps * ring_bytes);  // [places - 1][QUADS][32]
    Input<ROWS>* all_inputs = (Input<ROWS>*)(ended + (args.places - 1) * QUADS * 32);
    Input<ROWS>* inputs = all_inputs + warp * tpw;
    Part* parts = (Part*)(inputs + (warps - warp) * tpw) + warp * tpw;
    Step* steps = (Step*)(parts + (warps - warp) * tpw) + warp * (tpw * 16 + STAGES - 1);
    u32* borders = (u32*)(steps + (warps - warp) * (tpw * 16 + STAGES - 1));  // [warps + 1]
#else
    Input<ROWS>* all_inputs = (Input<ROWS>*)(shared + warps * ring_bytes);
    Part* parts = (Part*)(all_inputs + warps_k * tpw) + warp * tpw;
    Step* steps = (Step*)((Part*)(all_inputs + warps_k * tpw) + warps * tpw) + warp * (tpw * 16 + STAGES - 1);
    // [splits][ceil(tasks / splits)][64]: what the cluster's CTAs send for the output tiles (of one row each) that this one finishes.
    // A place of its own, so that nobody waits before sending.
    float* received = (float*)((Step*)((Part*)(all_inputs + warps_k * tpw) + warps * tpw) + warps * (tpw * 16 + STAGES - 1));
    const int tasks = args.rows * warps_n * TILES, tasks_here = (tasks + splits - 1) / splits;
    const Input<ROWS>* inputs = all_inputs + warp_k * tpw;
#endif
    const u32 ring = shared_address(own_ring);
#if STREAM
    if (lane == 0) borders[warp] = item_first;
    if (threadIdx.x == 0) borders[warps] = cta.first + cta.count;
#else
    cluster_started();  // nobody may send to a CTA that has not
#endif
    MARK(0);
    MARK(15);

#pragma unroll
    for (int i = 0; i < STAGES * STAGE / 512; ++i) ((uint4*)own_ring)[i * 32 + lane] = make_uint4(0, 0, 0, 0);
    // what belongs to the weight may be read before the activations are there
    uint2 my_meta = make_uint2(0, 0);
#if STREAM
    if (lane < mine) my_meta = args.meta[item_first + lane];
    for (int i = lane; i < mine * 8; i += 32)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&parts[i >> 3].factor[i & 7])), "l"(args.factor + (u64)item_first * 8 + i) : "memory");
    const int finished = cta.first_finished(warp, warps), finished_tile = cta.first_block * 8 + finished;
    u32 transform = 255;
    if (finished < cta.closed() * 8 && finished_tile < args.n_tiles) transform = args.transform[finished_tile];
#else
    if (lane < tpw && k_first + lane * stride < k_end) my_meta = args.meta[block * args.k_tiles + k_first + lane * stride];
    for (int i = lane; i < tpw * 8; i += 32) {
        const int kt = k_first + (i >> 3) * stride;
        if (kt < k_end)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&parts[i >> 3].factor[i & 7])),
                         "l"(args.factor + (long long)(block * args.k_tiles + kt) * 8 + (i & 7))
                         : "memory");
    }
    // the first output tile that this warp finishes
    u32 my_codes = 0x10000;
    if (warp * splits + split < tasks) my_codes = transform_codes(args, first_part * TILES + (warp * splits + split) % (warps_n * TILES), lane);
#endif

    // who copies what: 16 bytes (one tile's share of one channel) per lane and copy
    constexpr int COPIES = STAGE / 512, ROWS_PER_COPY = 32 / TILES;
    const int copy_tile = lane % TILES, copy_row = lane / TILES;
    u32 copy_to[COPIES], copy_needs[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
        const int row = copy_row + i * ROWS_PER_COPY;
        const int twist = TILES == 8 ? (row & 3) * 2 : (row & 2);
        copy_to[i] = ring + row * (TILES * 16) + (copy_tile ^ twist) * 16;
        copy_needs[i] = 1u << copy_tile | 256u << row;
    }
    u32 tiles_before = (1u << copy_tile) - 1;
    const u8* words = args.codes;
    asm volatile("" : "+l"(words));  // keeps the address in registers

    const int g = lane >> 2, c = lane & 3;
    const int twist = TILES == 8 ? c * 2 : (c & 2);
    u32 read_from = ring + c * (TILES * 16) + (TILES == 8 ? (g ^ twist) * 16 : ((g >> 1) ^ twist) * 16 + (g & 1) * 8);
    // B: column n = 4 * half + t; the activation goes to byte t of the word, the other bytes are zero
    const int half = ROWS == 1 ? 0 : g >> 2, t = g & 3;
    constexpr int SELECTS = ROWS == 1 ? 2 : 1;
    u32 select[SELECTS];
#pragma unroll
    for (int q = 0; q < SELECTS; ++q) select[q] = ROWS == 1 ? (g >> 2 == q ? 0x4444u ^ 4u << (4 * t) : 0x4444u) : 0x4444u ^ 4u << (4 * t);
    const int tile_of_lane = TILES == 8 ? g : sub + (g >> 1);

    // now, while there is time
#pragma unroll
    for (int i = 0; i < COPIES; ++i) keep(copy_needs[i]);
    keep(copy_to[0]);
    keep(tiles_before);
    keep(read_from);
#pragma unroll
    for (int q = 0; q < SELECTS; ++q) keep(select[q]);

#if STREAM
    // some of the first channels are wanted by all likelihood: memory would have nothing else to do
    if (lane == 0 && mine > 0) prefetch_L2(args.codes + (u64)item_first * 16384, PREFETCHED);
#endif
    wait_for_inputs();
    let_next_start();
    MARK(1);

    float t4[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) t4[i] = args.thresholds[i];
#if STREAM
#pragma unroll 1
    for (int j = 0, kt = my_kt; j < mine; j += 4) {
        Pair raw[4][ROWS];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (j + i < mine) load_rows<ROWS>(args, raw[i], kt, lane);
            if (++kt == args.k_tiles) kt = 0;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (j + i < mine) keep_rows<ROWS>(args, inputs[j + i], raw[i], lane);
    }
    MARK(2);
#else
#pragma unroll 1
    for (int task = warp; task < warps_k * tpw; task += warps) {
        const int kt = split * warps_k + task / tpw + task % tpw * stride;
        if (kt >= args.k_tiles) continue;
        Pair raw[ROWS];
        load_rows<ROWS>(args, raw, kt, lane);
        keep_rows<ROWS>(args, all_inputs[task], raw, lane);
        sort_channels<ROWS>(args, all_inputs[task], t4, lane);
    }
    __syncthreads();
    MARK(2);
#endif

    u32 cursor = shared_address(steps);
    auto produce = [&](u32 slot) {
        u32 unit, channels, wanted, unit_stride;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(unit), "=r"(channels), "=r"(wanted), "=r"(unit_stride) : "r"(cursor));
        cursor += 16;
        unit += __popc(wanted & tiles_before);
        channels += copy_row;
#pragma unroll
        for (int i = 0; i < COPIES; i += 2) {
            u32 channel[2];
            asm volatile("ld.shared.u8 %0, [%1];" : "=r"(channel[0]) : "r"(channels + i * ROWS_PER_COPY));
            asm volatile("ld.shared.u8 %0, [%1];" : "=r"(channel[1]) : "r"(channels + (i + 1) * ROWS_PER_COPY));
            const u8* from0 = words + (u64)(unit + channel[0] * unit_stride) * 16;
            const u8* from1 = words + (u64)(unit + channel[1] * unit_stride) * 16;
            asm volatile(
                "{.reg .pred p, q;\n"
                "setp.eq.u32 p, %4, 0;\n"
                "setp.eq.u32 q, %5, 0;\n"
                "@p cp.async.cg.shared.global [%0], [%2], 16;\n"
                "@q cp.async.cg.shared.global [%1], [%3], 16;}\n" ::"r"(copy_to[i] + slot), "r"(copy_to[i + 1] + slot), "l"(from0), "l"(from1),
                "r"(~wanted & copy_needs[i]), "r"(~wanted & copy_needs[i + 1])
                : "memory");
        }
        copy_commit();
    };

#if STREAM
    // An item is prepared when the ring will soon ask for its channels: the other warps' loads go on meanwhile. Only the first one keeps
    // memory waiting, so its first loads are asked for as soon as its channels of planes 0 and 1 are known.
    int total = 0, ready = 0, early = 0, ready_block = my_block, ready_kt = my_kt, block = my_block, kt = my_kt;
    auto prepare = [&]() {
        Input<ROWS>& input = inputs[ready];
        const int at = item_first + ready;
        const uint2 meta = make_uint2(__shfl_sync(FULL, my_meta.x, ready), __shfl_sync(FULL, my_meta.y, ready));
        sort_channels<ROWS>(args, input, t4, lane);
        __syncwarp();
        u32 counts = input.counts;  // planes that none of the block's tiles has need no step
        if (!(meta.y & 0xff)) counts &= 0x0000ffffu;
        if (!(meta.y & 0xff00)) counts &= 0x00ffffffu;
        list_steps<TILES, true>(args, input, counts, steps, total, meta, at, ready_block, 0, lane);
        if (ready == 0) {
            __syncwarp();
#pragma unroll
            for (int i = 0; i < STAGES - 1; ++i)
                if (i < total) produce(i * STAGE);
            early = total;
            MARK(3);
        }
        list_steps<TILES, false>(args, input, counts, steps, total, meta, at, ready_block, 0, lane);
        quantise<ROWS>(input, t4, lane);
        if (lane == 0) {
            parts[ready].masks = meta.y;
            parts[ready].counts = counts;
            parts[ready].end = total;
        }
        if (++ready_kt == args.k_tiles) ready_kt = 0, ++ready_block;
        ++ready;
    };
    auto end_list = [&]() {  // what the pipeline asks for beyond the end
        if (ready == mine && lane < STAGES - 1) steps[total + lane] = Step{0, shared_address(all_inputs), 0, 0};
        __syncwarp();
    };
#else
    // the first loads need nothing but the channels of planes 0 and 1; the activations are quantised while they are under way
    int total = 0;
    if (k_first < k_end)
        list_steps<TILES, true>(args, inputs[0], inputs[0].counts, steps, total, my_meta, block * args.k_tiles + k_first, block, sub, lane);
    __syncwarp();
    const int early = total;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i)
        if (i < early) produce(i * STAGE);
    MARK(3);
#pragma unroll 1
    for (int task = warp; task < warps_k * tpw; task += warps) {
        const int kt = split * warps_k + task / tpw + task % tpw * stride;
        if (kt < args.k_tiles) quantise<ROWS>(all_inputs[task], t4, lane);
    }
    for (int j = 0, kt = k_first; kt < k_end; ++j, kt += stride) {
        const int at = block * args.k_tiles + kt;
        const uint2 meta = make_uint2(__shfl_sync(FULL, my_meta.x, j), __shfl_sync(FULL, my_meta.y, j));
        u32 counts = inputs[j].counts;  // planes that none of the warp's tiles has need no step
        if (!(meta.y >> sub & ((1u << TILES) - 1))) counts &= 0x0000ffffu;
        if (!(meta.y >> (8 + sub) & ((1u << TILES) - 1))) counts &= 0x00ffffffu;
        if (lane == 0) {
            parts[j].masks = meta.y;
            parts[j].counts = counts;
        }
        if (j) list_steps<TILES, true>(args, inputs[j], counts, steps, total, meta, at, block, sub, lane);
        list_steps<TILES, false>(args, inputs[j], counts, steps, total, meta, at, block, sub, lane);
    }
    if (lane < STAGES - 1) steps[total + lane] = Step{0, shared_address(all_inputs), 0, 0};  // what the pipeline asks for beyond the end
    __syncthreads();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i)
        if (i >= early) produce(i * STAGE);
    MARK(4);
#endif

    u32 read_at = 0, write_at = (STAGES - 1) * STAGE;
#pragma unroll 1
#if STREAM
    for (int j = -1; j < mine; ++j) {
#pragma unroll 1
        while (ready < mine && (ready <= j || total < STAGES - 1 + (j < 0 ? 0 : (int)parts[j].end))) {
            prepare();
            __syncwarp();
        }
        end_list();
        if (j < 0) {
#pragma unroll
            for (int i = 0; i < STAGES - 1; ++i)
                if (i >= early) produce(i * STAGE);
            MARK(4);
            continue;
        }
        [[maybe_unused]] const int first_tile = block * 8;
        const bool fresh = j == 0 || kt == 0;  // no sum of this block yet
#else
    for (int j = 0, kt = k_first; kt < k_end; ++j, kt += stride) {
        const bool fresh = j == 0;
#endif
        const u32 counts = parts[j].counts, masks = parts[j].masks;
        int sum[SUMS_PER_LANE][2][4];
#pragma unroll
        for (int i = 0; i < SUMS_PER_LANE; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int r = 0; r < 4; ++r) sum[i][h][r] = 0;
        float unit = 512.f;  // doubled, and 4 for every plane below the last one read
        auto read_plane = [&](auto dense, int plane) {
            constexpr bool DENSE = decltype(dense)::value;
            const int count = counts >> (8 * plane) & 255;
            if (count == 0) return;
            unit *= 0.25f;
            if (plane > 0) {
#pragma unroll
                for (int i = 0; i < SUMS_PER_LANE; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
#pragma unroll
                        for (int r = 0; r < 4; ++r) sum[i][h][r] *= 4;
            }
            // of a tile without this plane the ring holds something older
            const u32 keep = DENSE || (masks >> (8 * (plane - 2) + tile_of_lane) & 1) ? 0xffffffffu : 0;
            // fields up to j of every byte: output j is a difference of two sums, and the last one needs no mask
            const u32 low[4] = {0x03030303u & keep, 0x0f0f0f0fu & keep, 0x3f3f3f3fu & keep, keep};
            u32 entries = shared_address(&inputs[j].entry[plane][c][half]);
            const u32 entries_end = entries + count * ROWS;
            auto eight = [&](int k) {  // slots 8k to 8k + 7 of the step
                u32 w[2][WORDS], x[2];
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const u32 from = read_from + read_at + (2 * k + s) * (TILES * 64), entry = entries + (2 * k + s) * 4 * ROWS;
                    if constexpr (TILES == 8)
                        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[s][0]), "=r"(w[s][1]), "=r"(w[s][2]), "=r"(w[s][3]) : "r"(from));
                    else
                        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[s][0]), "=r"(w[s][1]) : "r"(from));
                    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x[s]) : "r"(entry));
                }
                if (k == 0) produce(write_at);
                u32 b[SELECTS][2];
#pragma unroll
                for (int q = 0; q < SELECTS; ++q)
#pragma unroll
                    for (int s = 0; s < 2; ++s) b[q][s] = __byte_perm(x[s], 0, select[q]);
#pragma unroll
                for (int i = 0; i < SUMS_PER_LANE; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        if constexpr (ROWS == 1) {
#pragma unroll
                            for (int s = 0; s < 2; ++s)
                                mma<STREAM>(sum[i][h], w[s][2 * i] & low[2 * h], w[s][2 * i] & low[2 * h + 1], w[s][2 * i + 1] & low[2 * h],
                                    w[s][2 * i + 1] & low[2 * h + 1], b[0][s], b[1][s]);
                        } else {
                            const u32 a0 = w[0][i] & low[2 * h], a1 = w[0][i] & low[2 * h + 1];
                            const u32 a2 = w[1][i] & low[2 * h], a3 = w[1][i] & low[2 * h + 1];
                            mma<STREAM>(sum[i][h], a0, a1, a2, a3, b[0][0], b[0][1]);
                        }
                    }
            };
#pragma unroll 1
            do {
                copy_wait<STAGES - 2>();
                __syncwarp();
                eight(0);
                if (entries + 8 * ROWS < entries_end) eight(1);
                entries += STEP * ROWS;
                write_at = read_at;
                read_at = read_at == (STAGES - 1) * STAGE ? 0 : read_at + STAGE;
            } while (entries < entries_end);
        };
#pragma unroll 1
        for (int plane = 0; plane < 2; ++plane) read_plane(True{}, plane);
#pragma unroll 1
        for (int plane = 2; plane < 4; ++plane) read_plane(False{}, plane);
        if (counts == 0 || tpw == 1) {  // no step has waited for the tile's factors; or the sums take the ring's place
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncwarp();
        }
        const int bits_class = masks >> (16 + 2 * tile_of_lane) & 3;
        const float tile_factor = parts[j].factor[tile_of_lane];
        const int m = ROWS == 1 ? 0 : c >> 1;
        const float scale = tile_factor * inputs[j].scale[m], centre = inputs[j].centre[m][bits_class];
#pragma unroll
        for (int i = 0; i < SUMS_PER_LANE; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#if STREAM
                float4& held = warp_sums[place_of<ROWS>(i * 2 + h, lane)];
#else
                float4& held = warp_sums[(i * 2 + h) * 32 + lane];
#endif
                float4 v = fresh ? make_float4(0.f, 0.f, 0.f, 0.f) : held;
                float whole[4];
#pragma unroll
                for (int r = 0; r < 4; ++r) {  // exact: whole numbers below 2^24
                    const int below = r >= 2 ? sum[i][h][r - 2] : h ? sum[i][0][r + 2] : 0;
                    whole[r] = fmaf((float)(sum[i][h][r] - below), unit / (float)(1 << (4 * h + 2 * (r >> 1))), centre);
                }
                v.x = fmaf(whole[0], scale, v.x);
                v.y = fmaf(whole[1], scale, v.y);
                v.z = fmaf(whole[2], scale, v.z);
                v.w = fmaf(whole[3], scale, v.w);
                held = v;
#if SUMS
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int word = ROWS == 1 ? 2 * i + (c >> 1) : i;
                    const int out = first_tile * 64 + g * 16 * WORDS + word * 16 + 4 * (2 * (c & 1) + (r & 1)) + 2 * h + (r >> 1);
                    if (m < args.rows && out < args.n_tiles * 64)
                        args.sums[((long long)m * args.k_tiles + kt) * args.n_tiles * 64 + out] = (int)whole[r] / (1 << (6 - 2 * bits_class));
                }
#endif
            }
#if STREAM
        if (++kt == args.k_tiles) {
            kt = 0;
            if (j + 1 < mine) {  // the block's inputs end here, the run does not
                __syncwarp();
                float4* to = ended + (block - cta.first_block) * QUADS * 32;
#pragma unroll
                for (int i = 0; i < QUADS; ++i) to[i * 32 + lane] = warp_sums[i * 32 + lane];
            }
            ++block;
        }
#endif
    }
    MARK(5);
#if STREAM
    asm volatile("cp.async.wait_all;" ::: "memory");
    u32 codes = 0;
    if (transform != 255) codes = *(const u32*)(args.table + transform * 64 + 4 * (lane & 15));
    __syncthreads();
    MARK(10);
    hand_on<ROWS>(args, cta, shared, ring_bytes, ended, borders, transform, codes);
    MARK(7);
#else
    if (k_first >= k_end)
#pragma unroll
        for (int i = 0; i < QUADS; ++i) warp_sums[i * 32 + lane] = make_float4(0.f, 0.f, 0.f, 0.f);
    asm volatile("cp.async.wait_all;" ::: "memory");
    MARK(6);
    __syncthreads();
    cluster_wait();

    // warps that share outputs add in ascending order; the sum goes to the CTA that finishes the tile
    for (int quad = warp; quad < warps_n * QUADS; quad += warps) {
        const int n_part = quad / QUADS, in_part = quad % QUADS;
        const float4* at = (const float4*)(shared + n_part * warps_k * ring_bytes) + in_part * 32 + lane;
        float4 v = *at;
#pragma unroll 4
        for (int k = 1; k < warps_k; ++k) {
            const float4 more = at[k * (ring_bytes / 16)];
            v.x += more.x;
            v.y += more.y;
            v.z += more.z;
            v.w += more.w;
        }
        const int m = ROWS == 1 ? 0 : c >> 1;
        const int word = (ROWS == 1 ? in_part / 2 * 2 + (c >> 1) : in_part / 2) + (TILES == 8 ? 0 : (g & 1) * 2);
        if (m < args.rows) {
            const int task = m * warps_n * TILES + n_part * TILES + (TILES == 8 ? g : g >> 1);
            const float* slot = received + (split * tasks_here + task / splits) * 64 + ((word * 2 + (in_part & 1)) * 2 + (c & 1)) * 4;
            store_cluster(address_in(shared_address(slot), task % splits), v);
        }
    }
    cluster_arrive();
    cluster_wait();
    MARK(8);
    finish_tasks(args, received, splits, split, warps_n * TILES, first_part * TILES, my_codes, warps);
    MARK(10);
#endif
}

// The first bound sets the registers: 65536 / threads, so that enough warps are resident to hide each other's latencies.
#define KERNEL(TILES, ROWS, THREADS)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) decode_##TILES##_##ROWS(const __grid_constant__ Args args) { \
        decode<TILES, ROWS>(args);                                                                                    \
    }
KERNEL(8, 1, STREAM ? 768 : 896)
KERNEL(8, 2, 640)
#if !STREAM
KERNEL(4, 1, 896)
KERNEL(4, 2, 768)
#endif
