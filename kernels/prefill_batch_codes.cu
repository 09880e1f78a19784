// Part of prefill_batch.cu: from plane words to INT8 codes of one scale an output. Included there.

// (code - 128) * stretch, rounded to half precision, times `by`, rounded half to even; as the low bytes of two halves. code: 1024 + code of
// eight bits, exact, and so is -1152 * stretch.
__device__ __forceinline__ u32 scaled(u32 code, u32 stretch, u32 by) {
    return half2_fma(half2_fma(code, low_twice(stretch), high_twice(stretch)), by, 0x66006600u);
}

// Lower bytes of halves: four codes.
__device__ __forceinline__ u32 packed(u32 a, u32 b) { return __byte_perm(a, b, 0x6420); }

// Codes of two inputs of the same outputs, in halves: four of nibbles `high`, from the bottom, and `low` ones below them -> INT8 codes of the
// first, or (SECOND) second, and of the one two places further, in the lower bytes of halves. ones: 1024 twice, in a register: an instruction
// has room for one number besides.
template <bool WIDE, bool SECOND>
__device__ __forceinline__ void requantise(u32 high, u32 low, u32 ones, u32 by, u32 stretch, u32 stretch_further, u32 (&out)[2]) {
    constexpr u32 HIGH = 0xf0f0f0f0u, LOWER = 0x00ff00ffu, UP = 0x00f000f0u;
    u32 a, b;
    if constexpr (WIDE) {
        const u32 code = SECOND ? chosen(high, low >> 4, HIGH) : chosen(high << 4, low, HIGH);
        a = code & LOWER | ones, b = __byte_perm(code, ones, 0x7351);
    } else {
        // Lower nibbles move up: 16 times them, 1152 is a zero whose products are exact, 1032 would not be.
        a = (SECOND ? high : high << 4) & UP | ones, b = high >> (SECOND ? 8 : 4) & UP | ones;
    }
    out[0] = scaled(a, stretch, by), out[1] = scaled(b, stretch_further, by);
}

// Of half a tile's inputs, what a lane reads: plane words, each of two inputs and eight outputs, and these inputs' factors.
struct Half {
    u32 words[4][4];
    uint4 factors;
    template <int PLANES>
    __device__ __forceinline__ void load(u32 from, u32 smoothing, int half) {
#pragma unroll
        for (int p = 0; p < PLANES; ++p) load_transposed(words[p], from + plane_at(p) + half * (PLANE / 2));
        factors = load_shared4(smoothing + half * 16);
    }
};

// A tile: from plane words (this lane's row of plane 0) to codes. Row 8 t + `swapped(g)` of the codes is output 8 g + t, so that what half a warp
// stores lies in different banks. stretch: of the lane's eight outputs. `room` is called when the codes need room, `read` when all plane words
// have been read: those of the second half while the first are computed with.
template <int PLANES, typename Room, typename Read>
__device__ __forceinline__ void expand_tile(u32 from, u32 smoothing, u32 ratio, u32 ones, const u32 (&stretch)[2][4], u32 to, Room&& room, Read&& read) {
    constexpr u32 UPPER = 0xccccccccu;
    constexpr bool AHEAD = !STREAM || MULTIPLIERS == 1;  // if there are registers
    Half half;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (h == 0 || !AHEAD) half.load<PLANES>(from, smoothing, h);
        u32 high[4][2], low[4][2];  // nibbles of outputs 0, 2, 4, 6; of 1, 3, 5, 7
        const u32 four[4] = {half.factors.x, half.factors.y, half.factors.z, half.factors.w};
        u32 by[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 p0 = half.words[0][i], p1 = half.words[1][i];
            high[i][0] = chosen(p0 << 2, p1, UPPER), high[i][1] = chosen(p0, p1 >> 2, UPPER);
            if constexpr (PLANES > 2) {
                const u32 p2 = half.words[2][i], p3 = PLANES > 3 ? half.words[3][i] : 0;
                low[i][0] = chosen(p2 << 2, p3, UPPER), low[i][1] = chosen(p2, p3 >> 2, UPPER);
            }
            by[i] = half2_mul(four[i], ratio);
        }
        if (h == 1)
            read();
        else if (AHEAD)
            half.load<PLANES>(from, smoothing, 1);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            u32 done[4][2][2];  // of inputs, two each; of outputs odd, odd + 4; odd + 2, odd + 6
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                requantise<(PLANES > 2), false>(high[i][odd], low[i][odd], ones, by[i], stretch[0][odd], stretch[1][odd], done[i][0]);
                requantise<(PLANES > 2), true>(high[i][odd], low[i][odd], ones, by[i], stretch[0][odd + 2], stretch[1][odd + 2], done[i][1]);
            }
            if (h == 0 && odd == 0) room();
#pragma unroll
            for (int two = 0; two < 2; ++two)
#pragma unroll
                for (int upper = 0; upper < 2; ++upper)
                    store_shared2((to ^ h * 32) + (4 * upper + 2 * two + odd) * 512, packed(done[0][two][upper], done[1][two][upper]), packed(done[2][two][upper], done[3][two][upper]));
        }
    }
}
