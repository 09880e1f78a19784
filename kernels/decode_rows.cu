// Part of decode_bitplane.cu: arguments, small helpers, and what a CTA prepares of the activations. Included there.

#include "decode_ptx.cu"

#ifndef STAGES
#define STAGES 8
#endif
#ifndef STAMP
#define STAMP 0
#endif
#ifndef SUMS
#define SUMS 0
#endif
#ifndef STREAM
#define STREAM 0
#endif

struct True { static constexpr bool value = true; };
struct False { static constexpr bool value = false; };

struct Args {
    const void* x;           // [rows, k_tiles * 64], rows x_stride elements apart
    const float* thresholds; // [4] ascending
    const u8* codes;         // units of 16 bytes (4 words): the dense planes, then the extension
    const uint2* meta;       // [blocks, k_tiles]: first unit of the extension, masks (plane 2: bits 0-7, plane 3: 8-15, class: 16-31)
    const float* factor;     // [blocks, k_tiles, 8]: tile scale * 2^(bits - 9)
    const u8* transform;     // [n_tiles] row of `table`, 255 for the identity
    const u8* table;         // [., 64]: bits 0-5 permutation, 6 left sign, 7 right sign
    const void* bias;        // [n_tiles * 64] or null
    void* y;                 // [rows, n_tiles * 64], rows y_stride elements apart (STREAM: on 16-byte borders)
    int* sums;               // [rows, k_tiles, n_tiles * 64], only with SUMS
    long long x_stride, y_stride;
    int rows, n_tiles, k_tiles, tiles_per_warp, splits, warps_k, bias_type;
    int parts;               // decode_dense.cu: of the splits, those of a CTA; with STREAM and one row, of the stretches
    u32 ring, most_items;    // decode_dense.cu: bytes; items of a CTA
    u8* prepared;            // decode_dense.cu: [k_tiles] `Prepared`, made by a launch before; or null
    // the rest only with STREAM
    u32 items, places, chains;  // places: blocks of a CTA; chains: see decode_finish.cu
    float* partial;          // [CTAs, places, ROWS, 8, 64]: sums over a CTA's part of the inputs, for each of its blocks
    u32* carried;            // [CTAs, ROWS, 8, 64] zeros before and after: what a CTA hands on of a block that it leaves unfinished, one and two rows
    u32* arrivals;           // [blocks] zeros before and after: how many parts of a block's sums are in `partial`
};

// Two adjacent inputs as they lie in memory, the first one even.
#if XTYPE == 2
typedef float2 Pair;
__device__ __forceinline__ Pair load_raw(const void* x, long long at) { return *(const float2*)((const float*)x + at); }
__device__ __forceinline__ float2 floats(Pair v) { return v; }
typedef float Threshold;
__device__ __forceinline__ Threshold threshold(float t) { return t; }
// Of each of the two 0xffff where its magnitude is above the threshold.
__device__ __forceinline__ u32 above(Pair v, Threshold t) { return (fabsf(v.x) > t ? 0xffffu : 0) | (fabsf(v.y) > t ? 0xffff0000u : 0); }
__device__ __forceinline__ float load_x(const void* x, long long at) { return ((const float*)x)[at]; }
#else
typedef u32 Pair;
__device__ __forceinline__ Pair load_raw(const void* x, long long at) { return *(const u32*)((const u16*)x + at); }
__device__ __forceinline__ float2 floats(Pair v) { return make_float2(from_half((u16)v, XTYPE), from_half((u16)(v >> 16), XTYPE)); }
__device__ __forceinline__ float load_x(const void* x, long long at) { return from_half(((const u16*)x)[at], XTYPE); }
typedef u32 Threshold;
// Magnitudes of this type are above a number where they are above it rounded down; below zero any number will do.
__device__ __forceinline__ Threshold threshold(float t) { return 0x10001u * half_towards_zero(t < 0.f ? -1.f : t, XTYPE); }
__device__ __forceinline__ u32 above(Pair v, Threshold t) { return above_halves(v & 0x7fff7fffu, t, XTYPE); }
#endif

__device__ __forceinline__ float load_bias(const void* bias, int at, int type) {
    return type == 2 ? ((const float*)bias)[at] : from_half(((const u16*)bias)[at], type);
}

constexpr int STEP = 16;  // channels of a step
constexpr u32 PREFETCHED = 2048;  // with STREAM: bytes of a warp's first item

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
    u8 channel[64];                  // slot -> channel
    u8 slot[64];                     // channel -> slot
    u8 entry[4][64][ROWS];           // first the rows in float32; then, per plane: the INT8 activation of a row where its level wants the plane, else 0
    float scale[ROWS];               // activation scale of a row
    float centre[ROWS][4];           // sum of q * (doubled midpoint minus zero point) in steps of 8-bit codes, per tile class (2, 4, 6, 8 bits)
    u32 counts;                      // byte p: channels that need plane p, over all rows
};

// What a warp keeps of its part of the weight at an input tile.
struct __align__(16) Part {
    float factor[8];
    u32 masks;   // of `meta`
    u32 counts;  // of the input, without planes that none of the warp's tiles has
    u32 end;     // with STREAM: of its steps in the warp's list
    u32 unused;
};

__device__ __forceinline__ int level_of(float magnitude, const float (&t)[4]) {
    return (magnitude > t[0]) + (magnitude > t[1]) + (magnitude > t[2]) + (magnitude > t[3]);
}

// A row's two inputs of a lane. They wait in shared memory for both halves of the preparation: loads from afar would queue behind those of
// the weights.
template <int ROWS>
__device__ __forceinline__ void keep_rows(const Args& args, Input<ROWS>& tile, const Pair (&raw)[ROWS], int lane) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m) ((float2*)tile.entry)[m * 32 + lane] = m < args.rows ? floats(raw[m]) : make_float2(0.f, 0.f);
}
template <int ROWS>
__device__ __forceinline__ void load_rows(const Args& args, Pair (&raw)[ROWS], int kt, int lane) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
        if (m < args.rows) raw[m] = load_raw(args.x, m * args.x_stride + kt * 64 + 2 * lane);
}

// First half of the preparation: which channels are wanted. Loads of weights can start when it is done.
template <int ROWS>
__device__ __forceinline__ void sort_channels(const Args& args, Input<ROWS>& tile, const float (&t)[4], int lane) {
    float2 v[ROWS];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) v[m] = ((const float2*)tile.entry)[m * 32 + lane];
    int top0 = 0, top1 = 0;
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
        if (m < args.rows) {
            top0 = max(top0, level_of(fabsf(v[m].x), t));
            top1 = max(top1, level_of(fabsf(v[m].y), t));
        }
    // byte l - 1: how many of the channels before have level l; a scan of all levels at once (popc is slow)
    const u32 own0 = top0 ? 1u << (8 * top0 - 8) : 0, own1 = top1 ? 1u << (8 * top1 - 8) : 0;
    u32 upto = own0 + own1;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const u32 more = __shfl_up_sync(FULL, upto, d);
        if (lane >= d) upto += more;
    }
    const u32 counts = (u32)((u64)__shfl_sync(FULL, upto, 31) * 0x01010101u >> 24), before = upto - own0 - own1;  // of level l and above
    auto slot_of = [&](int top) {
        const u32 same = top ? before >> (8 * top - 8) & 255 : 2 * lane - (before * 0x01010101u >> 24);
        return (int)(same + (top < 4 ? counts >> (8 * top) & 255 : 0));
    };
    const int slot0 = slot_of(top0), slot1 = slot_of(top1) + (top0 == top1);
    tile.channel[slot0] = (u8)(2 * lane);
    tile.channel[slot1] = (u8)(2 * lane + 1);
    *(u16*)&tile.slot[2 * lane] = (u16)(slot0 | slot1 << 8);
    if (lane == 0) tile.counts = counts;
}

// v / s rounded as IEEE 754 asks, without the branches of the general division: for s well inside the normal range and |v| <= 127 s
// (a tiny quotient may lose its last bits, but then it rounds to 0 all the same).
__device__ __forceinline__ float divide(float v, float s, float reciprocal) {
    float q = v * reciprocal;
    q = fmaf(fmaf(-s, q, v), reciprocal, q);
    return fmaf(fmaf(-s, q, v), reciprocal, q);
}

// How a row's values become INT8: divided by `scale`. Where `plain`, `divide` is exact.
struct Scale {
    float scale, reciprocal;
    bool plain;
};

// largest: of the magnitudes. Of non-negative floats the bits order like integers, and a NaN is the greatest: it reaches the scale and the output.
__device__ __forceinline__ Scale scale_of(float largest) {
    Scale o;
    o.plain = largest > 1e-30f && largest < 1e30f;
    float seventh = reciprocal_approx(127.f);
    seventh = fmaf(seventh, fmaf(-127.f, seventh, 1.f), seventh);
    o.scale = o.plain ? divide(largest, 127.f, seventh) : 1.f;
    o.reciprocal = reciprocal_approx(o.scale);
    o.reciprocal = fmaf(o.reciprocal, fmaf(-o.scale, o.reciprocal, 1.f), o.reciprocal);
    if (!o.plain && largest != 0.f) o.scale = __fdiv_rn(largest, 127.f);
    if (o.scale == 0.f) o.scale = 1.f;
    return o;
}

// The weight of the sum of q over the channels of a level (2 level bits are read) in the constant part of a tile's sums: doubled midpoint minus
// zero point.
__device__ __forceinline__ int level_weight(int level, int bits) { return (256 >> min(2 * level, bits)) - (256 >> bits) - 256; }

// The INT8 activations of two inputs of a row, their levels, the scale of all 64, and in lanes 0 to 3, for tiles of 2, 4, 6, 8 bits, the
// constant part of their sums in steps of 8-bit codes.
struct Quantised {
    int q0, q1, l0, l1;
    float scale;
    int centre;
};

__device__ __forceinline__ float largest_of(float2 v) {
    return __uint_as_float(__reduce_max_sync(FULL, max(__float_as_uint(fabsf(v.x)), __float_as_uint(fabsf(v.y)))));
}

// largest: `largest_of(v)`
__device__ __forceinline__ Quantised quantise_row(float2 v, float largest, const float (&t)[4], int lane) {
    const Scale o = scale_of(largest);
    float a = divide(v.x, o.scale, o.reciprocal), b = divide(v.y, o.scale, o.reciprocal);
    if (!o.plain) {  // the whole warp, and almost never
        a = __fdiv_rn(v.x, o.scale);
        b = __fdiv_rn(v.y, o.scale);
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
        for (int l = 1; l <= 4; ++l) sum += at_level[l - 1] * level_weight(l, bits);
    }
    return Quantised{q0, q1, l0, l1, o.scale, sum};
}

// Second half of the preparation: INT8 activations in the order of the slots, their scales and the constant part of every sum.
template <int ROWS>
__device__ __forceinline__ void quantise(Input<ROWS>& tile, const float (&t)[4], int lane) {
    float2 v[ROWS];
    float largest[ROWS];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) v[m] = ((const float2*)tile.entry)[m * 32 + lane];
    __syncwarp();
#pragma unroll
    for (int m = 0; m < ROWS; ++m) largest[m] = largest_of(v[m]);
    const u32 slots = *(const u16*)&tile.slot[2 * lane];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        const Quantised o = quantise_row(v[m], largest[m], t, lane);
        if (lane < 4) {
            tile.centre[m][lane] = (float)o.centre;
            tile.scale[m] = o.scale;
        }
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            tile.entry[p][slots & 255][m] = (u8)(o.l0 > p ? o.q0 : 0);
            tile.entry[p][slots >> 8][m] = (u8)(o.l1 > p ? o.q1 : 0);
        }
    }
}

// Appends the steps of planes 0 and 1 (or 2 and 3) of an input tile to the warp's list.
template <int TILES, bool DENSE, int ROWS>
__device__ __forceinline__ void list_steps(const Args& args, const Input<ROWS>& input, u32 counts, Step* steps, int& total, uint2 meta, int at, int block, int sub, int lane) {
    const int second = lane >> 2 & 1, first = (lane & 3) * STEP, plane = (DENSE ? 0 : 2) + second;
    const int left = lane < 8 ? (int)(counts >> (8 * plane) & 255) - first : 0;
    const u32 all = __ballot_sync(FULL, left > 0);
    if (left > 0) {
        Step step;
        const u32 slots = left >= STEP ? 0xffff00u : ((1u << left) - 1) << 8;
        step.channels = shared_address(input.channel + first);
        if (DENSE) {
            const int inside = min(TILES, args.n_tiles - block * 8 - sub);
            step.unit = (u32)at * 1024 + plane * 512 + sub;
            step.wanted = ((1u << inside) - 1) | slots;
            step.stride = 8;
        } else {
            const u32 whole = meta.y >> (8 * second) & 255;
            step.unit = meta.x + (second ? 64 * __popc(meta.y & 255) : 0) + __popc(whole & ((1u << sub) - 1));
            step.wanted = (whole >> sub & ((1u << TILES) - 1)) | slots;
            step.stride = __popc(whole);
        }
        steps[total + __popc(all & ((1u << lane) - 1))] = step;
    }
    total += __popc(all);
}

// Table entries of outputs `lane` (low byte) and `lane + 32` of a tile; bit 16 for the identity and beyond the weight.
__device__ __forceinline__ u32 transform_codes(const Args& args, int nt, int lane) {
    if (nt >= args.n_tiles) return 0x10000;
    const u32 transform = args.transform[nt];
    if (transform == 255) return 0x10000;
    return args.table[transform * 64 + lane] | (u32)args.table[transform * 64 + lane + 32] << 8;
}
