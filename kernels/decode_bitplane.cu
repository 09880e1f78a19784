// Graded bit-planar GEMV for 1 to 8 rows: one launch from activations to outputs. Compiled at first use by NVRTC, so it includes nothing.
//
// A warp owns 64*TILES outputs and walks over whole 64-input tiles. Per tile it quantises the rows, finds every channel's level, sorts
// the channels by level, and streams only the planes that a channel's level asks for through a private ring in shared memory
// (cp.async, zero-filled where nothing is wanted). Plane words go to the INT8 tensor cores as they lie: a byte of `word & (3 << 2j)`
// is output 4t + j of ONE channel, scaled by 4^j, so four bytes of one channel fill four k-slots of the multiply, and the activation
// stands in B only where k-slot t meets column t. That needs no byte transposition, and any eight channels form a step.
// Sums inside a tile are integers (exact); tiles, warps and the CTAs of a cluster add in one fixed float order, the same for every M.
//
// Set by the compiler's command line: XTYPE (0 bf16, 1 fp16, 2 float32), STAGES (ring depth), SUMS (1: also write the integer sums).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef STAGES
#define STAGES 8
#endif
#ifndef SUMS
#define SUMS 0
#endif

#define FULL 0xffffffffu

struct Args {
    const void* x;           // [rows, k_tiles * 64], rows x_stride elements apart
    const float* thresholds; // [4] ascending
    const u8* codes;         // units of 16 bytes (4 words): the dense planes, then the extension
    const uint2* meta;       // [blocks, k_tiles]: first unit of the extension, masks (plane 2: bits 0-7, plane 3: 8-15, class: 16-31)
    const float* factor;     // [blocks, k_tiles, 8]: tile scale * 2^(bits - 9)
    const u8* transform;     // [n_tiles] row of `table`, 255 for the identity
    const u8* table;         // [., 64]: bits 0-5 permutation, 6 left sign, 7 right sign
    const void* bias;        // [n_tiles * 64] or null
    void* y;                 // [rows, n_tiles * 64], rows y_stride elements apart
    int* sums;               // [rows, k_tiles, n_tiles * 64], only with SUMS
    long long x_stride, y_stride;
    int rows, n_tiles, k_tiles, tiles_per_warp, splits, warps_k, bias_type;
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory"); }

__device__ __forceinline__ void mma(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float from_half(u16 h, int type) {
    float f;
    if (type == 0) return __uint_as_float((u32)h << 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ u16 to_half(float f, int type) {
    u16 h;
    if (type == 0)
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    else
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

__device__ __forceinline__ float2 load_pair(const void* x, long long at) {  // elements at, at + 1; at is even
#if XTYPE == 2
    return *(const float2*)((const float*)x + at);
#else
    u32 v = *(const u32*)((const u16*)x + at);
    return make_float2(from_half((u16)v, XTYPE), from_half((u16)(v >> 16), XTYPE));
#endif
}

__device__ __forceinline__ float load_bias(const void* bias, int at, int type) {
    return type == 2 ? ((const float*)bias)[at] : from_half(((const u16*)bias)[at], type);
}

constexpr int STEP = 16;  // channels of a step

// One step of a warp: up to 16 channels of one plane of one tile.
struct __align__(16) Step {
    u32 unit;     // of channel 0 and the warp's first tile that has the plane
    u32 channels; // shared address of the step's channel numbers
    u32 wanted;   // bits 0-7: the warp's tiles that have the plane; bits 8-23: the slots that are not padding
    u32 stride;   // units from channel to channel
};

// What a CTA keeps of an input tile. Slots are channels sorted by level, highest first, ascending inside a level.
template <int ROWS>
struct __align__(16) Input {
    static constexpr int PAIRS = (ROWS + 1) / 2, HALVES = ROWS == 1 ? 1 : 2;
    u8 channel[64];                  // slot -> channel
    u8 entry[4][64][HALVES][PAIRS];  // per plane: the INT8 activation of row 2 * pair + half where its level wants the plane, else 0
    float scale[ROWS];               // activation scale of a row
    float centre[ROWS][4];           // sum of q * (doubled midpoint minus zero point) in steps of 8-bit codes, per tile class (2, 4, 6, 8 bits)
    u32 counts;                      // byte p: channels that need plane p, over all rows
};

// What a warp keeps of its part of the weight at an input tile.
struct __align__(16) Part {
    float factor[8];
    u32 masks;   // of `meta`
    u32 counts;  // of the input, without planes that none of the warp's tiles has
    u32 unused[2];
};

template <int BYTES>
__device__ __forceinline__ void store_entry(void* to, u32 v) {
    if constexpr (BYTES == 1) *(u8*)to = (u8)v;
    if constexpr (BYTES == 2) *(u16*)to = (u16)v;
    if constexpr (BYTES == 4) *(u32*)to = v;
}

template <int ROWS>
__device__ __forceinline__ void prepare_input(const Args& args, Input<ROWS>& tile, int kt, int lane) {
    constexpr int PAIRS = Input<ROWS>::PAIRS, HALVES = Input<ROWS>::HALVES;
    u32 q_word[2][HALVES] = {}, l_word[2][HALVES] = {};  // [channel of this lane][row & 1], byte row >> 1
    int top0 = 0, top1 = 0;
    float t[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) t[i] = args.thresholds[i];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        float2 v = make_float2(0.f, 0.f);
        if (m < args.rows) v = load_pair(args.x, m * args.x_stride + kt * 64 + 2 * lane);
        const float a = fabsf(v.x), b = fabsf(v.y);
        // of non-negative floats the bits order like integers, and a NaN is the greatest: it reaches the scale and the output
        const u32 largest = __reduce_max_sync(FULL, max(__float_as_uint(a), __float_as_uint(b)));
        float scale = __fdiv_rn(__uint_as_float(largest), 127.f);
        if (scale == 0.f) scale = 1.f;
        const int q0 = max(-127, min(127, __float2int_rn(__fdiv_rn(v.x, scale))));
        const int q1 = max(-127, min(127, __float2int_rn(__fdiv_rn(v.y, scale))));
        const int l0 = (a > t[0]) + (a > t[1]) + (a > t[2]) + (a > t[3]);
        const int l1 = (b > t[0]) + (b > t[1]) + (b > t[2]) + (b > t[3]);
        top0 = max(top0, l0);
        top1 = max(top1, l1);
        q_word[0][m & 1] |= (u32)(q0 & 255) << (8 * (m >> 1));
        q_word[1][m & 1] |= (u32)(q1 & 255) << (8 * (m >> 1));
        l_word[0][m & 1] |= (u32)l0 << (8 * (m >> 1));
        l_word[1][m & 1] |= (u32)l1 << (8 * (m >> 1));
        int at_level[4];
#pragma unroll
        for (int l = 1; l <= 4; ++l) at_level[l - 1] = __reduce_add_sync(FULL, (l0 == l ? q0 : 0) + (l1 == l ? q1 : 0));
        if (lane < 4) {
            const int bits = 2 * lane + 2;
            int sum = 0;
#pragma unroll
            for (int l = 1; l <= 4; ++l) sum += at_level[l - 1] * ((256 >> min(2 * l, bits)) - (256 >> bits) - 256);
            tile.centre[m][lane] = (float)sum;
            tile.scale[m] = scale;
        }
    }
    const u32 before = (1u << lane) - 1;
    u32 above0 = 0, above1 = 0, counts = 0;
    int slot0 = 0, slot1 = 0;
#pragma unroll
    for (int l = 4; l >= 0; --l) {
        const u32 here0 = __ballot_sync(FULL, top0 == l), here1 = __ballot_sync(FULL, top1 == l);
        const int rank = __popc(above0) + __popc(above1) + __popc(here0 & before) + __popc(here1 & before);
        if (top0 == l) slot0 = rank;
        if (top1 == l) slot1 = rank + (top0 == l);
        above0 |= here0;
        above1 |= here1;
        if (l > 0) counts |= (u32)(__popc(above0) + __popc(above1)) << (8 * (l - 1));
    }
    tile.channel[slot0] = (u8)(2 * lane);
    tile.channel[slot1] = (u8)(2 * lane + 1);
#pragma unroll
    for (int p = 0; p < 4; ++p)
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
#pragma unroll
            for (int k = 0; k < 2; ++k) {  // a byte of 127 - p + level has its top bit where level > p
                const u32 wants = (l_word[k][half] + (127 - p) * 0x01010101u) >> 7 & 0x01010101u;
                store_entry<PAIRS>(&tile.entry[p][k ? slot1 : slot0][half][0], q_word[k][half] & wants * 255);
            }
    if (lane == 0) tile.counts = counts;
}

// Appends an input tile's steps to the warp's list.
template <int TILES, int ROWS>
__device__ __forceinline__ void list_steps(const Args& args, const Input<ROWS>& input, Part& part, Step* steps, int& total, uint2 meta, int at, int block, int sub, int lane) {
    constexpr u32 OWN = (1u << TILES) - 1;
    const u32 own_two = meta.y >> sub & OWN, own_three = meta.y >> (8 + sub) & OWN;
    u32 counts = input.counts;
    if (!own_two) counts &= 0x0000ffffu;
    if (!own_three) counts &= 0x00ffffffu;
    if (lane == 0) {
        part.masks = meta.y;
        part.counts = counts;
    }
    const int plane = lane >> 2 & 3, first = (lane & 3) * STEP, left = lane < 16 ? (int)(counts >> (8 * plane) & 255) - first : 0;
    const u32 all = __ballot_sync(FULL, left > 0);
    if (left > 0) {
        Step step;
        const u32 slots = left >= STEP ? 0xffff00u : ((1u << left) - 1) << 8;
        step.channels = shared_address(input.channel + first);
        if (plane < 2) {
            const int inside = min(TILES, args.n_tiles - block * 8 - sub);
            step.unit = (u32)at * 1024 + plane * 512 + sub;
            step.wanted = ((1u << inside) - 1) | slots;
            step.stride = 8;
        } else {
            const u32 whole = meta.y >> (8 * (plane - 2)) & 255;
            step.unit = meta.x + (plane == 2 ? 0 : 64 * __popc(meta.y & 255)) + __popc(whole & ((1u << sub) - 1));
            step.wanted = (plane == 2 ? own_two : own_three) | slots;
            step.stride = __popc(whole);
        }
        steps[total + __popc(all & ((1u << lane) - 1))] = step;
    }
    total += __popc(all);
}

// A warp (k, n) of the CTA's warps_k x warps_n takes every (splits * warps_k)-th input tile and the n-th range of outputs. Shared
// memory, as `cuda_geometry` in decode_bitplane.py counts it: sums of all warps; their rings; inputs of all k; parts; steps.
template <int TILES, int ROWS>
__device__ __forceinline__ void decode(const Args& args) {
    constexpr int PAIRS = Input<ROWS>::PAIRS, HALVES = Input<ROWS>::HALVES;
    constexpr int WORDS = TILES / 2;  // words of a channel that one lane works on
    constexpr int STAGE = TILES * STEP * 16, QUADS = PAIRS * WORDS * 2, SUM_BYTES = QUADS * 512;
    extern __shared__ __align__(16) u8 shared[];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int warps_k = args.warps_k, warps_n = warps / warps_k, warp_k = warp % warps_k, warp_n = warp / warps_k;
    const int splits = args.splits, split = blockIdx.x % splits, first_part = blockIdx.x / splits * warps_n;
    const int first_tile = (first_part + warp_n) * TILES, block = first_tile >> 3, sub = first_tile & 7;  // sub: 0, or 4 for the upper half
    const int stride = splits * warps_k, k_first = split * warps_k + warp_k, tpw = args.tiles_per_warp;
    const bool active = first_tile < args.n_tiles;
    const int k_end = active ? args.k_tiles : 0;

    float4* warp_sums = (float4*)(shared + warp * SUM_BYTES);  // [QUADS][32]: the accumulators of the tensor core as they lie
    u8* ring_bytes = shared + warps * SUM_BYTES + warp * (STAGES * STAGE);
    Input<ROWS>* all_inputs = (Input<ROWS>*)(shared + warps * (SUM_BYTES + STAGES * STAGE));
    Part* parts = (Part*)(all_inputs + warps_k * tpw) + warp * tpw;
    Step* steps = (Step*)((Part*)(all_inputs + warps_k * tpw) + warps * tpw) + warp * (tpw * 16 + STAGES - 1);
    const Input<ROWS>* inputs = all_inputs + warp_k * tpw;
    const u32 ring = shared_address(ring_bytes);

#pragma unroll
    for (int i = 0; i < STAGES * STAGE / 512; ++i) ((uint4*)ring_bytes)[i * 32 + lane] = make_uint4(0, 0, 0, 0);
    uint2 meta = make_uint2(0, 0);
    if (k_first < k_end) meta = args.meta[block * args.k_tiles + k_first];

    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    for (int task = warp; task < warps_k * tpw; task += warps) {
        const int kt = split * warps_k + task / tpw + task % tpw * stride;
        if (kt < args.k_tiles) prepare_input<ROWS>(args, all_inputs[task], kt, lane);
    }
    __syncthreads();
    int total = 0;
    for (int j = 0, kt = k_first; kt < k_end; ++j, kt += stride) {
        const int at = block * args.k_tiles + kt;
        if (j) meta = args.meta[at];
        if (lane < 8) parts[j].factor[lane] = args.factor[(long long)at * 8 + lane];
        list_steps<TILES, ROWS>(args, inputs[j], parts[j], steps, total, meta, at, block, sub, lane);
    }
    if (lane < STAGES - 1) steps[total + lane] = Step{0, shared_address(all_inputs), 0, 0};  // what the pipeline asks for beyond the end
    __syncwarp();

    // who copies what: 16 bytes (one tile's share of one channel) per lane and copy
    constexpr int COPIES = STAGE / 512, ROWS_PER_COPY = 32 / TILES;
    const int copy_tile = lane % TILES, copy_row = lane / TILES;
    u32 copy_to[COPIES], copy_needs[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
        const int row = copy_row + i * ROWS_PER_COPY;
        const int twist = TILES == 8 ? (row & 3) * 2 : (row & 2);
        copy_to[i] = ring + row * (TILES * 16) + (copy_tile ^ twist) * 16;
        copy_needs[i] = 1u << copy_tile | 256u << row;
    }
    const u32 tiles_before = (1u << copy_tile) - 1;
    const u8* codes = args.codes;
    asm volatile("" : "+l"(codes));  // keeps the address in registers
    u32 cursor = shared_address(steps);
    auto produce = [&](u32 slot) {
        u32 unit, channels, wanted, unit_stride;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(unit), "=r"(channels), "=r"(wanted), "=r"(unit_stride) : "r"(cursor));
        cursor += 16;
        unit += __popc(wanted & tiles_before);
        channels += copy_row;
#pragma unroll
        for (int i = 0; i < COPIES; i += 2) {
            u32 channel[2];
            asm volatile("ld.shared.u8 %0, [%1];" : "=r"(channel[0]) : "r"(channels + i * ROWS_PER_COPY));
            asm volatile("ld.shared.u8 %0, [%1];" : "=r"(channel[1]) : "r"(channels + (i + 1) * ROWS_PER_COPY));
            const u8* from0 = codes + (u64)(unit + channel[0] * unit_stride) * 16;
            const u8* from1 = codes + (u64)(unit + channel[1] * unit_stride) * 16;
            asm volatile(
                "{.reg .pred p, q;\n"
                "setp.eq.u32 p, %4, 0;\n"
                "setp.eq.u32 q, %5, 0;\n"
                "@p cp.async.cg.shared.global [%0], [%2], 16;\n"
                "@q cp.async.cg.shared.global [%1], [%3], 16;}\n" ::"r"(copy_to[i] + slot), "r"(copy_to[i + 1] + slot), "l"(from0), "l"(from1),
                "r"(~wanted & copy_needs[i]), "r"(~wanted & copy_needs[i + 1])
                : "memory");
        }
        copy_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) produce(i * STAGE);

    const int g = lane >> 2, c = lane & 3;
    const int twist = TILES == 8 ? c * 2 : (c & 2);
    const u32 read_from = ring + c * (TILES * 16) + (TILES == 8 ? (g ^ twist) * 16 : ((g >> 1) ^ twist) * 16 + (g & 1) * 8);
    // B: column n = 4 * half + t; the activation goes to byte t of the word, the other bytes are zero
    const int half = ROWS == 1 ? 0 : g >> 2, t = g & 3;
    u32 select[PAIRS];
#pragma unroll
    for (int q = 0; q < PAIRS; ++q) select[q] = ROWS == 1 && g >= 4 ? 0x4444u : 0x4444u ^ (u32)(4 ^ q) << (4 * t);
    const int tile_of_lane = TILES == 8 ? g : sub + (g >> 1);

    u32 read_at = 0, write_at = (STAGES - 1) * STAGE;
#pragma unroll 1
    for (int j = 0, kt = k_first; kt < k_end; ++j, kt += stride) {
        const u32 counts = parts[j].counts, masks = parts[j].masks;
        int sum[PAIRS][WORDS][2][4];
#pragma unroll
        for (int q = 0; q < PAIRS; ++q)
#pragma unroll
            for (int i = 0; i < WORDS; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int r = 0; r < 4; ++r) sum[q][i][h][r] = 0;
        float unit = 512.f;  // doubled, and 4 for every plane below the last one read
#pragma unroll 1
        for (int plane = 0; plane < 4; ++plane) {
            const int count = counts >> (8 * plane) & 255;
            if (count == 0) break;
            unit *= 0.25f;
            if (plane > 0) {
#pragma unroll
                for (int q = 0; q < PAIRS; ++q)
#pragma unroll
                    for (int i = 0; i < WORDS; ++i)
#pragma unroll
                        for (int h = 0; h < 2; ++h)
#pragma unroll
                            for (int r = 0; r < 4; ++r) sum[q][i][h][r] *= 4;
            }
            // of a tile without this plane the ring holds something older
            const u32 keep = plane < 2 || (masks >> (8 * (plane - 2) + tile_of_lane) & 1) ? 0xffffffffu : 0;
            const u32 field[4] = {0x03030303u & keep, 0x0c0c0c0cu & keep, 0x30303030u & keep, 0xc0c0c0c0u & keep};
            constexpr int ENTRY = HALVES * PAIRS;
            u32 entries = shared_address(&inputs[j].entry[plane][c][half][0]);
            const u32 entries_end = entries + count * ENTRY;
            auto eight = [&](int k) {  // slots 8k to 8k + 7 of the step
                u32 w[2][WORDS], x[2];
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const u32 from = read_from + read_at + (2 * k + s) * (TILES * 64), entry = entries + (2 * k + s) * 4 * ENTRY;
                    if constexpr (TILES == 8)
                        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[s][0]), "=r"(w[s][1]), "=r"(w[s][2]), "=r"(w[s][3]) : "r"(from));
                    else
                        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[s][0]), "=r"(w[s][1]) : "r"(from));
                    if constexpr (PAIRS == 1) asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x[s]) : "r"(entry));
                    if constexpr (PAIRS == 2) asm volatile("ld.shared.u16 %0, [%1];" : "=r"(x[s]) : "r"(entry));
                    if constexpr (PAIRS == 4) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x[s]) : "r"(entry));
                }
                if (k == 0) produce(write_at);
                u32 b[PAIRS][2];
#pragma unroll
                for (int q = 0; q < PAIRS; ++q)
#pragma unroll
                    for (int s = 0; s < 2; ++s) b[q][s] = __byte_perm(x[s], 0, select[q]);
#pragma unroll
                for (int i = 0; i < WORDS; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const u32 a0 = w[0][i] & field[2 * h], a1 = w[0][i] & field[2 * h + 1];
                        const u32 a2 = w[1][i] & field[2 * h], a3 = w[1][i] & field[2 * h + 1];
#pragma unroll
                        for (int q = 0; q < PAIRS; ++q) mma(sum[q][i][h], a0, a1, a2, a3, b[q][0], b[q][1]);
                    }
            };
#pragma unroll 1
            do {
                copy_wait();
                __syncwarp();
                eight(0);
                if (entries + 8 * ENTRY < entries_end) eight(1);
                entries += STEP * ENTRY;
                write_at = read_at;
                read_at = read_at == (STAGES - 1) * STAGE ? 0 : read_at + STAGE;
            } while (entries < entries_end);
        }
        const int bits_class = masks >> (16 + 2 * tile_of_lane) & 3;
        const float tile_factor = parts[j].factor[tile_of_lane];
#pragma unroll
        for (int q = 0; q < PAIRS; ++q) {
            const int m = ROWS == 1 ? 0 : 2 * q + (c >> 1);
            const float scale = tile_factor * inputs[j].scale[m], centre = inputs[j].centre[m][bits_class];
#pragma unroll
            for (int i = 0; i < WORDS; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float4& held = warp_sums[((q * WORDS + i) * 2 + h) * 32 + lane];
                    float4 v = j ? held : make_float4(0.f, 0.f, 0.f, 0.f);
                    float whole[4];
#pragma unroll
                    for (int r = 0; r < 4; ++r)  // exact: whole numbers below 2^24
                        whole[r] = fmaf((float)sum[q][i][h][r], unit / (float)(1 << (4 * h + 2 * (r >> 1))), centre);
                    v.x = fmaf(whole[0], scale, v.x);
                    v.y = fmaf(whole[1], scale, v.y);
                    v.z = fmaf(whole[2], scale, v.z);
                    v.w = fmaf(whole[3], scale, v.w);
                    held = v;
#if SUMS
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const int out = first_tile * 64 + g * 16 * WORDS + i * 16 + 4 * (2 * (c & 1) + (r & 1)) + 2 * h + (r >> 1);
                        if (m < args.rows && out < args.n_tiles * 64 && (ROWS > 1 || c < 2))
                            args.sums[((long long)m * args.k_tiles + kt) * args.n_tiles * 64 + out] = (int)whole[r] / (1 << (6 - 2 * bits_class));
                    }
#endif
                }
        }
    }
    if (k_first >= k_end)
#pragma unroll
        for (int i = 0; i < QUADS; ++i) warp_sums[i * 32 + lane] = make_float4(0.f, 0.f, 0.f, 0.f);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    // warps that share outputs add in ascending order, into the first one's sums
    if (warps_k > 1) {
        for (int quad = warp; quad < warps_n * QUADS; quad += warps) {
            float4* at = (float4*)shared + (quad / QUADS * warps_k * QUADS + quad % QUADS) * 32 + lane;
            float4 v = *at;
#pragma unroll 4
            for (int k = 1; k < warps_k; ++k) {
                const float4 more = at[k * QUADS * 32];
                v.x += more.x;
                v.y += more.y;
                v.z += more.z;
                v.w += more.w;
            }
            *at = v;
        }
        if (splits == 1) __syncthreads();
    }
    if (splits > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
    for (int task = split * warps + warp; task < args.rows * warps_n * TILES; task += splits * warps) {
        const int m = task / (warps_n * TILES), own = task % (warps_n * TILES), nt = first_part * TILES + own;
        if (nt >= args.n_tiles) continue;
        // output n of the tile in the order of the accumulators; this lane takes n = lane and lane + 32
        const int n_t = lane >> 2 & 3, n_j = lane & 3, group = own % TILES * (8 / TILES);  // group: the lanes that hold output 0
        const int float_at = (((m >> 1) * WORDS + (lane >> 4)) * 2 + (n_j >> 1)) * 128 + (group * 4 + (m & 1) * 2 + (n_t >> 1)) * 4 + (n_j & 1) * 2 + (n_t & 1);
        const float* from = (const float*)(shared + own / TILES * warps_k * SUM_BYTES) + float_at;
        constexpr int FAR = TILES == 8 ? 512 : 16;  // floats from output n to n + 32: two words on, or the next group of lanes
        float lo = 0.f, hi = 0.f;
        if (splits == 1) {
            lo = from[0];
            hi = from[FAR];
        } else {
            const u32 at = shared_address(from);
            for (int first = 0; first < splits; first += 8) {
                float a[8], b[8];
#pragma unroll
                for (int s = 0; s < 8; ++s)
                    if (first + s < splits) {
                        u32 there;
                        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(first + s));
                        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(a[s]) : "r"(there));
                        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(b[s]) : "r"(there + FAR * 4));
                    }
#pragma unroll
                for (int s = 0; s < 8; ++s)
                    if (first + s < splits) {
                        lo = first + s ? lo + a[s] : a[s];
                        hi = first + s ? hi + b[s] : b[s];
                    }
            }
        }
        const u32 transform = args.transform[nt];
        if (transform != 255) {  // y = l H[perm] (r y~) / 8
            const u32 code_lo = args.table[transform * 64 + lane], code_hi = args.table[transform * 64 + lane + 32];
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
    if (splits > 1) {  // nobody leaves while its sums may still be read
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
}

#define KERNEL(TILES, ROWS)                                                                                   \
    extern "C" __global__ void __launch_bounds__(512, 1) decode_##TILES##_##ROWS(const __grid_constant__ Args args) { \
        decode<TILES, ROWS>(args);                                                                            \
    }
KERNEL(8, 1)
KERNEL(8, 2)
KERNEL(8, 4)
KERNEL(4, 1)
KERNEL(4, 2)
KERNEL(4, 4)
KERNEL(4, 8)
