// Part of decode_bitplane.cu: three to eight rows. Included there.
//
// With so many rows nearly every channel is wanted by one. A CTA of eight warps streams the planes of its items (512 outputs x 64 inputs)
// in their order through one ring in shared memory, which a ninth warp fills; a warp multiplies one of an item's eight tiles.
// `ldmatrix.trans` gives a lane two channels' halves of one word, and `& (3 << 2j)` is output j of a byte's four, scaled by 4^j. All planes are
// read whole. The rows are quantised by these warps before they begin, or by a small launch before (decode_inputs.cu) and then read with each
// item.
//
// Warps do not wait for each other: each item has a barrier that tells when its bytes are there, and one that tells when all warps are through
// with it, so that its place in the ring may be filled again.

constexpr int WARPS = 8, THREADS = 32 * (WARPS + 1);  // and one that reads

// What a CTA keeps of its part of the weight at an item.
struct __align__(16) Item {
    u32 at, rows;     // addresses where it lies (planes 0 and 1, planes 2 and 3, rows of a launch), and where its rows lie
    u32 flags, bytes; // of the ring
    u32 kt, index;    // input tile; number in `meta`
    u32 ext, tiles;   // of planes 2 and 3: first unit, number of tiles in both
    uint4 tile[8];    // factor; of planes 2 and 3 offset of the tile + 65536 x bytes to the next input, or 0; class x bytes of `centre`
};
constexpr u32 CHAIN_ENDS = 1, SUM_ENDS = 2, THERE = 4, BLOCK_ENDS = 8;

// Adds one plane of a tile, 64 inputs x 64 outputs. from: this lane's row of the plane in shared memory; step: bytes to 32 inputs further.
// Sums are of fields up to j: output j is a difference of two, and the last one needs no mask.
//
// Eight rows: two `prmt` make of two registers one with four channels for each of two bytes, and all columns of the tensor core carry rows.
// sum: [j][2 upper + column]
template <bool FIRST>
__device__ __forceinline__ void multiply_plane(int (&sum)[4][4], u32 from, u32 step, const Activations<8>& b) {
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
        const u32 b0 = b.word[2 * half], b1 = b.word[2 * half + 1];
        mma<true>(sum[0], a0 & 0x03030303u, a1 & 0x03030303u, a2 & 0x03030303u, a3 & 0x03030303u, b0, b1);
        mma<true>(sum[1], a0 & 0x0f0f0f0fu, a1 & 0x0f0f0f0fu, a2 & 0x0f0f0f0fu, a3 & 0x0f0f0f0fu, b0, b1);
        mma<true>(sum[2], a0 & 0x3f3f3f3fu, a1 & 0x3f3f3f3fu, a2 & 0x3f3f3f3fu, a3 & 0x3f3f3f3fu, b0, b1);
        mma<true>(sum[3], a0, a1, a2, a3, b0, b1);
    }
}

// Four rows: registers stay as they are, channels' lower bytes meet the rows in columns 0 to 3, upper bytes in columns 4 to 7, and the two halves of A's
// rows take two masks. sum: [j / 2][2 (j & 1) + column]
template <bool FIRST>
__device__ __forceinline__ void multiply_plane(int (&sum)[2][4], u32 from, u32 step, const Activations<4>& b) {
    u32 r[2][4];
    load_transposed(r[0], from);
    load_transposed(r[1], from + step);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[j][k] = FIRST ? 0 : 4 * sum[j][k];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int q = 0; q < 4; q += 2) {
            const u32 r0 = r[half][q], r1 = r[half][q + 1], b0 = b.word[4 * half + q], b1 = b.word[4 * half + q + 1];
            mma<true>(sum[0], r0 & 0x03030303u, r0 & 0x0f0f0f0fu, r1 & 0x03030303u, r1 & 0x0f0f0f0fu, b0, b1);
            mma<true>(sum[1], r0 & 0x3f3f3f3fu, r0, r1 & 0x3f3f3f3fu, r1, b0, b1);
        }
}

// Planes 0 and 1 of an item take so many; planes 2 and 3 lie behind them as in memory. Places begin on 1024 bytes: so the tensor copy's
// swizzle is `tile ^ input & 7`.
constexpr u32 DENSE_BYTES = 16384;
template <int ROWS>
constexpr u32 ROWS_BYTES = (sizeof(Prepared<ROWS>) + 1023) / 1024 * 1024;

struct DenseArgs {
    Map planes;  // planes 0 and 1: rows of 128 bytes, in boxes of an item
    Args args;
};

// Items that are asked for before the rows: more, and these, and the tables of CTAs that begin late, would queue behind the weights.
constexpr int BEFORE_ROWS = 2;

// The lane that reads the weight, and rows of a launch with each item. Planes 0 and 1 of the first item are asked for already.
template <int ROWS>
struct Reader {
    const DenseArgs& dense;
    Item* items;
    u32 ring, full, done;
    u32 end = 0;  // of the newest item in the ring
    int oldest = 0;

    // Planes of items from one number to another; with their rows, or these (and plane 3) come later.
    __device__ __forceinline__ void read(int from, int to, bool rows) {
        const Args& args = dense.args;
#pragma unroll 1
        for (int i = from; i < to; ++i) {
            Item& item = items[i];
            const u32 bytes = item.bytes, to_byte = end + bytes > args.ring ? 0 : end, place = ring + to_byte, barrier = full + 8 * i;
            for (; oldest < i; ++oldest) {  // until enough of the ring is free
                const u32 held = items[oldest].at - ring;
                if (end > held ? to_byte > 0 || bytes <= held : to_byte == end && to_byte + bytes <= held) break;
                barrier_wait(done + 8 * oldest);
            }
            end = to_byte + bytes;
            item.at = place;
            if (args.prepared) item.rows = place + bytes - ROWS_BYTES<ROWS>;
            if (!(item.flags & THERE)) continue;
            const u32 tiles = item.tiles;
            barrier_arrive_expect(barrier, (i ? DENSE_BYTES : 0) + tiles * 1024);
            if (i) copy_box(place, dense.planes, 0, item.index * 128, barrier);
            if (tiles) copy_bulk(place + DENSE_BYTES, args.codes + (u64)item.ext * 16, tiles * 1024, barrier);
            if (rows) read_rows(i);
        }
    }

    __device__ __forceinline__ void read_rows(int i) {
        const Args& args = dense.args;
        const Item& item = items[i];
        if (!(item.flags & THERE)) return;
        barrier_arrive_expect(full + 8 * i, sizeof(Prepared<ROWS>));
        copy_bulk(item.rows, args.prepared + (u64)item.kt * sizeof(Prepared<ROWS>), sizeof(Prepared<ROWS>), full + 8 * i);
    }
};

// What a lane keeps of a tile's sums. Of eight rows: outputs 8g + 4 upper + j of rows 2c and 2c + 1, [j][upper][row]; of four: outputs
// 8g + 4 (c / 2) + j of rows 2 (c & 1) and one more, [j][row].
template <int ROWS>
struct Sums {
    static constexpr int N = 2 * ROWS, UPPERS = ROWS / 4;
    float v[N];

    static __device__ __forceinline__ constexpr int number(int j, int upper, int row) { return (j * UPPERS + upper) * 2 + row; }
    __device__ __forceinline__ void set(float to) {
#pragma unroll
        for (int k = 0; k < N; ++k) v[k] = to;
    }
    __device__ __forceinline__ void add(const Sums& more) {
#pragma unroll
        for (int k = 0; k < N; ++k) v[k] += more.v[k];
    }
    // store(row & 1, offset of four outputs in a tile's row), in the order of `finish` and `finish_tasks`
    template <typename Store>
    __device__ __forceinline__ void store(int lane, Store&& to) const {
        const int g = lane >> 2, upper = lane >> 1 & 1, base = (g >> 1) * 16 + (g & 1) * 4;
#pragma unroll
        for (int row = 0; row < 2; ++row)
            if constexpr (ROWS == 8) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    to(row, base + h * 8, make_float4(v[number(2 * h, 0, row)], v[number(2 * h, 1, row)], v[number(2 * h + 1, 0, row)], v[number(2 * h + 1, 1, row)]));
            } else {  // a lane has all j of one `upper`: half of them for half of the neighbour's
                float other[2];
#pragma unroll
                for (int z = 0; z < 2; ++z) other[z] = __shfl_xor_sync(FULL, upper ? v[number(z, 0, row)] : v[number(2 + z, 0, row)], 2);
                to(row, base + upper * 8, upper ? make_float4(other[0], v[number(2, 0, row)], other[1], v[number(3, 0, row)]) : make_float4(v[number(0, 0, row)], other[0], v[number(1, 0, row)], other[1]));
            }
    }
};

// Shared memory, as `dense_geometry` in tuning.py counts it: the ring; what the cluster sends; rows, if no launch prepares them; items; two
// barriers an item and two more; what the ends of blocks need (`Place`).
//
// The CTAs of a cluster share the input tiles of a block of 512 outputs; each takes one or two whole ones of the `splits` parts that the kernel
// for one and two rows cuts them into, in the same order: chains of a warp there (`tiles_per_warp`), warps (`warps_k`), parts. With MEET
// a CTA takes a stretch of such chains, with STREAM one of items: see decode_meet.cu.
template <int ROWS>
__device__ __forceinline__ void decode_dense(const DenseArgs& dense) {
    const Args& args = dense.args;
    extern __shared__ __align__(1024) u8 shared[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const u32 ring = shared_address(shared);
#if SPREAD
    const u32 first = begin_of(args, blockIdx.x), each = in_block(args), end = begin_of(args, blockIdx.x + 1), received_bytes = 0;
    const int first_block = divide_by(first, args.of_tiles), last_block = divide_by(end - 1, args.of_tiles);
    int block = first_block;
    u32 place = blockIdx.x * args.places;  // of the next sum
#if STREAM
    const int count = end - first;
#else
    const int count = (end - first) * args.tiles_per_warp;
    const u32 ends_alone = Addends(args, blockIdx.x).ends_alone;
#endif
#else
    const int ctas = args.splits / args.parts, rank = blockIdx.x % ctas, block = blockIdx.x / ctas, count = args.most_items;
    const int first_kt = rank * args.parts * args.warps_k, tasks_here = (args.rows * 8 + ctas - 1) / ctas;
    const u32 received_bytes = args.splits * tasks_here * 256;
    float* received = (float*)(shared + args.ring);  // [splits][tasks_here][64]
    cluster_started();  // nobody may send to a CTA that has not
#endif
    Prepared<ROWS>* inputs = (Prepared<ROWS>*)(shared + args.ring + received_bytes);
    Item* items = (Item*)(args.prepared ? inputs : inputs + args.most_items);
    const u32 full = shared_address(items + args.most_items), done = full + 8 * args.most_items, known = done + 8 * args.most_items;
    MARK(0);
    auto input_tile = [&](int i) {
#if STREAM
        return (int)(first + i - divide_by(first + i, args.of_tiles) * each);
#elif MEET
        const u32 chain = divide_by(i, args.of_run), of_all = first + chain;
        return (int)(of_all - divide_by(of_all, args.of_tiles) * each + (i - chain * args.tiles_per_warp) * each);
#else
        const int chain = divide_by(i, args.of_run), j = i - chain * args.tiles_per_warp;
        return first_kt + chain + j * args.splits * args.warps_k;
#endif
    };
    auto number = [&](int i, int kt) {
#if STREAM
        return first + i;
#elif MEET
        return divide_by(first + divide_by(i, args.of_run), args.of_tiles) * args.k_tiles + kt;
#else
        return (u32)(block * args.k_tiles + kt);
#endif
    };
    if (warp == WARPS) {
        if (lane == 0) prefetch_map(dense.planes);
        for (int i = lane; i < count; i += 32) {
            barrier_init(full + 8 * i, args.prepared ? 2 : 1);
            barrier_init(done + 8 * i, WARPS);
        }
        if (lane < 2) barrier_init(known + 8 * lane, WARPS);
        barriers_are_ready();
        __syncwarp();
        const int kt = input_tile(0);
        if (lane == 0 && kt < args.k_tiles) {  // the first load needs nothing but a number
            barrier_expect(full, DENSE_BYTES);
            copy_box(ring, dense.planes, 0, number(0, kt) * 128, full);
        }
    }
    for (int task = tid; task < count * 8; task += THREADS) {
        const int i = task >> 3, tile = task & 7, kt = input_tile(i);
        const u32 index = number(i, kt);
        Item& item = items[i];
        const bool there = kt < args.k_tiles;
        uint2 meta = make_uint2(0, 0);
        float factor = 0.f;
        if (there) {
            meta = args.meta[index];
            factor = args.factor[(u64)index * 8 + tile];
        }
        const u32 tiles2 = __popc(meta.y & 255), tiles3 = __popc(meta.y & 0xff00), before = (1u << tile) - 1;
        item.tile[tile] = make_uint4(__float_as_uint(factor), meta.y >> tile & 1 ? DENSE_BYTES + __popc(meta.y & before) * 16 + tiles2 * (16 << 16) : 0,
                                     meta.y >> (8 + tile) & 1 ? DENSE_BYTES + tiles2 * 1024 + __popc(meta.y >> 8 & before) * 16 + tiles3 * (16 << 16) : 0,
                                     (meta.y >> (16 + 2 * tile) & 3) * sizeof(float) * ROWS);
        if (tile) continue;
        item.rows = shared_address(inputs + i);
        item.kt = kt;
        item.index = index;
        item.ext = meta.x;
        item.tiles = tiles2 + tiles3;
        item.bytes = there ? DENSE_BYTES + 1024 * (tiles2 + tiles3) + (args.prepared ? ROWS_BYTES<ROWS> : 0) : 0;
        u32 flags = there ? THERE : 0;
#if STREAM
        const int chains = min((int)args.chains, count);
        if (kt == args.k_tiles - 1 || i == count - 1)
            flags |= SUM_ENDS | CHAIN_ENDS | BLOCK_ENDS;
        else if (((i + 1) * chains - 1) % count + chains >= count)
            flags |= CHAIN_ENDS;
#elif MEET
        const u32 run = divide_by(i + 1, args.of_run), behind = first + run;
        if (run * args.tiles_per_warp == i + 1) {
            flags |= CHAIN_ENDS;
            if (divide_by(behind, args.of_warps) * args.warps_k == behind || behind <= ends_alone || behind == end) flags |= SUM_ENDS;
            if (divide_by(behind, args.of_tiles) * each == behind) flags |= BLOCK_ENDS;
        }
#else
        const u32 run = divide_by(i + 1, args.of_run);
        if (run * args.tiles_per_warp == i + 1) flags |= divide_by(run, args.of_warps) * args.warps_k == run ? CHAIN_ENDS | SUM_ENDS : CHAIN_ENDS;
#endif
        item.flags = flags;
    }
    __syncthreads();
    MARK(1);
#if SPREAD
    Place* places = (Place*)((u8*)(items + args.most_items) + 16 * args.most_items + 16);
#else
    // of the first output tile that this warp finishes
    const u32 codes = warp < WARPS && warp * ctas + rank < args.rows * 8 ? transform_codes(args, block * 8 + (warp * ctas + rank) % 8, lane) : 0x10000;
#endif
    if (warp == WARPS) {
        Reader<ROWS> reader{dense, items, ring, full, done};
        int early = 0;
        for (u32 end = 0; early < min(count, BEFORE_ROWS) && (end += items[early].bytes) <= args.ring;) ++early;
        if (lane == 0) reader.read(0, early, false);
        __syncwarp();
        wait_for_inputs();
        let_next_start();
#if SPREAD
        say_started(args, first_block, last_block, lane);
#endif
        if (lane == 0) {
            if (args.prepared)
#pragma unroll 1
                for (int i = 0; i < early; ++i) reader.read_rows(i);
            else
                barrier_wait(known + 8);
            reader.read(early, count, args.prepared);
        }
        __syncwarp();
#if SPREAD
        make_places<ROWS>(args, places, first_block, last_block, lane);
        __syncwarp();
        const u32 started = all_started(args, places, first_block, last_block, lane);
        if (lane == 0) items[0].index = started;
#else
        cluster_wait();
#endif
    } else {
        if (!args.prepared) {
            wait_for_inputs();
            const Preparation<ROWS> preparation(args, lane);
            auto there = [&](int i) { return i < count && items[i].flags & THERE; };
            Pair raw[Preparation<ROWS>::PAIRS], next[Preparation<ROWS>::PAIRS];
            int i = warp;
            if (there(i)) preparation.load(args, items[i].kt, raw);
            bool asked = false;
#pragma unroll 1
            for (; i < count; i += WARPS) {
                if (there(i + WARPS)) preparation.load(args, items[i + WARPS].kt, next);
                if (!asked) {
                    __syncwarp();
                    if (lane == 0) barrier_arrive(known + 8);
                    asked = true;
                }
                if (there(i)) preparation.store(raw, inputs[i]);
#pragma unroll
                for (int k = 0; k < Preparation<ROWS>::PAIRS; ++k) raw[k] = next[k];
            }
            if (!asked && lane == 0) barrier_arrive(known + 8);
            __syncwarp();
            if (lane == 0) barrier_arrive(known);
            barrier_wait(known);
        }
        MARK(2);
        const int c = lane & 3, first_row = 2 * (ROWS == 8 ? c : c & 1);
        const u32 my_row = lane * 128 + ((warp ^ lane) & 7) * 16;
        Sums<ROWS> v, total;  // of a chain, and of a part
#if STREAM
        constexpr float NONE = 0.f;
#else
        constexpr float NONE = -0.f;  // the kernel for one and two rows begins with the first chain
#endif
#if !SPREAD
        u32 to[2];  // where the sums of two rows go, as `finish_tasks` wants them
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int task = (first_row + row) * 8 + warp;
            to[row] = address_in(shared_address(received + (rank * args.parts * tasks_here + task / ctas) * 64), task % ctas);
        }
        cluster_wait();
#endif
        v.set(0.f);
        total.set(NONE);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const u32 flags = items[i].flags;
            const bool mine = flags & THERE && block * 8 + warp < args.n_tiles;
            if (mine) {
                const uint4 tile = items[i].tile[warp];
                barrier_wait(full + 8 * i);
                const u32 at = items[i].at;
                const Prepared<ROWS>& input = *(const Prepared<ROWS>*)(shared + (items[i].rows - ring));
                const uint4 extra = input.wanted;
                int sum[ROWS / 2][4];
                multiply_plane<true>(sum, at + my_row, 4096, Activations<ROWS>(input, 0, lane));
                multiply_plane<false>(sum, at + my_row + 8192, 4096, Activations<ROWS>(input, 1, lane));
                float unit = 32.f;  // doubled, and a quarter for every further plane
                if (tile.y && (extra.x | extra.y)) {
                    const u32 pitch2 = tile.y >> 16;
                    multiply_plane<false>(sum, at + (tile.y & 0xffff) + lane * pitch2, pitch2 * 32, Activations<ROWS>(input, 2, lane));
                    unit = 8.f;
                    if (tile.z && (extra.z | extra.w)) {
                        const u32 pitch3 = tile.z >> 16;
                        multiply_plane<false>(sum, at + (tile.z & 0xffff) + lane * pitch3, pitch3 * 32, Activations<ROWS>(input, 3, lane));
                        unit = 2.f;
                    }
                }
                const float2 scales = *(const float2*)(input.scale + first_row), centres = *(const float2*)((const u8*)input.centre + tile.w + first_row * sizeof(float));
                __syncwarp();
                if (lane == 0) barrier_arrive(done + 8 * i);
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const float scale = __uint_as_float(tile.x) * (row ? scales.y : scales.x), centre = row ? centres.y : centres.x;
#pragma unroll
                    for (int upper = 0; upper < Sums<ROWS>::UPPERS; ++upper) {
                        int below = 0;
#pragma unroll
                        for (int j = 0; j < 4; ++j) {  // exact: whole numbers below 2^24
                            const int up_to = ROWS == 8 ? sum[j % (ROWS / 2)][2 * upper + row] : sum[j >> 1][2 * (j & 1) + row];
                            const float value = fmaf((float)(up_to - below), unit / (float)(1 << (2 * j)), centre);
                            below = up_to;
                            float& held = v.v[Sums<ROWS>::number(j, upper, row)];
                            held = fmaf(value, scale, held);
#if SUMS
                            const int m = first_row + row;
                            if (m < args.rows)
                                args.sums[((long long)m * args.k_tiles + items[i].kt) * args.n_tiles * 64 + (block * 8 + warp) * 64 + 8 * (lane >> 2) + 4 * (ROWS == 8 ? upper : c >> 1) + j] =
                                    (int)value / (1 << (6 - 2 * (tile.w / (4 * ROWS))));
#endif
                        }
                    }
                }
            } else if (lane == 0)
                barrier_arrive(done + 8 * i);
            if (flags & CHAIN_ENDS) {
                __syncwarp();  // makes it a branch: else every item pays
                total.add(v);
                v.set(0.f);
            }
            if (flags & SUM_ENDS) {
                __syncwarp();
#if SPREAD
                u32* to = args.partial + (u64)place++ * ROWS * 512 + warp * 64;
                if (block * 8 + warp < args.n_tiles)
                    total.store(lane, [&](int row, int offset, float4 v) {
                        if (first_row < args.rows) store_shared_by_all(to + (first_row + row) * 512 + offset, make_uint4(handed(v.x), handed(v.y), handed(v.z), handed(v.w)));
                    });
                if (flags & BLOCK_ENDS) ++block;
#else
                total.store(lane, [&](int row, int offset, float4 sums) {
                    if (first_row + row < args.rows) store_cluster(to[row] + offset * 4, sums);
                });
                to[0] += tasks_here * 256;
                to[1] += tasks_here * 256;
#endif
                total.set(NONE);
            }
        }
    }
    MARK(5);
#if SPREAD
    exchange<ROWS>(args, places, first_block, last_block, &items[0].index);
#else
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
