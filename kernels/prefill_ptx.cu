// Part of prefill_expand.cu and prefill_short.cu: one-instruction wrappers beside those of all.

#include "ptx.cu"

// 16 bytes from global to shared memory, zeros where `bytes` is 0.
__device__ __forceinline__ void copy16(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// The same at offsets that are known; zeros where `left_out` is not 0.
template <int TO, int FROM>
__device__ __forceinline__ void copy16_unless(u32 left_out, u32 to, const void* from) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\ncp.async.cg.shared.global [%0+%3], [%1+%4], 16, p;\n}\n" ::"r"(to), "l"(from), "r"(left_out), "n"(TO), "n"(FROM)
        : "memory");
}
__device__ __forceinline__ u32 load_shared(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

// What another multiprocessor wrote a moment ago.
__device__ __forceinline__ float4 load_fresh(const void* from) { return __ldcg((const float4*)from); }

// d = c + a b: 16 x 32 by 32 x 8, signed bytes.
__device__ __forceinline__ void mma_s8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const int (&c)[4]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
