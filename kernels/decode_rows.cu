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
#ifndef MEET
#define MEET 0
#endif
#define SPREAD (STREAM || MEET)
#ifndef LAUNCH
#define LAUNCH 0
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
    u8* prepared;            // decode_dense.cu: [k_tiles] `Prepared`, made by a launch before, with LAUNCH
    // the rest only with STREAM, or MEET (whose stretches are of chains)
    u32 items, places, chains;  // places: sums that a CTA may leave, with STREAM one for each of its blocks; chains: see decode_finish.cu
    u32 of_parts, of_tiles, of_chains;  // `divide_by`: number of parts (CTAs), items or chains of a block, chains
    u64 policy;              // of the L2 cache, for the weight
    u32* partial;            // [CTAs, places, ROWS, 8, 64] zeros before and after: sums over a CTA's part of the inputs, three rows and more
    u32* carried;            // [CTAs, ROWS, 8, 64] zeros before and after: what a CTA hands on of a block that it leaves unfinished, one and two rows
    u32* arrivals;           // [blocks, 4] zeros before and after: see decode_meet.cu
    u32 of_run, of_warps;    // `divide_by`, three rows and more: tiles_per_warp, warps_k
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
template <int ROWS, typename Input>
__device__ __forceinline__ void keep_rows(const Args& args, Input& tile, const Pair (&raw)[ROWS], int lane) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m) ((float2*)tile.entry)[m * 32 + lane] = m < args.rows ? floats(raw[m]) : make_float2(0.f, 0.f);
}
template <int ROWS>
__device__ __forceinline__ void load_rows(const Args& args, Pair (&raw)[ROWS], int kt, int lane) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m)
        if (m < args.rows) raw[m] = load_raw(args.x, m * args.x_stride + kt * 64 + 2 * lane);
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
__device__ __forceinline__ Scale scale_of(float largest, float reciprocal_of_127) {
    Scale o;
    o.plain = largest > 1e-30f && largest < 1e30f;
    o.scale = o.plain ? divide(largest, 127.f, reciprocal_of_127) : 1.f;
    o.reciprocal = reciprocal_approx(o.scale);
    o.reciprocal = fmaf(o.reciprocal, fmaf(-o.scale, o.reciprocal, 1.f), o.reciprocal);
    if (!o.plain && largest != 0.f) o.scale = __fdiv_rn(largest, 127.f);
    if (o.scale == 0.f) o.scale = 1.f;
    return o;
}

// 1 / 127 but for its last bits, which is what `divide` wants.
__device__ __forceinline__ float nearly_1_over_127() {
    const float v = reciprocal_approx(127.f);
    return fmaf(v, fmaf(-127.f, v, 1.f), v);
}

__device__ __forceinline__ int2 codes_of(float2 v, const Scale& o) {
    float a = divide(v.x, o.scale, o.reciprocal), b = divide(v.y, o.scale, o.reciprocal);
    if (!o.plain) {  // the whole warp, and almost never
        a = __fdiv_rn(v.x, o.scale);
        b = __fdiv_rn(v.y, o.scale);
    }
    return make_int2(max(-127, min(127, __float2int_rn(a))), max(-127, min(127, __float2int_rn(b))));
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
    const Scale o = scale_of(largest, nearly_1_over_127());
    const int2 q = codes_of(v, o);
    const int q0 = q.x, q1 = q.y;
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

// What a lane holds of a row's sums, and four more of an input tile: of outputs `out` + 0, 4, 1, 5, in steps of 8-bit codes. With SUMS these are
// also written, in steps of the tile's own codes.
__device__ __forceinline__ float4 add_sums(const Args& args, float4 v, const float (&whole)[4], float scale, int m, int kt, int out, int bits_class) {
#if SUMS
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int at = out + 4 * (r & 1) + (r >> 1);
        if (m < args.rows && at < args.n_tiles * 64)
            args.sums[((long long)m * args.k_tiles + kt) * args.n_tiles * 64 + at] = (int)whole[r] / (1 << (6 - 2 * bits_class));
    }
#endif
    return make_float4(fmaf(whole[0], scale, v.x), fmaf(whole[1], scale, v.y), fmaf(whole[2], scale, v.z), fmaf(whole[3], scale, v.w));
}

// Table entries of outputs `lane` (low byte) and `lane + 32` of a tile; bit 16 for the identity and beyond the weight.
__device__ __forceinline__ u32 transform_codes(const Args& args, int nt, int lane) {
    if (nt >= args.n_tiles) return 0x10000;
    const u32 transform = args.transform[nt];
    if (transform == 255) return 0x10000;
    return args.table[transform * 64 + lane] | (u32)args.table[transform * 64 + lane + 32] << 8;
}
