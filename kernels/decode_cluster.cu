// Part of decode_bitplane.cu, without STREAM: how a cluster finishes the outputs it shares. Included there.

// One row of an output tile is a task; a range of `tiles` of them has rows x tiles, and task i belongs to CTA i % ctas. received: what the CTAs
// sent to this one, [splits][ceil(tasks / ctas)][64]. codes: of the first task of this warp, as `transform_codes` gives them.
//
// Output 16 w + 4 (2 b + y) + 2 h + z of a tile (b, y, h, z bits) lies at 16 w + 8 h + 4 b + 2 z + y, as the tensor core leaves them.
__device__ __forceinline__ void finish_tasks(const Args& args, const float* received, int ctas, int rank, int tiles, int first_tile, u32 codes, int warps) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (warp >= warps) return;
    const int tasks = args.rows * tiles, tasks_here = (tasks + ctas - 1) / ctas;
    for (int mine = warp; mine * ctas + rank < tasks; mine += warps) {
        const int task = mine * ctas + rank, m = task / tiles, nt = first_tile + task % tiles;
        if (nt >= args.n_tiles) continue;
        const int n_t = lane >> 2 & 3, n_j = lane & 3;  // this lane takes outputs lane and lane + 32
        const float* from = received + mine * 64 + (((lane >> 4) * 2 + (n_j >> 1)) * 2 + (n_t >> 1)) * 4 + (n_j & 1) * 2 + (n_t & 1);
        float lo = from[0], hi = from[32];
#pragma unroll 4
        for (int s = 1; s < args.splits; ++s) {
            lo += from[s * tasks_here * 64];
            hi += from[s * tasks_here * 64 + 32];
        }
        const u32 both = nt == first_tile + (warp * ctas + rank) % tiles ? codes : transform_codes(args, nt, lane);
        if (!(both & 0x10000)) {  // y = l H[perm] (r y~) / 8
            const u32 code_lo = both & 255, code_hi = both >> 8;
            lo = code_lo & 128 ? -lo : lo;
            hi = code_hi & 128 ? -hi : hi;
            const float a = lo + hi, b = lo - hi;
            lo = a;
            hi = b;
#pragma unroll
            for (int bit = 1; bit < 32; bit <<= 1) {
                const float other_lo = __shfl_xor_sync(FULL, lo, bit), other_hi = __shfl_xor_sync(FULL, hi, bit);
                lo = lane & bit ? other_lo - lo : lo + other_lo;
                hi = lane & bit ? other_hi - hi : hi + other_hi;
            }
            const float lo_of_lo = __shfl_sync(FULL, lo, code_lo & 31), hi_of_lo = __shfl_sync(FULL, hi, code_lo & 31);
            const float lo_of_hi = __shfl_sync(FULL, lo, code_hi & 31), hi_of_hi = __shfl_sync(FULL, hi, code_hi & 31);
            lo = (code_lo & 32 ? hi_of_lo : lo_of_lo) * (code_lo & 64 ? -0.125f : 0.125f);
            hi = (code_hi & 32 ? hi_of_hi : lo_of_hi) * (code_hi & 64 ? -0.125f : 0.125f);
        }
        const int n = nt * 64 + lane;
        if (args.bias) {
            lo += load_bias(args.bias, n, args.bias_type);
            hi += load_bias(args.bias, n + 32, args.bias_type);
        }
#if XTYPE == 2
        float* y = (float*)args.y + m * args.y_stride + n;
        y[0] = lo;
        y[32] = hi;
#else
        u16* y = (u16*)args.y + m * args.y_stride + n;
        y[0] = to_half(lo, XTYPE);
        y[32] = to_half(hi, XTYPE);
#endif
    }
}
