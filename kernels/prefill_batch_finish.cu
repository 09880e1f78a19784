// Part of prefill_batch.cu: from whole sums to outputs. Included there.

// A warp's share of a range whose sums are complete: of one tile, every so manieth eight rows. They are taken from `sums` (in memory: left
// zero there; HERE: in shared memory), multiplied by the Hadamard matrix, permuted, rounded. room: 8 x 66 floats of this warp.
template <bool HERE>
__device__ __forceinline__ void finish_range(const Args& args, int* sums, int range, float* room, int warp, int lane) {
    const int tile = warp % WIDTH, nt = range * WIDTH + tile, g = lane >> 2, c = lane & 3, eights = (args.rows + 7) / 8;
    if (nt >= args.w.n_tiles) return;
    int next[2][8];  // of rows 2 c + side, outputs 8 g + i
    const auto load = [&](int eight) {
        int* from = sums + (tile * (TOKENS / 2) + eight) * 128 + lane;
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                int* at = from + (i >> 1) * (TOKENS * 16) + ((i & 1) * 2 + side) * 32;
                next[side][i] = HERE ? *at : __ldcg(at);
                if (!HERE) *at = 0;
            }
    };
    int eight = warp / WIDTH;
    if (eight < eights) load(eight);
    const u32 transform = args.transform[nt];
    const float unit = args.unit[nt];
    const bool rotated = transform != 255;
    uint2 signs = make_uint2(0, 0);
    u32 code[2] = {2u * lane, 2u * lane + 1};  // of outputs 2 lane and 2 lane + 1
    float bias[2] = {0, 0}, factor[2] = {1, 1};
    if (rotated) {
        const u8* table = args.table + transform * 64;
        signs = *(const uint2*)(table + 8 * g);
        const u32 two = *(const u16*)(table + 2 * lane);
        code[0] = two & 63, code[1] = two >> 8 & 63;
        factor[0] = two & 64 ? -0.125f : 0.125f, factor[1] = two & 64 << 8 ? -0.125f : 0.125f;
    }
    if (args.bias)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            bias[i] = args.bias_type == 2 ? ((const float*)args.bias)[nt * 64 + 2 * lane + i] : from_half(((const u16*)args.bias)[nt * 64 + 2 * lane + i], args.bias_type);
#pragma unroll 1
    for (; eight < eights; eight += WORKERS / WIDTH) {
        float v[2][8];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const int row = 8 * eight + 2 * c + side;
            const float scale = row < args.rows ? args.scale[row] * unit : 0.f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const u32 sign = (i < 4 ? signs.x : signs.y) << (24 - 8 * (i & 3)) & 0x80000000u;
                v[side][i] = __uint_as_float(__float_as_uint((float)next[side][i] * scale) ^ sign);
            }
        }
        if (eight + WORKERS / WIDTH < eights) load(eight + WORKERS / WIDTH);
        if (rotated)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
#pragma unroll
                for (int d = 1; d < 8; d *= 2)
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        if (!(i & d)) {
                            const float a = v[side][i], b = v[side][i + d];
                            v[side][i] = a + b;
                            v[side][i + d] = a - b;
                        }
#pragma unroll
                for (int d = 4; d < 32; d *= 2)
#pragma unroll
                    for (int i = 0; i < 8; ++i) v[side][i] = fmaf(v[side][i], lane & d ? -1.f : 1.f, __shfl_xor_sync(FULL, v[side][i], d));
            }
        __syncwarp();
#pragma unroll
        for (int side = 0; side < 2; ++side)
#pragma unroll
            for (int i = 0; i < 8; i += 2) *(float2*)(room + (2 * c + side) * 66 + 8 * g + i) = make_float2(v[side][i], v[side][i + 1]);
        __syncwarp();
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const int row = 8 * eight + r;
            if (row >= args.rows) break;
            const u32 low = to_half(fmaf(room[r * 66 + code[0]], factor[0], bias[0]), XTYPE), high = to_half(fmaf(room[r * 66 + code[1]], factor[1], bias[1]), XTYPE);
            *(u32*)((u16*)args.y + row * args.y_stride + nt * 64 + 2 * lane) = low | high << 16;
        }
    }
}
