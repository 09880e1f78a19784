// Part of decode_bitplane.cu: one-instruction wrappers beside those of all.

#include "ptx.cu"

// Four copies of 16 bytes: of rows `row0` and `row1` of two halves of a step, to `to0` and `to1`, and 1024 bytes further. Each is made where its row is
// below the half's `count`; where `bytes` is 0 and not 16 it is of zeros. policy: of the L2 cache.
__device__ __forceinline__ void copy_some(u32 to0, u32 to1, const u8* a0, const u8* a1, const u8* b0, const u8* b1, u32 row0, u32 row1, u32 count_a, u32 count_b, u32 bytes_a, u32 bytes_b, u64 policy) {
    asm volatile(
        "{.reg .pred p<4>;\n"
        "setp.lt.u32 p0, %6, %8;\nsetp.lt.u32 p1, %7, %8;\nsetp.lt.u32 p2, %6, %9;\nsetp.lt.u32 p3, %7, %9;\n"
        "@p0 cp.async.cg.shared.global.L2::cache_hint [%0], [%2], 16, %10, %12;\n"
        "@p1 cp.async.cg.shared.global.L2::cache_hint [%1], [%3], 16, %10, %12;\n"
        "@p2 cp.async.cg.shared.global.L2::cache_hint [%0 + 1024], [%4], 16, %11, %12;\n"
        "@p3 cp.async.cg.shared.global.L2::cache_hint [%1 + 1024], [%5], 16, %11, %12;}" ::"r"(to0),
        "r"(to1), "l"(a0), "l"(a1), "l"(b0), "l"(b1), "r"(row0), "r"(row1), "r"(count_a), "r"(count_b), "r"(bytes_a), "r"(bytes_b), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void prefetch_map(const Map& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// n / d, where n * d < 2^32. by: 2^32 / d rounded down, and one more; 0 for d = 1
__device__ __forceinline__ u32 divide_by(u32 n, u32 by) { return by ? __umulhi(n, by) : n; }

// To a place that `address_in` gives. `barrier`, of the same CTA, counts the bytes.
__device__ __forceinline__ void send(u32 at, float4 v, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier) : "memory");
}
// `barrier_wait` for what other CTAs of the cluster send.
__device__ __forceinline__ void barrier_wait_cluster(u32 at) {
    u32 done;
    do {
        asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(at) : "memory");
    } while (!done);
}
__device__ __forceinline__ void cluster_started() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// Orders this thread's accesses to global memory before and after it, for all threads of the GPU.
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Four words that other CTAs may write at the same time: each is the old one or the new one.
__device__ __forceinline__ uint4 load_shared_by_all(const u32* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void store_shared_by_all(u32* to, uint4 v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ u16 half_towards_zero(float f, int type) {
    u16 h;
    if (type == 0)
        asm("cvt.rz.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    else
        asm("cvt.rz.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
// Of each half 0xffff where a > b.
__device__ __forceinline__ u32 above_halves(u32 a, u32 b, int type) {
    u32 r;
    if (type == 0)
        asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    else
        asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Has the barrier wait for this thread's copies by `copy_unit`, beside those that it waits for already.
__device__ __forceinline__ void barrier_awaits_copies(u32 at) { asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(at) : "memory"); }

// `load_transposed` of two matrices.
__device__ __forceinline__ void load_transposed(u32 (&r)[2], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(at));
}

// Keeps a value in registers instead of computing it again.
__device__ __forceinline__ void keep(u32& v) { asm volatile("" : "+r"(v)); }

// d += a b: 16 x 32 unsigned by 32 x 8 signed bytes. With FREE the compiler may move it.
template <bool FREE>
__device__ __forceinline__ void mma(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#define MMA(ASM)                                                                                                                \
    ASM("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"       \
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                                                        \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
    if constexpr (FREE)
        MMA(asm);
    else
        MMA(asm volatile);
#undef MMA
}

__device__ __forceinline__ float reciprocal_approx(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// Into the L2 cache.
__device__ __forceinline__ void prefetch_L2(const u8* from, u32 bytes) { asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory"); }

__device__ __forceinline__ int multiprocessor() {
    int id;
    asm("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}
