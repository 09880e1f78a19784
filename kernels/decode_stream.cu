// Part of decode_bitplane.cu, with STREAM: one and two rows. Included there.
//
// Multiprocessors have more instructions to issue here than they have time for, rather than too little memory: what follows is short where it is
// often done. A step's second half may be of another plane than its first, so that half as many lines stay empty. A tile that lacks a plane gets
// zeros, so that words need no masks but those of the fields.

// One step of a warp: up to 16 channels of one tile, in two halves of up to 8 of one plane each.
struct __align__(16) Step {
    static constexpr u32 SOME = 0xf00, NEXT_PLANE = 1u << 12;
    struct {
        u32 unit;  // of channel 0 and the first tile that has the plane
        u32 what;  // from bit 0 the block's tiles that have the plane; 8 number of channels; 12 whether a further plane begins; 13 of the first half:
                   // where in shared memory the step's channels lie, in 16 bytes; 28 units from channel to channel
    } half[2];
};

// What a CTA keeps of an input tile. Its slots are the channels that want plane 0, ascending, then, from a multiple of 8 on, those that want
// plane 1, and so on.
template <int ROWS>
struct __align__(16) Input {
    u8 channel[256];                 // of a slot
    u8 entry[256][ROWS];             // first the rows in float32; then, per slot: the INT8 activation of a row where its level wants the plane, else 0
    float scale[ROWS];               // activation scale of a row
    float centre[ROWS][4];           // sum of q * (doubled midpoint minus zero point) in steps of 8-bit codes, per tile class (2, 4, 6, 8 bits)
};

__device__ __forceinline__ int up_to_8(int n) { return (n + 7) & ~7; }

// First half of the preparation, for planes FIRST to LAST: which channels want them. Loads of weights can start when plane 0 is known. counts:
// byte p: how many want plane p, below FIRST known, the others are added. ranks, byte p: the first slot of plane p that is of this lane's inputs.
template <int FIRST, int LAST, int ROWS>
__device__ __forceinline__ u32 find_channels(Input<ROWS>& tile, const float (&t)[4], u32 counts, u32& ranks, int lane) {
    float2 most = make_float2(0.f, 0.f);
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        const float2 v = ((const float2*)tile.entry)[m * 32 + lane];
        most.x = m ? fmaxf(most.x, fabsf(v.x)) : fabsf(v.x);
        most.y = m ? fmaxf(most.y, fabsf(v.y)) : fabsf(v.y);
    }
    const u32 before = (1u << lane) - 1;
    int base = 0;
#pragma unroll
    for (int p = 0; p <= LAST; ++p) {
        if (p < FIRST) {
            base += up_to_8(counts >> (8 * p) & 255);
            continue;
        }
        const bool first = most.x > t[p], second = most.y > t[p];
        const u32 even = __ballot_sync(FULL, first), odd = __ballot_sync(FULL, second);
        const int slot = base + __popc(even & before) + __popc(odd & before), count = __popc(even) + __popc(odd);
        if (first) tile.channel[slot] = (u8)(2 * lane);
        if (second) tile.channel[slot + first] = (u8)(2 * lane + 1);
        counts |= (u32)count << (8 * p);
        ranks |= (u32)slot << (8 * p);
        base += up_to_8(count);
    }
    return counts;
}

// Second half of the preparation: INT8 activations in the order of the slots, their scales and the constant part of every sum.
template <int ROWS>
__device__ __forceinline__ void quantise(Input<ROWS>& tile, const float (&t)[4], u32 ranks, int lane) {
    float2 v[ROWS];
    float largest[ROWS];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) v[m] = ((const float2*)tile.entry)[m * 32 + lane];
    __syncwarp();
#pragma unroll
    for (int m = 0; m < ROWS; ++m) ((float2*)tile.entry)[m * 32 + lane] = make_float2(0.f, 0.f);
    float2 most = make_float2(0.f, 0.f);
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        largest[m] = largest_of(v[m]);
        most.x = m ? fmaxf(most.x, fabsf(v[m].x)) : fabsf(v[m].x);
        most.y = m ? fmaxf(most.y, fabsf(v[m].y)) : fabsf(v[m].y);
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        const Scale o = scale_of(largest[m], 1.f / 127.f);
        const int2 q = codes_of(v[m], o);
        // sums over the channels that want each plane, two 16-bit sums (of at most 64 * 127) to a reduction
        int wanted[4];
#pragma unroll
        for (int p = 0; p < 4; ++p) wanted[p] = (fabsf(v[m].x) > t[p] ? q.x : 0) + (fabsf(v[m].y) > t[p] ? q.y : 0);
        const int low = __reduce_add_sync(FULL, wanted[0] + wanted[1] * 65536), high = __reduce_add_sync(FULL, wanted[2] + wanted[3] * 65536);
        const int sum[4] = {(int)(short)low, (low - (int)(short)low) >> 16, (int)(short)high, (high - (int)(short)high) >> 16};
        int centre = sum[0] * level_weight(1, 2 * lane + 2);
#pragma unroll
        for (int p = 1; p < 4; ++p) centre -= lane >= p ? sum[p] * (192 >> 2 * p) : 0;  // level_weight(p, bits) - level_weight(p + 1, bits)
        if (lane < 4) {
            tile.centre[m][lane] = (float)centre;
            tile.scale[m] = o.scale;
        }
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const int slot = ranks >> (8 * p) & 255;
            if (most.x > t[p]) tile.entry[slot][m] = (u8)(ROWS == 1 || level_of(fabsf(v[m].x), t) > p ? q.x : 0);
            if (most.y > t[p]) tile.entry[slot + (most.x > t[p])][m] = (u8)(ROWS == 1 || level_of(fabsf(v[m].y), t) > p ? q.y : 0);
        }
    }
}

// Writes the steps of an input tile (number `at` in `meta`) to the warp's list from step `total` on, and adds their number to it.
template <int ROWS>
__device__ __forceinline__ void list_steps(const Args& args, const Input<ROWS>& input, u32 counts, Step* steps, int& total, uint2 meta, int at, int block, int lane) {
    const u32 eights = ((counts & 0x7f7f7f7fu) + 0x07070707u) >> 3 & 0x0f0f0f0fu;  // of each plane
    const u32 upto = eights * 0x01010101u, halves = upto >> 24;                     // byte p: of planes up to p
    const int plane = (lane >= (int)(upto & 255)) + (lane >= (int)(upto >> 8 & 255)) + (lane >= (int)(upto >> 16 & 255));
    const u32 begin = (upto - eights) >> (8 * plane) & 255, left = (counts >> (8 * plane) & 255) - 8 * (lane - begin);
    u32 unit = 0, what = 0;
    if (lane < (int)halves) {
        u32 tiles, pitch;
        if (plane < 2) {
            tiles = (1u << min(8, args.n_tiles - block * 8)) - 1;
            unit = (u32)at * 1024 + plane * 512;
            pitch = 8;
        } else {
            tiles = meta.y >> (8 * (plane - 2)) & 255;
            unit = meta.x + (plane > 2 ? 64 * __popc(meta.y & 255) : 0);
            pitch = __popc(tiles);
        }
        what = tiles | min(left, 8u) << 8 | (plane && lane == (int)begin ? Step::NEXT_PLANE : 0) | shared_address(&input.channel[lane * 8]) >> 4 << 13 | pitch << 28;
    }
    if (lane < (int)(halves + 1 & ~1)) ((uint2*)(steps + total))[lane] = make_uint2(unit, what);
    total += halves + 1 >> 1;
}

// A warp takes a run of the CTA's items (decode_finish.cu), which may cross from one block to the next. Shared memory, as tuning.py counts it: sums
// and rings of all warps; sums of blocks that end inside a warp's run; inputs; parts; steps; where runs begin.
template <int ROWS>
__device__ __forceinline__ void decode(const Args& args) {
    constexpr int TILES = 8, WORDS = TILES / 2;  // words of a channel that one lane works on
    // One row needs half of B's columns, so its other half takes other words of the same channels: a lane's four words are a multiply's A as they
    // are loaded. Columns 0-3 take words 0 and 1 (in the two halves of A's rows), columns 4-7 words 2 and 3; a multiply has one field of all of
    // them, and there are half as many accumulators.
    constexpr bool WHOLE = ROWS == 1;
    constexpr int SUMS_PER_LANE = WHOLE ? WORDS / 2 : WORDS;
    constexpr int STAGE = TILES * STEP * 16, QUADS = SUMS_PER_LANE * 2, SUM_BYTES = QUADS * 512;
    extern __shared__ __align__(16) u8 shared[];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int tpw = args.tiles_per_warp;
    const int cuts = ROWS == 1 ? args.parts : 1;
    // its number in the order of additions: of two parts every other one, as their first runs may be shorter and had better not share a scheduler
    const int seat = cuts == 2 ? (warp & 1) * (warps >> 1) + (warp >> 1) : warp;
    const Stretch cta(args, cuts, seat, warps);
    const int item_first = cta.item_first, mine = cta.mine, my_block = divide_by(item_first, args.of_tiles), my_kt = item_first - my_block * args.k_tiles;

    // [QUADS][32] accumulators of the tensor core as they lie; a warp with one tile needs them when its ring is no longer needed
    const int ring_bytes = tpw > 1 ? SUM_BYTES + STAGES * STAGE : max(SUM_BYTES, STAGES * STAGE);
    float4* warp_sums = (float4*)(shared + seat * ring_bytes);
    u8* own_ring = shared + seat * ring_bytes + (tpw > 1 ? SUM_BYTES : 0);
    float4* ended = (float4*)(shared + warps * ring_bytes);  // [places - 1][QUADS][32]
    Input<ROWS>* all_inputs = (Input<ROWS>*)(ended + (args.places - 1) * QUADS * 32);
    Input<ROWS>* inputs = all_inputs + seat * tpw;
    Part* parts = (Part*)(inputs + (warps - seat) * tpw) + seat * tpw;
    Step* steps = (Step*)(parts + (warps - seat) * tpw) + seat * (tpw * 16 + STAGES - 1);
    u32* borders = (u32*)(steps + (warps - seat) * (tpw * 16 + STAGES - 1));  // [warps + 1]
    const u32 ring = shared_address(own_ring);
    if (lane == 0) borders[seat] = item_first;
    if (threadIdx.x == 0) borders[warps] = cta.first + cta.count;
    MARK(0);
    MARK(15);

    // what belongs to the weight may be read before the activations are there
    uint2 my_meta = make_uint2(0, 0);
    if (lane < mine) my_meta = args.meta[item_first + lane];
#pragma unroll 1
    for (int i = lane; i < mine * 8; i += 32)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&parts[i >> 3].factor[i & 7])), "l"(args.factor + (u64)item_first * 8 + i) : "memory");
    const int finished = cta.first_finished(warp, warps), finished_tile = cta.first_block * 8 + finished;
    u32 transform = 255;
    if (finished < cta.closed() * 8 && finished_tile < args.n_tiles) transform = args.transform[finished_tile];

    // who copies what: 16 bytes (one tile's share of one channel) per lane and copy
    constexpr int COPIES = STAGE / 512, ROWS_PER_COPY = 32 / TILES;
    const int copy_tile = lane % TILES, copy_row = lane / TILES;
    u32 copy_to[2], copy_rows = copy_row << 8;  // the first two rows of a lane, the others are 1024 bytes further; its first row as `Step` counts
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = copy_row + i * ROWS_PER_COPY;
        copy_to[i] = ring + row * (TILES * 16) + (copy_tile ^ row & 6) * 16;
    }
    u32 tile_bit = 1u << copy_tile, tiles_before = tile_bit - 1;
    const u8* words = args.codes;
    asm volatile("" : "+l"(words));  // keeps the address in registers

    const int g = lane >> 2, c = lane & 3;
    u32 read_from = ring + c * (TILES * 32) + (g ^ 2 * c) * 16;  // of a lane's two channels of eight, 2c and 2c + 1
    // B: column n = 4 * half + t; the activation goes to byte t of the word, the other bytes are zero
    const int half = ROWS == 1 ? 0 : g >> 2, t = g & 3;
    constexpr int SELECTS = ROWS == 1 ? 2 : 1;
    u32 select[SELECTS][2];  // of the activations of a lane's two channels, [slot][row], one to byte t, or none
#pragma unroll
    for (int q = 0; q < SELECTS; ++q)
#pragma unroll
        for (int s = 0; s < 2; ++s) select[q][s] = ROWS == 1 && g >> 2 != q ? 0x4444u : 0x4444u ^ (4u ^ (s * ROWS + half)) << (4 * t);

    // now, while there is time
    keep(copy_to[0]);
    keep(copy_to[1]);
    keep(copy_rows);
    keep(tile_bit);
    keep(tiles_before);
    keep(read_from);
#pragma unroll
    for (int q = 0; q < SELECTS; ++q)
#pragma unroll
        for (int s = 0; s < 2; ++s) keep(select[q][s]);

    // some of the first channels are wanted by all likelihood: memory would have nothing else to do
    if (lane == 0 && mine > 0) prefetch_L2(args.codes + (u64)item_first * 16384, PREFETCHED);
    wait_for_inputs();
    let_next_start();
    MARK(1);

    float t4[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) t4[i] = args.thresholds[i];
#pragma unroll 1
    for (int j = 0, kt = my_kt; j < mine; j += 2) {
        Pair raw[2][ROWS];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (j + i < mine) load_rows<ROWS>(args, raw[i], kt, lane);
            if (++kt == args.k_tiles) kt = 0;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (j + i < mine) keep_rows<ROWS>(args, inputs[j + i], raw[i], lane);
    }
    MARK(2);

    auto copy = [&](u32 slot, auto from, const u32 (&count)[2], const u32 (&bytes)[2]) {
        copy_some(copy_to[0] + slot, copy_to[1] + slot, from(0), from(1), from(2), from(3), copy_rows, copy_rows + 0x400, count[0], count[1], bytes[0], bytes[1], args.policy);
        copy_commit();
    };
    u32 cursor = shared_address(steps);
    // The first steps of the list as long as there is none: whole ones of plane 0 of the first input tile. Returns their number.
    auto produce_first = [&](const Input<ROWS>& input, u32 counts, int at, int block) {
        const int some = min(STAGES - 1, (int)(counts & 255) / STEP);
        const u32 whole[2] = {Step::SOME, Step::SOME}, inside = copy_tile < args.n_tiles - block * 8 ? 16 : 0, bytes[2] = {inside, inside};
        const u8* to_tile = words + ((u64)at * 1024 + copy_tile) * 16;
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) {
            if (i >= some) continue;
            const u8* channel = input.channel + i * STEP + copy_row;
            copy(i * STAGE, [&](int r) { return to_tile + channel[r * ROWS_PER_COPY] * 128; }, whole, bytes);
        }
        cursor += some * sizeof(Step);
        return some;
    };
    auto produce = [&](u32 slot) {
        uint4 step;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(step.x), "=r"(step.y), "=r"(step.z), "=r"(step.w) : "r"(cursor));
        cursor += 16;
        u32 channels = (step.y >> 9 & 0x3fff0) + copy_row, channel[COPIES];
        keep(channels);
#pragma unroll
        for (int i = 0; i < COPIES; ++i) asm volatile("ld.shared.u8 %0, [%1];" : "=r"(channel[i]) : "r"(channels + i * ROWS_PER_COPY));
        const u32 what[2] = {step.y, step.w}, unit[2] = {step.x + __popc(what[0] & tiles_before), step.z + __popc(what[1] & tiles_before)};
        const u32 count[2] = {what[0] & Step::SOME, what[1] & Step::SOME}, bytes[2] = {what[0] & tile_bit ? 16u : 0, what[1] & tile_bit ? 16u : 0};
        auto from = [&](int i) { return words + (u64)(unit[i / (COPIES / 2)] + channel[i] * (what[i / (COPIES / 2)] >> 28)) * 16; };
        copy(slot, from, count, bytes);
    };

    // An item is prepared when the ring will soon ask for its channels: the other warps' loads go on meanwhile. Only the first one keeps
    // memory waiting, so its first loads are asked for as soon as its channels of plane 0 are known.
    int total = 0, ready = 0, early = 0, ready_block = my_block, ready_kt = my_kt, block = my_block, kt = my_kt;
    auto prepare = [&]() {
        Input<ROWS>& input = inputs[ready];
        const int at = item_first + ready;
        const uint2 meta = make_uint2(__shfl_sync(FULL, my_meta.x, ready), __shfl_sync(FULL, my_meta.y, ready));
        u32 ranks = 0, counts = find_channels<0, 0, ROWS>(input, t4, 0, ranks, lane);
        if (ready == 0) {
            __syncwarp();
            early = produce_first(input, counts, at, ready_block);
            MARK(3);
        }
        counts = find_channels<1, 3, ROWS>(input, t4, counts, ranks, lane);
        if (!(meta.y & 0xff)) counts &= 0x0000ffffu;  // planes that none of the block's tiles has need no step
        if (!(meta.y & 0xff00)) counts &= 0x00ffffffu;
        list_steps<ROWS>(args, input, counts, steps, total, meta, at, ready_block, lane);
        quantise<ROWS>(input, t4, ranks, lane);
        if (lane == 0) {
            parts[ready].masks = meta.y;
            parts[ready].counts = counts;
            parts[ready].end = total;
        }
        if (++ready_kt == args.k_tiles) ready_kt = 0, ++ready_block;
        ++ready;
    };

    u32 read_at = 0, write_at = (STAGES - 1) * STAGE, multiplied = shared_address(steps);
#pragma unroll 1
    for (int j = -1; j < mine; ++j) {
#pragma unroll 1
        while (ready < mine && (ready <= j || total < STAGES - 1 + (j < 0 ? 0 : (int)parts[j].end))) {
            prepare();
            __syncwarp();
        }
        if (ready == mine && lane < STAGES - 1) steps[total + lane] = Step{};  // what the pipeline asks for beyond the end
        __syncwarp();
        if (j < 0) {
#pragma unroll
            for (int i = 0; i < STAGES - 1; ++i)
                if (i >= early) produce(i * STAGE);
            MARK(4);
            continue;
        }
        [[maybe_unused]] const int first_tile = block * 8;
        const bool fresh = j == 0 || kt == 0;  // no sum of this block yet
        const u32 counts = parts[j].counts, masks = parts[j].masks;
        int sum[SUMS_PER_LANE][2][4];
#pragma unroll
        for (int i = 0; i < SUMS_PER_LANE; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int r = 0; r < 4; ++r) sum[i][h][r] = 0;
        u32 entries = shared_address(&inputs[j].entry[2 * c][0]);
        // fields up to j of every byte: output j is a difference of two sums, and the last one needs no mask
        constexpr u32 low[4] = {0x03030303u, 0x0f0f0f0fu, 0x3f3f3f3fu, 0xffffffffu};
        auto eight = [&](int k, u32 what) {  // channels 8k to 8k + 7 of the step
            u32 w[2][WORDS], x;
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const u32 from = read_from + read_at + (8 * k + s) * (TILES * 16);
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[s][0]), "=r"(w[s][1]), "=r"(w[s][2]), "=r"(w[s][3]) : "r"(from));
            }
            if constexpr (ROWS == 1)
                asm volatile("ld.shared.u16 %0, [%1];" : "=r"(x) : "r"(entries + 8 * k));
            else
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(entries + 16 * k));
            if (k == 0) produce(write_at);
            if (what & Step::NEXT_PLANE) {
                __syncwarp();  // makes it a branch
#pragma unroll
                for (int i = 0; i < SUMS_PER_LANE; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
#pragma unroll
                        for (int r = 0; r < 4; ++r) sum[i][h][r] *= 4;
            }
            u32 b[SELECTS][2];
#pragma unroll
            for (int q = 0; q < SELECTS; ++q)
#pragma unroll
                for (int s = 0; s < 2; ++s) b[q][s] = __byte_perm(x, 0, select[q][s]);
            if constexpr (WHOLE) {
#pragma unroll
                for (int s = 0; s < 2; ++s)
#pragma unroll
                    for (int f = 0; f < 4; ++f)
                        mma<true>(sum[f >> 1][f & 1], w[s][0] & low[f], w[s][1] & low[f], w[s][2] & low[f], w[s][3] & low[f], b[0][s], b[1][s]);
            } else {
#pragma unroll
                for (int i = 0; i < SUMS_PER_LANE; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        mma<true>(sum[i][h], w[0][i] & low[2 * h], w[0][i] & low[2 * h + 1], w[1][i] & low[2 * h], w[1][i] & low[2 * h + 1], b[0][0], b[0][1]);
            }
        };
        const u32 end = shared_address(steps + parts[j].end);
#pragma unroll 1
        for (; multiplied != end; multiplied += 16) {
            u32 first, second;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(first) : "r"(multiplied + 4));
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(second) : "r"(multiplied + 12));
            copy_wait<STAGES - 2>();
            __syncwarp();
            eight(0, first);
            if (second & Step::SOME) eight(1, second);
            entries += STEP * ROWS;
            write_at = read_at;
            read_at = read_at == (STAGES - 1) * STAGE ? 0 : read_at + STAGE;
        }
        // doubled, and 4 for every plane below the last one read; planes are nested
        const int planes = (counts & 255 ? 1 : 0) + (counts & 0xff00 ? 1 : 0) + (counts & 0xff0000 ? 1 : 0) + (counts >> 24 ? 1 : 0);
        const float unit = __uint_as_float((136 - 2 * planes) << 23);
        if (counts == 0 || tpw == 1) {  // no step has waited for the tile's factors; or the sums take the ring's place
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncwarp();
        }
        const int bits_class = masks >> (16 + 2 * g) & 3;
        const float tile_factor = parts[j].factor[g];
        const int m = ROWS == 1 ? 0 : c >> 1;
        const float scale = tile_factor * inputs[j].scale[m], centre = inputs[j].centre[m][bits_class];
#pragma unroll
        for (int i = 0; i < SUMS_PER_LANE; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float4& held = warp_sums[place_of<ROWS>(i * 2 + h, lane)];
                float4 v = fresh ? make_float4(0.f, 0.f, 0.f, 0.f) : held;
                float whole[4];
#pragma unroll
                for (int r = 0; r < 4; ++r) {  // exact: whole numbers below 2^24
                    const int upto = WHOLE ? sum[h][r >> 1][2 * i + (r & 1)] : sum[i][h][r];
                    const int below = WHOLE ? (r >= 2 ? sum[h][0][2 * i + (r & 1)] : h ? sum[0][1][2 * i + (r & 1)] : 0) : r >= 2 ? sum[i][h][r - 2] : h ? sum[i][0][r + 2] : 0;
                    whole[r] = fmaf((float)(upto - below), unit / (float)(1 << (4 * h + 2 * (r >> 1))), centre);
                }
                const int word = WHOLE ? i + 2 * (c >> 1) : ROWS == 1 ? 2 * i + (c >> 1) : i;
                held = add_sums(args, v, whole, scale, m, kt, first_tile * 64 + g * 16 * WORDS + word * 16 + 8 * (c & 1) + 2 * h, bits_class);
            }
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
    }
    MARK(5);
    asm volatile("cp.async.wait_all;" ::: "memory");
    u32 codes = 0;
    if (transform != 255) codes = *(const u32*)(args.table + transform * 64 + 4 * (lane & 15));
    __syncthreads();
    MARK(10);
    hand_on<ROWS>(args, cta, shared, ring_bytes, ended, borders, transform, codes);
    MARK(7);
}

