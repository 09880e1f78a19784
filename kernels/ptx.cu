// One-instruction wrappers of all CUDA sources here, and the types they are written in. Included first, by decode_ptx.cu and
// prefill_ptx.cu, which add what only their kernels use.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define FULL 0xffffffffu

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes from global to shared memory.
__device__ __forceinline__ void copy_unit(u32 to, const u8* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory"); }
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// Barriers in shared memory, which those who arrive need not wait at. Each passes when `barrier_init`'s number of arrivals and all
// expected bytes have come, and its parity turns.
__device__ __forceinline__ void barrier_init(u32 at, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory"); }
__device__ __forceinline__ void barriers_are_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) { asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(bytes) : "memory"); }
__device__ __forceinline__ void barrier_arrive_expect(u32 at, u32 bytes) {
    asm volatile("{.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 at) { asm volatile("{.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(at) : "memory"); }
// Arrives when the copies that this thread has started are there.
__device__ __forceinline__ void barrier_arrive_copied(u32 at) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory"); }
__device__ __forceinline__ void barrier_wait(u32 at, u32 parity = 0) {
    u32 done;
    do {
        asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(at), "r"(parity) : "memory");
    } while (!done);
}

// One thread copies a whole piece; the barrier counts its bytes. Of a `Map`: its box from byte `column` of row `row` on.
struct __align__(64) Map {
    u64 opaque[16];
};
__device__ __forceinline__ void copy_box(u32 to, const Map& map, u32 column, u32 row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Between what this thread wrote to shared memory, `cp.async` too, and copies in bulk to the same place, or reads by the tensor core itself.
__device__ __forceinline__ void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Into the shared memory of CTA `rank` of the cluster, at the place that `at` is in this one.
__device__ __forceinline__ u32 address_in(u32 at, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Programmatic dependent launch: wait for the kernel before; let the kernel after start.
__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The last launch of a product says so after it has waited: whatever starts then, others' kernels too, finds all done that was launched before
// the one that is waited for, without waiting itself. A launch in front of it may say so at once.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit elements, a lane's address being that of a row, transposed: lane (g, c) gets elements (2c, g) and
// (2c + 1, g) of each.
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
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
