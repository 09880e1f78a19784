// Part of prefill_expand.cu and prefill_short.cu: the one reader of the decode form of a weight (`decode_weight.DecodeWeight`), and
// how four plane words become signed codes. Who changes that form changes `PlaneReader` here and `_codes` in prefill_triton.py.

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

// What one of THREADS threads copies of every block: channels threadIdx.x / 8 + i * THREADS / 8 of the tile of rank threadIdx.x % 8.
template <int THREADS>
struct PlaneReader {
    static constexpr int CHANNELS = THREADS / 8;
    static_assert(CHANNELS % 32 == 0);  // channels of a thread have one twist
    const u8 *codes, *dense;
    u32 channel, rank, to;

    // first: block * k_tiles + kt of the block that is number 0; to: of a ring of blocks
    __device__ __forceinline__ PlaneReader(const u8* all, u32 first, u32 ring) : codes(all), channel(threadIdx.x >> 3), rank(threadIdx.x & 7) {
        dense = all + (u64)(first * 1024 + threadIdx.x) * 16;
        to = ring + channel * 128 + (rank ^ twist(channel)) * 16;
        asm("" : "+l"(dense), "+r"(channel), "+r"(rank), "+r"(to));  // kept, not computed again at every step
    }

    // Block `number` of those that follow each other, its entry of `meta`, its slot of the ring. Planes that nobody has are left out.
    __device__ __forceinline__ void load(u32 number, uint2 meta, int slot) const {
        const u32 at = to + slot * BLOCK_BYTES;
        const u8* from = dense + (u64)number * (2 * PLANE_BYTES);
        copy<PLANE_BYTES / 64>(at, from);
        copy<PLANE_BYTES / 64>(at + PLANE_BYTES, from + PLANE_BYTES);
        const u32 count2 = __popc(meta.y & 255), count3 = __popc(meta.y & 0xff00);
        if (rank < count2) copy_compact(at + 2 * PLANE_BYTES, meta.x, count2);
        if (rank < count3) copy_compact(at + 3 * PLANE_BYTES, meta.x + 64 * count2, count3);
    }

private:
    template <int PITCH>
    __device__ __forceinline__ void copy(u32 at, const u8* from) const {
#pragma unroll
        for (int i = 0; i < 64 / CHANNELS; ++i) copy16(at + i * CHANNELS * 128, from + i * CHANNELS * PITCH, 16);
    }
    __device__ __forceinline__ void copy_compact(u32 at, u32 first, u32 count) const {
        const u8* from = codes + (u64)(first + channel * count + rank) * 16;
#pragma unroll
        for (int i = 0; i < 64 / CHANNELS; ++i) copy16(at + i * CHANNELS * 128, from + (u64)(i * CHANNELS * 16) * count, 16);
    }
};

// Rank of a tile among those with plane 2 or 3, or -1 where it lacks the plane.
__device__ __forceinline__ int rank_in(u32 tiles, int tile) { return tiles >> tile & 1 ? __popc(tiles & ((1u << tile) - 1)) : -1; }

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
