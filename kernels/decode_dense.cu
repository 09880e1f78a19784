// Part of decode_bitplane.cu: three to eight rows. Included there.
//
// With so many rows nearly every channel is wanted by one. A CTA of eight warps streams the planes of its items (512 outputs x 64 inputs)
// in their order through one ring in shared memory, which a ninth warp fills; a warp multiplies one of an item's eight tiles.
// `ldmatrix.trans` gives a lane two channels' halves of one word, and `& (3 << 2j)` is output j of a byte's four, scaled by 4^j. Planes
// are read whole, but for plane 3 where few of an item's inputs are wanted (`Few`). The rows are quantised by these warps before they begin, or by a
// small launch before (decode_inputs.cu) and then read with each item.
//
// Warps do not wait for each other: each item has a barrier that tells when its bytes are there, and one that tells when all warps are through
// with it, so that its place in the ring may be filled again.

constexpr int WARPS = 8, THREADS = 32 * (WARPS + 1);  // and one that reads

// What a CTA keeps of its part of the weight at an item.
struct __align__(16) Item {
    u32 at, rows;     // addresses where it lies (planes 0 and 1, planes 2 and 3, rows of a launch), and where its rows lie
    u32 some, bytes;  // whether of plane 3 only the inputs of `few` are read; bytes of the ring
    u32 kt, index;    // input tile; number in `meta`
    u32 ext, flags;   // first unit of planes 2 and 3; from bit 8 on number of tiles in plane 2, from bit 16 on in plane 3
    Few few;
    uint4 tile[8];    // factor; of planes 2 and 3 offset of the tile + 65536 x bytes to the next input, or 0; class x bytes of `centre`
};
constexpr u32 CHAIN_ENDS = 1, SUM_ENDS = 2, THERE = 4, BLOCK_ENDS = 8;

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

// The warp that reads the weight, and rows of a launch with each item: one lane of it, but all where of plane 3 few inputs are wanted. Planes 0 and 1 of the
// first item are asked for already.
template <int ROWS>
struct Reader {
    const DenseArgs& dense;
    Item* items;
    u32 ring, full, done;
    int lane;
    u32 end = 0;  // of the newest item in the ring
    int oldest = 0;

    // Of few inputs of plane 3 a lane copies a tile of every fourth one, in units of 16 bytes.
    struct Units {
        u32 from[FEW / 4];  // from `codes` on, 0 for none
        u32 to, step;       // from the item's place on, bytes
    };
    __device__ __forceinline__ Units units_of(const Item& item, u32 ext, u32 tiles2, u32 tiles3) const {
        const uint4 few = *(const uint4*)&item.few;
        const u32 words[FEW / 4] = {few.x, few.y, few.z, few.w}, tile = lane & 7, fourth = lane >> 3, from = ext + tiles2 * 64 + tile;
        Units o;
#pragma unroll
        for (int k = 0; k < FEW / 4; ++k) {
            const u32 byte = words[k] >> 8 * fourth & 255;
            o.from[k] = byte >= USED && tile < tiles3 ? from + (byte & 63) * tiles3 : 0;
        }
        o.to = DENSE_BYTES + tiles2 * 1024 + (fourth * tiles3 + tile) * 16;
        o.step = tiles3 * 64;
        return o;
    }
    __device__ __forceinline__ void read_units(const Units& units, u32 place, u32 barrier) const {
#pragma unroll
        for (int k = 0; k < FEW / 4; ++k)
            if (units.from[k]) copy_unit(place + units.to + k * units.step, dense.args.codes + (u64)units.from[k] * 16);
        barrier_awaits_copies(barrier);
        __syncwarp();
    }

    // Planes of an item, where `third` is false without plane 3; with its rows, or these come later.
    // With LAUNCH by all lanes, otherwise by one.
    __device__ __forceinline__ void read(int i, bool third, bool rows) {
        const Args& args = dense.args;
        Item& item = items[i];
        const uint4 words = *(const uint4*)&item.kt;  // kt, index, ext, flags: all that does not need a place, before one is waited for
        const u32 flags = words.w, tiles2 = flags >> 8 & 255, tiles3 = flags >> 16, bytes = item.bytes, to_byte = end + bytes > args.ring ? 0 : end;
        const u32 place = ring + to_byte, barrier = full + 8 * i, few = LAUNCH && third && item.some, to_rows = place + bytes - ROWS_BYTES<ROWS>;
        const u32 more = (third && !few ? tiles2 + tiles3 : tiles2) * 1024, row = words.y * 128;
        const u8 *codes = args.codes + (u64)words.z * 16, *prepared = args.prepared + (u64)words.x * sizeof(Prepared<ROWS>);
        Units units;
        if (few) units = units_of(item, words.z, tiles2, tiles3);
        for (; oldest < i; ++oldest) {  // until enough of the ring is free
            const u32 held = items[oldest].at - ring;
            if (end > held ? to_byte > 0 || bytes <= held : to_byte == end && to_byte + bytes <= held) break;
            barrier_wait(done + 8 * oldest);
        }
        end = to_byte + bytes;
        if (!LAUNCH || lane == 0) {
            if (LAUNCH) fence_shared();  // of plane 3 of an item that lay there
            item.at = place;
            if (LAUNCH) item.rows = to_rows;
            if (flags & THERE) {
                const u32 expected = (i ? DENSE_BYTES : 0) + more;
                if (LAUNCH)
                    barrier_expect(barrier, expected);
                else
                    barrier_arrive_expect(barrier, expected);
                if (i) copy_box(place, dense.planes, 0, row, barrier);
                if (more) copy_bulk(place + DENSE_BYTES, codes, more, barrier);
            }
        }
        if (LAUNCH) __syncwarp();
        if (!(flags & THERE)) return;
        if (few) read_units(units, place, barrier);
        if (LAUNCH && rows && lane == 0) {
            barrier_arrive_expect(barrier, sizeof(Prepared<ROWS>));
            copy_bulk(to_rows, prepared, sizeof(Prepared<ROWS>), barrier);
        }
    }
    // What `read` left of an item: plane 3, and of a launch rows, which tell that nothing more will come.
    __device__ __forceinline__ void read_third(int i) {
        const Item& item = items[i];
        const u32 tiles2 = item.flags >> 8 & 255, tiles3 = item.flags >> 16, barrier = full + 8 * i;
        if (!(item.flags & THERE)) return;
        if (item.some)
            read_units(units_of(item, item.ext, tiles2, tiles3), item.at, barrier);
        else if (lane == 0 && tiles3) {
            barrier_expect(barrier, tiles3 * 1024);
            copy_bulk(item.at + DENSE_BYTES + tiles2 * 1024, dense.args.codes + (u64)(item.ext + tiles2 * 64) * 16, tiles3 * 1024, barrier);
        }
    }
    __device__ __forceinline__ void read_rows(int i) {
        const Item& item = items[i];
        if (lane || !(item.flags & THERE)) return;
        barrier_arrive_expect(full + 8 * i, sizeof(Prepared<ROWS>));
        copy_bulk(item.rows, dense.args.prepared + (u64)item.kt * sizeof(Prepared<ROWS>), sizeof(Prepared<ROWS>), full + 8 * i);
    }
};

// Shared memory, as `dense_geometry` in tuning.py counts it: the ring; what the cluster sends; rows, if no launch prepares them; items; two
// barriers an item and three more; what the ends of blocks need (`Place`).
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
#endif
    Prepared<ROWS>* inputs = (Prepared<ROWS>*)(shared + args.ring + received_bytes);
    Item* items = (Item*)(LAUNCH ? inputs : inputs + args.most_items);
    const u32 full = shared_address(items + args.most_items), done = full + 8 * args.most_items, known = done + 8 * args.most_items, sums_here = known + 16;
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
            barrier_init(full + 8 * i, 1);
            barrier_init(done + 8 * i, WARPS);
        }
        if (lane < 2) barrier_init(known + 8 * lane, WARPS);
        if (lane == 2) barrier_init(sums_here, 1);
        barriers_are_ready();
        __syncwarp();
#if !SPREAD
        if (lane == 0) barrier_arrive_expect(sums_here, (args.rows * 8 + ctas - 1 - rank) / ctas * args.splits * 256);
        cluster_started();  // nobody may send to a CTA that has not
#endif
        const int kt = input_tile(0);
        if (lane == 0 && kt < args.k_tiles) {  // the first load needs nothing but a number
            barrier_expect(full, DENSE_BYTES);
            copy_box(ring, dense.planes, 0, number(0, kt) * 128, full);
        }
    }
#if !SPREAD
    else
        cluster_started();
#endif
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
        item.some = 0;
        item.bytes = there ? DENSE_BYTES + 1024 * (tiles2 + tiles3) + (LAUNCH ? ROWS_BYTES<ROWS> : 0) : 0;
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
        item.flags = flags | tiles2 << 8 | tiles3 << 16;
    }
    __syncthreads();
    MARK(1);
#if SPREAD
    Place* places = (Place*)((u8*)(items + args.most_items) + 16 * args.most_items + 32);
#else
    // of the first output tile that this warp finishes
    const u32 codes = warp < WARPS && warp * ctas + rank < args.rows * 8 ? transform_codes(args, block * 8 + (warp * ctas + rank) % 8, lane) : 0x10000;
#endif
    if (warp == WARPS) {
        Reader<ROWS> reader{dense, items, ring, full, done, lane};
        int early = 0;
        for (u32 end = 0; early < min(count, BEFORE_ROWS) && (end += items[early].bytes) <= args.ring;) ++early;
        if (LAUNCH || lane == 0)
#pragma unroll 1
            for (int i = 0; i < early; ++i) reader.read(i, true, false);
        __syncwarp();
        wait_for_inputs();
        let_next_start();
#if SPREAD
        say_started(args, first_block, last_block, lane);
#endif
        if constexpr (LAUNCH) {
            auto few_at = [&](int i) {
                const bool there = i < count && items[i].flags & THERE;
                return there ? *(const uint4*)&((const Prepared<ROWS>*)args.prepared)[items[i].kt].few : make_uint4(WHOLE * 0x01010101u, 0, 0, 0);
            };
            uint4 words = few_at(lane);
#pragma unroll 1
            for (int i = 0; i < early; ++i) reader.read_rows(i);
            if (early < count) reader.read(early, false, false);  // while it still asks which inputs of plane 3 are wanted
#pragma unroll 1
            for (int i = lane; i < count; i += 32) {
                if (i >= 32) words = few_at(i);
                const Few few{words.x, words.y, words.z, words.w};
                if (i < early || few.whole()) continue;
                Item& item = items[i];
                item.few = few;
                item.some = 1;
                const u32 tiles3 = item.flags >> 16;
                if (i > early) item.bytes -= (tiles3 * 1024 - tiles3 * few.count() * 16) & ~1023u;
            }
            __syncwarp();
            if (early < count) {
                reader.read_third(early);
                reader.read_rows(early);
            }
#pragma unroll 1
            for (int i = early + 1; i < count; ++i) reader.read(i, true, true);
        } else if (lane == 0) {
            barrier_wait(known + 8);
#pragma unroll 1
            for (int i = early; i < count; ++i) reader.read(i, true, false);
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
        if constexpr (!LAUNCH) {
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
        u32 to[2], to_tell[2];  // where the sums of two rows go, as `finish_tasks` wants them, and the barrier there
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int task = (first_row + row) * 8 + warp;
            to[row] = address_in(shared_address(received + (rank * args.parts * tasks_here + task / ctas) * 64), task % ctas);
            to_tell[row] = address_in(sums_here, task % ctas);
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
                [[maybe_unused]] const u32 some = items[i].some;
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
                        const u32 at3 = at + (tile.z & 0xffff);
#if LAUNCH
                        if (some || !input.few.whole()) {
                            const int row = lane & (FEW - 1);
                            multiply_few(sum, at3 + (some ? row : ((const u8*)input.few.word)[row] & 63) * pitch3, input, lane);
                        } else
#endif
                            multiply_plane<false>(sum, at3 + lane * pitch3, pitch3 * 32, Activations<ROWS>(input, 3, lane));
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
                    if (first_row + row < args.rows) send(to[row] + offset * 4, sums, to_tell[row]);
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
    if (warp < WARPS) barrier_wait_cluster(sums_here);
    finish_tasks(args, received, ctas, rank, 8, block * 8, codes, WARPS);
#endif
    MARK(7);
}

#define DENSE(ROWS)                                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) decode_dense_##ROWS(const __grid_constant__ DenseArgs args) {      \
        decode_dense<ROWS>(args);                                                                                              \
    }
DENSE(4)
DENSE(8)
#if LAUNCH
#define PREPARE(ROWS) \
    extern "C" __global__ void __launch_bounds__(32 * ROWS) prepare_##ROWS(const __grid_constant__ Args args) { prepare<ROWS>(args); }
PREPARE(4)
PREPARE(8)
#endif
