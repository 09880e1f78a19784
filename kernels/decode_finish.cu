// Part of decode_bitplane.cu, with STREAM: how the parts of an output's sum come together, and what becomes of it. Included there.
//
// The weight is a sequence of items, each 512 outputs (a block) x 64 inputs. Every CTA takes a stretch of items of the same length, so that
// all multiprocessors finish together whatever the shape. Items add up in chains (runs of a CTA's items: its warps', for one and two
// rows), chains of a block in ascending order, and the parts of CTAs in global memory: the last to arrive finishes the block.
//
// In `partial`, output 16 w + 4 (2 b + y) + 2 h + z of a tile (b, y, h, z bits) lies at 16 w + 8 h + 4 b + 2 z + y, as the tensor core
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

// Adds the parts that CTAs `first` to `last` left of an output tile, and writes its outputs. The order is the same for every ROWS: parts
// number 0, 2, 4 ..., parts number 1, 3, 5 ..., and the two sums. shift: by how many blocks this one lies behind the first one of CTA
// `first`; of the others it is the first.
template <int ROWS>
__device__ __forceinline__ void finish(const Args& args, int block, int tile, u32 first, u32 last, u32 shift, u32 transform, int lane) {
    constexpr int PAIRS = (ROWS + 1) / 2, BATCH = ROWS == 1 ? 12 : ROWS == 2 ? 6 : ROWS == 4 ? 3 : 2;  // of two parts
    const int half = lane >> 4, column = 4 * (lane & 15), n = (block * 8 + tile) * 64 + column;
    const u32 codes = transform == 255 ? 0 : *(const u32*)(args.table + transform * 64 + column);
    const float* from = args.partial + (ROWS == 1 ? 0 : half * 512) + tile * 64 + column;
    constexpr int EACH = ROWS == 1 ? 1 : 2;  // one row: half a warp takes the even parts, the other half the odd ones
    float4 sum[PAIRS][EACH];
#pragma unroll
    for (int q = 0; q < PAIRS; ++q)
#pragma unroll
        for (int e = 0; e < EACH; ++e) sum[q][e] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (u32 s = first + (ROWS == 1 ? half : 0); s <= last; s += 2 * BATCH) {
        float4 part[BATCH][EACH][PAIRS];
#pragma unroll
        for (int u = 0; u < BATCH; ++u)
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                const u32 cta = s + 2 * u + e;
#pragma unroll
                for (int q = 0; q < PAIRS; ++q) {
                    part[u][e][q] = make_float4(0.f, 0.f, 0.f, 0.f);
                    if (cta <= last)
                        part[u][e][q] = __ldcg((const float4*)(from + (u64)(cta * args.places + (cta == first ? shift : 0)) * (ROWS * 512) + q * 1024));
                }
            }
#pragma unroll
        for (int u = 0; u < BATCH; ++u)
#pragma unroll
            for (int e = 0; e < EACH; ++e)
#pragma unroll
                for (int q = 0; q < PAIRS; ++q) {
                    sum[q][e].x += part[u][e][q].x;
                    sum[q][e].y += part[u][e][q].y;
                    sum[q][e].z += part[u][e][q].z;
                    sum[q][e].w += part[u][e][q].w;
                }
    }
    __syncwarp();
#pragma unroll
    for (int q = 0; q < PAIRS; ++q) {
        float y[4] = {sum[q][0].x, sum[q][0].y, sum[q][0].z, sum[q][0].w};
        if (ROWS == 1) {
#pragma unroll
            for (int e = 0; e < 4; ++e) y[e] += __shfl_xor_sync(FULL, y[e], 16);
        } else {
            const float4& odd = sum[q][EACH - 1];
            y[0] += odd.x;
            y[1] += odd.y;
            y[2] += odd.z;
            y[3] += odd.w;
        }
        restore(y, codes, transform != 255, lane);
        const int m = 2 * q + half;
        if (m >= args.rows) continue;
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
}

// The rows of `table` of the tiles that a warp may have to finish: lane l, of block number l % 16 and the warp's tile number l / 16.
__device__ __forceinline__ u32 transforms_of(const Args& args, int first_block, int warp, int warps, int lane) {
    const int tile = warp + (lane >> 4) * warps, at = (first_block + (lane & 15)) * 8 + tile;
    return tile < 8 && at < args.n_tiles ? args.transform[at] : 255;
}

// Everybody's parts are written: count them, and finish the blocks that this CTA completes. `complete` lies in shared memory.
template <int ROWS>
__device__ __forceinline__ void exchange(const Args& args, int first_block, int last_block, u32 transform, u32* complete) {
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
                finish<ROWS>(args, first_block + which, tile, __shfl_sync(FULL, from, which), __shfl_sync(FULL, to, which), __shfl_sync(FULL, shift, which), row, lane);
        }
    }
}

// One and two rows: the runs of a CTA's warps add up in ascending order. sums: [warps] of `bytes`, each [QUADS][32] accumulators of the
// tensor core; ended: [places - 1] of the same, of blocks that end inside a run; borders: [warps + 1] first items of the runs.
template <int ROWS>
__device__ __forceinline__ void add_runs(const Args& args, const u8* sums, int bytes, const float4* ended, const u32* borders, int first_block, int last_block) {
    constexpr int QUADS = 4 * ROWS;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, g = lane >> 2, c = lane & 3;
    for (int place = 0; place <= last_block - first_block; ++place) {
        const u32 from = (first_block + place) * args.k_tiles, to = from + args.k_tiles;
        for (int quad = warp; quad < QUADS; quad += warps) {
            float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
            for (int w = 0; w < warps; ++w) {
                const u32 begin = borders[w], end = borders[w + 1];
                if (begin == end || begin >= to || end <= from) continue;
                const float4 more = (end > to ? ended + place * QUADS * 32 : (const float4*)(sums + w * bytes))[quad * 32 + lane];
                v.x += more.x;
                v.y += more.y;
                v.z += more.z;
                v.w += more.w;
            }
            const int m = ROWS == 1 ? 0 : c >> 1, word = ROWS == 1 ? quad / 2 * 2 + (c >> 1) : quad / 2;
            *(float4*)(args.partial + ((u64)(blockIdx.x * args.places + place) * ROWS + m) * 512 + g * 64 + word * 16 + (quad & 1) * 8 + (c & 1) * 4) = v;
        }
    }
}
