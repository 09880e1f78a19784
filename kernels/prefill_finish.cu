// Part of prefill_short.cu and prefill_batch.cu: from a CTA's sums to outputs. A CTA's sums of TILES tiles are floats in the order of `sum_at`.

constexpr int ROW_BYTES = TILES * 256;  // of a row of sums

#if XTYPE == 2
typedef float Output;
__device__ __forceinline__ float rounded(float f) { return f; }
#else
typedef u16 Output;
__device__ __forceinline__ u16 rounded(float f) { return to_half(f, XTYPE); }
#endif

// Of the CTA's outputs: bias, an entry of the table (the identity's is i, without signs); what rotated sums are multiplied with.
struct Finish {
    float bias[TILES * 64];
    u8 code[TILES * 64];
    float factor[TILES];  // 0 for the identity
};

__device__ __forceinline__ void prepare_finish(const Args& args, Finish& finish, int tiles_before) {
    if (threadIdx.x >= TILES * 64) return;
    const int tile = threadIdx.x >> 6, i = threadIdx.x & 63, nt = tiles_before + tile;
    if (nt >= args.w.n_tiles) return;
    const u32 transform = args.transform[nt];
    finish.code[threadIdx.x] = transform != 255 ? args.table[transform * 64 + i] : i;
    if (i == 0) finish.factor[tile] = transform != 255 ? 0.125f : 0.f;
    float bias = 0;
    if (args.bias) bias = args.bias_type == 2 ? ((const float*)args.bias)[nt * 64 + i] : from_half(((const u16*)args.bias)[nt * 64 + i], args.bias_type);
    finish.bias[threadIdx.x] = bias;
}

// Where a row's sums of 4 outputs stand among those of a CTA: twisted, so that eight lanes that write or read meet every bank.
__device__ __forceinline__ u32 sum_at(int row, int tile, int four) {
    return row * ROW_BYTES + tile * 256 + ((four ^ (row >> 1 & 1 | (row << 2 ^ row) & 4)) << 4);
}

// The rows of `mine` from first_mine on, finished under one tile, by ROUNDS warps that take eight in turn: the parts of the CTAs are added
// up, `own` being here and the others in `parts`, AT_ONCE of them under way, multiplied by the Hadamard matrix, permuted, rounded.
template <int ROUNDS, int AT_ONCE>
__device__ __forceinline__ void finish_tile(u8* sums, const u8* parts, const Finish& finish, int splits, int own, int first_mine, int mine, int round, int tile,
                                            Output* y, long long y_stride, int lane) {
    const int g = lane >> 2, part = lane & 3;  // four lanes to a row: outputs 16 i + 4 part + e
    const bool rotated = finish.factor[tile] != 0;
    const float low = part & 1 ? -1.f : 1.f, high = part & 2 ? -1.f : 1.f;
    u32 at[2], e[2];  // of the sums that become outputs `lane` and `lane + 32`
    float factor[2], bias[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 code = finish.code[tile * 64 + 32 * i + lane];
        at[i] = (code & 63) >> 2;
        e[i] = (code & 3) * 4;
        factor[i] = !rotated ? 1.f : code & 64 ? -0.125f : 0.125f;
        bias[i] = finish.bias[tile * 64 + 32 * i + lane];
    }
#pragma unroll 1
    for (int first = round * 8; first < mine; first += 8 * ROUNDS) {
        const int row = first_mine + min(first + g, mine - 1);
        float v[16];
#pragma unroll
        for (int k = 0; k < 16; ++k) v[k] = 0;
#pragma unroll 1
        for (int s = 0; s < splits; s += AT_ONCE) {
            float4 more[AT_ONCE][4];
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k)
                if (s + k < splits)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const u32 from = sum_at(row, tile, 4 * i + part);
                        more[k][i] = s + k == own ? *(const float4*)(sums + from) : load_fresh(parts + (u64)(s + k) * TOKENS * ROW_BYTES + from);
                    }
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k)
                if (s + k < splits)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        v[4 * i] += more[k][i].x;
                        v[4 * i + 1] += more[k][i].y;
                        v[4 * i + 2] += more[k][i].z;
                        v[4 * i + 3] += more[k][i].w;
                    }
        }
        if (rotated) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 signs = *(const u32*)(finish.code + tile * 64 + 16 * i + 4 * part);
#pragma unroll
                for (int k = 0; k < 4; ++k) v[4 * i + k] = __uint_as_float(__float_as_uint(v[4 * i + k]) ^ (signs << (24 - 8 * k) & 0x80000000u));
            }
#pragma unroll
            for (int d = 1; d < 16; d *= 2)
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    if (!(i & d)) {
                        const float a = v[i], b = v[i + d];
                        v[i] = a + b;
                        v[i + d] = a - b;
                    }
#pragma unroll
            for (int i = 0; i < 16; ++i) v[i] = fmaf(v[i], low, __shfl_xor_sync(FULL, v[i], 1));
#pragma unroll
            for (int i = 0; i < 16; ++i) v[i] = fmaf(v[i], high, __shfl_xor_sync(FULL, v[i], 2));
        }
        if (first + g < mine)
#pragma unroll
            for (int i = 0; i < 4; ++i) *(float4*)(sums + sum_at(row, tile, 4 * i + part)) = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
        __syncwarp();
#pragma unroll
        for (int k = 0; k < 8; ++k)
            if (first + k < mine) {
                const int done = first_mine + first + k;
#pragma unroll
                for (int i = 0; i < 2; ++i) y[done * y_stride + 32 * i + lane] = rounded(fmaf(*(const float*)(sums + sum_at(done, tile, at[i]) + e[i]), factor[i], bias[i]));
            }
    }
}

// Which rows a CTA of a cluster finishes, of `rows`.
struct Share {
    int each, first, count;
    __device__ __forceinline__ Share(int rows, int splits, int split) : each((rows + splits - 1) / splits), first(split * each), count(min(each, rows - first)) {}
};

// All threads of the cluster's CTAs: rows that another one finishes go through memory.
__device__ __forceinline__ void exchange(const Args& args, const u8* sums, int split, int rows) {
    if (args.splits == 1) return;
    const Share mine(rows, args.splits, split);
    u8* to = args.parts + (u64)blockIdx.x * TOKENS * ROW_BYTES;
    for (int i = threadIdx.x * 16; i < rows * ROW_BYTES; i += THREADS * 16)
        if ((u32)(i / ROW_BYTES - mine.first) >= (u32)mine.each) *(float4*)(to + i) = *(const float4*)(sums + i);
    cluster_arrive();
    cluster_wait();
}

// Behind `exchange`, for TILES * ROUNDS warps.
template <int ROUNDS, int AT_ONCE>
__device__ __forceinline__ void finish_rows(const Args& args, u8* sums, const Finish& finish, int split, int tiles_before, int first_row, int rows, int warp, int lane) {
    const int tile = warp % TILES;
    if (tiles_before + tile >= args.w.n_tiles) return;
    const Share mine(rows, args.splits, split);
    finish_tile<ROUNDS, AT_ONCE>(sums, args.parts + (u64)(blockIdx.x - split) * TOKENS * ROW_BYTES, finish, args.splits, split, mine.first, mine.count,
                                 warp / TILES, tile, (Output*)args.y + first_row * args.y_stride + (tiles_before + tile) * 64, args.y_stride, lane);
}
