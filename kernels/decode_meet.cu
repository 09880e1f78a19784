// Part of decode_bitplane.cu: what becomes of sums of three rows and more, and where CTAs take stretches of a weight without regard to its
// blocks (STREAM, MEET), how those of a block meet in global memory. Included there.
//
// A CTA leaves its sums in places of its own, which hold zeros between launches: a word that is not zero is there, so that reading, waiting
// and the sum itself are one trip to the L2 cache and back. All CTAs that have parts of a block share its end. They wait for each other,
// which they may only if all of them run; where one of them had not started when another was through, that one leaves its share to the last.
//
// With STREAM parts add up in the order that decode_finish.cu tells. With MEET a CTA takes chains, and these add up as in a cluster: chains of
// a part in ascending order, then parts. What a CTA takes of a part that a CTA before began, it leaves chain by chain.

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
        auto lanes = [&](int bit) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float other = __shfl_xor_sync(FULL, v[e], bit);
                v[e] = lane & bit ? other - v[e] : v[e] + other;
            }
        };
        auto registers = [&](int bit) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int low = bit == 1 ? 2 * i : i, high = low + bit;
                const float sum = v[low] + v[high];
                v[high] = v[low] - v[high];
                v[low] = sum;
            }
        };
        if (STREAM) {
            registers(1);
            registers(2);
            lanes(1);
            lanes(2);
            lanes(4);
            lanes(8);
        } else {  // in the order of `finish_tasks`
            lanes(8);
            registers(2);
            lanes(2);
            registers(1);
            lanes(1);
            lanes(4);
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

// What CTAs take stretches of: with STREAM items, else chains.
__device__ __forceinline__ u32 in_block(const Args& args) { return STREAM ? args.k_tiles : args.splits * args.warps_k; }
__device__ __forceinline__ u32 begin_of(const Args& args, u32 cta) { return divide_by(cta * args.items, args.of_parts); }

#if !STREAM
// The sums that a CTA leaves, in their order: each of the chains that end a part which a CTA before began; then of all its chains of a part.
struct Addends {
    u32 begin, end, ends_alone;  // chains of the CTA

    __device__ __forceinline__ Addends(const Args& args, u32 cta) {
        begin = begin_of(args, cta);
        end = begin_of(args, cta + 1);
        const u32 inside = begin - divide_by(begin, args.of_warps) * args.warps_k;
        ends_alone = inside ? min(end, begin + args.warps_k - inside) : begin;
    }
    // Which of them begins with a chain.
    __device__ __forceinline__ u32 number(const Args& args, u32 chain) const {
        return chain <= ends_alone ? chain - begin : ends_alone - begin + divide_by(chain - ends_alone + args.warps_k - 1, args.of_warps);
    }
    // The chain behind the sum that begins with one.
    __device__ __forceinline__ u32 behind(const Args& args, u32 chain) const {
        return chain < ends_alone ? chain + 1 : min(end, divide_by(chain, args.of_warps) * args.warps_k + args.warps_k);
    }
};
#endif

// Three rows and more: the CTAs that have parts of a block, and how they share its end. Outputs of a tile and two rows are a task; share s of
// `shares` has tasks s, s + shares, ...
constexpr u32 MOST_SHARES = 22;  // bits of a word beside a count of CTAs
struct Sharing {
    u32 first, parts, shares, shift;  // shift: by how many blocks this one lies behind the first one of CTA `first`; of the others it is the first

    __device__ __forceinline__ Sharing(const Args& args, int block) {
        const u32 each = in_block(args);
        first = (block * each * gridDim.x + gridDim.x - 1) / args.items;
        parts = ((block + 1) * each * gridDim.x - 1) / args.items + 1 - first;
        shares = min(parts, MOST_SHARES);
        shift = block - divide_by(begin_of(args, first), args.of_tiles);
    }
    __device__ __forceinline__ u32 own() const { return blockIdx.x - first; }  // beyond `shares`: none
    // The first task of a warp in a share; the next one is `warps` times `shares` on. place: of the block, among those of the CTA.
    __device__ __forceinline__ u32 task(u32 share, u32 place, u32 warp, u32 warps) const { return share + (warp + 5 * place) % warps * shares; }
};

// The row of `table` of an output tile: of outputs 4 (lane & 15) .. + 3.
constexpr u32 NO_TRANSFORM = 0xffffffffu;  // four outputs never have the same entry
__device__ __forceinline__ u32 table_codes(const Args& args, int nt, int lane) {
    const u32 transform = nt < args.n_tiles ? args.transform[nt] : 255;
    return transform == 255 ? NO_TRANSFORM : *(const u32*)(args.table + transform * 64 + 4 * (lane & 15));
}
// What a CTA keeps of a block of its.
struct __align__(16) Place {
    Sharing sharing;
    u32 codes[8][16];  // of the tile that a warp finishes first
};
#if STREAM
constexpr u32 LISTED = 0;
#else
#define LISTED (in_block(args) + 1)  // words of a list: how many sums a block has; their numbers, doubled, and one more where a part of the inputs ends
#endif

// By one warp.
template <int ROWS>
__device__ __forceinline__ void make_places(const Args& args, Place* places, int first_block, int last_block, int lane) {
    [[maybe_unused]] u32* list = (u32*)(places + (last_block - first_block + 1));
#pragma unroll 1
    for (int block = first_block; block <= last_block; ++block) {
        Place& place = places[block - first_block];
        const Sharing sharing(args, block);
        if (lane == 0) place.sharing = sharing;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 warp = 2 * i + (lane >> 4), task = sharing.task(sharing.own(), block - first_block, warp, 8);
            if (sharing.own() < sharing.shares && task < 4 * ROWS) place.codes[warp][lane & 15] = table_codes(args, block * 8 + (task & 7), lane);
        }
#if !STREAM
        const u32 begin = block * in_block(args), end = begin + in_block(args);
        u32 before = 0;
#pragma unroll 1
        for (u32 part = lane; part - lane < sharing.parts; part += 32) {
            u32 count = 0, chain = 0, number = 0;
            const u32 cta = sharing.first + part;
            const Addends addends(args, cta);
            if (part < sharing.parts) {
                chain = max(addends.begin, begin);
                number = addends.number(args, chain);
                count = addends.number(args, min(addends.end, end)) - number;
            }
            u32 upto = count;
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) {
                const u32 more = __shfl_up_sync(FULL, upto, d);
                if (lane >= d) upto += more;
            }
            u32* to = list + 1 + before + upto - count;
            for (u32 i = 0; i < count; ++i) {
                chain = addends.behind(args, chain);
                to[i] = 2 * (cta * args.places + number + i) + (divide_by(chain, args.of_warps) * args.warps_k == chain);
            }
            before += __shfl_sync(FULL, upto, 31);
        }
        if (lane == 0) list[0] = before;
        list += LISTED;
#endif
    }
}

// A sum as CTAs leave it: 0 stands for nothing yet, so that zero becomes negative zero. Sums begin at zero, to which that adds nothing.
__device__ __forceinline__ u32 handed(float v) { return v == 0.f ? 0x80000000u : __float_as_uint(v); }
__device__ __forceinline__ bool complete(const uint4& v) { return min(min(v.x, v.y), min(v.z, v.w)) != 0; }

// Adds all parts of a task's outputs, as they come, and writes them. Leaves zeros.
template <int ROWS>
__device__ __forceinline__ void finish(const Args& args, const Sharing& sharing, const u32* list, int block, u32 task, u32 codes, int lane) {
    constexpr u32 BATCH = 8;
    const int tile = task & 7, m = 2 * (task >> 3) + (lane >> 4), column = 4 * (lane & 15);
    u32* from = args.partial + m * 512 + tile * 64 + column;
    u32 at[BATCH];  // of what is to be added next
    uint4 part[BATCH];
    auto read = [&](u32 count) {
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) part[i] = i < count ? load_shared_by_all(from + (u64)at[i] * (ROWS * 512)) : make_uint4(1, 1, 1, 1);
        for (;;) {
            bool all = true;
#pragma unroll
            for (u32 i = 0; i < BATCH; ++i) all &= complete(part[i]);
            if (__all_sync(FULL, all)) break;
#pragma unroll
            for (u32 i = 0; i < BATCH; ++i)
                if (!complete(part[i])) part[i] = load_shared_by_all(from + (u64)at[i] * (ROWS * 512));
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i)
            if (i < count) store_shared_by_all(from + (u64)at[i] * (ROWS * 512), make_uint4(0, 0, 0, 0));
    };
    auto add = [](float4& to, const uint4& v) {
        to.x += __uint_as_float(v.x);
        to.y += __uint_as_float(v.y);
        to.z += __uint_as_float(v.z);
        to.w += __uint_as_float(v.w);
    };
#if STREAM
    float4 sum[2] = {make_float4(0.f, 0.f, 0.f, 0.f), make_float4(0.f, 0.f, 0.f, 0.f)};
#pragma unroll 1
    for (u32 s = 0; s < sharing.parts; s += BATCH) {
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) at[i] = (sharing.first + s + i) * args.places + (s + i ? 0 : sharing.shift);
        read(sharing.parts - s);
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i)
            if (s + i < sharing.parts) add(sum[i & 1], part[i]);
    }
    float y[4] = {sum[0].x + sum[1].x, sum[0].y + sum[1].y, sum[0].z + sum[1].z, sum[0].w + sum[1].w};
#else
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
    float4 sum = none, total = none;
    const u32 all = list[0];
#pragma unroll 1
    for (u32 s = 0; s < all; s += BATCH) {
        const u32 count = all - s;
        u32 ends = 0;
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) {
            const u32 word = i < count ? list[1 + s + i] : 0;
            at[i] = word >> 1;
            ends |= (word & 1) << i;
        }
        read(count);
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) {
            if (i < count) add(sum, part[i]);
            if (ends >> i & 1) {
                total.x += sum.x;
                total.y += sum.y;
                total.z += sum.z;
                total.w += sum.w;
                sum = none;
            }
        }
    }
    float y[4] = {total.x, total.y, total.z, total.w};
#endif
    restore(y, codes, codes != NO_TRANSFORM, lane);
    if (m < args.rows) write_outputs(args, m, (block * 8 + tile) * 64 + column, y);
}

// Of a block, two of four words of `arrivals`: CTAs whose parts are written, and from bit 10 on shares that they left to the last; CTAs that have
// started.
constexpr u32 ARRIVED = 1023;
__device__ __forceinline__ u32* meeting_of(const Args& args, int block) { return args.arrivals + 4 * block; }

// A CTA starts: the kernel before has ended. By one warp, a lane to a block.
__device__ __forceinline__ void say_started(const Args& args, int first_block, int last_block, int lane) {
    const int block = first_block + lane;
    if (block <= last_block && Sharing(args, block).parts > 1) atomicAdd(meeting_of(args, block) + 1, 1);
}
// The blocks all of whose CTAs have: these can be waited for.
__device__ __forceinline__ u32 all_started(const Args& args, const Place* places, int first_block, int last_block, int lane) {
    const int block = first_block + lane;
    bool all = false;
    if (block <= last_block) {
        const u32 parts = places[lane].sharing.parts;
        all = parts == 1 || load_shared_by_all(meeting_of(args, block)).y == parts;
    }
    return __ballot_sync(FULL, all);
}

// All sums of this CTA are on their way: take its share of their blocks, where all CTAs of a block run, so that they can be waited for. Where
// some CTA had not started yet, a share is left to whoever comes last; one warp counts. started: `all_started`, in shared memory.
template <int ROWS>
__device__ __forceinline__ void exchange(const Args& args, const Place* places, int first_block, int last_block, const u32* started) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x >> 5) - 1;
    const u32* lists = (const u32*)(places + (last_block - first_block + 1));
    __syncthreads();
    const u32 running = *started;
    if (warp < warps) {
#pragma unroll 1
        for (int block = first_block; block <= last_block; ++block) {
            const u32 number = block - first_block;
            const Place& place = places[number];
            const Sharing& sharing = place.sharing;
            const u32 own = sharing.own(), first_task = sharing.task(own, number, warp, warps);
            if (!(running >> number & 1) || own >= sharing.shares) continue;
#pragma unroll 1
            for (u32 task = first_task; task < 4 * ROWS; task += warps * sharing.shares) {
                const int nt = block * 8 + (task & 7);
                if (nt >= args.n_tiles || 2 * (task >> 3) >= args.rows) continue;
                finish<ROWS>(args, sharing, lists + number * LISTED, block, task, task == first_task ? place.codes[warp][lane & 15] : table_codes(args, nt, lane), lane);
            }
        }
        return;
    }
    fence();
    const int block = first_block + lane;
    u32 abandoned = 0;
    if (block <= last_block) {
        const Sharing& sharing = places[lane].sharing;
        if (sharing.parts > 1) {
            const u32 own = running >> lane & 1 || sharing.own() >= sharing.shares ? 0 : 1u << sharing.own();
            const u32 seen = atomicAdd(meeting_of(args, block), 1 + own * (ARRIVED + 1));
            if ((seen & ARRIVED) == sharing.parts - 1) {
                abandoned = seen / (ARRIVED + 1) | own;
                *(uint2*)meeting_of(args, block) = make_uint2(0, 0);
            }
        }
    }
    if (!__any_sync(FULL, abandoned != 0)) return;
    fence();
#pragma unroll 1
    for (int b = first_block; b <= last_block; ++b)
#pragma unroll 1
        for (u32 left = __shfl_sync(FULL, abandoned, b - first_block); left; left &= left - 1) {
            const u32 number = b - first_block;
            const Sharing& sharing = places[number].sharing;
#pragma unroll 1
            for (u32 task = __ffs(left) - 1; task < 4 * ROWS; task += sharing.shares) {
                const int nt = b * 8 + (task & 7);
                if (nt < args.n_tiles && 2 * (task >> 3) < args.rows) finish<ROWS>(args, sharing, lists + number * LISTED, b, task, table_codes(args, nt, lane), lane);
            }
        }
}
