// Part of decode_bitplane.cu: types and one-instruction wrappers, nothing that knows what a tile is. Included there.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define FULL 0xffffffffu

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copy i of four, 16 bytes from `from` + i step to `to` + i pitch in shared memory, is made if bit 8 i is set. One piece of assembly: alone, a
// predicate becomes a branch, and the compiler guards every copy that stands by itself with three instructions.
__device__ __forceinline__ void copy_four(u32 to, u32 pitch, const u8* from, u32 step, u32 bits) {
    asm volatile(
        "{.reg .pred p<4>;\n.reg .b32 t<4>;\n"
        "and.b32 t0, %8, 1;\nand.b32 t1, %8, 0x100;\nand.b32 t2, %8, 0x10000;\nand.b32 t3, %8, 0x1000000;\n"
        "setp.ne.u32 p0, t0, 0;\nsetp.ne.u32 p1, t1, 0;\nsetp.ne.u32 p2, t2, 0;\nsetp.ne.u32 p3, t3, 0;\n"
        "@p0 cp.async.cg.shared.global [%0], [%4], 16;\n@p1 cp.async.cg.shared.global [%1], [%5], 16;\n"
        "@p2 cp.async.cg.shared.global [%2], [%6], 16;\n@p3 cp.async.cg.shared.global [%3], [%7], 16;}" ::"r"(to),
        "r"(to + pitch), "r"(to + 2 * pitch), "r"(to + 3 * pitch), "l"(from), "l"(from + step), "l"(from + 2 * step), "l"(from + 3 * step), "r"(bits)
        : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// Barriers in shared memory that are used once: `barrier_wait` returns when `barrier_init`'s number of arrivals and all expected bytes have come.
__device__ __forceinline__ void barrier_init(u32 at, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory"); }
__device__ __forceinline__ void barriers_are_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) { asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(bytes) : "memory"); }
__device__ __forceinline__ void barrier_arrive_expect(u32 at, u32 bytes) {
    asm volatile("{.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 at) { asm volatile("{.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(at) : "memory"); }
// Arrives when all of `copy_four` that this thread has started are there.
__device__ __forceinline__ void barrier_arrive_copied(u32 at) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory"); }
__device__ __forceinline__ void barrier_wait(u32 at) {
    u32 done;
    do {
        asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(at) : "memory");
    } while (!done);
}

// One thread copies a whole piece; the barrier counts its bytes. Of a `Map`: its box of rows from `row` on.
struct __align__(64) Map {
    u64 opaque[16];
};
__device__ __forceinline__ void copy_box(u32 to, const Map& map, u32 row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(0), "r"(row), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void prefetch_map(const Map& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Into the shared memory of CTA `rank` of the cluster, at the place that `at` is in this one.
__device__ __forceinline__ u32 address_in(u32 at, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
__device__ __forceinline__ void store_cluster(u32 at, float4 v) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ __forceinline__ void cluster_started() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Programmatic dependent launch: wait for the kernel before; let the kernel after start.
__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Orders this thread's accesses to global memory before and after it, for all threads of the GPU.
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Keeps a value in registers instead of computing it again.
__device__ __forceinline__ void keep(const u8*& v) { asm volatile("" : "+l"(v)); }

// Four 8 x 8 matrices of 16-bit elements, transposed: lane (g, c) gets elements (2c, g) and (2c + 1, g) of each.
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

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

__device__ __forceinline__ float from_half(u16 h, int type) {
    float f;
    if (type == 0) return __uint_as_float((u32)h << 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ u16 to_half(float f, int type) {
    u16 h;
    if (type == 0)
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    else
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
