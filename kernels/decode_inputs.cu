// Part of decode_bitplane.cu: the activations of three to eight rows, as decode_dense.cu reads them. Included there.

// An input tile of all rows, as the tensor core wants it. Byte 2b + e of word [plane][row][c][2 * half + q] is the INT8 activation of input
// 32 half + 16 q + 8 b + 2 c + e, zero where its level does not want the plane.
template <int ROWS>
struct __align__(16) Prepared {
    u32 word[4][ROWS][4][4];
    float scale[ROWS];      // of the activations
    float centre[4][ROWS];  // sum of q * (doubled midpoint minus zero point) in steps of 8-bit codes, per class of tiles (2, 4, 6, 8 bits)
    uint4 wanted;           // of planes 2 and 3, two words each: the inputs that some row wants
};

// The launch before, where there is one: a CTA for an input tile, a warp for a row.
template <int ROWS>
__device__ __forceinline__ void prepare(const Args& args) {
    __shared__ Prepared<ROWS> tile;
    const int lane = threadIdx.x & 31, m = threadIdx.x >> 5, kt = blockIdx.x;
    u32* wanted = (u32*)&tile.wanted;
    if (threadIdx.x < 4) wanted[threadIdx.x] = 0;
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
    __syncthreads();
    const Quantised o = quantise_row(v, largest_of(v), t4, lane);
    if (lane < 4) {
        tile.centre[lane][m] = (float)o.centre;
        tile.scale[m] = o.scale;
    }
    u8* to = (u8*)&tile.word[0][m][lane >> 1 & 3][lane >> 4] + 2 * (lane >> 3 & 1) + (lane & 1);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        to[64 * ROWS * p] = (u8)(o.l0 > p ? o.q0 : 0);
        to[64 * ROWS * p + 8] = (u8)(o.l1 > p ? o.q1 : 0);  // 32 inputs on: `half` is the higher bit of a word's number
        if (p < 2) continue;
        const u32 low = __ballot_sync(FULL, o.l0 > p), high = __ballot_sync(FULL, o.l1 > p);
        if (lane == 0 && m < args.rows) {
            atomicOr(wanted + 2 * p - 4, low);
            atomicOr(wanted + 2 * p - 3, high);
        }
    }
    __syncthreads();
    uint4* there = (uint4*)(args.prepared + (u64)kt * sizeof(tile));
    for (int i = threadIdx.x; i < sizeof(tile) / 16; i += blockDim.x) there[i] = ((const uint4*)&tile)[i];
}

// Without that launch one warp prepares an input tile of all rows: lanes (row, c) of eight rows, (row, half, c) of four; each has the inputs of its words. What it
// computes is what `quantise_row` does.
template <int ROWS>
struct Preparation {
    static constexpr int LANES = 32 / ROWS, WORDS = 16 / LANES, PAIRS = 2 * WORDS;
    int lane;
    float t[4];
    int weight[4];  // of the sums of q over the channels that want a plane, in the constant part of tiles of class c

    __device__ __forceinline__ Preparation(const Args& args, int lane) : lane(lane) {
        const int bits = 2 * (lane & 3) + 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            t[i] = args.thresholds[i];
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
        const Scale o = scale_of(__uint_as_float(most));
        int q[2 * PAIRS];
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; ++i) q[i] = __float2int_rn(divide(v[i], o.scale, o.reciprocal));
        if (!o.plain && most)
#pragma unroll
            for (int i = 0; i < 2 * PAIRS; ++i) q[i] = max(-127, min(127, __float2int_rn(__fdiv_rn(v[i], o.scale))));
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
                u32 bytes = 0;
#pragma unroll
                for (int k = 0; k < 4; ++k) bytes |= fabsf(v[4 * i + k]) > t[p] ? 255u << (8 * k) : 0;
                graded[i] = word[i] & bytes;
                sum[p] = __dp4a((int)graded[i], 0x01010101, sum[p]);
                if (p >= 2) some |= (u32)__dp4a((int)(bytes & 0x08040201u), 0x01010101, 0) << (16 * (p - 2) + 4 * i);
            }
            if constexpr (WORDS == 4)
                *(uint4*)tile.word[p][row][c] = make_uint4(graded[0], graded[1], graded[2], graded[3]);
            else
                *(uint2*)&tile.word[p][row][c][2 * half] = make_uint2(graded[0], graded[1]);
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
