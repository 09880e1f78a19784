// Part of decode_bitplane.cu, with STREAM: three to eight rows. Included there.
//
// With so many rows nearly every channel is wanted by one. A CTA of four warps streams the planes of its items in their order through one
// ring in shared memory and leaves out what no row wants; a warp multiplies two of an item's eight tiles. `ldmatrix.trans` gives a lane two
// channels' halves of one word, two `prmt` make of two such registers one with four channels for each of two bytes, and `& (3 << 2j)` is
// output j of the byte's four, scaled by 4^j: all eight columns of the tensor core carry rows.
// The rows are quantised once, by a small launch before.

constexpr int WARPS = 4;

// The INT8 activations of two inputs of a row, their levels, the scale of all 64, and in lanes 0 to 3, for tiles of 2, 4, 6, 8 bits, the
// constant part of their sums: q * (doubled midpoint minus zero point) in steps of 8-bit codes.
struct Quantised {
    int q0, q1, l0, l1;
    float scale;
    int centre;
};

// The arithmetic of `quantise`, for one row. largest: of its magnitudes
__device__ __forceinline__ Quantised quantise_row(float2 v, float largest, const float (&t)[4], int lane) {
    const bool plain = largest > 1e-30f && largest < 1e30f;
    float seventh;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(seventh) : "f"(127.f));
    seventh = fmaf(seventh, fmaf(-127.f, seventh, 1.f), seventh);
    float s = plain ? divide(largest, 127.f, seventh) : 1.f, reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(s));
    reciprocal = fmaf(reciprocal, fmaf(-s, reciprocal, 1.f), reciprocal);
    float a = divide(v.x, s, reciprocal), b = divide(v.y, s, reciprocal);
    if (!plain) {  // the whole warp, and almost never
        s = __fdiv_rn(largest, 127.f);
        if (s == 0.f) s = 1.f;
        a = __fdiv_rn(v.x, s);
        b = __fdiv_rn(v.y, s);
    }
    const int q0 = max(-127, min(127, __float2int_rn(a))), q1 = max(-127, min(127, __float2int_rn(b)));
    const int l0 = level_of(fabsf(v.x), t), l1 = level_of(fabsf(v.y), t);
    // sums over the channels of each level, two 16-bit sums (of at most 64 * 127) to a reduction
    const int low = __reduce_add_sync(FULL, (l0 == 1 ? q0 : 0) + (l1 == 1 ? q1 : 0) + ((l0 == 2 ? q0 : 0) + (l1 == 2 ? q1 : 0)) * 65536);
    const int high = __reduce_add_sync(FULL, (l0 == 3 ? q0 : 0) + (l1 == 3 ? q1 : 0) + ((l0 == 4 ? q0 : 0) + (l1 == 4 ? q1 : 0)) * 65536);
    const int at_level[4] = {(int)(short)low, (low - (int)(short)low) >> 16, (int)(short)high, (high - (int)(short)high) >> 16};
    int sum = 0;
    if (lane < 4) {
        const int bits = 2 * lane + 2;
#pragma unroll
        for (int l = 1; l <= 4; ++l) sum += at_level[l - 1] * ((256 >> min(2 * l, bits)) - (256 >> bits) - 256);
    }
    return Quantised{q0, q1, l0, l1, s, sum};
}

template <int VALUE>
struct Number {
    static constexpr int value = VALUE;
};

__device__ __forceinline__ float load_x(const void* x, long long at) {
#if XTYPE == 2
    return ((const float*)x)[at];
#else
    return from_half(((const u16*)x)[at], XTYPE);
#endif
}

// Four 8 x 8 matrices of 16-bit elements, transposed: lane (g, c) gets elements (2c, g) and (2c + 1, g) of each.
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// 16 bytes to shared memory if `bytes` is 16, or zeros (and nothing is read) if it is 0. A predicate on the instruction itself would
// become a branch.
template <int TO, int FROM>
__device__ __forceinline__ void copy_16(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0+%3], [%1+%4], 16, %2;" ::"r"(to), "l"(from), "r"(bytes), "n"(TO), "n"(FROM) : "memory");
}

__device__ __forceinline__ u32 turn(u32 v, u32 right) { return __funnelshift_r(v, v, right); }

// Keeps a value in a register instead of computing it again.
__device__ __forceinline__ void keep(u32& v) { asm volatile("" : "+r"(v)); }

// Waits until at most `later` of this thread's groups are under way, or fewer.
__device__ __forceinline__ void wait_for(int later) {
    if (later >= 3)
        asm volatile("cp.async.wait_group 3;" ::: "memory");
    else if (later == 2)
        asm volatile("cp.async.wait_group 2;" ::: "memory");
    else if (later == 1)
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    else
        asm volatile("cp.async.wait_group 0;" ::: "memory");
}

// What a CTA keeps of its part of the weight at an item: 512 outputs and 64 inputs.
struct __align__(16) Item {
    u32 bytes;       // of the ring that it takes: 16 KiB of planes 0 and 1, then planes 2 and 3 with padded rows
    u32 ext, masks;  // of `meta`
    u32 unused;
    float factor[8];
};

// The INT8 activations of a row under 64 inputs as the tensor core wants them, [plane][c][2 * half + q] words: byte 2b + e of word
// (half, q) belongs to input 32 half + 16 q + 8 b + 2 c + e and is zero where its level does not want the plane.
struct __align__(16) Entries {
    u32 word[4][4][4];
    u32 apart[4];  // keeps rows off each other's banks
};

// An input tile of all rows.
template <int ROWS>
struct __align__(16) Prepared {
    Entries row[ROWS];
    u32 wanted[4][2];       // per plane: the inputs that some row wants
    float scale[ROWS];      // of the activations
    float centre[4][ROWS];  // sum of q * (doubled midpoint minus zero point) in steps of 8-bit codes, per class of tiles (2, 4, 6, 8 bits)
};

// One CTA for an input tile, a warp for a row.
template <int ROWS>
__device__ __forceinline__ void prepare(const Args& args) {
    __shared__ Prepared<ROWS> tile;
    const int lane = threadIdx.x & 31, m = threadIdx.x >> 5, kt = blockIdx.x;
    if (threadIdx.x < 8) tile.wanted[threadIdx.x >> 1][threadIdx.x & 1] = 0;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    float t4[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) t4[i] = args.thresholds[i];
    float2 v = make_float2(0.f, 0.f);
    if (m < args.rows) {
        const long long at = m * args.x_stride + kt * 64 + lane;
        v = make_float2(load_x(args.x, at), load_x(args.x, at + 32));
    }
    __syncthreads();
    const u32 largest = __reduce_max_sync(FULL, max(__float_as_uint(fabsf(v.x)), __float_as_uint(fabsf(v.y))));
    const Quantised o = quantise_row(v, __uint_as_float(largest), t4, lane);
    if (lane < 4) {
        tile.centre[lane][m] = (float)o.centre;
        tile.scale[m] = o.scale;
        tile.row[m].apart[lane] = 0;
    }
    u8* to = (u8*)&tile.row[m].word[0][lane >> 1 & 3][lane >> 4] + 2 * (lane >> 3 & 1) + (lane & 1);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        to[64 * p] = (u8)(o.l0 > p ? o.q0 : 0);
        to[64 * p + 8] = (u8)(o.l1 > p ? o.q1 : 0);  // 32 inputs on: `half` is the higher bit of a word's number
        const u32 low = __ballot_sync(FULL, o.l0 > p), high = __ballot_sync(FULL, o.l1 > p);
        if (lane == 0 && m < args.rows) {
            atomicOr(&tile.wanted[p][0], low);
            atomicOr(&tile.wanted[p][1], high);
        }
    }
    __syncthreads();
    uint4* there = (uint4*)(args.prepared + (u64)kt * sizeof(tile));
    for (int i = threadIdx.x; i < sizeof(tile) / 16; i += blockDim.x) there[i] = ((const uint4*)&tile)[i];
}

// Shared memory, as `cuda_geometry` in tuning.py counts it: the ring; items; inputs.
template <int ROWS>
__device__ __forceinline__ void decode_dense(const Args& args) {
    extern __shared__ __align__(16) u8 shared[];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const u32 first = blockIdx.x * args.items / gridDim.x;
    const int count = (blockIdx.x + 1) * args.items / gridDim.x - first, slots = min(count, args.k_tiles);
    const u32 ring = shared_address(shared);
    Item* items = (Item*)(shared + args.ring);
    Prepared<ROWS>* inputs = (Prepared<ROWS>*)(items + args.most_items);
    const int first_block = first / args.k_tiles;
    int block = first_block, kt = first - first_block * args.k_tiles;
    MARK(0);

    // What a thread copies of planes 0 and 1: its tile's 16 bytes of inputs tid / 8, 16 further, and so on, twisted so that eight inputs
    // of a tile lie in different banks. Of planes 2 and 3: of inputs tid / 4 and 32 further one or two of the tiles that have them.
    u32 dense_to = ring + (tid >> 3) * 128 + ((tid ^ tid >> 3) & 7) * 16, dense_turn = (tid >> 3) - 4;
    u32 extra_input = tid >> 2, extra_turn = (tid >> 2) - 4;
    const u8* dense_from = args.codes + ((u64)first * 1024 + tid) * 16;  // of the next item to read
    keep(dense_to);
    keep(dense_turn);
    keep(extra_input);
    keep(extra_turn);
    auto read_dense = [&](const u8* from, u32 at, auto plane, u32 low, u32 high) {  // low, high: the inputs that are wanted
        constexpr int PLANE = decltype(plane)::value * 8192;
        low = turn(low, dense_turn);  // this thread's inputs in bits 4 and 20
        high = turn(high, dense_turn);
        copy_16<PLANE, PLANE>(dense_to + at, from, low & 16);
        copy_16<PLANE + 2048, PLANE + 2048>(dense_to + at, from, low >> 16 & 16);
        copy_16<PLANE + 4096, PLANE + 4096>(dense_to + at, from, high & 16);
        copy_16<PLANE + 6144, PLANE + 6144>(dense_to + at, from, high >> 16 & 16);
    };
    auto fits = [&](u32 to, u32 bytes, u32 end, u32 at) {  // whether the ring's bytes from `to` are free; `end`: of the item before
        return end > at ? to > 0 || bytes <= at : to == end && to + bytes <= at;
    };

    // What belongs to the weight may be read before the rows are ready: planes 0 and 1 of the first items, whole.
    read_dense(dense_from, 0, Number<0>{}, FULL, FULL);
    read_dense(dense_from, 0, Number<1>{}, FULL, FULL);
    for (int i = tid; i < count; i += 32 * WARPS) {
        const uint2 meta = args.meta[first + i];
        const u32 with2 = __popc(meta.y & 255), with3 = __popc(meta.y & 0xff00);
        items[i].bytes = 16384 + 1024 * ((with2 ? with2 | 1 : 0) + (with3 ? with3 | 1 : 0));
        items[i].ext = meta.x;
        items[i].masks = meta.y;
    }
    for (int i = tid; i < count * 8; i += 32 * WARPS) items[i >> 3].factor[i & 7] = args.factor[first * 8 + i];
    const u32 transform = transforms_of(args, first_block, warp, WARPS, lane);
    __syncthreads();
    int early = 1;
    for (u32 at = items[0].bytes; early < count && at + items[early].bytes <= args.ring; ++early) {
        read_dense(dense_from + early * 16384, at, Number<0>{}, FULL, FULL);
        read_dense(dense_from + early * 16384, at, Number<1>{}, FULL, FULL);
        at += items[early].bytes;
    }

    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    MARK(1);
    for (int slot = warp; slot < slots; slot += WARPS) {
        const int tile = kt + slot < args.k_tiles ? kt + slot : kt + slot - args.k_tiles;
        const uint4* from = (const uint4*)(args.prepared + (u64)tile * sizeof(Prepared<ROWS>));
        for (int i = lane; i < sizeof(Prepared<ROWS>) / 16; i += 32) ((uint4*)&inputs[slot])[i] = __ldcg(from + i);
    }
    __syncthreads();
    MARK(2);

    const int g = lane >> 2, c = lane & 3;
    // [tile][j][upper][column]: output 8g + 4 upper + j of the warp's tile, row 2c + column; of a chain, and of the block
    float v[2][4][2][2] = {}, total[2][4][2][2] = {};
    const int chains = min((int)args.chains, count);
    int chain = chains - 1;  // ((i + 1) * chains - 1) % count: a chain ends where it comes round
    // Items 0 to put - 1 are read or under way, the last of them ends at `put_end` of the ring. Item i starts at `at`, in slot `slot` of
    // the inputs, and has landed if `ready`; nobody works on any before.
    int put = 0, put_slot = 0, i = 0, slot = 0;
    u32 put_end = 0, at = 0;
    bool ready = false;
#pragma unroll 1
    for (;;) {
#pragma unroll 1
        while (put < count) {
            const uint4 item = *(const uint4*)&items[put];
            const u32 bytes = item.x, masks = item.z, to = put_end + bytes > args.ring ? 0 : put_end;
            if (put == i)
                at = to;
            else if (!fits(to, bytes, put_end, at))
                break;
            const uint4 dense = *(const uint4*)inputs[put_slot].wanted[0], extra = *(const uint4*)inputs[put_slot].wanted[2];
            if (put >= early) {
                read_dense(dense_from, to, Number<0>{}, dense.x, dense.y);
                read_dense(dense_from, to, Number<1>{}, dense.z, dense.w);
            }
            // Planes 2 and 3 lie one behind the other, rows of 16-byte units; here a row takes an odd number, so that eight are apart.
            // Four threads take a row (or repeat its last unit), and the one 32 inputs on.
            const u32 with2 = __popc(masks & 255), with3 = __popc(masks & 0xff00);
            auto read_extra = [&](u32 with, u32 row, u32 unit, u32 low, u32 high) {
                low = turn(low, extra_turn);
                high = turn(high, extra_turn);
                const u32 padded = with | 1;
                unit += extra_input * with;
                row += extra_input * padded * 16;
#pragma unroll
                for (u32 more = 0; more < 8; more += 4)
                    if (more == 0 || with > more) {
                        const u32 tile = min((tid & 3) + more, with - 1);
                        copy_16<0, 0>(row + tile * 16, args.codes + (u64)(unit + tile) * 16, low & 16);
                        copy_16<0, 0>(row + tile * 16 + padded * 512, args.codes + (u64)(unit + tile + 32 * with) * 16, high & 16);
                    }
            };
            if (with2 && (extra.x | extra.y)) read_extra(with2, ring + to + 16384, item.y, extra.x, extra.y);
            if (with3 && (extra.z | extra.w)) read_extra(with3, ring + to + 16384 + (with2 | 1) * 1024, item.y + with2 * 64, extra.z, extra.w);
            dense_from += 16384;
            copy_commit();
            put_end = to + bytes;
            ++put;
            put_slot = put_slot + 1 == slots ? 0 : put_slot + 1;
        }
        if (!ready) {
            wait_for(put - i - 1);
            __syncthreads();
            ready = true;
            continue;
        }
        const u32 masks = items[i].masks;
        const Prepared<ROWS>& input = inputs[slot];
        uint4 b[4];
#pragma unroll
        for (int plane = 0; plane < 4; ++plane) {
            b[plane] = make_uint4(0, 0, 0, 0);
            if (g < ROWS) b[plane] = *(const uint4*)input.row[g].word[plane][c];
        }
        const uint4 extra = *(const uint4*)input.wanted[2];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const int tile = 2 * warp + t;
            if (block * 8 + tile >= args.n_tiles) break;
            int sum[4][4] = {};
            auto multiply = [&](u32 from, u32 step, const uint4& b, bool first) {  // step: bytes to 32 inputs further
                u32 r[2][4];
                load_transposed(r[0], from);
                load_transposed(r[1], from + step);
                if (!first)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
#pragma unroll
                        for (int k = 0; k < 4; ++k)
                            sum[j][k] *= 4;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const u32 a0 = __byte_perm(r[half][0], r[half][1], 0x6420), a1 = __byte_perm(r[half][0], r[half][1], 0x7531);
                    const u32 a2 = __byte_perm(r[half][2], r[half][3], 0x6420), a3 = __byte_perm(r[half][2], r[half][3], 0x7531);
                    const u32 b0 = half ? b.z : b.x, b1 = half ? b.w : b.y;
                    // fields up to j of every byte: output j is a difference of two sums, and the last one needs no mask
                    mma(sum[0], a0 & 0x03030303u, a1 & 0x03030303u, a2 & 0x03030303u, a3 & 0x03030303u, b0, b1);
                    mma(sum[1], a0 & 0x0f0f0f0fu, a1 & 0x0f0f0f0fu, a2 & 0x0f0f0f0fu, a3 & 0x0f0f0f0fu, b0, b1);
                    mma(sum[2], a0 & 0x3f3f3f3fu, a1 & 0x3f3f3f3fu, a2 & 0x3f3f3f3fu, a3 & 0x3f3f3f3fu, b0, b1);
                    mma(sum[3], a0, a1, a2, a3, b0, b1);
                }
            };
            const u32 dense = ring + at + lane * 128 + ((tile ^ lane) & 7) * 16;
            multiply(dense, 4096, b[0], true);
            multiply(dense + 8192, 4096, b[1], false);
            float unit = 32.f;  // doubled, and a quarter for every further plane
            if ((masks >> tile & 1) && (extra.x | extra.y)) {
                const u32 padded2 = __popc(masks & 255) | 1, padded3 = __popc(masks & 0xff00) | 1, before = (1u << tile) - 1;
                multiply(ring + at + 16384 + (lane * padded2 + __popc(masks & before)) * 16, padded2 * 512, b[2], false);
                unit = 8.f;
                if ((masks >> (8 + tile) & 1) && (extra.z | extra.w)) {
                    multiply(ring + at + 16384 + padded2 * 1024 + (lane * padded3 + __popc(masks >> 8 & before)) * 16, padded3 * 512, b[3], false);
                    unit = 2.f;
                }
            }
            const int bits_class = masks >> (16 + 2 * tile) & 3;
            const float tile_factor = items[i].factor[tile];
#pragma unroll
            for (int column = 0; column < 2; ++column) {
                const int m = (2 * c + column) % ROWS;  // lanes beyond the last row compute what nobody reads
                const float scale = tile_factor * input.scale[m], centre = input.centre[bits_class][m];
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int upper = 0; upper < 2; ++upper) {  // exact: whole numbers below 2^24
                        const int k = 2 * upper + column, below = j ? sum[j - 1][k] : 0;
                        const float value = fmaf((float)(sum[j][k] - below), unit / (float)(1 << (2 * j)), centre);
                        v[t][j][upper][column] = fmaf(value, scale, v[t][j][upper][column]);
#if SUMS
                        if (2 * c + column < args.rows)
                            args.sums[((long long)m * args.k_tiles + kt) * args.n_tiles * 64 + (block * 8 + tile) * 64 + 8 * g + 4 * upper + j] =
                                (int)value / (1 << (6 - 2 * bits_class));
#endif
                    }
            }
        }
        const u32 end = at + items[i].bytes;
        ++i;
        slot = slot + 1 == slots ? 0 : slot + 1;
        const bool block_ends = ++kt == args.k_tiles || i == count;
        chain += chains;
        if (block_ends || chain >= count) {
#pragma unroll
            for (int t = 0; t < 2; ++t)
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int upper = 0; upper < 2; ++upper)
#pragma unroll
                        for (int column = 0; column < 2; ++column) {
                            total[t][j][upper][column] += v[t][j][upper][column];
                            v[t][j][upper][column] = 0.f;
                        }
        }
        if (chain >= count) chain -= count;
        if (block_ends) {
            float* to = args.partial + (u64)(blockIdx.x * args.places + block - first_block) * ROWS * 512 + 2 * warp * 64 + (g >> 1) * 16 + (g & 1) * 4;
#pragma unroll
            for (int t = 0; t < 2; ++t)
#pragma unroll
                for (int column = 0; column < 2; ++column)
                    if (2 * c + column < ROWS)
#pragma unroll
                        for (int h = 0; h < 2; ++h)
                            *(float4*)(to + (2 * c + column) * 512 + t * 64 + h * 8) =
                                make_float4(total[t][2 * h][0][column], total[t][2 * h][1][column], total[t][2 * h + 1][0][column], total[t][2 * h + 1][1][column]);
            if (i == count) break;
            kt = 0;
            ++block;
#pragma unroll
            for (int t = 0; t < 2; ++t)
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int upper = 0; upper < 2; ++upper)
#pragma unroll
                        for (int column = 0; column < 2; ++column) total[t][j][upper][column] = 0.f;
        }
        ready = put > i;
        if (ready) {
            at = end + items[i].bytes > args.ring ? 0 : end;
            wait_for(put - i - 1);
        }
        __syncthreads();  // every thread's copies have landed, and everyone is done with the item before
    }
    MARK(5);
    exchange<ROWS>(args, first_block, block, transform, &items[0].bytes);
    MARK(7);
}
