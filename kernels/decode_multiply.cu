// Part of decode_bitplane.cu: a tile's planes times three to eight rows, in the tensor core, and the sums that a lane keeps. Included there.

// Adds one plane of a tile, 64 inputs x 64 outputs. from: this lane's row of the plane in shared memory; step: bytes to 32 inputs further.
// Sums are of fields up to j: output j is a difference of two, and the last one needs no mask.
//
// Eight rows: two `prmt` make of two registers one with four channels for each of two bytes, and all columns of the tensor core carry rows.
// sum: [j][2 upper + column]
template <bool FIRST>
__device__ __forceinline__ void multiply_plane(int (&sum)[4][4], u32 from, u32 step, const Activations<8>& b) {
    u32 r[2][4];
    load_transposed(r[0], from);
    load_transposed(r[1], from + step);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[j][k] = FIRST ? 0 : 4 * sum[j][k];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 a0 = __byte_perm(r[half][0], r[half][1], 0x6420), a1 = __byte_perm(r[half][0], r[half][1], 0x7531);
        const u32 a2 = __byte_perm(r[half][2], r[half][3], 0x6420), a3 = __byte_perm(r[half][2], r[half][3], 0x7531);
        const u32 b0 = b.word[2 * half], b1 = b.word[2 * half + 1];
        mma<true>(sum[0], a0 & 0x03030303u, a1 & 0x03030303u, a2 & 0x03030303u, a3 & 0x03030303u, b0, b1);
        mma<true>(sum[1], a0 & 0x0f0f0f0fu, a1 & 0x0f0f0f0fu, a2 & 0x0f0f0f0fu, a3 & 0x0f0f0f0fu, b0, b1);
        mma<true>(sum[2], a0 & 0x3f3f3f3fu, a1 & 0x3f3f3f3fu, a2 & 0x3f3f3f3fu, a3 & 0x3f3f3f3fu, b0, b1);
        mma<true>(sum[3], a0, a1, a2, a3, b0, b1);
    }
}

// Four rows: registers stay as they are, channels' lower bytes meet the rows in columns 0 to 3, upper bytes in columns 4 to 7, and the two halves of A's
// rows take two masks. sum: [j / 2][2 (j & 1) + column]
template <bool FIRST>
__device__ __forceinline__ void multiply_plane(int (&sum)[2][4], u32 from, u32 step, const Activations<4>& b) {
    u32 r[2][4];
    load_transposed(r[0], from);
    load_transposed(r[1], from + step);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[j][k] = FIRST ? 0 : 4 * sum[j][k];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int q = 0; q < 4; q += 2) {
            const u32 r0 = r[half][q], r1 = r[half][q + 1], b0 = b.word[4 * half + q], b1 = b.word[4 * half + q + 1];
            mma<true>(sum[0], r0 & 0x03030303u, r0 & 0x0f0f0f0fu, r1 & 0x03030303u, r1 & 0x0f0f0f0fu, b0, b1);
            mma<true>(sum[1], r0 & 0x3f3f3f3fu, r0, r1 & 0x3f3f3f3fu, r1, b0, b1);
        }
}

// Of plane 3 the inputs of `Few` alone. from: this lane's (the lower half's) row of them.
__device__ __forceinline__ void multiply_few(int (&sum)[4][4], u32 from, const Prepared<8>& input, int lane) {
    u32 r[2];
    load_transposed(r, from);
    const u32 a0 = __byte_perm(r[0], r[1], 0x6420), a1 = __byte_perm(r[0], r[1], 0x7531), b = ((const u32*)input.word[3])[4 * lane];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const u32 mask = (4u << 2 * j) * 0x01010101u - 0x01010101u;
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[j][k] *= 4;
        mma<true>(sum[j], j < 3 ? a0 & mask : a0, j < 3 ? a1 & mask : a1, 0, 0, b, 0);
    }
}
__device__ __forceinline__ void multiply_few(int (&sum)[2][4], u32 from, const Prepared<4>& input, int lane) {
    u32 r[2];
    load_transposed(r, from);
    const uint2 b = spread(((const u32*)input.word[3])[4 * (lane & 15)], lane);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[j][k] *= 4;
    mma<true>(sum[0], r[0] & 0x03030303u, r[0] & 0x0f0f0f0fu, r[1] & 0x03030303u, r[1] & 0x0f0f0f0fu, b.x, b.y);
    mma<true>(sum[1], r[0] & 0x3f3f3f3fu, r[0], r[1] & 0x3f3f3f3fu, r[1], b.x, b.y);
}

// What a lane keeps of a tile's sums. Of eight rows: outputs 8g + 4 upper + j of rows 2c and 2c + 1, [j][upper][row]; of four: outputs
// 8g + 4 (c / 2) + j of rows 2 (c & 1) and one more, [j][row].
template <int ROWS>
struct Sums {
    static constexpr int N = 2 * ROWS, UPPERS = ROWS / 4;
    float v[N];

    static __device__ __forceinline__ constexpr int number(int j, int upper, int row) { return (j * UPPERS + upper) * 2 + row; }
    __device__ __forceinline__ void set(float to) {
#pragma unroll
        for (int k = 0; k < N; ++k) v[k] = to;
    }
    __device__ __forceinline__ void add(const Sums& more) {
#pragma unroll
        for (int k = 0; k < N; ++k) v[k] += more.v[k];
    }
    // store(row & 1, offset of four outputs in a tile's row), in the order of `finish` and `finish_tasks`
    template <typename Store>
    __device__ __forceinline__ void store(int lane, Store&& to) const {
        const int g = lane >> 2, upper = lane >> 1 & 1, base = (g >> 1) * 16 + (g & 1) * 4;
#pragma unroll
        for (int row = 0; row < 2; ++row)
            if constexpr (ROWS == 8) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    to(row, base + h * 8, make_float4(v[number(2 * h, 0, row)], v[number(2 * h, 1, row)], v[number(2 * h + 1, 0, row)], v[number(2 * h + 1, 1, row)]));
            } else {  // a lane has all j of one `upper`: half of them for half of the neighbour's
                float other[2];
#pragma unroll
                for (int z = 0; z < 2; ++z) other[z] = __shfl_xor_sync(FULL, upper ? v[number(z, 0, row)] : v[number(2 + z, 0, row)], 2);
                to(row, base + upper * 8, upper ? make_float4(other[0], v[number(2, 0, row)], other[1], v[number(3, 0, row)]) : make_float4(v[number(0, 0, row)], other[0], v[number(1, 0, row)], other[1]));
            }
    }
};
