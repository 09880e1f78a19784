// Part of prefill_expand.cu and prefill_short.cu: the one reader of the decode form of a weight (`decode_weight.DecodeWeight`), and
// how four plane words become signed codes. Who changes that form changes `tile_planes` here and `planes` in prefill_triton.py.

struct Weight {
    const u8* codes;     // units of 16 bytes: one channel of one tile and plane, 4 words
    const uint2* meta;   // [blocks, k_tiles]: first unit of planes 2 and 3; tiles with plane 2 (bits 0-7), with plane 3 (8-15)
    const float* factor; // [blocks, k_tiles, 8]: tile scale * 2^(bits - 9)
    int n_tiles, k_tiles;
};

// Where a tile's planes lie: channel c of plane p is unit `first[p] + c * stride[p]`; stride 0 says that the tile lacks the plane.
struct TilePlanes {
    u32 first[4], stride[4];
};

// tile: of the block, 0 to 7; at: block * k_tiles + kt; meta: entry `at`
__device__ __forceinline__ TilePlanes tile_planes(uint2 meta, u32 at, int tile) {
    TilePlanes p;
    p.first[0] = at * 1024 + tile;
    p.first[1] = p.first[0] + 512;
    p.stride[0] = p.stride[1] = 8;
    const u32 has2 = meta.y & 255, has3 = meta.y >> 8 & 255, before = (1u << tile) - 1;
    p.first[2] = meta.x + __popc(has2 & before);
    p.stride[2] = has2 >> tile & 1 ? __popc(has2) : 0;
    p.first[3] = meta.x + 64 * __popc(has2) + __popc(has3 & before);
    p.stride[3] = has3 >> tile & 1 ? __popc(has3) : 0;
    return p;
}

// The top bit of every code, flipped, makes the unsigned 8-bit-aligned code a the signed a - 128.
constexpr u32 SIGN = 0xaaaaaaaau;

// Bytes of 4 fields (two bits of outputs j = 0..3 each) of four planes -> for every j a word with the whole code in each byte.
// p0 comes with SIGN flipped. WIDE 0: planes 2 and 3 are absent.
template <bool WIDE>
__device__ __forceinline__ void codes_of(u32 p0, u32 p1, u32 p2, u32 p3, u32 (&out)[4]) {
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
