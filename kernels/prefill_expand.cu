// Long prompts, first half: packed tiles -> INT8 [N, K] in the basis of the model, one scale per output. Rows of the prompt become INT8 in
// the same launch (prefill_rows.cu). Compiled by NVRTC.
//
// A step is a block of 8 tiles of outputs at one input tile, one for each warp; its plane words arrive in a ring (cp.async). All CTAs
// work on neighbouring steps at a time, in the order of memory, so that lines that are written together lie together.
// The inverse output rotation is a product with the 64 x 64 matrix 8U of whole numbers on the INT8 tensor cores: a plane word gives 16
// outputs of ONE input channel, and `codes_of` makes of it four words of four outputs each, which is what a lane has to hold of B when
// outputs are the contraction. So no byte moves between lanes. The columns of 8U are permuted to fit (lane t of a quad holds word t).
// Sums are exact; they start at the bits of 1.5 * 2^23, so that they are floats as they come, and this start leaves again in the
// multiplication by 1 / scale, which has 22 bits so that start times it is a float (`reference.coarse`). Columns of the product are
// spread so that a lane ends up with 16 adjacent inputs.

#include "prefill_ptx.cu"
#include "prefill_planes.cu"

constexpr int THREADS = 256, STAGES = 2;
// FORM: how rows and steps meet. FEW: rows of up to 4,096 inputs; a CTA asks for its rows before its first step and quantises them in
// registers. SOME: a CTA's rows before its steps, longer ones. MANY: steps first, then rows, which go to whoever asks first.
#include "prefill_rows.cu"

struct Args {
    Weight w;
    const u8* rotation;       // [., 64, 64] int8, 8U by rows
    const u8* rotation_index; // [n_tiles]
    const float* smoothing;   // [K] or null: inputs are divided by it, so the weight is multiplied
    const float* inverse;     // [N] 1 / scale of the output
    u8* out;                  // [N, K] int8
    int ctas, most_steps;     // CTAs that expand, the others only quantise rows; steps of one, every ctas-th
    Rows rows;
};

// Shared memory: the ring, 8U and scales of every tile's outputs, smoothing of a step's 64 inputs, maxima of rows, and lists of what a
// CTA has to do: `Step` for each step, then `Tile` for each of its 8 tiles.
constexpr int ROTATION_AT = STAGES * BLOCK_BYTES, INVERSE_AT = ROTATION_AT + 8 * 4096, SMOOTHING_AT = INVERSE_AT + 8 * 512;
constexpr int FOUND_AT = SMOOTHING_AT + STAGES * 256, LISTS_AT = FOUND_AT + 2 * SLOTS * WARPS * 4 + 16;

struct __align__(16) Step {
    u32 at, units, counts, kt;  // block * k_tiles + kt; first unit of planes 2 and 3; tiles that have plane 2, and plane 3 (from bit 8)
};
struct __align__(16) Tile {
    u32 out, bits;  // place of its first output and input in the workspace, in pieces of 64 bytes; see below
    float factor;   // tile scale * 2^(bits - 8) / 8
    int nt;
};
// Of Tile.bits: 16 * rank among the tiles with plane 2, and with plane 3 (from bit 8); row of `rotation` from bit 24.
constexpr u32 HAS2 = 1u << 16, HAS3 = 1u << 17, EXISTS = 1u << 18;

// Rows of 16 bytes at the lanes' addresses, four blocks of 8: a lane gets word lane % 4 of row lane / 4 of each block.
__device__ __forceinline__ void load_rows(u32 at, u32 (&out)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(at));
}

template <int TO, int FROM>
__device__ __forceinline__ void copy16_to(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0+%2], [%1+%3], 16;" ::"r"(to), "l"(from), "n"(TO), "n"(FROM) : "memory");
}

// What a thread copies of every step: channels threadIdx.x / 8 and 32 further, of the tile of rank threadIdx.x % 8 among those that have
// the plane. A channel's 8 places are exchanged by `turn`, so that a warp that reads channels 16i, 16i + 1 of a tile meets every bank.
struct Reader {
    const u8 *codes, *dense;
    u32 channel, rank, to, to_second;
    __device__ __forceinline__ Reader(const u8* all, u32 ring) : codes(all), dense(all + threadIdx.x * 16), channel(threadIdx.x >> 3), rank(threadIdx.x & 7) {
        to = ring + channel * 128 + (rank ^ ((channel & 1) | (channel >> 4 & 3) << 1)) * 16;
        to_second = (to ^ 64) + 32 * 128;
        asm("" : "+l"(dense), "+r"(channel), "+r"(rank), "+r"(to), "+r"(to_second));  // kept, not computed again at every step
    }
    __device__ __forceinline__ void load(uint4 step, u32 slot_bytes) const {
        load_dense(step.x, slot_bytes);
        load_others(step.y, step.z & 255, step.z >> 8, slot_bytes);
    }
    __device__ __forceinline__ void load_dense(u32 at, u32 slot_bytes) const {  // planes 0 and 1
        const u32 first = to + slot_bytes, second = to_second + slot_bytes;
        const u8* from = dense + (u64)at * (2 * PLANE_BYTES);
        copy16_to<0, 0>(first, from);
        copy16_to<0, PLANE_BYTES / 2>(second, from);
        copy16_to<PLANE_BYTES, PLANE_BYTES>(first, from);
        copy16_to<PLANE_BYTES, PLANE_BYTES + PLANE_BYTES / 2>(second, from);
    }
    __device__ __forceinline__ void load_others(u32 unit, u32 count2, u32 count3, u32 slot_bytes) const {
        const u32 first = to + slot_bytes, second = to_second + slot_bytes;
        if (rank < count2) compact<2 * PLANE_BYTES>(first, second, unit + rank + channel * count2, count2);
        if (rank < count3) compact<3 * PLANE_BYTES>(first, second, unit + rank + 64 * count2 + channel * count3, count3);
    }
    template <int TO>
    __device__ __forceinline__ void compact(u32 first, u32 second, u32 unit, u32 count) const {
        copy16_to<TO, 0>(first, codes + (u64)unit * 16);
        copy16_to<TO, 0>(second, codes + (u64)(unit + 32 * count) * 16);
    }
};

// One tile by a warp. from: of the planes, this lane's row of `load_rows`; rotation, inverse, smoothing: in shared memory, at this lane's
// place; out: of its first row and 16 inputs.
template <bool WIDE>
__device__ __forceinline__ void expand_tile(const u32 (&from)[4], bool has3, u32 rotation, u32 inverse, float factor, u32 smoothing, u8* out, u32 k) {
    const int magic[4] = {0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};
    u32 code[8][4];
#pragma unroll
    for (int v = 0; v < 2; ++v) {
        u32 p0[4], p1[4], p2[4] = {}, p3[4] = {};
        load_rows(from[0] + v * 8 * 128, p0);
        load_rows(from[1] + v * 8 * 128, p1);
        if constexpr (WIDE) {
            load_rows(from[2] + v * 8 * 128, p2);
            if (has3) load_rows(from[3] + v * 8 * 128, p3);
        }
#pragma unroll
        for (int b = 0; b < 4; ++b) codes_of<WIDE>(p0[b], p1[b], p2[b], p3[b], code[4 * v + b]);
    }
    float f[16];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 by = load_shared4(smoothing + 16 * i);
        f[4 * i] = factor * __uint_as_float(by.x), f[4 * i + 1] = factor * __uint_as_float(by.y);
        f[4 * i + 2] = factor * __uint_as_float(by.z), f[4 * i + 3] = factor * __uint_as_float(by.w);
    }
#pragma unroll 1
    for (int m = 0; m < 4; ++m) {
        u32 packed[2][4];
        const uint4 first = load_shared4(rotation + m * 1024), second = load_shared4(rotation + m * 1024 + 512), scales = load_shared4(inverse + m * 128);
        const float4 by = make_float4(__uint_as_float(scales.x), __uint_as_float(scales.y), __uint_as_float(scales.z), __uint_as_float(scales.w));
        const u32 a0[4] = {first.x, first.y, first.z, first.w}, a1[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
        for (int v = 0; v < 2; ++v) {
            int d[4][4];
#pragma unroll
            for (int b = 0; b < 4; ++b) mma_s8(d[b], a0, code[4 * v + b][0], code[4 * v + b][1], magic);
#pragma unroll
            for (int b = 0; b < 4; ++b) mma_s8(d[b], a1, code[4 * v + b][2], code[4 * v + b][3], d[b]);
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    u32 q[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float sum = __int_as_float(d[2 * pair + (i >> 1)][2 * h + (i & 1)]);
                        const float scaled = fmaf(sum, h ? by.z : by.x, h ? by.w : by.y);  // the sum's, rounded once
                        q[i] = __float_as_uint(fmaf(scaled, f[8 * v + 4 * pair + i], 12582912.0f));
                    }
                    packed[h][2 * v + pair] = __byte_perm(__byte_perm(q[0], q[1], 0x0040), __byte_perm(q[2], q[3], 0x0040), 0x5410);
                }
        }
        *(uint4*)out = make_uint4(packed[0][0], packed[0][1], packed[0][2], packed[0][3]);
        *(uint4*)(out + 8 * k) = make_uint4(packed[1][0], packed[1][1], packed[1][2], packed[1][3]);
        out += 16 * k;
    }
}

// 8U as lanes hold it in A, [m][step][lane], slots 4t..4t+3 (+ 16) of a step being outputs 16t + 4i + 2 step (+ 1), i = 0..3: a lane's
// bytes of 8 rows are asked for, and put into shared memory when they are there.
__device__ __forceinline__ void ask_for_rotation(const Args& args, u32 matrix, int lane, uint4 (&rows)[8]) {
    const u8* from = args.rotation + matrix * 4096 + (lane >> 2) * 64 + (lane & 3) * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) rows[i] = *(const uint4*)(from + i * 512);
}
__device__ __forceinline__ void put_rotation(const uint4 (&rows)[8], u32 rotation) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        u32 a[2][2][2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint4 row = rows[2 * m + h];  // bytes 4i + j
            const u32 low01 = __byte_perm(row.x, row.y, 0x5140), low23 = __byte_perm(row.z, row.w, 0x5140);
            const u32 high01 = __byte_perm(row.x, row.y, 0x7362), high23 = __byte_perm(row.z, row.w, 0x7362);
            a[0][0][h] = __byte_perm(low01, low23, 0x5410);
            a[0][1][h] = __byte_perm(low01, low23, 0x7632);
            a[1][0][h] = __byte_perm(high01, high23, 0x5410);
            a[1][1][h] = __byte_perm(high01, high23, 0x7632);
        }
#pragma unroll
        for (int step = 0; step < 2; ++step)
            store_shared4(rotation + m * 1024 + step * 512, a[step][0][0], a[step][0][1], a[step][1][0], a[step][1][1]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) expand(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x & 31, tile = threadIdx.x >> 5, k_tiles = args.w.k_tiles, n_tiles = args.w.n_tiles;
    const int all = (n_tiles + 7) / 8 * k_tiles, first = blockIdx.x, every = args.ctas, steps = first < min(all, every) ? (all - first + every - 1) / every : 0;
    const u32 k = k_tiles * 64, ring = shared_address(shared), list_at = ring + LISTS_AT, smoothing_at = ring + SMOOTHING_AT;
    const Rows& rows = args.rows;
    let_next_start();

    Step* list = (Step*)(shared + LISTS_AT);
    Tile* tiles = (Tile*)(list + args.most_steps);
    struct Entry {
        uint2 meta;
        float factor;
        u32 matrix;
    };
    const auto look = [&](int i) {  // of a tile of the list, what is known of it
        const int at = first + (i >> 3) * every, nt = min(at / k_tiles * 8 + (i & 7), n_tiles - 1);
        return Entry{args.w.meta[at], args.w.factor[(u64)at * 8 + (i & 7)], args.rotation_index[nt]};
    };
    const auto note = [&](int i, const Entry& found) {
        const int own = i & 7, at = first + (i >> 3) * every, block = at / k_tiles, kt = at - block * k_tiles, nt = block * 8 + own;
        const u32 below = (1u << own) - 1, has2 = found.meta.y & 255, has3 = found.meta.y >> 8 & 255;
        u32 bits = __popc(has2 & below) << 4 | __popc(has3 & below) << 12 | (has2 >> own & 1 ? HAS2 : 0) | (has3 >> own & 1 ? HAS3 : 0);
        if (nt < n_tiles) bits |= EXISTS | found.matrix << 24;
        tiles[i] = Tile{(u32)nt * 64 * k_tiles + kt, bits, found.factor * 0.25f, min(nt, n_tiles - 1)};
        if (own == 0) list[i >> 3] = Step{(u32)at, found.meta.x, (u32)(__popc(has2) | __popc(has3) << 8), (u32)kt};
    };
    const bool smooths = args.smoothing && threadIdx.x < 16;
    const auto load_smoothing = [&](u32 kt, u32 slot) {
        if (smooths) copy16_to<0, 0>(smoothing_at + slot * 256 + threadIdx.x * 16, args.smoothing + kt * 64 + threadIdx.x * 4);
    };
    if (!args.smoothing && threadIdx.x < STAGES * 64) store_shared(smoothing_at + threadIdx.x * 4, 0x3f800000);
    const u32 rotation = ring + ROTATION_AT + tile * 4096 + lane * 16;
    u32 held = ~0u;
    const float* scales = args.inverse + (lane >> 3) * 16 + (lane & 7);
    float low = 0, high = 0;  // 1 / scale of outputs lane % 8 + 16 (lane / 8) and 8 further
#if FORM == MANY
    const int row = first * (SLOTS >> chunks_log(k)), last = rows.count;
#else
    const int row = (first - rows.first_cta) * rows.per_cta, last = min(row + rows.per_cta, rows.count);
    const bool has_rows = first >= rows.first_cta && row < last;
#endif
#if FORM == FEW
    // What is asked for at a time arrives in this order, and the last of it late, as all CTAs ask now: first the small loads on which
    // others depend, then rows, as there is something to compute, then the first step.
    const int block = first / k_tiles, kt = first - block * k_tiles, nt = min(block * 8 + tile, n_tiles - 1);
    uint2 meta = {};
    Entry entry = {};
    if (steps) meta = args.w.meta[first], held = args.rotation_index[nt];
    if (threadIdx.x < steps * 8) entry = look(threadIdx.x);
    if (steps) low = scales[(u64)nt * 64], high = scales[(u64)nt * 64 + 8];
    uint4 next[SLOTS], factors[4], matrix[8];
    wait_for_inputs();  // the workspace may still be read by the product before, and rows are not there
    if (has_rows) ask_for(rows, k, row, last, chunks_log(k), next), ask_for_factors(rows, k, factors);
    {
        const Reader reader(args.w.codes, ring);
        if (steps) ask_for_rotation(args, held, lane, matrix);
        if (steps) reader.load_dense(first, 0), load_smoothing(kt, 0);
        if (steps) reader.load_others(meta.x, __popc(meta.y & 255), __popc(meta.y >> 8 & 255), 0);
    }
    copy_commit();
    for (int i = threadIdx.x; i < steps * 8; i += THREADS) {
        if (i >= THREADS) entry = look(i);
        note(i, entry);
    }
    if (has_rows) {
        if (k > THREADS * 8)
            quantize<1>(rows, k, row, last, 0, ring + FOUND_AT, next, factors);
        else
            quantize<0>(rows, k, row, last, 0, ring + FOUND_AT, next, factors);
    }
    if (steps) put_rotation(matrix, rotation);
    __syncthreads();
#else
    const u32 by = ring + BLOCK_BYTES;  // over what is not yet in use, or no longer
#if FORM == SOME
    if (has_rows) load_factors(rows, k, by);
    copy_commit();
#endif
    for (int i = threadIdx.x; i < steps * 8; i += THREADS) note(i, look(i));
    __syncthreads();
    if (steps) {
        const uint4 step = load_shared4(list_at);
        Reader(args.w.codes, ring).load(step, 0), load_smoothing(step.w, 0);
    }
    copy_commit();
    wait_for_inputs();  // as above
#if FORM == SOME
    if (has_rows) {  // what the first step needs arrives meanwhile
        uint4 next[SLOTS];
        ask_for(rows, k, row, last, chunks_log(k), next);
        copy_wait<1>();
        __syncthreads();
        quantize_rows(rows, k, row, last, by, ring + FOUND_AT, next);
        __syncthreads();
    }
#endif
#endif

    const Reader reader(args.w.codes, ring);
    const auto load_step = [&](int s, int slot) {
        const uint4 step = load_shared4(list_at + s * 16);
        reader.load(step, slot * BLOCK_BYTES);
        load_smoothing(step.w, slot);
    };
    // This lane's row of `load_rows`: of channel 16 (r / 2) + r % 2 + 2b, r = lane % 8, b = lane / 8, whose places are exchanged by r.
    u32 turn = (lane & 7) * 16, own = ring + ((lane >> 1 & 3) * 16 + (lane & 1) + (lane >> 3) * 2) * 128, own_dense = own + (tile * 16 ^ turn);
    u32 inverse = ring + INVERSE_AT + tile * 512;
    u32 tile_at = list_at + args.most_steps * 16 + tile * 16;
    u8* out = args.out + (u64)(lane >> 2) * k + 16 * (lane & 3);
    asm("" : "+r"(turn), "+r"(own), "+r"(own_dense), "+r"(inverse), "+r"(tile_at));
    uint4 now = load_shared4(tile_at);
    if (FORM != FEW && steps) low = scales[(u64)now.w * 64], high = scales[(u64)now.w * 64 + 8];
    int slot = 0;
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
        __syncwarp();
        if (now.y & EXISTS && now.y >> 24 != held) {
            uint4 matrix[8];
            ask_for_rotation(args, held = now.y >> 24, lane, matrix);
            put_rotation(matrix, rotation);
        }
        store_shared4(inverse + lane * 16, low, -12582912.0f * low, high, -12582912.0f * high);
        copy_wait<STAGES - 2>();
        __syncthreads();  // step s is there, and everybody is through with step s - 1, whose place is the next to be filled
        if (s + STAGES - 1 < steps) load_step(s + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
        copy_commit();
#if FORM == MANY
        if (s == steps - 1 && row < last && threadIdx.x * 64 < k) prefetch(rows.x + row * rows.stride + threadIdx.x * 64);
#endif
        const u32 bits = now.y, at = own + slot * BLOCK_BYTES, dense = own_dense + slot * BLOCK_BYTES;
        const u32 from[4] = {dense, dense + PLANE_BYTES, at + 2 * PLANE_BYTES + (bits & 0x70 ^ turn), at + 3 * PLANE_BYTES + (bits >> 8 & 0x70 ^ turn)};
        const float factor = __uint_as_float(now.z);
        u8* to = out + (u64)now.x * 64;
        if (s + 1 < steps) {
            now = load_shared4(tile_at += 128);
            low = scales[(u64)now.w * 64], high = scales[(u64)now.w * 64 + 8];
        }
        const u32 smoothing = smoothing_at + slot * 256 + 64 * (lane & 3);
        if (bits & HAS2)
            expand_tile<true>(from, bits & HAS3, rotation, inverse + (lane >> 2) * 16, factor, smoothing, to, k);
        else if (bits & EXISTS)
            expand_tile<false>(from, false, rotation, inverse + (lane >> 2) * 16, factor, smoothing, to, k);
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
#if FORM == MANY
    __syncthreads();
    load_factors(rows, k, by);
    copy_commit();
    uint4 next[SLOTS];
    ask_for(rows, k, row, last, chunks_log(k), next);
    copy_wait<0>();
    __syncthreads();
    quantize_rows(rows, k, row, last, by, ring + FOUND_AT, next);
#endif
}
