// Part of prefill_expand.cu and prefill_short.cu: the decode form of a weight (`decode_weight.DecodeWeight`), and how four plane words
// become signed codes. Who changes that form changes `Reader` in prefill_expand.cu, prefill_short.cu and `_codes` in prefill_triton.py.

struct Weight {
    const u8* codes;     // units of 16 bytes: one channel of one tile and plane, 4 words
    const uint2* meta;   // [blocks, k_tiles]: first unit of planes 2 and 3; tiles with plane 2 (bits 0-7), with plane 3 (8-15)
    const float* factor; // [blocks, k_tiles, 8]: tile scale * 2^(bits - 9)
    int n_tiles, k_tiles;
};

// Of a block of 8 tiles at one input tile, all 8 having the plane: 64 channels of 8 units.
constexpr int PLANE_BYTES = 8192, BLOCK_BYTES = 4 * PLANE_BYTES;

// a where the mask has ones, b elsewhere. In assembly because the compiler takes three instructions, and two for `flipped`.
__device__ __forceinline__ u32 chosen(u32 a, u32 b, u32 mask) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(r) : "r"(a), "r"(b), "r"(mask));
    return r;
}
__device__ __forceinline__ u32 flipped(u32 a, u32 bits) {
    u32 r;
    asm("xor.b32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(bits));
    return r;
}

// Bytes of 4 fields (two bits of outputs j = 0..3 each) of four planes -> for every j a word with the whole code in each byte, signed:
// the top bit of an unsigned 8-bit-aligned code a, flipped, makes it a - 128. WIDE 0: planes 2 and 3 are absent.
template <bool WIDE>
__device__ __forceinline__ void codes_of(u32 p0, u32 p1, u32 p2, u32 p3, u32 (&out)[4]) {
    constexpr u32 UPPER = 0xccccccccu, HIGH = 0xf0f0f0f0u;
    p0 = flipped(p0, 0xaaaaaaaau);
    const u32 odd = chosen(p0, p1 >> 2, UPPER), even = chosen(p0 << 2, p1, UPPER);  // nibbles: j = 1, 3 and j = 0, 2
    if constexpr (WIDE) {
        const u32 low_odd = chosen(p2, p3 >> 2, UPPER), low_even = chosen(p2 << 2, p3, UPPER);
        out[0] = chosen(even << 4, low_even, HIGH);
        out[1] = chosen(odd << 4, low_odd, HIGH);
        out[2] = chosen(even, low_even >> 4, HIGH);
        out[3] = chosen(odd, low_odd >> 4, HIGH);
    } else {
        out[0] = even << 4 & HIGH;
        out[1] = odd << 4 & HIGH;
        out[2] = even & HIGH;
        out[3] = odd & HIGH;
    }
}
