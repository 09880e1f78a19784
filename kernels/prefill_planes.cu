// Part of prefill_expand.cu and prefill_short.cu: the one reader of the decode form of a weight (`decode_weight.DecodeWeight`), and
// how four plane words become signed codes. Who changes that form changes `load_planes` here and `_codes` in prefill_triton.py.

struct Weight {
    const u8* codes;     // units of 16 bytes: one channel of one tile and plane, 4 words
    const uint2* meta;   // [blocks, k_tiles]: first unit of planes 2 and 3; tiles with plane 2 (bits 0-7), with plane 3 (8-15)
    const float* factor; // [blocks, k_tiles, 8]: tile scale * 2^(bits - 9)
    int n_tiles, k_tiles;
};

// A block of 8 tiles at one input tile, in shared memory: [plane][64 channels][8 places] units. The tile of rank r among those that
// have the plane stands at place r ^ twist(channel), so that a warp that reads 8 channels or 8 tiles at once meets every bank.
constexpr int PLANE_BYTES = 8192, BLOCK_BYTES = 4 * PLANE_BYTES;

__device__ __forceinline__ u32 twist(u32 channel) { return (channel & 1) | (channel >> 3 & 3) << 1; }

// at: block * k_tiles + kt; meta: entry `at`. Every one of THREADS threads copies its share; planes that nobody has are left out.
template <int THREADS>
__device__ __forceinline__ void load_planes(const u8* codes, uint2 meta, u32 at, u32 to) {
    const u32 rank = threadIdx.x & 7, channel = threadIdx.x >> 3;
    const u32 count2 = __popc(meta.y & 255), count3 = __popc(meta.y >> 8 & 255);
    const u32 first[4] = {at * 1024, at * 1024 + 512, meta.x, meta.x + 64 * count2};
    const u32 count[4] = {8, 8, count2, count3};
    static_assert(THREADS / 8 % 32 == 0);  // channels of a thread have one twist
    to += channel * 128 + (rank ^ twist(channel)) * 16;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        if (rank >= count[p]) continue;
        const u8* from = codes + (u64)(first[p] + channel * count[p] + rank) * 16;
#pragma unroll
        for (int i = 0; i < 64 / (THREADS / 8); ++i) copy16(to + p * PLANE_BYTES + i * (THREADS / 8) * 128, from + (u64)i * (THREADS / 8) * count[p] * 16, 16);
    }
}

// Rank of a tile among those with plane 2 or 3, or -1 where it lacks the plane.
__device__ __forceinline__ int rank_in(u32 tiles, int tile) { return tiles >> tile & 1 ? __popc(tiles & ((1u << tile) - 1)) : -1; }

// The top bit of every code, flipped, makes the unsigned 8-bit-aligned code a the signed a - 128.
constexpr u32 SIGN = 0xaaaaaaaau;

// Bytes of 4 fields (two bits of outputs j = 0..3 each) of four planes -> for every j a word with the whole code in each byte.
// WIDE 0: planes 2 and 3 are absent.
template <bool WIDE>
__device__ __forceinline__ void codes_of(u32 p0, u32 p1, u32 p2, u32 p3, u32 (&out)[4]) {
    p0 ^= SIGN;
    const u32 odd = p0 & 0xccccccccu | p1 >> 2 & 0x33333333u;    // nibbles: j = 1, j = 3
    const u32 even = p0 << 2 & 0xccccccccu | p1 & 0x33333333u;   // j = 0, j = 2
    if constexpr (WIDE) {
        const u32 low_odd = p2 & 0xccccccccu | p3 >> 2 & 0x33333333u;
        const u32 low_even = p2 << 2 & 0xccccccccu | p3 & 0x33333333u;
        out[0] = even << 4 & 0xf0f0f0f0u | low_even & 0x0f0f0f0fu;
        out[1] = odd << 4 & 0xf0f0f0f0u | low_odd & 0x0f0f0f0fu;
        out[2] = even & 0xf0f0f0f0u | low_even >> 4 & 0x0f0f0f0fu;
        out[3] = odd & 0xf0f0f0f0u | low_odd >> 4 & 0x0f0f0f0fu;
    } else {
        out[0] = even << 4 & 0xf0f0f0f0u;
        out[1] = odd << 4 & 0xf0f0f0f0u;
        out[2] = even & 0xf0f0f0f0u;
        out[3] = odd & 0xf0f0f0f0u;
    }
}
