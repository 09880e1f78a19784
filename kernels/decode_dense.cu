// Part of decode_bitplane.cu: three to eight rows. Included there.
//
// With so many rows nearly every channel is wanted by one. A CTA of eight warps streams the planes of its items (512 outputs x 64 inputs)
// in their order through one ring in shared memory, which a ninth warp fills; a warp multiplies one of an item's eight tiles.
// `ldmatrix.trans` gives a lane two channels' halves of one word, two `prmt` make of two such registers one with four channels for each of
// two bytes, and `& (3 << 2j)` is output j of the byte's four, scaled by 4^j: all eight columns of the tensor core carry rows. Planes 0 and
// 1 are read whole, of planes 2 and 3 what some row wants. The rows are quantised by these warps before they begin, or by a small launch
// before (decode_inputs.cu).
//
// Warps do not wait for each other: each item has a barrier that tells when its bytes are there, and one that tells when all warps are through
// with it, so that its place in the ring may be filled again.

constexpr int WARPS = 8, THREADS = 32 * (WARPS + 1);  // and one that reads

// What a CTA keeps of its part of the weight at an item.
struct __align__(16) Item {
    u32 at;           // address where it lies: planes 0 and 1, planes 2 and 3 with padded rows
    u32 ext, masks;   // of `meta`
    u32 kt, index;    // input tile; number in `meta`
    u32 bytes;        // of the ring
    u32 flags;
    u32 unused;
    uint4 wanted;     // of `Prepared`, with a launch before: the reader needs it first
    float factor[8];
};
constexpr u32 CHAIN_ENDS = 1, SUM_ENDS = 2, THERE = 4;

// Adds one plane of a tile, 64 inputs x 64 outputs. from: this lane's row of the plane in shared memory; step: bytes to 32 inputs further.
// sum: [j][2 upper + column], of fields up to j: output j is a difference of two sums, and the last one needs no mask.
template <bool FIRST>
__device__ __forceinline__ void multiply_plane(int (&sum)[4][4], u32 from, u32 step, const uint4& b) {
    u32 r[2][4];
    load_transposed(r[0], from);
    load_transposed(r[1], from + step);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[j][k] = FIRST ? 0 : 4 * sum[j][k];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 a0 = __byte_perm(r[half][0], r[half][1], 0x6420), a1 = __byte_perm(r[half][0], r[half][1], 0x7531);
        const u32 a2 = __byte_perm(r[half][2], r[half][3], 0x6420), a3 = __byte_perm(r[half][2], r[half][3], 0x7531);
        const u32 b0 = half ? b.z : b.x, b1 = half ? b.w : b.y;
        mma<true>(sum[0], a0 & 0x03030303u, a1 & 0x03030303u, a2 & 0x03030303u, a3 & 0x03030303u, b0, b1);
        mma<true>(sum[1], a0 & 0x0f0f0f0fu, a1 & 0x0f0f0f0fu, a2 & 0x0f0f0f0fu, a3 & 0x0f0f0f0fu, b0, b1);
        mma<true>(sum[2], a0 & 0x3f3f3f3fu, a1 & 0x3f3f3f3fu, a2 & 0x3f3f3f3fu, a3 & 0x3f3f3f3fu, b0, b1);
        mma<true>(sum[3], a0, a1, a2, a3, b0, b1);
    }
}

// Planes 0 and 1 of an item take so many; planes 2 and 3 behind them have rows of an odd number of 16-byte units, so that eight rows are apart. Places
// begin on 1024 bytes: so the tensor copy's swizzle is `tile ^ input & 7`.
constexpr u32 DENSE_BYTES = 16384;
__device__ __forceinline__ u32 padded(u32 tiles) { return tiles ? tiles | 1 : 0; }

struct DenseArgs {
    Map planes;  // planes 0 and 1: rows of 128 bytes, in boxes of an item
    Args args;
};

// The warp that reads the weight: planes 0 and 1 in one piece, of planes 2 and 3 what some row wants, and all of the first `early` items, as
// nobody knows yet what the rows want. `asked`, `known`: barriers of those who prepare the rows, if no launch before does.
template <int ROWS>
__device__ __forceinline__ void read_items(const DenseArgs& dense, Item* items, Prepared<ROWS>* inputs, int count, int early, u32 ring, u32 full, u32 done, u32 known, u32 asked, int lane) {
    const u8* prepared = dense.args.prepared;
    auto read_rows = [&]() {
        wait_for_inputs();
        if (lane == 0)
            for (int i = 0; i < count; ++i)
                if (items[i].flags & THERE) {
                    barrier_arrive_expect(full + 8 * i, sizeof(Prepared<ROWS>));
                    copy_bulk(shared_address(inputs + i), prepared + (u64)items[i].kt * sizeof(Prepared<ROWS>), sizeof(Prepared<ROWS>), full + 8 * i);
                }
        for (int i = early + lane; i < count; i += 32)
            if (items[i].flags & THERE) items[i].wanted = __ldcg((const uint4*)(prepared + (u64)(items[i].kt + 1) * sizeof(Prepared<ROWS>)) - 1);
        __syncwarp();
    };
    u32 end = 0;
    int oldest = 0;
    if (!prepared) barrier_wait(asked);  // or the rows would queue behind the weights
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        if (i == early) {
            if (prepared)
                read_rows();
            else
                barrier_wait(known);
        }
        Item& item = items[i];
        const u32 bytes = item.bytes, to_byte = end + bytes > dense.args.ring ? 0 : end, place = ring + to_byte, barrier = full + 8 * i;
        for (; oldest < i; ++oldest) {  // until enough of the ring is free
            const u32 from = items[oldest].at - ring;
            if (end > from ? to_byte > 0 || bytes <= from : to_byte == end && to_byte + bytes <= from) break;
            barrier_wait(done + 8 * oldest);
        }
        end = to_byte + bytes;
        if (lane == 0) item.at = place;
        __syncwarp();
        if (!(item.flags & THERE)) continue;
        if (lane == 0) {
            barrier_expect(barrier, DENSE_BYTES);
            copy_box(place, dense.planes, 0, item.index * 128, barrier);
        }
        u32 with = __popc(item.masks & 255), unit = item.ext, to = place + DENSE_BYTES;
        const uint4 wanted = i < early ? make_uint4(FULL, FULL, FULL, FULL) : prepared ? item.wanted : inputs[i].wanted;
#pragma unroll 1
        for (int plane = 0; with; ++plane) {
            // four lanes to an input, eight inputs to a copy
            const u32 low = (plane ? wanted.z : wanted.x) >> (lane >> 2), high = (plane ? wanted.w : wanted.y) >> (lane >> 2);
#pragma unroll 1
            for (u32 tile = lane & 3; tile < (lane & 3) + with; tile += 4) {
                const u8* from = dense.args.codes + (u64)(unit + (lane >> 2) * with + tile) * 16;
                keep(from);
                const u32 row = to + ((lane >> 2) * (with | 1) + tile) * 16, step = 128 * with, pitch = 128 * (with | 1);
                const bool there = tile < with;
                copy_four(row, pitch, from, step, there ? low : 0);
                copy_four(row + 4 * pitch, pitch, from + 4 * step, step, there ? high : 0);
            }
            if (plane) break;
            unit += 64 * with;
            to += 1024 * (with | 1);
            with = __popc(item.masks & 0xff00);
        }
        barrier_arrive_copied(barrier);
    }
    if (prepared && early == count) read_rows();
}

// What a lane keeps of a tile's sums: outputs 8g + 4 upper + j of rows 2c and 2c + 1 of eight. Of four rows the tensor core has every column
// twice, and a lane takes half of the outputs: j from 2 (c / 2) on.
template <int ROWS>
struct Sums {
    static constexpr int J = ROWS / 2;
    float v[J][2][2];  // [j][upper][row]

    __device__ __forceinline__ void set(float to) {
#pragma unroll
        for (int k = 0; k < 4 * J; ++k) v[k >> 2][k >> 1 & 1][k & 1] = to;
    }
    __device__ __forceinline__ void add(const Sums& more) {
#pragma unroll
        for (int k = 0; k < 4 * J; ++k) v[k >> 2][k >> 1 & 1][k & 1] += more.v[k >> 2][k >> 1 & 1][k & 1];
    }
    // store(row & 1, half of a tile's 16-byte pieces, four outputs), in the order of `finish` and `finish_tasks`
    template <typename Store>
    __device__ __forceinline__ void store(Store&& to) const {
#pragma unroll
        for (int row = 0; row < 2; ++row)
#pragma unroll
            for (int h = 0; h < J / 2; ++h) to(row, h, make_float4(v[2 * h][0][row], v[2 * h][1][row], v[2 * h + 1][0][row], v[2 * h + 1][1][row]));
    }
};

// Shared memory, as `dense_geometry` in tuning.py counts it: the ring, whose place takes what the cluster sends when all are through; inputs;
// items; two barriers an item and two more.
//
// The CTAs of a cluster share the input tiles of a block of 512 outputs; each takes one or two whole ones of the `splits` parts that the kernel
// for one and two rows cuts them into, in the same order: chains of a warp there (`tiles_per_warp`), warps (`warps_k`), parts. With STREAM see
// decode_finish.cu.
template <int ROWS>
__device__ __forceinline__ void decode_dense(const DenseArgs& dense) {
    const Args& args = dense.args;
    extern __shared__ __align__(1024) u8 shared[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const u32 ring = shared_address(shared);
    Prepared<ROWS>* inputs = (Prepared<ROWS>*)(shared + args.ring);
    Item* items = (Item*)(inputs + args.most_items);
    const u32 full = shared_address(items + args.most_items), done = full + 8 * args.most_items, known = done + 8 * args.most_items;
#if STREAM
    const u32 first = blockIdx.x * args.items / gridDim.x;
    const int count = (blockIdx.x + 1) * args.items / gridDim.x - first, first_block = first / args.k_tiles;
    int block = first_block;
#else
    const int ctas = args.splits / args.parts, rank = blockIdx.x % ctas, block = blockIdx.x / ctas, count = args.most_items;
    const int first_kt = rank * args.parts * args.warps_k;
#endif
    let_next_start();
    MARK(0);
    if (warp == WARPS) {
        if (lane == 0) prefetch_map(dense.planes);
        for (int i = lane; i < count; i += 32) {
            barrier_init(full + 8 * i, args.prepared ? 33 : 32);
            barrier_init(done + 8 * i, WARPS);
        }
        if (lane < 2) barrier_init(known + 8 * lane, WARPS);
        barriers_are_ready();
    }
    for (int i = tid; i < count; i += THREADS) {
        Item& item = items[i];
#if STREAM
        const int chains = min((int)args.chains, count);
        item.index = first + i;
        item.kt = item.index % args.k_tiles;
        item.flags = THERE;
        if (item.kt == args.k_tiles - 1 || i == count - 1)
            item.flags |= SUM_ENDS | CHAIN_ENDS;
        else if (((i + 1) * chains - 1) % count + chains >= count)
            item.flags |= CHAIN_ENDS;
#else
        const int chain = i / args.tiles_per_warp, j = i - chain * args.tiles_per_warp;
        item.kt = first_kt + chain + j * args.splits * args.warps_k;
        item.index = block * args.k_tiles + item.kt;
        item.flags = item.kt < args.k_tiles ? THERE : 0;
        if (j == args.tiles_per_warp - 1) item.flags |= (chain + 1) % args.warps_k ? CHAIN_ENDS : CHAIN_ENDS | SUM_ENDS;
#endif
        item.bytes = item.masks = 0;
        if (item.flags & THERE) {
            const uint2 meta = args.meta[item.index];
            item.bytes = DENSE_BYTES + 1024 * (padded(__popc(meta.y & 255)) + padded(__popc(meta.y & 0xff00)));
            item.ext = meta.x;
            item.masks = meta.y;
            const float4* factor = (const float4*)(args.factor + (u64)item.index * 8);
            ((float4*)item.factor)[0] = factor[0];
            ((float4*)item.factor)[1] = factor[1];
        }
    }
#if STREAM
    const u32 transform = transforms_of(args, first_block, warp, WARPS + 1, lane);
#else
    // of the first output tile that this warp finishes
    const u32 codes = warp < WARPS && warp * ctas + rank < args.rows * 8 ? transform_codes(args, block * 8 + (warp * ctas + rank) % 8, lane) : 0x10000;
#endif
    __syncthreads();
    MARK(1);
    int early = 0;
    for (u32 end = 0; early < count && (end += items[early].bytes) <= args.ring;) ++early;
    Sums<ROWS> v, total, before;  // of a chain, of a part, and of the CTA's first part if it has two
    const int g = lane >> 2, c = lane & 3, first_row = 2 * (ROWS == 8 ? c : c & 1);
    if (warp == WARPS) {
        read_items<ROWS>(dense, items, inputs, count, early, ring, full, done, known, known + 8, lane);
    } else {
        wait_for_inputs();
        if (!args.prepared) {
            const Preparation<ROWS> preparation(args, lane);
            Pair raw[2][Preparation<ROWS>::PAIRS];
#pragma unroll 1
            for (int i = warp; i < count; i += 2 * WARPS) {
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    if (i + k * WARPS < count && items[i + k * WARPS].flags & THERE) preparation.load(args, items[i + k * WARPS].kt, raw[k]);
                if (i == warp) {
                    __syncwarp();
                    if (lane == 0) barrier_arrive(known + 8);
                }
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    if (i + k * WARPS < count && items[i + k * WARPS].flags & THERE) preparation.store(raw[k], inputs[i + k * WARPS]);
            }
            if (warp >= count && lane == 0) barrier_arrive(known + 8);
            __syncwarp();
            if (lane == 0) barrier_arrive(known);
            barrier_wait(known);
        }
        MARK(2);
        const u32 my_row = lane * 128 + ((warp ^ lane) & 7) * 16, my_b = (ROWS == 8 ? lane : lane & 15) * 16, tiles_before = (1u << warp) - 1;
#if STREAM
        constexpr float NONE = 0.f;
#else
        constexpr float NONE = -0.f;  // the kernel for one and two rows begins with the first chain
#endif
        v.set(0.f);
        total.set(NONE);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const u32 masks = items[i].masks, flags = items[i].flags;
            const int bits_class = masks >> (16 + 2 * warp) & 3;
            const float tile_factor = items[i].factor[warp];
            const bool mine = (flags & THERE) && block * 8 + warp < args.n_tiles;
            if (mine) {
                const Prepared<ROWS>& input = inputs[i];
                auto b = [&](int plane) { return *(const uint4*)((const u8*)&input + my_b + plane * 64 * ROWS); };
                barrier_wait(full + 8 * i);
                const u32 at = items[i].at;
                const uint4 extra = input.wanted;
                int sum[4][4];
                multiply_plane<true>(sum, at + my_row, 4096, b(0));
                multiply_plane<false>(sum, at + my_row + 8192, 4096, b(1));
                float unit = 32.f;  // doubled, and a quarter for every further plane
                if ((masks >> warp & 1) && (extra.x | extra.y)) {
                    const u32 pitch2 = padded(__popc(masks & 255)), from = at + DENSE_BYTES;
                    multiply_plane<false>(sum, from + (lane * pitch2 + __popc(masks & tiles_before)) * 16, pitch2 * 512, b(2));
                    unit = 8.f;
                    if ((masks >> (8 + warp) & 1) && (extra.z | extra.w)) {
                        const u32 pitch3 = padded(__popc(masks & 0xff00));
                        multiply_plane<false>(sum, from + pitch2 * 1024 + (lane * pitch3 + __popc(masks >> 8 & tiles_before)) * 16, pitch3 * 512, b(3));
                        unit = 2.f;
                    }
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(done + 8 * i);
                const bool upper_j = ROWS == 4 && c >= 2;
                if (upper_j) unit *= 1.f / 16;
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const float scale = tile_factor * input.scale[first_row + row], centre = input.centre[bits_class][first_row + row];
#pragma unroll
                    for (int upper = 0; upper < 2; ++upper) {
                        const int k = 2 * upper + row;
                        int below = upper_j ? sum[1][k] : 0;
#pragma unroll
                        for (int j = 0; j < Sums<ROWS>::J; ++j) {  // exact: whole numbers below 2^24
                            const int up_to = ROWS == 4 && upper_j ? sum[2 + (j & 1)][k] : sum[j][k];
                            const float value = fmaf((float)(up_to - below), unit / (float)(1 << (2 * j)), centre);
                            below = up_to;
                            v.v[j][upper][row] = fmaf(value, scale, v.v[j][upper][row]);
#if SUMS
                            const int m = first_row + row;
                            if (m < args.rows)
                                args.sums[((long long)m * args.k_tiles + items[i].kt) * args.n_tiles * 64 + (block * 8 + warp) * 64 + 8 * g + 4 * upper + j + (upper_j ? 2 : 0)] =
                                    (int)value / (1 << (6 - 2 * bits_class));
#endif
                        }
                    }
                }
            } else if (lane == 0)
                barrier_arrive(done + 8 * i);
            if (flags & CHAIN_ENDS) {
                total.add(v);
                v.set(0.f);
            }
            if (flags & SUM_ENDS) {
#if STREAM
                float* to = args.partial + (u64)(blockIdx.x * args.places + block - first_block) * ROWS * 512 + warp * 64 + (g >> 1) * 16 + (g & 1) * 4;
                total.store([&](int row, int h, float4 sums) { *(float4*)(to + (first_row + row) * 512 + (ROWS == 8 ? h : c >> 1) * 8) = sums; });
                total.set(NONE);
                if (i + 1 < count) ++block;
#else
                if (i + 1 < count) {
                    before = total;
                    total.set(NONE);
                }
#endif
            }
        }
    }
    MARK(5);
#if STREAM
    exchange<ROWS>(args, first_block, (first + count - 1) / args.k_tiles, transform, &items[0].unused);
#else
    cluster_arrive();
    cluster_wait();  // nobody needs the ring any more
    float* received = (float*)shared;  // [splits][tasks_here][64]
    const int tasks_here = (args.rows * 8 + ctas - 1) / ctas;
    if (warp < WARPS)
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int m = first_row + row, task = m * 8 + warp;
            const u32 to = address_in(shared_address(received + (rank * args.parts * tasks_here + task / ctas) * 64 + (g >> 1) * 16 + (g & 1) * 4), task % ctas);
            auto send = [&](const Sums<ROWS>& sums, u32 to) {
                sums.store([&](int of, int h, float4 four) {
                    if (of == row && m < args.rows) store_cluster(to + (ROWS == 8 ? h : c >> 1) * 32, four);
                });
            };
            if (args.parts == 2) send(before, to);
            send(total, to + (args.parts - 1) * tasks_here * 256);
        }
    cluster_arrive();
    cluster_wait();
    finish_tasks(args, received, ctas, rank, 8, block * 8, codes, WARPS);
#endif
    MARK(7);
}

#define DENSE(ROWS)                                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) decode_dense_##ROWS(const __grid_constant__ DenseArgs args) {      \
        decode_dense<ROWS>(args);                                                                                              \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(32 * ROWS) prepare_##ROWS(const __grid_constant__ Args args) { prepare<ROWS>(args); }
DENSE(4)
DENSE(8)
