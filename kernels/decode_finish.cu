// Part of decode_bitplane.cu, with STREAM: how the parts of an output's sum come together, and what becomes of it. Included there.
//
// The weight is a sequence of items, each 512 outputs (a block) x 64 inputs. Every CTA takes a stretch of items of the same length, so that
// all multiprocessors finish together whatever the shape. Items add up in chains (runs of a CTA's items: its warps', for one and two
// rows), chains of a block in ascending order, and then the parts of CTAs, which meet in global memory: those number 0, 2, 4 ..., those
// number 1, 3, 5 ..., and the two sums. For one and two rows a CTA hands its part on to the one that has the block's last item
// (`hand_on`); with more rows those who have parts of a block share its end (`exchange`).
//
// In `partial` and `carried`, output 16 w + 4 (2 b + y) + 2 h + z of a tile (b, y, h, z bits) lies at 16 w + 8 h + 4 b + 2 z + y, as the tensor core
// leaves them. Sixteen lanes hold a tile's row, four values each: lane bits w, h, b, register bits z, y.

// One and two rows: where in a warp's sums the accumulators number `quad` of a lane lie, so that neither those who write nor `own_sum` meet
// in a bank.
template <int ROWS>
__device__ __forceinline__ int place_of(int quad, int lane) { return quad * 32 + (lane ^ (ROWS == 1 ? (quad & 1) << 2 | (quad & 2) : (quad & 3) << 1)); }

// One and two rows: of a tile, the sum of the warps `mine` in ascending order, a float4 to a lane, where `restore` wants it. sums:
// [warps] of `bytes`, each [QUADS][32] accumulators of the tensor core; ended: the same of a block that ends inside a run, for warps `beyond`.
template <int ROWS>
__device__ __forceinline__ float4 own_sum(const u8* sums, int bytes, const float4* ended, u32 mine, u32 beyond, int tile, int lane) {
    constexpr int BATCH = 8;
    const int l = lane & 15, quad = (ROWS == 1 ? l >> 2 & 1 : l >> 2) * 2 + (l >> 1 & 1), c = (ROWS == 1 ? l >> 3 : lane >> 4) * 2 + (l & 1);
    const int at = place_of<ROWS>(quad, tile * 4 + c), first = max(0, __ffs(mine) - 1), span = 32 - __clz(mine) - first;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int i = 0; __any_sync(FULL, i < span); i += BATCH) {
        float4 more[BATCH];
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
            const int w = first + i + u;
            more[u] = make_float4(0.f, 0.f, 0.f, 0.f);
            const float4* held = beyond >> w & 1 ? ended : (const float4*)(sums + w * bytes);
            if (mine >> w & 1) more[u] = held[at];  // warps with no item may be among them
        }
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
            v.x += more[u].x;
            v.y += more[u].y;
            v.z += more[u].z;
            v.w += more[u].w;
        }
    }
    return v;
}

// One and two rows: what a CTA takes. Of the stretches that the weight is cut into one, or for one row two, each with its share of the warps.
struct Stretch {
    int chains;                   // warps of a part
    u32 first_part, first, count; // its number, items
    u32 item_first;               // of the warp's run
    int mine, first_block, last_block;
    int others;                   // parts of the first block that other CTAs have
    bool open;                    // the last block goes on in the next CTA

    __device__ __forceinline__ Stretch(const Args& args, int parts, int warp, int warps) {
        const u32 cut = gridDim.x * parts;
        auto begin = [&](u32 part) { return divide_by(part * args.items, args.of_parts); };
        chains = parts == 2 ? warps >> 1 : warps;
        first_part = blockIdx.x * parts;
        first = begin(first_part);
        count = begin(first_part + parts) - first;
        const int second = warp >= chains;
        const u32 part = first_part + second, part_first = begin(part), part_count = begin(part + 1) - part_first, chain = warp - second * chains;
        auto run = [&](u32 chain) { return part_first + divide_by(chain * part_count, args.of_chains); };
        item_first = run(chain);
        mine = run(chain + 1) - item_first;
        first_block = divide_by(first, args.of_tiles);
        last_block = divide_by(first + count - 1, args.of_tiles);
        others = max(0, (int)(first_part - (first_block * args.k_tiles * cut + cut - 1) / args.items));
        open = first + count != (last_block + 1) * args.k_tiles;
    }
    __device__ __forceinline__ int closed() const { return last_block - first_block + !open; }
    // The first tile that a warp finishes, of all of the closed blocks. `hand_on` has the tiles of an open one before.
    __device__ __forceinline__ int first_finished(int warp, int warps) const {
        return open && warp < 8 ? warp + (8 - warp + warps - 1) / warps * warps - 8 : warp - (open ? 8 : 0);
    }
};

// A CTA hands on its sums of the block that it leaves unfinished, and finishes those whose last item it has, with what the CTAs before hand
// on: it waits for these alone, which have begun before it. Its own parts are the last ones: of two (one row), that of its first `chains`
// warps comes first. sums, bytes: as `own_sum` wants them; ended: [places - 1] of the same, of blocks that end inside a run; borders:
// [warps + 1] first items of the runs; transform, codes: of the first tile that this warp finishes.
template <int ROWS>
__device__ __forceinline__ void hand_on(const Args& args, const Stretch& cta, const u8* sums, int bytes, const float4* ended, const u32* borders, u32 transform, u32 codes) {
    constexpr int EACH = ROWS == 1 ? 1 : 2, BATCH = ROWS == 1 ? 9 : 5;  // one row: half a warp takes the even parts, the other half the odd ones
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, half = lane >> 4, column = 4 * (lane & 15);
    const int handed_on = cta.open ? 8 : 0, tasks = cta.closed() * 8 + handed_on;
    u32 begin = 0, end = 0;  // lane l: of warp l
    if (lane < warps) begin = borders[lane], end = borders[lane + 1];
#pragma unroll 1
    for (int task = warp; task < tasks; task += warps) {  // what others wait for, first
        const int tile = task & 7, place = task < handed_on ? cta.closed() : (task - handed_on) >> 3, block = cta.first_block + place;
        if (block * 8 + tile >= args.n_tiles) continue;
        const int before = place > 0 ? 0 : cta.others;  // parts of other CTAs
        const u32 from_item = block * args.k_tiles, to_item = from_item + args.k_tiles;
        const u32 have = __ballot_sync(FULL, begin < end && begin < to_item && end > from_item), beyond = __ballot_sync(FULL, begin < to_item && end > to_item);
        u32 mine = have;
        if (ROWS == 1) {  // half a warp to a part: the first one if it is to be handed on, otherwise whose number fits
            const u32 of_first = have & ((1u << cta.chains) - 1), of_second = have & ~of_first;
            if (task < handed_on)
                mine = half ? of_second : of_first;
            else
                mine = half == (before & 1) ? (of_first ? of_first : of_second) : of_first ? of_second : 0;
        }
        const float4 own = own_sum<ROWS>(sums, bytes, ended + place * ROWS * 128, mine, beyond, tile, lane);
        const int offset = (ROWS == 1 ? 0 : half * 512) + tile * 64 + column;
        if (task < handed_on) {
            if (mine)
                store_shared_by_all(args.carried + (cta.first_part + (ROWS == 1 ? half : 0)) * (ROWS * 512) + offset, make_uint4(handed(own.x), handed(own.y), handed(own.z), handed(own.w)));
            continue;
        }
        float4 sum[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) sum[e] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int s = ROWS == 1 ? half : 0; s < before; s += 2 * BATCH) {
            u32* from = args.carried + (u64)(cta.first_part - before + s) * (ROWS * 512) + offset;
            uint4 part[BATCH][EACH];
            u32 least;  // 0 as long as something is missing
            do {
                least = 1;
#pragma unroll
                for (int u = 0; u < BATCH; ++u)
#pragma unroll
                    for (int e = 0; e < EACH; ++e)
                        if (s + 2 * u + e < before) part[u][e] = load_shared_by_all(from + (2 * u + e) * (ROWS * 512));
#pragma unroll
                for (int u = 0; u < BATCH; ++u)
#pragma unroll
                    for (int e = 0; e < EACH; ++e)
                        if (s + 2 * u + e < before) least = min(min(least, min(part[u][e].x, part[u][e].y)), min(part[u][e].z, part[u][e].w));
            } while (least == 0);
#pragma unroll
            for (int u = 0; u < BATCH; ++u)
#pragma unroll
                for (int e = 0; e < EACH; ++e)
                    if (s + 2 * u + e < before) {
                        store_shared_by_all(from + (2 * u + e) * (ROWS * 512), make_uint4(0, 0, 0, 0));
                        sum[e].x += __uint_as_float(part[u][e].x);
                        sum[e].y += __uint_as_float(part[u][e].y);
                        sum[e].z += __uint_as_float(part[u][e].z);
                        sum[e].w += __uint_as_float(part[u][e].w);
                    }
        }
        float4& with = ROWS == 1 || !(before & 1) ? sum[0] : sum[EACH - 1];
        with.x += own.x;
        with.y += own.y;
        with.z += own.z;
        with.w += own.w;
        __syncwarp();
        float y[4] = {sum[0].x, sum[0].y, sum[0].z, sum[0].w};
        if (ROWS == 1) {
#pragma unroll
            for (int e = 0; e < 4; ++e) y[e] += __shfl_xor_sync(FULL, y[e], 16);
        } else {
            const float4& odd = sum[EACH - 1];
            y[0] += odd.x;
            y[1] += odd.y;
            y[2] += odd.z;
            y[3] += odd.w;
        }
        if (task != handed_on + cta.first_finished(warp, warps)) {
            transform = args.transform[block * 8 + tile];
            codes = transform == 255 ? 0 : *(const u32*)(args.table + transform * 64 + column);
        }
        restore(y, codes, transform != 255, lane);
        if (ROWS == 2 || half == 0) write_outputs(args, half, (block * 8 + tile) * 64 + column, y);
    }
}
