// Part of decode_bitplane.cu: the activations of three to eight rows, as decode_dense.cu reads them. Included there.

// With LAUNCH, of an input tile: the inputs of which some row wants plane 3, if they are at most so many: plane 3 of `Prepared` has these alone, in their order. Bytes: USED
// and the number of an input, or UNUSED; or all WHOLE.
constexpr u32 FEW = 16, USED = 0xc0, UNUSED = 0x80, WHOLE = 0xbf;
struct __align__(16) Few {
    u32 word[FEW / 4];

    __device__ __forceinline__ bool whole() const { return word[0] == WHOLE * 0x01010101u; }
    __device__ __forceinline__ u32 count() const {
        u32 n = 0;
#pragma unroll
        for (int i = 0; i < FEW / 4; ++i) n += __popc(word[i] & 0x40404040u);
        return n;
    }
};

// An input tile of all rows: INT8 activations, zero where their level does not want the plane. Byte 2b + e of word [plane][0][0][row][c][2 half + q] is that
// of input 32 half + 16 q + 8 b + 2 c + e. Four rows lie as the tensor core wants them, where no launch prepares them: byte 2e of word
// [plane][half][0][row][c][2q + b] and byte 2e + 1 of [plane][half][1][row][c][2q + b], beside zeros. In a ring less is more.
template <int ROWS>
struct __align__(16) Prepared {
    static constexpr int COPIES = ROWS == 8 || LAUNCH ? 1 : 2;
    u32 word[4][COPIES][COPIES][ROWS][4][4];
    float scale[ROWS];      // of the activations
    float centre[4][ROWS];  // sum of q * (doubled midpoint minus zero point) in steps of 8-bit codes, per class of tiles (2, 4, 6, 8 bits)
    uint4 wanted;           // of planes 2 and 3, two words each: the inputs that some row wants
#if LAUNCH
    Few few;
#endif
};

// Of a word of four rows the two that the tensor core wants: bytes beside zeros, in the upper of two bytes for a lane from 16 on.
__device__ __forceinline__ uint2 spread(u32 word, int lane) {
    return make_uint2(__byte_perm(word, 0, lane & 16 ? 0x1404 : 0x4140), __byte_perm(word, 0, lane & 16 ? 0x3424 : 0x4342));
}

// A plane's operand of the tensor core: of eight rows two of 32 inputs, of four rows four of 16, each of two words. A lane from 16 on has rows of four in
// the upper of two bytes, others in the lower ones, beside zeros.
template <int ROWS>
struct Activations {
    u32 word[ROWS == 8 ? 4 : 8];

    __device__ __forceinline__ Activations(const Prepared<ROWS>& input, int plane, int lane) {
        constexpr int COPIES = Prepared<ROWS>::COPIES;
#pragma unroll
        for (int half = 0; half < COPIES; ++half) {
            const uint4 four = ((const uint4*)input.word[plane][half])[ROWS == 4 && LAUNCH ? lane & 15 : lane];
            const u32 held[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if constexpr (ROWS == 4 && LAUNCH) {
                    const uint2 both = spread(held[i], lane);
                    word[2 * i] = both.x;
                    word[2 * i + 1] = both.y;
                } else
                    word[4 * half + i] = held[i];
        }
    }
};

// The launch before, where there is one: a CTA for an input tile, a warp for a row.
template <int ROWS>
__device__ __forceinline__ void prepare(const Args& args) {
    __shared__ Prepared<ROWS> tile;
    __shared__ uint4 wanted[ROWS];
    const int lane = threadIdx.x & 31, m = threadIdx.x >> 5, kt = blockIdx.x;
    let_next_start();  // its weights may be on their way meanwhile
    wait_for_inputs();
    float t4[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) t4[i] = args.thresholds[i];
    float2 v = make_float2(0.f, 0.f);
    if (m < args.rows) {
        const long long at = m * args.x_stride + kt * 64 + lane;
        v = make_float2(load_x(args.x, at), load_x(args.x, at + 32));
    }
    const Quantised o = quantise_row(v, largest_of(v), t4, lane);
    if (lane < 4) {
        tile.centre[lane][m] = (float)o.centre;
        tile.scale[m] = o.scale;
    }
    auto store = [&](int p, int input, u32 value) {
        const int b = input >> 3 & 1, c = input >> 1 & 3, q = input >> 4 & 1, e = input & 1, half = input >> 5;
        ((u8*)&tile.word[p][0][0][m][c][2 * half + q])[2 * b + e] = (u8)value;
    };
    u32 low_q = 0, high_q = 0, low = 0, high = 0;  // at last, of plane 3; inputs 32 on are the high ones
    uint4 some;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        low_q = o.l0 > p ? o.q0 & 255 : 0, high_q = o.l1 > p ? o.q1 & 255 : 0;
        if (p < 3) {
            store(p, lane, low_q);
            store(p, lane + 32, high_q);
        }
        low = __ballot_sync(FULL, o.l0 > p), high = __ballot_sync(FULL, o.l1 > p);
        if (p == 2) some.x = low, some.y = high;
    }
    some.z = low, some.w = high;
    if (lane == 0) wanted[m] = m < args.rows ? some : make_uint4(0, 0, 0, 0);
    __syncthreads();
    some = wanted[0];
#pragma unroll
    for (int row = 1; row < ROWS; ++row) {
        const uint4 more = wanted[row];
        some = make_uint4(some.x | more.x, some.y | more.y, some.z | more.z, some.w | more.w);
    }
    if (threadIdx.x == 0) tile.wanted = some;
    const u32 of_low = __popc(some.z), count = of_low + __popc(some.w), below = (1u << lane) - 1;
    u8* list = (u8*)tile.few.word;
    if (count > FEW) {
        store(3, lane, low_q);
        store(3, lane + 32, high_q);
        if (m == 0 && lane < FEW) list[lane] = WHOLE;
    } else {
        const u32 low_at = __popc(some.z & below), high_at = of_low + __popc(some.w & below);
        const bool in_low = some.z >> lane & 1, in_high = some.w >> lane & 1, in_none = lane >= count && lane < FEW;
        if (in_low) store(3, low_at, low_q);
        if (in_high) store(3, high_at, high_q);
        if (in_none) store(3, lane, 0);
        if (m == 0) {
            if (in_low) list[low_at] = USED | lane;
            if (in_high) list[high_at] = USED | 32 | lane;
            if (in_none) list[lane] = UNUSED;
        }
    }
    __syncthreads();
    uint4* there = (uint4*)(args.prepared + (u64)kt * sizeof(tile));
    for (int i = threadIdx.x; i < sizeof(tile) / 16; i += blockDim.x) there[i] = ((const uint4*)&tile)[i];
}

// Of numbers beyond the range of `divide`. Rarely called: out of the way.
__device__ __noinline__ int quotient(float v, float scale) { return max(-127, min(127, __float2int_rn(__fdiv_rn(v, scale)))); }

// Without that launch one warp prepares an input tile of all rows: lanes (row, c) of eight rows, (row, half, c) of four; each has the inputs of its words. What it
// computes is what `quantise_row` does.
template <int ROWS>
struct Preparation {
    static constexpr int LANES = 32 / ROWS, WORDS = 16 / LANES, PAIRS = 2 * WORDS;
    int lane;
    Threshold t[4];
    int weight[4];  // of the sums of q over the channels that want a plane, in the constant part of tiles of class c

    __device__ __forceinline__ Preparation(const Args& args, int lane) : lane(lane) {
        const int bits = 2 * (lane & 3) + 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            t[i] = threshold(args.thresholds[i]);
            weight[i] = level_weight(i + 1, bits) - (i ? level_weight(i, bits) : 0);
        }
    }

    __device__ __forceinline__ void load(const Args& args, int kt, Pair (&raw)[PAIRS]) const {
        const int row = lane / LANES, first = (ROWS == 8 ? 0 : (lane & 4) * 8) + 2 * (lane & 3);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) raw[i] = Pair{};
        if (row < args.rows)
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) raw[i] = load_raw(args.x, row * args.x_stride + kt * 64 + first + 8 * i);
    }

    __device__ __forceinline__ void store(const Pair (&raw)[PAIRS], Prepared<ROWS>& tile) const {
        float v[2 * PAIRS];
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const float2 both = floats(raw[i]);
            v[2 * i] = both.x;
            v[2 * i + 1] = both.y;
            most = max(most, max(__float_as_uint(fabsf(both.x)), __float_as_uint(fabsf(both.y))));
        }
#pragma unroll
        for (int bit = 1; bit < LANES; bit <<= 1) most = max(most, __shfl_xor_sync(FULL, most, bit));
        const Scale o = scale_of(__uint_as_float(most), nearly_1_over_127());
        int q[2 * PAIRS];
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; ++i) q[i] = __float2int_rn(divide(v[i], o.scale, o.reciprocal));
        if (!o.plain && most)
#pragma unroll
            for (int i = 0; i < 2 * PAIRS; ++i) q[i] = quotient(v[i], o.scale);
        u32 word[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; ++i)
            word[i] = __byte_perm(__byte_perm(q[4 * i], q[4 * i + 1], 0x0040), __byte_perm(q[4 * i + 2], q[4 * i + 3], 0x0040), 0x5410);
        const int row = lane / LANES, c = lane & 3, half = ROWS == 8 ? 0 : lane >> 2 & 1;
        int sum[4] = {};
        u32 some = 0;  // of this lane's inputs, those that want plane 2, and plane 3 from bit 16 on
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            u32 graded[WORDS];
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                const u32 bytes = __byte_perm(above(raw[2 * i], t[p]), above(raw[2 * i + 1], t[p]), 0x6420);
                graded[i] = word[i] & bytes;
                sum[p] = __dp4a((int)graded[i], 0x01010101, sum[p]);
                if (p >= 2) some |= (u32)__dp4a((int)(bytes & 0x08040201u), 0x01010101, 0) << (16 * (p - 2) + 4 * i);
            }
            if constexpr (WORDS == 4)
                *(uint4*)tile.word[p][0][0][row][c] = make_uint4(graded[0], graded[1], graded[2], graded[3]);
            else
#pragma unroll
                for (int upper = 0; upper < Prepared<ROWS>::COPIES; ++upper) {
                    const u32 first = upper ? 0x1404 : 0x4140, second = upper ? 0x3424 : 0x4342;
                    *(uint4*)tile.word[p][ROWS == 8 ? 0 : half][upper][row][c] =
                        make_uint4(__byte_perm(graded[0], 0, first), __byte_perm(graded[0], 0, second), __byte_perm(graded[1], 0, first), __byte_perm(graded[1], 0, second));
                }
        }
        // two sums (of at most 64 * 127) to a word
        int low = sum[0] + sum[1] * 65536, high = sum[2] + sum[3] * 65536;
#pragma unroll
        for (int bit = 1; bit < LANES; bit <<= 1) {
            low += __shfl_xor_sync(FULL, low, bit);
            high += __shfl_xor_sync(FULL, high, bit);
        }
        const int centre = (short)low * weight[0] + ((low - (short)low) >> 16) * weight[1] + (short)high * weight[2] + ((high - (short)high) >> 16) * weight[3];
        if (half == 0) tile.centre[c][row] = (float)centre;
        if (half == 0 && c == 0) tile.scale[row] = o.scale;
#pragma unroll
        for (int bit = LANES; bit < 32; bit <<= 1) some |= __shfl_xor_sync(FULL, some, bit);
        auto spread = [&](u32 bits) { return ((bits & 3) | (bits & 12) << 6 | (bits & 48) << 12 | (bits & 192) << 18) << (2 * c); };
        u32 all[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {  // plane 2, its upper half, plane 3, its upper half
            all[k] = spread(some >> (16 * (k >> 1) + (ROWS == 8 ? 8 * (k & 1) : 0)));
            if (ROWS == 4 && half != (k & 1)) all[k] = 0;
#pragma unroll
            for (int bit = 1; bit < LANES; bit <<= 1) all[k] |= __shfl_xor_sync(FULL, all[k], bit);
        }
        if (lane == 0) tile.wanted = make_uint4(all[0], all[1], all[2], all[3]);
    }
};
