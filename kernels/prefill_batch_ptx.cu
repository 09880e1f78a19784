// Part of prefill_batch.cu: one-instruction wrappers that only it uses.

__device__ __forceinline__ u32 half2_mul(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 half2_fma(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// One of two halves, twice: an instruction takes its operand so.
__device__ __forceinline__ u32 low_twice(u32 a) {
    u32 r;
    asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};}" : "=r"(r) : "r"(a));
    return r;
}
__device__ __forceinline__ u32 high_twice(u32 a) {
    u32 r;
    asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};}" : "=r"(r) : "r"(a));
    return r;
}

__device__ __forceinline__ void store_shared4(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void store_shared2(u32 at, u32 a, u32 b) { asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory"); }
__device__ __forceinline__ void store_shared(u32 at, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
__device__ __forceinline__ uint4 load_shared4(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

template <int ID, int COUNT>
__device__ __forceinline__ void named_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}
template <int ID, int COUNT>
__device__ __forceinline__ void named_arrive() {
    asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}
// Of the four warps of a group, all of which say so.
template <int COUNT>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void less_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Adds whole numbers in shared memory to those in global memory, in one instruction of one thread.
__device__ __forceinline__ void add_bulk(int* to, u32 from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// Until what this thread has sent so is read (or, not only READ, is there).
template <bool READ>
__device__ __forceinline__ void sent_wait() {
    if constexpr (READ)
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    else
        asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async;" ::: "memory");
}

// What lies at a place that `address_in` gives.
__device__ __forceinline__ uint4 load_there4(u32 at) {
    uint4 v;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
// What another multiprocessor sends through memory, word by word.
__device__ __forceinline__ uint4 load_sent4(const int* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void store_sent4(int* to, const uint4& v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// As `cluster_arrive`, of a thread whose reads are done and whose writes are of no concern to others.
__device__ __forceinline__ void cluster_leave() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the last LATER groups of products are done.
template <int LATER>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
}

// An operand in shared memory: rows of 64 bytes, swizzled by 64 bytes, eight of them 512 apart. 16-byte steps may be added.
__device__ __forceinline__ u64 operand(u32 at) { return (u64)(at >> 4 & 0x3fff) | 1ull << 16 | 32ull << 32 | 2ull << 62; }

// d += a b: [64 outputs, 32 inputs] by [32 inputs, TOKENS rows] of signed bytes, started for the four warps of a group. Thread 32 w + 4 g + c:
// d[4 n + 2 h + side] is output 16 w + 8 h + g of row 8 n + 2 c + side.
#define R4(d, i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define R16(d, i) R4(d, i), R4(d, i + 4), R4(d, i + 8), R4(d, i + 12)
#define R64(d, i) R16(d, i), R16(d, i + 16), R16(d, i + 32), R16(d, i + 48)
#define P8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define P16 P8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define P32 P16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define P64                                                                                                               \
    P32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53," \
        "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
__device__ __forceinline__ void multiply(int (&d)[TOKENS / 2], u64 a, u64 b) {
#if TOKENS == 16
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {" P8 "}, %8, %9, 1;" : R4(d, 0), R4(d, 4) : "l"(a), "l"(b));
#elif TOKENS == 32
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 {" P16 "}, %16, %17, 1;" : R16(d, 0) : "l"(a), "l"(b));
#elif TOKENS == 64
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {" P32 "}, %32, %33, 1;" : R16(d, 0), R16(d, 16) : "l"(a), "l"(b));
#else  // two of 128 rows for 256: an instruction of so many sums needs more registers than all warps are compiled for
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" P64 "}, %64, %65, 1;" : R64(d, 0) : "l"(a), "l"(b));
#if TOKENS == 256
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" P64 "}, %64, %65, 1;" : R64(d, 64) : "l"(a), "l"(b + 128 * 64 / 16));
#endif
#endif
}
