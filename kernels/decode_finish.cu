// Part of decode_bitplane.cu, with STREAM: how the parts of an output's sum come together, and what becomes of it. Included there.
//
// The weight is a sequence of items, each 512 outputs (a block) x 64 inputs. Every CTA takes a stretch of items of the same length, so that
// all multiprocessors finish together whatever the shape. Items add up in chains (runs of a CTA's items: its warps', for one and two
// rows), chains of a block in ascending order, and then the parts of CTAs, which meet in global memory: those number 0, 2, 4 ..., those
// number 1, 3, 5 ..., and the two sums. For one and two rows a CTA hands its part on to the one that has the block's last item
// (`hand_on`); more rows count parts, and the last to arrive finishes the block (`exchange`).
//
// In `partial` and `carried`, output 16 w + 4 (2 b + y) + 2 h + z of a tile (b, y, h, z bits) lies at 16 w + 8 h + 4 b + 2 z + y, as the tensor core
// leaves them. Sixteen lanes hold a tile's row, four values each: lane bits w, h, b, register bits z, y.

// A row in half a warp: times diag(r), times H, and of that element `code & 63` wherever a code asks, with its left sign over 8.
// Without `rotated`, only into the order of the outputs. codes: of outputs 4 (lane & 15) .. + 3.
__device__ __forceinline__ void restore(float (&v)[4], u32 codes, bool rotated, int lane) {
    if (rotated) {
        const u32 even = __shfl_sync(FULL, codes, lane & 28 | (lane & 1) << 1), odd = __shfl_sync(FULL, codes, lane & 28 | (lane & 1) << 1 | 1);
        const int at = lane & 2 ? 16 : 0;
        v[0] = even >> (at + 7) & 1 ? -v[0] : v[0];
        v[1] = odd >> (at + 7) & 1 ? -v[1] : v[1];
        v[2] = even >> (at + 15) & 1 ? -v[2] : v[2];
        v[3] = odd >> (at + 15) & 1 ? -v[3] : v[3];
        const float s0 = v[0] + v[1], d0 = v[0] - v[1], s1 = v[2] + v[3], d1 = v[2] - v[3];
        v[0] = s0 + s1;
        v[1] = d0 + d1;
        v[2] = s0 - s1;
        v[3] = d0 - d1;
#pragma unroll
        for (int bit = 1; bit < 16; bit <<= 1)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float other = __shfl_xor_sync(FULL, v[e], bit);
                v[e] = lane & bit ? other - v[e] : v[e] + other;
            }
    }
    float out[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const u32 code = codes >> (8 * e), k = rotated ? code & 63 : 4 * (lane & 15) + e;
        const int from = lane & 16 | k >> 2 & 12 | k & 2 | k >> 3 & 1;
        const float a = __shfl_sync(FULL, v[0], from), b = __shfl_sync(FULL, v[1], from);
        const float c = __shfl_sync(FULL, v[2], from), d = __shfl_sync(FULL, v[3], from);
        const float value = k & 1 ? (k & 4 ? d : c) : (k & 4 ? b : a);
        out[e] = rotated ? value * (code & 64 ? -0.125f : 0.125f) : value;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = out[e];
}

// Four outputs of row m from number n on.
__device__ __forceinline__ void write_outputs(const Args& args, int m, int n, float (&y)[4]) {
    if (args.bias)
#pragma unroll
        for (int e = 0; e < 4; ++e) y[e] += load_bias(args.bias, n + e, args.bias_type);
#if XTYPE == 2
    *(float4*)((float*)args.y + m * args.y_stride + n) = make_float4(y[0], y[1], y[2], y[3]);
#else
    u16 h[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) h[e] = to_half(y[e], XTYPE);
    *(uint2*)((u16*)args.y + m * args.y_stride + n) = make_uint2(h[0] | (u32)h[1] << 16, h[2] | (u32)h[3] << 16);
#endif
}

// Adds the parts that CTAs `first` to `last` left of an output tile, and writes its outputs. shift: by how many blocks this one lies
// behind the first one of CTA `first`; of the others it is the first. What the CTAs left comes through shared memory (`staging`), `room` parts (an even
// number) at a time: registers hold too few of so many rows.
template <int ROWS>
__device__ __forceinline__ void finish(const Args& args, int block, int tile, u32 first, u32 last, u32 shift, u32 transform, const u8* staging, u32 room, int lane) {
    constexpr int PAIRS = ROWS / 2;
    const int half = lane >> 4, column = 4 * (lane & 15), n = (block * 8 + tile) * 64 + column;
    const u32 codes = transform == 255 ? 0 : *(const u32*)(args.table + transform * 64 + column);
    const float* from = args.partial + half * 512 + tile * 64 + column;
    const float4* mine = (const float4*)staging + lane;
    const u32 to = shared_address(mine);
    float4 sum[PAIRS][2];
#pragma unroll
    for (int q = 0; q < PAIRS; ++q)
#pragma unroll
        for (int e = 0; e < 2; ++e) sum[q][e] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (u32 s = first; s <= last; s += room) {
        const u32 parts = min(room, last + 1 - s);
#pragma unroll 2
        for (u32 part = 0; part < parts; ++part) {
            const u32 cta = s + part;
            const float* there = from + (u64)(cta * args.places + (cta == first ? shift : 0)) * (ROWS * 512);
#pragma unroll
            for (int q = 0; q < PAIRS; ++q) copy_16(to + (part * PAIRS + q) * 512, there + q * 1024);
        }
        copy_commit();
        copy_wait<0>();
#pragma unroll 1
        for (u32 part = 0; part < parts; part += 2)
#pragma unroll
            for (int q = 0; q < PAIRS; ++q)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (part + e >= parts) continue;
                    const float4 more = mine[((part + e) * PAIRS + q) * 32];
                    sum[q][e].x += more.x;
                    sum[q][e].y += more.y;
                    sum[q][e].z += more.z;
                    sum[q][e].w += more.w;
                }
    }
#pragma unroll
    for (int q = 0; q < PAIRS; ++q) {
        float y[4] = {sum[q][0].x + sum[q][1].x, sum[q][0].y + sum[q][1].y, sum[q][0].z + sum[q][1].z, sum[q][0].w + sum[q][1].w};
        restore(y, codes, transform != 255, lane);
        const int m = 2 * q + half;
        if (m < args.rows) write_outputs(args, m, n, y);
    }
}
// The rows of `table` of the tiles that a warp may have to finish: lane l, of block number l % 16 and the warp's tile number l / 16.
__device__ __forceinline__ u32 transforms_of(const Args& args, int first_block, int warp, int warps, int lane) {
    const int tile = warp + (lane >> 4) * warps, at = (first_block + (lane & 15)) * 8 + tile;
    return tile < 8 && at < args.n_tiles ? args.transform[at] : 255;
}

// Everybody's parts are written: count them, and finish the blocks that this CTA completes. `complete` lies in shared memory; staging: a
// warp's part of it.
template <int ROWS>
__device__ __forceinline__ void exchange(const Args& args, int first_block, int last_block, u32 transform, u32* complete, const u8* staging, u32 room) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int block = first_block + lane;  // each lane answers for one
    const u32 from = (block * args.k_tiles * gridDim.x + gridDim.x - 1) / args.items;
    const u32 to = ((block + 1) * args.k_tiles * gridDim.x - 1) / args.items;
    const u32 shift = block - from * args.items / gridDim.x / args.k_tiles;
    fence();
    __syncthreads();
    if (warp == 0) {
        bool done = false;
        if (block <= last_block) {
            done = from == to || atomicAdd(args.arrivals + block, 1) == to - from;
            if (done && from != to) args.arrivals[block] = 0;
        }
        const u32 all = __ballot_sync(FULL, done);
        if (lane == 0) *complete = all;
    }
    __syncthreads();
    u32 left = *complete;
    if (left) fence();
#pragma unroll 1
    for (; left; left &= left - 1) {
        const int which = __ffs(left) - 1;
#pragma unroll 1
        for (int tile = warp; tile < 8; tile += warps) {
            const u32 row = __shfl_sync(FULL, transform, which + (tile == warp ? 0 : 16));
            if ((first_block + which) * 8 + tile < args.n_tiles)
                finish<ROWS>(args, first_block + which, tile, __shfl_sync(FULL, from, which), __shfl_sync(FULL, to, which), __shfl_sync(FULL, shift, which), row, staging, room, lane);
        }
    }
}

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

// A sum as it is handed on: 0 stands for nothing yet, so that zero becomes negative zero, which adds as little.
__device__ __forceinline__ u32 handed(float v) { return v == 0.f ? 0x80000000u : __float_as_uint(v); }

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
