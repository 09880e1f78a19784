// Part of prefill_batch.cu: from whole sums to outputs. Included there.

// Sums of a range, in shared and in global memory: [WIDTH tiles][4 warps][TOKENS / 8][32 lanes][4]. Word of what `multiply` leaves in
// d[4 eight..] of a lane.
__device__ __forceinline__ u32 sums_at(u32 tile, u32 w, u32 eight, u32 lane) { return ((tile * 4 + w) * (TOKENS / 8) + eight) * 128 + lane * 4; }

// What is known of the outputs of a tile before there are sums.
struct Known {
    u8 code[64];  // as in `Args::table`
    float bias[64], unit[64];  // unit: with the sign that comes before the Hadamard matrix
    u32 rotated;
    u32 padding[3];
};
static_assert(sizeof(Known) == KNOWN_BYTES);

__device__ __forceinline__ void find_known(const Args& args, Known* known, int range, int thread, int threads) {
    for (int i = thread; i < WIDTH * 64; i += threads) {
        const int output = i % 64, nt = range * WIDTH + i / 64;
        if (nt >= args.w.n_tiles) return;
        Known& to = known[i / 64];
        const u32 transform = args.transform[nt];
        float bias = 0;
        if (args.bias) bias = args.bias_type == 2 ? ((const float*)args.bias)[nt * 64 + output] : from_half(((const u16*)args.bias)[nt * 64 + output], args.bias_type);
        const bool rotated = transform != 255;
        to.bias[output] = bias, to.code[output] = rotated ? args.table[transform * 64 + output] : output;
        const float unit = args.unit[nt * 64 + output];
        to.unit[output] = rotated && args.table[transform * 64 + output] & 128 ? -unit : unit;
        if (output == 0) to.rotated = rotated;
    }
}

// Pieces of a range and block of rows (`rows` from `row0` on), of eight rows and a tile each, tile by tile: those that a CTA finishes.
struct Share {
    int row0, rows, begin, end;
    __device__ __forceinline__ Share(int row0, int rows, int parts, int part) : row0(row0), rows(rows) {
        const int pieces = (rows + 7) / 8 * WIDTH;
        begin = part * pieces / parts, end = (part + 1) * pieces / parts;
    }
};

__device__ __forceinline__ uint4 plus(const uint4& a, const uint4& b) { return make_uint4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Adds the sums of a CTA's share that lie in the other CTAs of its cluster to its own, a warp 512 bytes at a time.
template <int OTHERS>
__device__ __forceinline__ void gather(u32 here, int parts, int part, const Share& share, int warp, int lane) {
#pragma unroll 1
    for (int i = warp; i < 4 * (share.end - share.begin); i += WORKERS) {
        const int piece = share.begin + (i >> 2);
        const u32 at = here + sums_at(piece % WIDTH, i & 3, piece / WIDTH, lane) * 4;
        uint4 four[OTHERS];
#pragma unroll
        for (int other = 0; other < OTHERS; ++other) four[other] = load_there4(address_in(at, part + other + 1 < parts ? part + other + 1 : part + other + 1 - parts));
        uint4 sum = load_shared4(at);
#pragma unroll
        for (int other = 0; other < OTHERS; ++other) sum.x += four[other].x, sum.y += four[other].y, sum.z += four[other].z, sum.w += four[other].w;
        store_shared4(at, sum.x, sum.y, sum.z, sum.w);
    }
}

// The same where several clusters, `groups`, of one or two CTAs have a range: each finishes some of the pieces, and sends the sums of the others
// to who does, through memory, in places that hold zeros between launches. On their way sums have a bias (all that can be is less than 2^28),
// so that a word that is not zero is there. A warp sends all it has to before it waits; all CTAs run at the same time.
template <int OTHERS>
__device__ __forceinline__ Share exchange(const Args& args, u32 here, const Share& share, int groups, int group, int rank, u32 range, u32 ranges, int warp, int lane) {
    constexpr u32 BIAS = 1u << 30;
    constexpr int UNITS = TOKENS == 128 ? 2 : 1;  // of 512 bytes, that a warp has on their way: as many as it sends where two groups meet
    const int count = share.end - share.begin, most = (count + groups - 1) / groups;
    Share mine = share;
    mine.begin = min(share.begin + group * most, share.end), mine.end = min(mine.begin + most, share.end);
    const int own = 4 * (mine.end - mine.begin), others = 4 * count - own;
    const auto place = [&](int of, int from, u32 word) { return args.sums + ((u64)(from > of ? from - of - 1 : from - of + groups - 1) * ranges + range) * SUMS + word; };
    const auto load = [&](u32 word, uint4& sum, uint4& there) {
        if constexpr (OTHERS == 1) there = load_there4(address_in(here + word * 4, rank ^ 1));
        sum = load_shared4(here + word * 4);
    };
    const auto is_any = [&](int piece) { return range * WIDTH + piece % WIDTH < args.w.n_tiles; };  // as those who finish say
#pragma unroll 1
    for (int first = warp; first < others; first += UNITS * WORKERS) {
        u32 word[UNITS];
        int piece[UNITS];
        uint4 sum[UNITS], there[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const int i = min(first + u * WORKERS, others - 1);  // beyond: loaded, not sent
            piece[u] = mine.end + (i >> 2);
            if (piece[u] >= share.end) piece[u] -= count;
            word[u] = sums_at(piece[u] % WIDTH, i & 3, piece[u] / WIDTH, lane);
            load(word[u], sum[u], there[u]);
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if constexpr (OTHERS == 1) sum[u] = plus(sum[u], there[u]);
            int to = 0;
            while (piece[u] - share.begin >= (to + 1) * most) ++to;
            if (first + u * WORKERS < others && is_any(piece[u])) store_sent4(place(to, group, word[u]), plus(sum[u], make_uint4(BIAS, BIAS, BIAS, BIAS)));
        }
    }
#pragma unroll 1
    for (int first = warp; first < own; first += UNITS * WORKERS) {
        u32 word[UNITS];
        bool any[UNITS];
        uint4 sum[UNITS], there[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const int i = min(first + u * WORKERS, own - 1), piece = mine.begin + (i >> 2);
            any[u] = first + u * WORKERS < own && is_any(piece);
            word[u] = sums_at(piece % WIDTH, i & 3, piece / WIDTH, lane);
            load(word[u], sum[u], there[u]);
        }
#pragma unroll 1
        for (int from = 0; from < groups; ++from) {
            if (from == group) continue;
            uint4 sent[UNITS];
            bool here_all;
            do {
                here_all = true;
#pragma unroll
                for (int u = 0; u < UNITS; ++u) sent[u] = load_sent4(place(group, from, word[u]));
#pragma unroll
                for (int u = 0; u < UNITS; ++u) here_all = here_all && (!any[u] || (sent[u].x && sent[u].y && sent[u].z && sent[u].w));
            } while (!__all_sync(FULL, here_all));
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                if (any[u]) *(uint4*)place(group, from, word[u]) = make_uint4(0, 0, 0, 0);
                sum[u] = plus(sum[u], plus(sent[u], make_uint4(-BIAS, -BIAS, -BIAS, -BIAS)));
            }
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if constexpr (OTHERS == 1) sum[u] = plus(sum[u], there[u]);
            if (any[u]) store_shared4(here + word[u] * 4, sum[u].x, sum[u].y, sum[u].z, sum[u].w);
        }
    }
    return mine;
}

// Sums of all CTAs of a range meet: what this one finishes. part: the CTA's number in its cluster, of `parts`.
__device__ __forceinline__ Share meet(const Args& args, u32 here, const Share& share, int groups, int group, int parts, int part, u32 range, u32 ranges, int warp, int lane) {
    if (groups > 1)
        return parts == 2 ? exchange<1>(args, here, share, groups, group, part, range, ranges, warp, lane)
                          : exchange<0>(args, here, share, groups, group, part, range, ranges, warp, lane);
    switch (parts) {
        case 2: gather<1>(here, parts, part, share, warp, lane); break;
        case 3: gather<2>(here, parts, part, share, warp, lane); break;
        case 4: gather<3>(here, parts, part, share, warp, lane); break;
        case 5: gather<4>(here, parts, part, share, warp, lane); break;
        case 6: gather<5>(here, parts, part, share, warp, lane); break;
        case 7: gather<6>(here, parts, part, share, warp, lane); break;
        default: gather<7>(here, parts, part, share, warp, lane);
    }
    return share;
}

constexpr int ROW = 100, BLOCK = 12, ROOM = 8 * ROW;  // floats of a row, of eight outputs, of eight rows: banks
static_assert(SUMS * 4 + WORKERS * ROOM * 4 <= STEPS_AT);

// All sums and differences of COUNT numbers, or what is left to do from those FIRST places apart on.
template <int COUNT, int FIRST, typename At>
__device__ __forceinline__ void butterflies(At&& at) {
#pragma unroll
    for (int d = FIRST; d < COUNT; d *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (!(i & d)) {
                const float a = at(i), b = at(i + d);
                at(i) = a + b;
                at(i + d) = a - b;
            }
}

// All sums and differences of eight products, the first of neighbours in the instructions that multiply (by name: what the compiler joins
// shall not depend on where this stands).
template <typename At, typename By>
__device__ __forceinline__ void products_of_eight(At&& at, By&& by) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const float a = __fmul_rn(at(i), by(i)), b = at(i + 1);
        at(i) = __fmaf_rn(b, by(i + 1), a);
        at(i + 1) = __fmaf_rn(-b, by(i + 1), a);
    }
    butterflies<8, 2>(at);
}

// A warp's pieces of a range whose sums are complete, every so manieth. They are taken from `sums` (in memory: left zero there; HERE: in
// shared memory), multiplied by the Hadamard matrix, permuted, rounded. room: ROOM floats of this warp.
template <bool HERE>
__device__ __forceinline__ void finish_range(const Args& args, int* sums, u32 here, const float* scales, const Share& share, const Known* known, int range, float* room, int warp, int lane) {
    const int tile = (share.begin + warp) % WIDTH, nt = range * WIDTH + tile, g = swapped(lane >> 2), c = lane & 3;
    if (nt >= args.w.n_tiles) return;
    int next[16];  // of row 2 c + side, output 8 g + i: at 2 i + side
    const int turned_row = 2 * (lane >> 2 & 3) + (lane >> 4);  // in the second half of the rotation
    float scale;
    const auto load = [&](int piece) {
        const int eight = piece / WIDTH;
        const u32 at = sums_at(tile, 0, eight, lane);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            uint4 four;
            if constexpr (HERE) {
                four = load_shared4(here + (at + w * (TOKENS * 16)) * 4);
            } else {
                uint4* from = (uint4*)(sums + at + w * (TOKENS * 16));
                four = __ldcg(from);
                *from = make_uint4(0, 0, 0, 0);
            }
            next[4 * w] = four.x, next[4 * w + 1] = four.y, next[4 * w + 2] = four.z, next[4 * w + 3] = four.w;
        }
        const int row = 8 * eight + turned_row;
        scale = HERE ? scales[row] : row < share.rows ? __ldcg(args.scale + row) : 0.f;
    };
    int piece = share.begin + warp;
    if (piece < share.end) load(piece);
    const Known& of = known[tile];
    float unit[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) unit[i] = of.unit[8 * g + i];
    const u32 two = *(const u16*)(of.code + 2 * lane);  // of outputs 2 lane and 2 lane + 1
    const float2 bias = *(const float2*)(of.bias + 2 * lane);
    const float low_factor = !of.rotated ? 1.f : two & 64 ? -0.125f : 0.125f, high_factor = !of.rotated ? 1.f : two & 64 << 8 ? -0.125f : 0.125f;
    const bool rotated = of.rotated;
    float* const put = room + 2 * c * ROW + g * BLOCK;                                                   // this lane's sums
    float* const turned = room + turned_row * ROW + 2 * c;                                               // two outputs of every eight
    const float *low = room + (two >> 3 & 7) * BLOCK + (two & 7), *high = room + (two >> 11 & 7) * BLOCK + (two >> 8 & 7);
    u8* const y = (u8*)args.y + (long long)share.row0 * args.y_stride * 2;
    const u32 stride = args.y_stride;
#pragma unroll 1
    for (; piece < share.end; piece += WORKERS) {
        const int row = piece / WIDTH * 8;
        float v[2][8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int side = 0; side < 2; ++side) v[side][i] = (float)next[2 * i + side];
        const float row_scale = scale;
        if (piece + WORKERS < share.end) load(piece + WORKERS);
        __syncwarp();
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            if (rotated)
                products_of_eight([&](int i) -> float& { return v[side][i]; }, [&](int i) { return unit[i]; });
            else
#pragma unroll
                for (int i = 0; i < 8; ++i) v[side][i] *= unit[i];
#pragma unroll
            for (int i = 0; i < 8; i += 4) *(float4*)(put + side * ROW + i) = make_float4(v[side][i], v[side][i + 1], v[side][i + 2], v[side][i + 3]);
        }
        __syncwarp();
        float2 u[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) u[i] = *(const float2*)(turned + i * BLOCK);
        const auto by = [&](int) { return row_scale; };
        if (rotated)
            products_of_eight([&](int i) -> float& { return u[i].x; }, by), products_of_eight([&](int i) -> float& { return u[i].y; }, by);
        else
#pragma unroll
            for (int i = 0; i < 8; ++i) u[i].x *= row_scale, u[i].y *= row_scale;
#pragma unroll
        for (int i = 0; i < 8; ++i) *(float2*)(turned + i * BLOCK) = u[i];
        __syncwarp();
        const u32 at = (row * stride + nt * 64 + 2 * lane) * 2;  // bytes in the block of rows, whose place is the same for all lanes
        const auto store = [&](int r) {
            const u32 a = to_half(fmaf(low[r * ROW], low_factor, bias.x), XTYPE), b = to_half(fmaf(high[r * ROW], high_factor, bias.y), XTYPE);
            *(u32*)(y + at + r * 2 * stride) = a | b << 16;
        };
        if (row + 8 <= share.rows) {
#pragma unroll
            for (int r = 0; r < 8; ++r) store(r);
        } else {
#pragma unroll 1
            for (int r = 0; row + r < share.rows; ++r) store(r);
        }
    }
}
