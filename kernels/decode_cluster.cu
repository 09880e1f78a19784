// Part of decode_bitplane.cu, without STREAM: one and two rows, and how a cluster finishes the outputs it shares. Included there.

// One step of a warp: up to 16 channels of one plane of one tile.
struct __align__(16) Step {
    u32 unit;     // of channel 0 and the warp's first tile that has the plane
    u32 channels; // shared address of the step's channel numbers
    u32 wanted;   // bits 0-7: the warp's tiles that have the plane; bits 8-23: the slots that are not padding
    u32 stride;   // units from channel to channel
};

// What a CTA keeps of an input tile. Slots are channels sorted by level, highest first, ascending inside a level.
template <int ROWS>
struct __align__(16) Input {
    u8 channel[64];                  // slot -> channel
    u8 slot[64];                     // channel -> slot
    u8 entry[4][64][ROWS];           // first the rows in float32; then, per plane: the INT8 activation of a row where its level wants the plane, else 0
    float scale[ROWS];               // activation scale of a row
    float centre[ROWS][4];           // sum of q * (doubled midpoint minus zero point) in steps of 8-bit codes, per tile class (2, 4, 6, 8 bits)
    u32 counts;                      // byte p: channels that need plane p, over all rows
};

// First half of the preparation: which channels are wanted. Loads of weights can start when it is done.
template <int ROWS>
__device__ __forceinline__ void sort_channels(const Args& args, Input<ROWS>& tile, const float (&t)[4], int lane) {
    float2 v[ROWS];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) v[m] = ((const float2*)tile.entry)[m * 32 + lane];
    int top0 = 0, top1 = 0;
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
        if (m < args.rows) {
            top0 = max(top0, level_of(fabsf(v[m].x), t));
            top1 = max(top1, level_of(fabsf(v[m].y), t));
        }
    // byte l - 1: how many of the channels before have level l; a scan of all levels at once (popc is slow)
    const u32 own0 = top0 ? 1u << (8 * top0 - 8) : 0, own1 = top1 ? 1u << (8 * top1 - 8) : 0;
    u32 upto = own0 + own1;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const u32 more = __shfl_up_sync(FULL, upto, d);
        if (lane >= d) upto += more;
    }
    const u32 counts = (u32)((u64)__shfl_sync(FULL, upto, 31) * 0x01010101u >> 24), before = upto - own0 - own1;  // of level l and above
    auto slot_of = [&](int top) {
        const u32 same = top ? before >> (8 * top - 8) & 255 : 2 * lane - (before * 0x01010101u >> 24);
        return (int)(same + (top < 4 ? counts >> (8 * top) & 255 : 0));
    };
    const int slot0 = slot_of(top0), slot1 = slot_of(top1) + (top0 == top1);
    tile.channel[slot0] = (u8)(2 * lane);
    tile.channel[slot1] = (u8)(2 * lane + 1);
    *(u16*)&tile.slot[2 * lane] = (u16)(slot0 | slot1 << 8);
    if (lane == 0) tile.counts = counts;
}

// Second half of the preparation: INT8 activations in the order of the slots, their scales and the constant part of every sum.
template <int ROWS>
__device__ __forceinline__ void quantise(Input<ROWS>& tile, const float (&t)[4], int lane) {
    float2 v[ROWS];
    float largest[ROWS];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) v[m] = ((const float2*)tile.entry)[m * 32 + lane];
    __syncwarp();
#pragma unroll
    for (int m = 0; m < ROWS; ++m) largest[m] = largest_of(v[m]);
    const u32 slots = *(const u16*)&tile.slot[2 * lane];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        const Quantised o = quantise_row(v[m], largest[m], t, lane);
        if (lane < 4) {
            tile.centre[m][lane] = (float)o.centre;
            tile.scale[m] = o.scale;
        }
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            tile.entry[p][slots & 255][m] = (u8)(o.l0 > p ? o.q0 : 0);
            tile.entry[p][slots >> 8][m] = (u8)(o.l1 > p ? o.q1 : 0);
        }
    }
}

// Appends the steps of planes 0 and 1 (or 2 and 3) of an input tile to the warp's list.
template <int TILES, bool DENSE, int ROWS>
__device__ __forceinline__ void list_steps(const Args& args, const Input<ROWS>& input, u32 counts, Step* steps, int& total, uint2 meta, int at, int block, int sub, int lane) {
    const int second = lane >> 2 & 1, first = (lane & 3) * STEP, plane = (DENSE ? 0 : 2) + second;
    const int left = lane < 8 ? (int)(counts >> (8 * plane) & 255) - first : 0;
    const u32 all = __ballot_sync(FULL, left > 0);
    if (left > 0) {
        Step step;
        const u32 slots = left >= STEP ? 0xffff00u : ((1u << left) - 1) << 8;
        step.channels = shared_address(input.channel + first);
        if (DENSE) {
            const int inside = min(TILES, args.n_tiles - block * 8 - sub);
            step.unit = (u32)at * 1024 + plane * 512 + sub;
            step.wanted = ((1u << inside) - 1) | slots;
            step.stride = 8;
        } else {
            const u32 whole = meta.y >> (8 * second) & 255;
            step.unit = meta.x + (second ? 64 * __popc(meta.y & 255) : 0) + __popc(whole & ((1u << sub) - 1));
            step.wanted = (whole >> sub & ((1u << TILES) - 1)) | slots;
            step.stride = __popc(whole);
        }
        steps[total + __popc(all & ((1u << lane) - 1))] = step;
    }
    total += __popc(all);
}

// One row of an output tile is a task; a range of `tiles` of them has rows x tiles, and task i belongs to CTA i % ctas. received: what the CTAs
// sent to this one, [splits][ceil(tasks / ctas)][64]. codes: of the first task of this warp, as `transform_codes` gives them.
//
// Output 16 w + 4 (2 b + y) + 2 h + z of a tile (b, y, h, z bits) lies at 16 w + 8 h + 4 b + 2 z + y, as the tensor core leaves them.
__device__ __forceinline__ void finish_tasks(const Args& args, const float* received, int ctas, int rank, int tiles, int first_tile, u32 codes, int warps) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (warp >= warps) return;
    const int tasks = args.rows * tiles, tasks_here = (tasks + ctas - 1) / ctas;
    for (int mine = warp; mine * ctas + rank < tasks; mine += warps) {
        const int task = mine * ctas + rank, m = task / tiles, nt = first_tile + task % tiles;
        if (nt >= args.n_tiles) continue;
        const int n_t = lane >> 2 & 3, n_j = lane & 3;  // this lane takes outputs lane and lane + 32
        const float* from = received + mine * 64 + (((lane >> 4) * 2 + (n_j >> 1)) * 2 + (n_t >> 1)) * 4 + (n_j & 1) * 2 + (n_t & 1);
        float lo = from[0], hi = from[32];
#pragma unroll 1
        for (int s = 1; s < args.splits; s += 8) {
            float more[8][2];
#pragma unroll
            for (int u = 0; u < 8; ++u)
                if (s + u < args.splits) {
                    more[u][0] = from[(s + u) * tasks_here * 64];
                    more[u][1] = from[(s + u) * tasks_here * 64 + 32];
                }
#pragma unroll
            for (int u = 0; u < 8; ++u)
                if (s + u < args.splits) {
                    lo += more[u][0];
                    hi += more[u][1];
                }
        }
        const u32 both = nt == first_tile + (warp * ctas + rank) % tiles ? codes : transform_codes(args, nt, lane);
        if (!(both & 0x10000)) {  // y = l H[perm] (r y~) / 8
            const u32 code_lo = both & 255, code_hi = both >> 8;
            lo = code_lo & 128 ? -lo : lo;
            hi = code_hi & 128 ? -hi : hi;
            const float a = lo + hi, b = lo - hi;
            lo = a;
            hi = b;
#pragma unroll
            for (int bit = 1; bit < 32; bit <<= 1) {
                const float other_lo = __shfl_xor_sync(FULL, lo, bit), other_hi = __shfl_xor_sync(FULL, hi, bit);
                lo = lane & bit ? other_lo - lo : lo + other_lo;
                hi = lane & bit ? other_hi - hi : hi + other_hi;
            }
            const float lo_of_lo = __shfl_sync(FULL, lo, code_lo & 31), hi_of_lo = __shfl_sync(FULL, hi, code_lo & 31);
            const float lo_of_hi = __shfl_sync(FULL, lo, code_hi & 31), hi_of_hi = __shfl_sync(FULL, hi, code_hi & 31);
            lo = (code_lo & 32 ? hi_of_lo : lo_of_lo) * (code_lo & 64 ? -0.125f : 0.125f);
            hi = (code_hi & 32 ? hi_of_hi : lo_of_hi) * (code_hi & 64 ? -0.125f : 0.125f);
        }
        const int n = nt * 64 + lane;
        if (args.bias) {
            lo += load_bias(args.bias, n, args.bias_type);
            hi += load_bias(args.bias, n + 32, args.bias_type);
        }
#if XTYPE == 2
        float* y = (float*)args.y + m * args.y_stride + n;
        y[0] = lo;
        y[32] = hi;
#else
        u16* y = (u16*)args.y + m * args.y_stride + n;
        y[0] = to_half(lo, XTYPE);
        y[32] = to_half(hi, XTYPE);
#endif
    }
}

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
    const int warps_k = args.warps_k, warps_n = warps / warps_k, warp_k = warp % warps_k, warp_n = warp / warps_k;
    const int splits = args.splits, split = blockIdx.x % splits, first_part = blockIdx.x / splits * warps_n;
    const int first_tile = (first_part + warp_n) * TILES, block = first_tile >> 3, sub = first_tile & 7;  // sub: 0, or 4 for the upper half
    const int stride = splits * warps_k, k_first = split * warps_k + warp_k, tpw = args.tiles_per_warp;
    const bool active = first_tile < args.n_tiles;
    const int k_end = active ? args.k_tiles : 0;

    // [QUADS][32] accumulators of the tensor core as they lie; a warp with one tile needs them when its ring is no longer needed
    const int ring_bytes = tpw > 1 ? SUM_BYTES + STAGES * STAGE : max(SUM_BYTES, STAGES * STAGE);
    float4* warp_sums = (float4*)(shared + warp * ring_bytes);
    u8* own_ring = shared + warp * ring_bytes + (tpw > 1 ? SUM_BYTES : 0);
    Input<ROWS>* all_inputs = (Input<ROWS>*)(shared + warps * ring_bytes);
    Part* parts = (Part*)(all_inputs + warps_k * tpw) + warp * tpw;
    Step* steps = (Step*)((Part*)(all_inputs + warps_k * tpw) + warps * tpw) + warp * (tpw * 16 + STAGES - 1);
    // [splits][ceil(tasks / splits)][64]: what the cluster's CTAs send for the output tiles (of one row each) that this one finishes.
    // A place of its own, so that nobody waits before sending, and a barrier that counts what has come.
    float* received = (float*)((Step*)((Part*)(all_inputs + warps_k * tpw) + warps * tpw) + warps * (tpw * 16 + STAGES - 1));
    const int tasks = args.rows * warps_n * TILES, tasks_here = (tasks + splits - 1) / splits;
    const Input<ROWS>* inputs = all_inputs + warp_k * tpw;
    const u32 ring = shared_address(own_ring), sums_here = shared_address(received + splits * tasks_here * 64);
    if (warp == 0) {
        if (lane == 0) {
            barrier_init(sums_here, 1);
            barriers_are_ready();
            barrier_arrive_expect(sums_here, (tasks + splits - 1 - split) / splits * splits * 256);
        }
        __syncwarp();
    }
    cluster_started();  // nobody may send to a CTA that has not
    MARK(0);
    MARK(15);

    // what belongs to the weight may be read before the activations are there
    uint2 my_meta = make_uint2(0, 0);
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

    wait_for_inputs();
    let_next_start();
    MARK(1);

    float t4[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) t4[i] = args.thresholds[i];
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

    u32 cursor = shared_address(steps);
    auto produce = [&](u32 slot) {
        u32 unit, channels, wanted, unit_stride;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(unit), "=r"(channels), "=r"(wanted), "=r"(unit_stride) : "r"(cursor));
        cursor += 16;
        unit += __popc(wanted & tiles_before);
        channels += copy_row;
        u32 channel[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; ++i) asm volatile("ld.shared.u8 %0, [%1];" : "=r"(channel[i]) : "r"(channels + i * ROWS_PER_COPY));
#pragma unroll
        for (int i = 0; i < COPIES; i += 2) {
            const u8* from0 = words + (u64)(unit + channel[i] * unit_stride) * 16;
            const u8* from1 = words + (u64)(unit + channel[i + 1] * unit_stride) * 16;
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

    u32 read_at = 0, write_at = (STAGES - 1) * STAGE;
#pragma unroll 1
    for (int j = 0, kt = k_first; kt < k_end; ++j, kt += stride) {
        const bool fresh = j == 0;
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
                                mma<false>(sum[i][h], w[s][2 * i] & low[2 * h], w[s][2 * i] & low[2 * h + 1], w[s][2 * i + 1] & low[2 * h],
                                    w[s][2 * i + 1] & low[2 * h + 1], b[0][s], b[1][s]);
                        } else {
                            const u32 a0 = w[0][i] & low[2 * h], a1 = w[0][i] & low[2 * h + 1];
                            const u32 a2 = w[1][i] & low[2 * h], a3 = w[1][i] & low[2 * h + 1];
                            mma<false>(sum[i][h], a0, a1, a2, a3, b[0][0], b[0][1]);
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
                float4& held = warp_sums[(i * 2 + h) * 32 + lane];
                float4 v = fresh ? make_float4(0.f, 0.f, 0.f, 0.f) : held;
                float whole[4];
#pragma unroll
                for (int r = 0; r < 4; ++r) {  // exact: whole numbers below 2^24
                    const int below = r >= 2 ? sum[i][h][r - 2] : h ? sum[i][0][r + 2] : 0;
                    whole[r] = fmaf((float)(sum[i][h][r] - below), unit / (float)(1 << (4 * h + 2 * (r >> 1))), centre);
                }
                const int word = ROWS == 1 ? 2 * i + (c >> 1) : i;
                held = add_sums(args, v, whole, scale, m, kt, first_tile * 64 + g * 16 * WORDS + word * 16 + 8 * (c & 1) + 2 * h, bits_class);
            }
    }
    MARK(5);
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
            send(address_in(shared_address(slot), task % splits), v, address_in(sums_here, task % splits));
        }
    }
    barrier_wait_cluster(sums_here);
    MARK(8);
    finish_tasks(args, received, splits, split, warps_n * TILES, first_part * TILES, my_codes, warps);
    MARK(10);
}
